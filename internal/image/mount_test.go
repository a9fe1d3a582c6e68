package image_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// These tests need root. Mounts are detached: nothing of them can stay behind.

func sample(t *testing.T) image.LayerFiles {
	l, _ := imagetest.MustBuild(t, layer.Options{}, func(b *layer.Builder) error {
		return errors.Join(
			b.Special("null", unix.S_IFCHR, 1, 3, layer.Attr{Perm: 0o666}),
			b.File(t.Context(), "f", layer.Attr{Perm: 0o644}, 9000, strings.NewReader(strings.Repeat("x", 9000))),
			setuidID(t.Context(), b),
		)
	})
	return l
}

// setuidID adds a setuid copy of this machine's static busybox, owned by uid 1234.
func setuidID(ctx context.Context, b *layer.Builder) error {
	p, err := exec.LookPath("busybox")
	if err != nil {
		return err
	}
	f, err := os.Open(p)
	if err != nil {
		return err
	}
	defer f.Close()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	return b.File(ctx, "busybox", layer.Attr{Perm: 0o4755, UID: 1234, GID: 0}, st.Size(), f)
}

func TestMountAttributes(t *testing.T) {
	t.Parallel()
	fd, err := image.Mount(t.Context(), sample(t))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	dir := fmt.Sprintf("/proc/%d/fd/%d/", os.Getpid(), fd)
	if _, err := os.OpenFile(dir+"f", os.O_WRONLY, 0); !errors.Is(err, unix.EROFS) {
		t.Errorf("opening for writing: %v", err)
	}
	if _, err := os.Open(dir + "null"); !errors.Is(err, unix.EACCES) {
		t.Errorf("opening a device: %v", err)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil || st.Flags&unix.ST_NOSUID != 0 || st.Flags&unix.ST_RDONLY == 0 || st.Flags&unix.ST_NODEV == 0 {
		t.Errorf("mount flags %#x, %v", st.Flags, err)
	}
	if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); err != nil || flags&unix.FD_CLOEXEC == 0 {
		t.Error("the mount's descriptor would leak into children")
	}
	p, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(p), "erofs") {
		t.Errorf("the mount is visible: %v", err)
	}
	mine, err := image.Clone(fd)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(mine)
	if _, err := os.Stat(fmt.Sprintf("/proc/self/fd/%d/f", mine)); err != nil {
		t.Error(err)
	}
}

func TestMountFailures(t *testing.T) {
	// Not parallel: it counts descriptors.
	good := sample(t)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	text := filepath.Join(t.TempDir(), "text")
	if err := os.WriteFile(text, []byte(strings.Repeat("no image", 1000)), 0o600); err != nil {
		t.Fatal(err)
	}
	before := descriptors(t)
	for _, c := range []struct {
		name string
		ctx  context.Context
		l    image.LayerFiles
		code errs.Code
	}{
		{"cancelled", cancelled, good, errs.RequestCanceled},
		{"not an image", t.Context(), image.LayerFiles{Meta: text}, errs.ImageCorrupt},
		{"missing metadata", t.Context(), image.LayerFiles{Meta: text + "x"}, errs.ImageCorrupt},
		{"missing data", t.Context(), image.LayerFiles{Meta: good.Meta, Data: text + "x"}, errs.ImageCorrupt},
	} {
		if _, err := image.Mount(c.ctx, c.l); !errors.Is(err, c.code) {
			t.Errorf("%s: got %v", c.name, err)
		}
	}
	if after := descriptors(t); after != before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func descriptors(t *testing.T) int {
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(list)
}
