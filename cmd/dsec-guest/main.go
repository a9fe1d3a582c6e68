package main

import (
	"context"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"dsec/aether"
	"dsec/internal/guest/boot"
	"dsec/internal/guest/file"
	"dsec/internal/guest/proc"
	"dsec/internal/guest/serve"
	"dsec/internal/guest/session"
	"dsec/internal/guest/user"
)

// version is set by the linker.
var version = "dev"

func main() {
	if err := run(); err != nil {
		os.Stderr.WriteString("dsec-guest: " + err.Error() + "\n")
		os.Exit(1)
	}
}

func run() error {
	debug.SetGCPercent(50)
	if os.Getpid() == 1 {
		if err := boot.ProtectSelf(); err != nil {
			return err
		}
	}
	if err := boot.KeepDescriptors(); err != nil {
		return err
	}
	if err := boot.Prepare(); err != nil {
		return err
	}
	l, err := listener(os.Args[1:])
	if err != nil {
		return err
	}
	users := user.NewDatabase("")
	oom, err := number("DSEC_GUEST_OOM_SCORE")
	if err != nil {
		return err
	}
	if oom == 0 {
		oom = 300
	}
	generation, err := number("DSEC_GUEST_GENERATION")
	if err != nil {
		return err
	}
	defUser, cwd := os.Getenv("DSEC_GUEST_USER"), os.Getenv("DSEC_GUEST_CWD")
	procs, err := proc.NewTable(proc.Config{
		User: defUser, Cwd: cwd, Env: programEnv(os.Environ()), Users: users, OOMScore: int(oom),
	}, proc.NewReaper())
	if err != nil {
		return err
	}
	g := serve.New(serve.Config{
		Procs: procs, Sessions: session.NewTable(procs), Files: &file.FS{Users: users, User: defUser, Cwd: cwd},
		Version: version, User: defUser, Cwd: cwd,
	})
	server := aether.NewServer(aether.ServerConfig{
		Handlers: g.Handlers(), Node: os.Getenv("DSEC_GUEST_NODE"), Generation: generation,
		Log: func(event string, err error) {
			os.Stderr.WriteString("dsec-guest: " + event + ": " + err.Error() + "\n")
		},
	})
	return server.Serve(context.Background(), l)
}

// programEnv returns the variables that the sandbox's programs get.
func programEnv(environ []string) map[string]string {
	var m map[string]string
	for _, e := range environ {
		if e, ok := strings.CutPrefix(e, "DSEC_ENV_"); ok {
			k, v, _ := strings.Cut(e, "=")
			if m == nil {
				m = map[string]string{}
			}
			m[k] = v
		}
	}
	return m
}

func number(name string) (uint64, error) {
	s := os.Getenv(name)
	if s == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(s, 10, 64)
	if err != nil {
		return 0, &os.SyscallError{Syscall: name, Err: err}
	}
	return n, nil
}

// listener takes the socket that the edge made, or makes one for "--listen PATH".
func listener(args []string) (net.Listener, error) {
	var fd int
	if len(args) == 2 && args[0] == "--listen" {
		var err error
		if fd, err = listen(args[1]); err != nil {
			return nil, err
		}
	} else {
		n, err := number("DSEC_GUEST_LISTEN_FD")
		if err != nil {
			return nil, err
		}
		if fd = int(n); fd < 3 {
			return nil, os.NewSyscallError("DSEC_GUEST_LISTEN_FD", syscall.EBADF)
		}
	}
	f := os.NewFile(uintptr(fd), "listener")
	defer f.Close() // FileListener has its own
	return net.FileListener(f)
}

func listen(path string) (int, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC|syscall.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	if err := syscall.Bind(fd, &syscall.SockaddrUnix{Name: path}); err != nil {
		return -1, os.NewSyscallError("bind "+path, err)
	}
	return fd, os.NewSyscallError("listen", syscall.Listen(fd, 64))
}
