package store

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image"

	"golang.org/x/sys/unix"
)

// fakeMounts counts mounts and closes, by descriptors of /dev/null.
func fakeMounts(idle time.Duration, mount func(context.Context, image.LayerFiles) (int, error)) *Mounts {
	return &Mounts{
		use: func(_ context.Context, l image.Layer) (image.LayerFiles, func(), error) {
			return image.LayerFiles{Meta: l.MetaDigest}, func() {}, nil
		},
		idle: idle, mount: mount, byMeta: map[string]*mounted{},
	}
}

func nullFD() (int, error) { return unix.Open("/dev/null", unix.O_PATH|unix.O_CLOEXEC, 0) }

func closed(fd int) bool {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0)
	return errors.Is(err, unix.EBADF)
}

func held(m *Mounts) string { a, b := m.Held(); return fmt.Sprint(a, b) }

func TestAMountIsSharedAndEndsAfterItsIdleTime(t *testing.T) {
	// Not parallel: it asks whether a descriptor number is closed.
	synctest.Test(t, func(t *testing.T) {
		var n int
		m := fakeMounts(time.Minute, func(context.Context, image.LayerFiles) (int, error) { n++; return nullFD() })
		l := image.Layer{MetaDigest: "a"}
		fd, release, err := m.Acquire(t.Context(), l)
		if err != nil {
			t.Fatal(err)
		}
		fd2, release2, err := m.Acquire(t.Context(), l)
		if err != nil || fd2 != fd || n != 1 {
			t.Fatalf("mounted %d times: %d, %d, %v", n, fd, fd2, err)
		}
		release()
		release() // harmless
		time.Sleep(2 * time.Minute)
		if held(m) != "1 1" || closed(fd) {
			t.Errorf("in use, held %s", held(m))
		}
		release2()
		time.Sleep(59 * time.Second)
		if held(m) != "1 0" {
			t.Errorf("idle, held %s", held(m))
		}
		_, release3, err := m.Acquire(t.Context(), l)
		if err != nil || n != 1 {
			t.Fatalf("mounted %d times, %v", n, err)
		}
		time.Sleep(time.Hour)
		release3()
		time.Sleep(59 * time.Second)
		if closed(fd) {
			t.Error("the idle time did not start anew")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if held(m) != "0 0" || !closed(fd) {
			t.Errorf("after its idle time, held %s", held(m))
		}
	})
}

func TestAFailedMountIsTriedAnew(t *testing.T) {
	t.Parallel()
	var n atomic.Int32
	m := fakeMounts(time.Hour, func(context.Context, image.LayerFiles) (int, error) {
		if n.Add(1) == 1 {
			return -1, errs.New(errs.ImageCorrupt, "test", "broken")
		}
		return nullFD()
	})
	if _, _, err := m.Acquire(t.Context(), image.Layer{MetaDigest: "a"}); !errors.Is(err, errs.ImageCorrupt) {
		t.Errorf("got %v", err)
	}
	if held(m) != "0 0" {
		t.Errorf("held %s", held(m))
	}
	_, release, err := m.Acquire(t.Context(), image.Layer{MetaDigest: "a"})
	if err != nil {
		t.Fatal(err)
	}
	release()
	m.Close()
	if held(m) != "0 0" {
		t.Errorf("held %s", held(m))
	}
	if _, _, err := m.Acquire(t.Context(), image.Layer{MetaDigest: "a"}); !errors.Is(err, errs.ShuttingDown) {
		t.Errorf("got %v", err)
	}
}

func TestACallerThatLeavesDoesNotSpoilTheMountForOthers(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		m := fakeMounts(time.Minute, func(ctx context.Context, _ image.LayerFiles) (int, error) {
			<-gate
			if err := ctx.Err(); err != nil {
				return -1, err
			}
			return nullFD()
		})
		ctx, cancel := context.WithCancel(t.Context())
		left := make(chan error)
		go func() { _, _, err := m.Acquire(ctx, image.Layer{MetaDigest: "a"}); left <- err }()
		synctest.Wait()
		got := make(chan error)
		go func() {
			_, release, err := m.Acquire(t.Context(), image.Layer{MetaDigest: "a"})
			if err == nil {
				release()
			}
			got <- err
		}()
		synctest.Wait()
		cancel()
		if err := <-left; !errors.Is(err, errs.RequestCanceled) {
			t.Errorf("got %v", err)
		}
		close(gate)
		if err := <-got; err != nil {
			t.Error(err)
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if held(m) != "0 0" {
			t.Errorf("held %s", held(m))
		}
	})
}

func TestRealMountsAreSharedAndOutliveTheImage(t *testing.T) {
	t.Parallel()
	s := open(t, t.TempDir()+"/node")
	img, err := s.ImportPath(t.Context(), tree(t, map[string]string{"f": big("x")}), ImportOptions{})
	if err != nil {
		t.Fatal(err)
	}
	m := NewMounts(s, time.Millisecond)
	defer m.Close()
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for range 20 {
				fd, release, err := m.Acquire(t.Context(), img.Layers[0])
				if err != nil {
					t.Error(err)
					return
				}
				mine, err := image.Clone(fd)
				release()
				if err != nil {
					t.Error(err)
					return
				}
				if p, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/f", mine)); err != nil || string(p) != big("x") {
					t.Errorf("%d bytes, %v", len(p), err)
				}
				unix.Close(mine)
			}
		})
	}
	wg.Wait()
	fd, release, err := m.Acquire(t.Context(), img.Layers[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(img.Digest); err != nil {
		t.Fatal(err)
	}
	if p, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/f", fd)); err != nil || string(p) != big("x") {
		t.Errorf("%d bytes, %v", len(p), err)
	}
	release()
}
