package swap

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
)

// fake is a kernel that swaps to what it is told to.
type fake struct {
	mu    sync.Mutex
	host  []area
	own   map[string]int64
	used  int64
	fails error // of on
}

func (f *fake) machine() (total, free, memory int64, err error) {
	areas, err := f.swaps()
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, a := range areas {
		total += a.total
	}
	return total, total - f.used, 64 << 20, err
}

func (f *fake) swaps() ([]area, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := append([]area(nil), f.host...)
	for path, bytes := range f.own {
		out = append(out, area{path: path, total: bytes})
	}
	return out, nil
}

func (f *fake) on(path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fails != nil {
		return f.fails
	}
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	if f.own == nil {
		f.own = map[string]int64{}
	}
	f.own[path] = st.Size()
	return nil
}

func (f *fake) off(_ context.Context, path string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if _, ok := f.own[path]; !ok {
		return unix.EINVAL
	}
	delete(f.own, path)
	return nil
}

func (f *fake) use(n int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.used += n
}

func space(t *testing.T, dir string, k *fake, o Option) *Space {
	t.Helper()
	s, err := New(Config{Dir: dir, Option: o, kernel: k})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func take(t *testing.T, s *Space, bytes int64) func() {
	t.Helper()
	release, err := s.Take(t.Context(), bytes)
	if err != nil {
		t.Fatal(err)
	}
	return release
}

func TestOptions(t *testing.T) {
	t.Parallel()
	for _, o := range []Option{{}, {Kind: Auto}, {Kind: File, Bytes: Least}, {Kind: Zram}, {Kind: None}} {
		if _, err := New(Config{Option: o}); err != nil {
			t.Errorf("%v: %v", o, err)
		}
	}
	for _, o := range []Option{{Kind: "disk"}, {Kind: Host, Bytes: 1 << 30}, {Kind: Auto, Bytes: 1 << 30}, {Kind: File, Bytes: 1}, {Kind: File, Bytes: -1}} {
		if _, err := New(Config{Option: o}); !errors.Is(err, errs.BadRequest) {
			t.Errorf("%v: %v", o, err)
		}
	}
}

// Nothing is made before something is paused, and all of it goes.
func TestAFileFromTheFirstPauseOn(t *testing.T) {
	t.Parallel()
	k, dir := &fake{}, filepath.Join(t.TempDir(), "swap")
	s := space(t, dir, k, Option{Kind: File, Bytes: 8 << 20})
	if got := s.Stat(); got.TotalBytes != 8<<20 || got.UsedBytes != 0 {
		t.Errorf("before: %+v", got)
	}
	if exists(dir) || len(s.Devices()) != 0 {
		t.Error("made too early")
	}
	take(t, s, 1<<20)()
	path := filepath.Join(dir, fileName)
	p, err := os.ReadFile(path)
	if err != nil || len(p) != 8<<20 || string(p[page-10:page]) != "SWAPSPACE2" || binary.NativeEndian.Uint32(p[1024:]) != 1 || binary.NativeEndian.Uint32(p[1028:]) != uint32(8<<20/page-1) {
		t.Errorf("%d bytes, %v", len(p), err)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	if got := s.Stat(); got.TotalBytes != 8<<20 {
		t.Errorf("after: %+v", got)
	}
	if d := s.Devices(); len(d) != 1 || d[0] != (Device{File, path, true}) {
		t.Errorf("%+v", d)
	}
	for range 2 {
		if err := s.Remove(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if exists(dir) || len(k.own) != 0 {
		t.Errorf("left: %v", k.own)
	}
	take(t, s, 1<<20)() // it is made again
	if len(k.own) != 1 {
		t.Error("not made again")
	}
}

// A restarted node goes on with what is in use; what a restarted machine left is made anew.
func TestAFileIsFoundAgain(t *testing.T) {
	t.Parallel()
	k, dir := &fake{}, t.TempDir()
	path := filepath.Join(dir, fileName)
	take(t, space(t, dir, k, Option{Kind: File, Bytes: 4 << 20}), 1)()
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	again := space(t, dir, k, Option{Kind: File, Bytes: 2 << 20})
	if got := again.Stat(); got.TotalBytes != 4<<20 {
		t.Errorf("%+v", got)
	}
	take(t, again, 3<<20)()
	if now, err := os.Stat(path); err != nil || !os.SameFile(before, now) {
		t.Errorf("another file: %v", err)
	}
	booted := &fake{}
	take(t, space(t, dir, booted, Option{Kind: File, Bytes: 2 << 20}), 1)()
	if now, err := os.Stat(path); err != nil || now.Size() != 2<<20 {
		t.Errorf("%v, %v", now, err)
	}
	// Whoever removes the node needs to know no more than where.
	if err := space(t, dir, booted, Option{Kind: None}).Remove(t.Context()); err != nil || len(booted.own) != 0 {
		t.Errorf("%v, left %v", err, booted.own)
	}
}

func TestAutoTakesTheMachinesOwn(t *testing.T) {
	t.Parallel()
	k, dir := &fake{host: []area{{path: "/other/swap/" + fileName, total: 1 << 30}}}, t.TempDir()
	s := space(t, dir, k, Option{Kind: Auto})
	take(t, s, 1<<20)()
	if len(k.own) != 1 {
		t.Error("another node's file is taken for the machine's swap")
	}
	k = &fake{host: []area{{path: "/swapfile", total: 8 << 20}}}
	for _, o := range []Option{{Kind: Auto}, {Kind: Host}} {
		s = space(t, filepath.Join(dir, "b"), k, o)
		take(t, s, 8<<20)()
		if got := s.Stat(); len(k.own) != 0 || got.TotalBytes != 8<<20 {
			t.Errorf("%v: %+v, made %v", o, got, k.own)
		}
		if _, err := s.Take(t.Context(), 8<<20+1); !errors.Is(err, errs.SwapFull) {
			t.Errorf("%v: %v", o, err)
		}
	}
	k.host = nil // switched off
	if _, err := s.Take(t.Context(), 1); !errors.Is(err, errs.NotSupported) {
		t.Errorf("no swap: %v", err)
	}
	if _, err := space(t, dir, k, Option{Kind: None}).Take(t.Context(), 1); !errors.Is(err, errs.NotSupported) {
		t.Errorf("none: %v", err)
	}
	if got := space(t, dir, k, Option{Kind: None}).Stat(); got.TotalBytes != 0 {
		t.Errorf("none: %+v", got)
	}
}

func TestWhatDoesNotFit(t *testing.T) {
	t.Parallel()
	k := &fake{}
	s := space(t, t.TempDir(), k, Option{Kind: File, Bytes: 8 << 20})
	first := take(t, s, 6<<20)
	if _, err := s.Take(t.Context(), 9<<20); !errors.Is(err, errs.SwapFull) || errs.Of(err).Facts()["needed_bytes"] != "9437184" || errs.Of(err).Facts()["free_bytes"] != "8388608" {
		t.Errorf("%v %v", err, errs.Of(err).Facts())
	}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := s.Take(ctx, 4<<20); !errors.Is(err, errs.DeadlineExceeded) {
		t.Errorf("while others are on their way: %v", err)
	}
	// It waits for them, and then it is known whether it fits.
	for _, used := range []int64{2 << 20, 6 << 20} {
		got := make(chan error, 1)
		go func() {
			release, err := s.Take(t.Context(), 4<<20)
			if err == nil {
				release()
			}
			got <- err
		}()
		k.use(used)
		first()
		if err := <-got; (err == nil) != (used == 2<<20) {
			t.Errorf("with %d in use: %v", used, err)
		}
		k.use(-used)
		first = take(t, s, 6<<20)
	}
	first()
	first() // does no harm
	take(t, s, 8<<20)()
}

func TestWhatTheKernelRefuses(t *testing.T) {
	t.Parallel()
	for errno, want := range map[unix.Errno]error{unix.EINVAL: errs.NotSupported, unix.EPERM: errs.NotSupported, unix.ENOSPC: errs.SwapFull, unix.EIO: errs.InternalError} {
		dir := filepath.Join(t.TempDir(), "swap")
		s := space(t, dir, &fake{fails: errno}, Option{Kind: File, Bytes: 2 << 20})
		_, err := s.Take(t.Context(), 1)
		if !errors.Is(err, want) || !errors.Is(err, errno) {
			t.Errorf("%v: %v", errno, err)
		}
		if exists(filepath.Join(dir, fileName)) {
			t.Errorf("%v: the file is left", errno)
		}
	}
}

func TestSwapsFile(t *testing.T) {
	t.Parallel()
	got, err := parseSwaps("Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n/a\\040b/dsec.swap                      file\t\t1024\t\t8\t\t10\n/dev/zram0   partition\t2048\t0\t-2\n")
	if err != nil || len(got) != 2 || got[0] != (area{"/a b/dsec.swap", 1 << 20, 8 << 10}) || !got[0].nodes() || got[1].path != "/dev/zram0" || got[1].nodes() {
		t.Errorf("%+v, %v", got, err)
	}
	if _, err := parseSwaps("head\n/x file many 0 1\n"); err == nil {
		t.Error("no error")
	}
	if got, err := parseSwaps(""); err != nil || got != nil {
		t.Errorf("%v, %v", got, err)
	}
}

// On the real kernel. Needs root, and a file system that swaps.
func TestReal(t *testing.T) {
	for _, kind := range []Kind{File, Zram} {
		t.Run(string(kind), func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "with a blank", "swap")
			s, err := New(Config{Dir: dir, Option: Option{Kind: kind, Bytes: 16 << 20}})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				if err := s.Remove(ctx); err != nil {
					t.Error(err)
				}
				if swaps, err := os.ReadFile("/proc/swaps"); err != nil || strings.Contains(string(swaps), strings.ReplaceAll(dir, " ", `\040`)) {
					t.Errorf("left: %s, %v", swaps, err)
				}
				if exists(dir) {
					t.Error("the directory is left")
				}
			})
			release, err := s.Take(t.Context(), 1<<20)
			if errors.Is(err, errs.NotSupported) {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			release()
			d := s.Devices()
			if len(d) != 1 || !d[0].Active || d[0].Kind != kind {
				t.Fatalf("%+v", d)
			}
			if got := s.Stat(); got.TotalBytes < 15<<20 {
				t.Errorf("%+v", got)
			}
			again, err := New(Config{Dir: dir, Option: Option{Kind: kind, Bytes: 16 << 20}})
			if err != nil {
				t.Fatal(err)
			}
			release, err = again.Take(t.Context(), 1<<20)
			if err != nil {
				t.Fatal(err)
			}
			release()
			if now := again.Devices(); len(now) != 1 || now[0] != d[0] {
				t.Errorf("another: %+v, was %+v", now, d)
			}
		})
	}
}

// What cannot hold a swap file says so.
func TestRealFileSystemWithoutSwap(t *testing.T) {
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skip("needs root: ", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	s, err := New(Config{Dir: filepath.Join(dir, "swap"), Option: Option{Kind: File, Bytes: 2 << 20}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Take(t.Context(), 1); !errors.Is(err, errs.NotSupported) || !strings.Contains(err.Error(), "tmpfs") {
		t.Errorf("%v", err)
	}
	if err := s.Remove(t.Context()); err != nil {
		t.Error(err)
	}
}

// A probe tells what a pause would find, and leaves nothing.
func TestProbe(t *testing.T) {
	t.Parallel()
	above := t.TempDir()
	dir := filepath.Join(above, "swap")
	probe := func(k *fake, o Option) (Report, error) {
		t.Helper()
		r, err := Probe(t.Context(), Config{Dir: dir, Option: o, kernel: k})
		if left, lerr := filepath.Glob(filepath.Join(above, "*.probe")); lerr != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, lerr)
		}
		return r, err
	}
	if r, err := probe(&fake{host: []area{{path: "/swapfile", total: 8 << 20}}}, Option{}); err != nil || r.Option.Kind != Host || r.Swap.TotalBytes != 8<<20 {
		t.Errorf("%+v, %v", r, err)
	}
	if r, err := probe(&fake{}, Option{Kind: File, Bytes: 4 << 20}); err != nil || r.Made || r.Option.Bytes != 4<<20 || r.Swap.TotalBytes != 4<<20 {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := probe(&fake{}, Option{Kind: File, Bytes: 1 << 60}); !errors.Is(err, errs.SwapFull) {
		t.Errorf("%v", err)
	}
	if _, err := probe(&fake{fails: unix.EINVAL}, Option{}); !errors.Is(err, errs.NotSupported) {
		t.Errorf("%v", err)
	}
	k := &fake{}
	take(t, space(t, dir, k, Option{Kind: File, Bytes: 4 << 20}), 1)()
	k.fails = unix.EIO // it is not tried
	if r, err := probe(k, Option{Kind: File, Bytes: 4 << 20}); err != nil || !r.Made {
		t.Errorf("%+v, %v", r, err)
	}
}
