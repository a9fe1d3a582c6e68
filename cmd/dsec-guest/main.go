package main

import (
	"context"
	"errors"
	"net"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/internal/guest/boot"
	"dsec/internal/guest/file"
	"dsec/internal/guest/proc"
	guest "dsec/internal/guest/serve"
	"dsec/internal/guest/session"
	"dsec/internal/guest/user"
)

// version is set by the linker.
var version = "dev"

// init is the whole guest, since only init functions are sure to run on the main thread
// without a call of runtime.LockOSThread, for which the runtime starts a thread more: of
// all that a sandbox costs, threads are the dearest.
//
// The main thread does nothing once the guest serves, so that it never blocks a signal. The
// kernel drops a signal to PID 1 from inside only if that thread does not block it; one
// that it blocks, as the runtime does around each fork, goes to another thread and there
// ends the process (kernel 6.18: complete_signal looks at the default action alone).
func init() {
	failed := make(chan error)
	serve, err := prepare()
	if err == nil {
		go func() { failed <- serve() }()
		err = <-failed
	}
	os.Stderr.WriteString("dsec-guest: " + err.Error() + "\n")
	os.Exit(1)
}

func main() {}

// oomScore of the sandbox's programs: the kernel prefers to kill them rather than PID 1.
const oomScore = 300

// Descriptors that a container's guest is started with (internal/backend/container).
const (
	channelFD  = 3
	listenerFD = 4
)

// prepare sets the guest up and returns what then serves.
func prepare() (serve func() error, err error) {
	debug.SetGCPercent(25) // of the 4 MiB at which the first collection would be
	if os.Getpid() == 1 {
		if err := boot.ProtectSelf(); err != nil {
			return nil, err
		}
		if err := proc.OwnTimerSlack(); err != nil {
			return nil, err
		}
	}
	if err := boot.KeepDescriptors(); err != nil {
		return nil, err
	}
	if len(os.Args) == 2 && os.Args[1] == "--container" {
		return container()
	}
	if len(os.Args) == 3 && os.Args[1] == "--listen" {
		return process(os.Args[2])
	}
	return nil, errors.New("usage: dsec-guest --container | --listen PATH")
}

// container makes this process PID 1, which serves on the channel that it was started
// with, and on the listener for later edges.
func container() (serve func() error, err error) {
	cfg, memory, err := boot.Container(channelFD)
	if err != nil {
		return nil, err
	}
	server, err := newServer(cfg, memory)
	if err != nil {
		return nil, err
	}
	channel := os.NewFile(channelFD, "channel")
	conn, err := net.FileConn(channel)
	channel.Close() // FileConn has its own
	if err != nil {
		return nil, err
	}
	return func() error {
		go serveFirst(server, conn)
		return accept(server, listenerFD)
	}, nil
}

func serveFirst(server *aether.Server, conn net.Conn) {
	if err := server.ServeConn(context.Background(), conn); err != nil {
		logEvent("first connection", err)
	}
}

// process serves as an ordinary process, for tests; its environment stands for what
// an edge would say.
func process(path string) (serve func() error, err error) {
	fd, err := listen(path)
	if err != nil {
		return nil, err
	}
	generation, err := number("DSEC_GUEST_GENERATION")
	if err != nil {
		return nil, err
	}
	server, err := newServer(&msg.BootConfig{
		Sandbox: os.Getenv("DSEC_GUEST_NODE"), Generation: generation, User: os.Getenv("DSEC_GUEST_USER"), Cwd: os.Getenv("DSEC_GUEST_CWD"),
		Env: programEnv(os.Environ()),
	}, 0)
	if err != nil {
		return nil, err
	}
	return func() error { return accept(server, fd) }, nil
}

func accept(server *aether.Server, fd int) error {
	f := os.NewFile(uintptr(fd), "listener")
	l, err := net.FileListener(f)
	f.Close() // FileListener has its own
	if err != nil {
		return err
	}
	return server.Serve(context.Background(), l)
}

func newServer(cfg *msg.BootConfig, memory int) (*aether.Server, error) {
	users := user.NewDatabase("")
	procs, err := proc.NewTable(proc.Config{
		User: cfg.User, Cwd: cfg.Cwd, Env: cfg.Env, Users: users, Memory: proc.Memory{Limit: int64(cfg.MemoryBytes), Events: memory}, CPUs: int(cfg.Cpus),
	}, proc.NewReaper(oomScore))
	if err != nil {
		return nil, err
	}
	g := guest.New(guest.Config{
		Procs: procs, Sessions: session.NewTable(procs), Files: &file.FS{Users: users, User: cfg.User, Cwd: cfg.Cwd},
		Version: version, User: cfg.User, Cwd: cfg.Cwd,
	})
	return aether.NewServer(aether.ServerConfig{
		Handlers: g.Handlers(), Node: cfg.Sandbox, Generation: cfg.Generation, Log: logEvent,
		// The edge is on this machine: its death closes the socket. A time limit would pass while
		// the sandbox is paused, in the middle of a write.
		KeepAlive: -1, WriteTimeout: -1,
	}), nil
}

func logEvent(event string, err error) {
	os.Stderr.WriteString("dsec-guest: " + event + ": " + err.Error() + "\n")
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
