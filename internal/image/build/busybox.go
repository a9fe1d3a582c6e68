package build

import (
	"context"
	"debug/elf"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"
)

// busybox makes a small system of the machine's static busybox, with a hard link
// for each of its commands.
func (b *builder) busybox(ctx context.Context) error {
	bin, err := exec.LookPath("busybox")
	if err != nil {
		return errs.New(errs.NotSupported, phase, "busybox is not installed here; install the package busybox-static").Because(err)
	}
	if err := checkStatic(bin); err != nil {
		return err
	}
	out, err := exec.CommandContext(ctx, bin, "--list-full").Output()
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "list busybox's commands", err)
	}
	b.tell("busybox from " + bin)
	for _, d := range []struct {
		path string
		perm os.FileMode
	}{
		{"bin", 0o755}, {"dev", 0o755}, {"etc", 0o755}, {"home", 0o755}, {"proc", 0o755}, {"root", 0o700}, {"run", 0o755},
		{"sbin", 0o755}, {"sys", 0o755}, {"tmp", 0o777 | os.ModeSticky}, {"usr/bin", 0o755}, {"usr/sbin", 0o755}, {"var/tmp", 0o777 | os.ModeSticky},
	} {
		p := filepath.Join(b.root, d.path)
		if err := os.MkdirAll(p, 0o755); err != nil {
			return layer.DiskError("make busybox image", err)
		}
		if err := os.Chmod(p, d.perm); err != nil { // past the umask
			return layer.DiskError("make busybox image", err)
		}
	}
	first := filepath.Join(b.root, "bin/busybox")
	if err := copyFile(bin, first, 0o755); err != nil {
		return err
	}
	for _, name := range strings.Fields(string(out)) {
		p := filepath.Join(b.root, filepath.Clean("/"+name))
		if p == first {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			return layer.DiskError("make busybox image", err)
		}
		if err := os.Link(first, p); err != nil {
			return layer.DiskError("make busybox image", err)
		}
	}
	for name, text := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
		"etc/group":  "root:x:0:\nnogroup:x:65534:\n",
		"etc/shells": "/bin/sh\n/bin/ash\n",
	} {
		if err := os.WriteFile(filepath.Join(b.root, name), []byte(text), 0o644); err != nil {
			return layer.DiskError("make busybox image", err)
		}
	}
	return nil
}

// checkStatic refuses a busybox that would find no libraries in the image.
func checkStatic(bin string) error {
	f, err := elf.Open(bin)
	if err != nil {
		return errs.Wrap(errs.NotSupported, phase, "read "+bin, err)
	}
	defer f.Close()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return errs.New(errs.NotSupported, phase, bin+" needs shared libraries; install the package busybox-static")
		}
	}
	return nil
}

func copyFile(from, to string, perm os.FileMode) error {
	src, err := os.Open(from)
	if err != nil {
		return errs.Wrap(errs.BadRequest, phase, "open "+from, err)
	}
	defer src.Close()
	return copyTo(src, to, perm)
}

func copyTo(src io.Reader, to string, perm os.FileMode) error {
	dst, err := os.OpenFile(to, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return layer.DiskError("make file", err)
	}
	_, err = io.Copy(dst, src)
	if cerr := dst.Chmod(perm); err == nil {
		err = cerr
	}
	if cerr := dst.Close(); err == nil {
		err = cerr
	}
	return layer.DiskError("write file", err)
}
