package build

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// Options of a build; the zero value is usable.
type Options struct {
	// TempDir holds the root file system while it is made (default: the system's).
	TempDir string
	// Progress is told one line at a time what happens, tools' output included.
	Progress func(line string)
}

// Build makes the recipe's root file system and writes it to out as a tar with
// the real owners. It needs root. On error nothing is left behind.
func Build(ctx context.Context, r *Recipe, out io.Writer, opts Options) error {
	if opts.Progress == nil {
		opts.Progress = func(string) {}
	}
	if os.Geteuid() != 0 {
		return errs.New(errs.PermissionDenied, phase, "building an image needs root: owners and devices must be real").Advise("run it as root")
	}
	tmp, err := os.MkdirTemp(opts.TempDir, "dsec-build-")
	if err != nil {
		return layer.DiskError("make build directory", err)
	}
	defer os.RemoveAll(tmp)
	if err := os.Chmod(tmp, 0o711); err != nil { // apt reads its lists as another user
		return layer.DiskError("make build directory", err)
	}
	b := &builder{recipe: r, root: filepath.Join(tmp, "root"), tell: opts.Progress}
	if err := os.Mkdir(b.root, 0o755); err != nil {
		return layer.DiskError("make root directory", err)
	}
	if err := b.base(ctx); err != nil {
		return err
	}
	for i, s := range r.Steps {
		if err := b.step(ctx, s); err != nil {
			return fmt.Errorf("step %d: %w", i+1, err)
		}
	}
	b.tell("writing tar")
	return writeTar(ctx, b.root, out)
}

type builder struct {
	recipe *Recipe
	root   string
	tell   func(string)
}

func (b *builder) base(ctx context.Context) error {
	switch b.recipe.From {
	case FromDebian:
		return b.debian(ctx)
	case FromBusybox:
		return b.busybox(ctx)
	}
	return nil
}

func (b *builder) step(ctx context.Context, s Step) error {
	if s.Copy != nil {
		b.tell("copy " + s.Copy.Src + " to " + s.Copy.Dest)
		return b.copy(ctx, *s.Copy)
	}
	b.tell("run " + firstLine(s.Run))
	return b.run(ctx, s.Run)
}

func firstLine(s string) string {
	first, _, _ := strings.Cut(strings.TrimSpace(s), "\n")
	return first
}

// enter prepares a root file system for commands and runs one in it. $1 is the
// root, $2 the command. It runs in namespaces of its own, so nothing needs undoing.
const enter = `set -e
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
if [ -e "$1/etc/resolv.conf" ]; then mount --bind /etc/resolv.conf "$1/etc/resolv.conf"; fi
exec chroot "$1" /bin/sh -euc "cd /; $2"
`

func (b *builder) run(ctx context.Context, command string) error {
	if _, err := os.Lstat(filepath.Join(b.root, "bin/sh")); err != nil {
		return errs.New(errs.BadRequest, phase, "a run step needs /bin/sh in the image")
	}
	made, err := b.mountPoints()
	if err != nil {
		return err
	}
	defer func() {
		for _, p := range slices.Backward(made) {
			os.Remove(p)
		}
	}()
	cmd := exec.CommandContext(ctx, "/bin/sh", "-c", enter, "sh", b.root, command)
	cmd.Env = b.env()
	return b.tool(ctx, strconv.Quote(firstLine(command)), cmd)
}

// mountPoints makes what enter mounts over and the image lacks; it returns what it made.
func (b *builder) mountPoints() ([]string, error) {
	var made []string
	for _, d := range []string{"proc", "dev", "etc"} {
		p := filepath.Join(b.root, d)
		if err := os.Mkdir(p, 0o755); err == nil {
			made = append(made, p)
		} else if !errors.Is(err, os.ErrExist) {
			return made, layer.DiskError("make mount point", err)
		}
	}
	// A link there may point to nothing, or out of the root.
	resolv := filepath.Join(b.root, "etc/resolv.conf")
	f, err := os.OpenFile(resolv, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if errors.Is(err, os.ErrExist) {
		return made, nil
	}
	if err != nil {
		return made, layer.DiskError("make mount point", err)
	}
	return append(made, resolv), f.Close()
}

func (b *builder) env() []string {
	env := []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LC_ALL=C.UTF-8", "DEBIAN_FRONTEND=noninteractive"}
	for _, k := range []string{"http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"} {
		if v, ok := os.LookupEnv(k); ok {
			env = append(env, k+"="+v)
		}
	}
	for k, v := range b.recipe.Env {
		env = append(env, k+"="+v)
	}
	return env
}

// tool runs a command in mount and PID namespaces of its own, passing its output
// on line by line; ending the command ends all it started.
func (b *builder) tool(ctx context.Context, what string, cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:   unix.CLONE_NEWPID,
		Unshareflags: unix.CLONE_NEWNS, // private mounts, too
		Pdeathsig:    unix.SIGKILL,
	}
	cmd.WaitDelay = 5 * time.Second
	lines := &lineWriter{tell: b.tell}
	cmd.Stdout, cmd.Stderr = lines, lines
	err := cmd.Run()
	lines.end()
	if err == nil {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return errs.Wrap(errs.RequestCanceled, phase, "build image", err)
	}
	said := what + " ended with an error"
	if len(lines.last) > 0 {
		said += "; its last lines: " + strings.Join(lines.last, " | ")
	}
	e := errs.New(errs.BuildFailed, phase, said).Because(err)
	if strings.Contains(strings.Join(lines.last, "\n"), "No space left on device") {
		e.Code, e.Retryable, e.Infra = errs.DiskFull, true, true
	}
	return e
}

// lineWriter cuts output into lines and keeps the last few.
type lineWriter struct {
	tell func(string)
	buf  []byte
	last []string
}

const (
	keepLines = 6
	maxLine   = 2000
)

func (w *lineWriter) Write(p []byte) (int, error) {
	w.buf = append(w.buf, p...)
	for {
		i := bytes.IndexAny(w.buf, "\n\r")
		if i < 0 && len(w.buf) > maxLine {
			i = maxLine
		}
		if i < 0 {
			return len(p), nil
		}
		w.line(string(w.buf[:i]))
		w.buf = w.buf[i+1:]
	}
}

func (w *lineWriter) end() { w.line(string(w.buf)); w.buf = nil }

func (w *lineWriter) line(s string) {
	if s = strings.TrimSpace(s); s == "" {
		return
	}
	w.tell(s)
	if w.last = append(w.last, s); len(w.last) > keepLines {
		w.last = w.last[1:]
	}
}
