package lazy_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"dsec/internal/image"
	"dsec/internal/image/lazy"
	"dsec/internal/keeper"
)

// The test binary is the edge and the keeper, too.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 {
		switch os.Args[1] {
		case "lazy-keeper":
			os.Exit(keeper.Main(os.Args[2:], []string{"lazy-keeper"}, keeper.Hooks{Abandoned: func(ctx context.Context, held *keeper.Client) error {
				p, err := os.ReadFile(keeperDir(os.Args) + "/cache")
				if err != nil {
					return err
				}
				return lazy.Abandoned(ctx, string(p), lazy.Options{Holder: held, Log: slog.Default()})
			}}))
		case "lazy-edge":
			if err := crashEdge(os.Args[2]); err != nil {
				fmt.Println(err)
				os.Exit(1)
			}
			os.Exit(0)
		}
	}
	os.Exit(m.Run())
}

func keeperDir(args []string) string {
	for i, a := range args {
		if a == "-dir" {
			return args[i+1]
		}
	}
	return ""
}

// crashSpec is what the edge under test does.
type crashSpec struct {
	Cache, Keeper string
	Mode          lazy.Mode
	Limit         int64
	Delay         time.Duration
	Patience      time.Duration
	Meta, Digest  []string
	Data          []string
}

func (s crashSpec) keeper() keeper.Config {
	return keeper.Config{Dir: s.Keeper, Verb: []string{"lazy-keeper"}, Patience: s.Patience, Linger: 500 * time.Millisecond}
}

func crashEdge(spec string) error {
	var s crashSpec
	if err := json.Unmarshal([]byte(spec), &s); err != nil {
		return err
	}
	ctx := context.Background()
	k, err := keeper.Start(ctx, s.keeper())
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelWarn}))
	c, err := lazy.Open(ctx, s.Cache, lazy.Options{Mode: s.Mode, Limit: s.Limit, ColdAfter: time.Nanosecond, Holder: k, Readahead: 512 << 10, SaveEvery: 20 * time.Millisecond, Log: log})
	if err != nil {
		return err
	}
	held, err := k.List(ctx)
	if err != nil {
		return err
	}
	for i := range s.Meta {
		data, err := os.ReadFile(s.Data[i])
		if err != nil {
			return err
		}
		src := newSource(data, 5)
		src.delay.Store(int64(s.Delay))
		h, err := c.Blob(ctx, s.Digest[i], int64(len(data)), src)
		if err != nil {
			return err
		}
		name := fmt.Sprintf("test/mount/%d", i)
		if strings.Contains(strings.Join(held, ","), name) {
			continue
		}
		m, err := image.Mount(ctx, image.LayerFiles{Meta: s.Meta[i], Data: h.Path()})
		if err != nil {
			return err
		}
		f := os.NewFile(uintptr(m), "mount")
		if err := k.Put(ctx, name, []*os.File{f}); err != nil {
			return err
		}
		defer f.Close()
	}
	fmt.Println("ready")
	io.Copy(io.Discard, os.Stdin)
	return nil
}

// crashRig runs an edge in a process of its own, and readers in this one.
type crashRig struct {
	t       *testing.T
	spec    crashSpec
	layers  []*testLayer
	edge    *exec.Cmd
	stdin   io.Closer
	readers []*reader
	mounts  []*os.File

	reads, errors atomic.Int64
	slowest       atomic.Int64
}

func newCrashRig(t *testing.T, mode lazy.Mode, layers, size int, limit int64, patience time.Duration) *crashRig {
	needRoot(t)
	dir := t.TempDir()
	r := &crashRig{t: t, spec: crashSpec{Cache: dir + "/cache", Keeper: dir + "/keeper", Mode: mode, Limit: limit, Delay: 2 * time.Millisecond, Patience: patience}}
	os.Mkdir(r.spec.Keeper, 0o700)
	if err := os.WriteFile(r.spec.Keeper+"/cache", []byte(r.spec.Cache), 0o600); err != nil {
		t.Fatal(err)
	}
	for k := range layers {
		l := buildLayer(t, size, uint64(100+k))
		path := filepath.Join(dir, fmt.Sprint("full-", k))
		if err := os.WriteFile(path, l.data, 0o600); err != nil {
			t.Fatal(err)
		}
		r.layers = append(r.layers, l)
		r.spec.Meta = append(r.spec.Meta, l.meta)
		r.spec.Digest = append(r.spec.Digest, l.digest)
		r.spec.Data = append(r.spec.Data, path)
	}
	t.Cleanup(func() {
		r.killEdge()
		for range 20 {
			for _, pid := range r.keepers() {
				syscall.Kill(pid, syscall.SIGKILL)
			}
		}
	})
	r.startEdge()
	r.takeMounts()
	return r
}

func (r *crashRig) startEdge() {
	r.t.Helper()
	p, _ := json.Marshal(r.spec)
	cmd := exec.Command("/proc/self/exe", "lazy-edge", string(p))
	cmd.Stderr = os.Stderr
	in, _ := cmd.StdinPipe()
	out, err := cmd.StdoutPipe()
	if err != nil {
		r.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		r.t.Fatal(err)
	}
	r.edge, r.stdin = cmd, in
	line := make([]byte, 200)
	n, _ := out.Read(line)
	if string(line[:n]) != "ready\n" {
		r.t.Fatalf("edge said %q", line[:n])
	}
}

func (r *crashRig) killEdge() {
	if r.edge != nil {
		r.edge.Process.Kill()
		r.edge.Wait()
		r.stdin.Close()
		r.edge = nil
	}
}

// takeMounts opens the layers' files through the mounts that the edge made.
func (r *crashRig) takeMounts() {
	k, err := keeper.Connect(r.t.Context(), r.spec.keeper())
	if err != nil {
		r.t.Fatal(err)
	}
	defer k.Close()
	for i, l := range r.layers {
		f, err := k.Take(r.t.Context(), fmt.Sprintf("test/mount/%d", i))
		if err != nil {
			r.t.Fatal(err)
		}
		r.mounts = append(r.mounts, f[0])
		r.readers = append(r.readers, openBig(r.t, l, int(f[0].Fd())))
	}
}

// keepers are the keepers' processes.
func (r *crashRig) keepers() (out []int) {
	list, _ := os.ReadDir("/proc")
	for _, e := range list {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		p, _ := os.ReadFile("/proc/" + e.Name() + "/cmdline")
		if strings.Contains(string(p), "lazy-keeper\x00-dir\x00"+r.spec.Keeper+"\x00") {
			out = append(out, pid)
		}
	}
	return out
}

// settled waits until two keepers run and hold the same.
func (r *crashRig) settled() {
	r.t.Helper()
	k, err := keeper.Connect(r.t.Context(), r.spec.keeper())
	if err != nil {
		r.t.Fatal(err)
	}
	defer k.Close()
	waitFor(r.t, func() bool {
		s := k.Status(r.t.Context())
		return len(s) == 2 && s[0].Names == s[1].Names && s[0].Names > 0
	})
}

const hangAfter = 20 * time.Second

// load reads at random until stop, comparing every byte.
func (r *crashRig) load(stop <-chan struct{}, workers int) *sync.WaitGroup {
	var wg sync.WaitGroup
	for k := range workers {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(uint64(k), 3))
			for {
				select {
				case <-stop:
					return
				default:
				}
				rd := r.readers[rnd.IntN(len(r.readers))]
				size := int64(len(rd.l.content))
				off := rnd.Int64N(size - 200<<10)
				start := time.Now()
				err := rd.check(off, 1+rnd.Int64N(200<<10))
				took := time.Since(start)
				for old := r.slowest.Load(); int64(took) > old && !r.slowest.CompareAndSwap(old, int64(took)); old = r.slowest.Load() {
				}
				r.reads.Add(1)
				if errors.Is(err, errWrongBytes) {
					r.t.Error(err)
					return
				}
				if err != nil {
					r.errors.Add(1)
				}
				if rnd.IntN(3) == 0 {
					rd.forget()
				}
			}
		}()
	}
	return &wg
}

func (r *crashRig) report() {
	r.t.Helper()
	r.t.Logf("%d reads, %d failed, slowest %v", r.reads.Load(), r.errors.Load(), time.Duration(r.slowest.Load()))
	if d := time.Duration(r.slowest.Load()); d > hangAfter {
		r.t.Errorf("a read took %v", d)
	}
}

// leave unmounts and sees that nothing stays.
func (r *crashRig) leave() {
	r.t.Helper()
	for _, rd := range r.readers {
		rd.f.Close()
	}
	for _, m := range r.mounts {
		m.Close()
	}
	k, err := keeper.Connect(r.t.Context(), r.spec.keeper())
	if err != nil {
		r.t.Fatal(err)
	}
	k.Stop(r.t.Context())
	r.killEdge()
	waitFor(r.t, func() bool { return len(r.keepers()) == 0 })
}

func TestCrash(t *testing.T) {
	for _, mode := range []lazy.Mode{lazy.Fanotify, lazy.FUSE} {
		for _, c := range []struct {
			name string
			once func(r *crashRig, rnd *rand.Rand)
		}{
			{"Edge", func(r *crashRig, rnd *rand.Rand) {
				r.killEdge()
				time.Sleep(time.Duration(rnd.Int64N(int64(50 * time.Millisecond))))
				r.startEdge()
			}},
			{"OneKeeper", func(r *crashRig, rnd *rand.Rand) {
				k := r.keepers()
				syscall.Kill(k[rnd.IntN(len(k))], syscall.SIGKILL)
				r.settled()
			}},
			{"BothKeepersInTurn", func(r *crashRig, rnd *rand.Rand) {
				for _, pid := range r.keepers() {
					syscall.Kill(pid, syscall.SIGKILL)
					r.settled()
				}
			}},
			{"EdgeAndOneKeeper", func(r *crashRig, rnd *rand.Rand) {
				k := r.keepers()
				syscall.Kill(k[rnd.IntN(len(k))], syscall.SIGKILL)
				r.killEdge()
				r.startEdge()
				r.settled()
			}},
			{"EdgeThenBothKeepersInTurn", func(r *crashRig, rnd *rand.Rand) {
				r.killEdge()
				for _, pid := range r.keepers() {
					syscall.Kill(pid, syscall.SIGKILL)
					r.settled()
				}
				r.startEdge()
			}},
		} {
			t.Run(string(mode)+"/"+c.name, func(t *testing.T) {
				const size = 8 << 20
				r := newCrashRig(t, mode, 2, size, size/2, time.Hour)
				stop := make(chan struct{})
				wg := r.load(stop, 24)
				rnd := rand.New(rand.NewPCG(1, 1))
				for end, n := time.Now().Add(4*time.Second), 0; time.Now().Before(end) || n < 3; n++ {
					time.Sleep(time.Duration(rnd.Int64N(int64(200 * time.Millisecond))))
					c.once(r, rnd)
				}
				close(stop)
				wg.Wait()
				r.report()
				if n := r.errors.Load(); n > 0 {
					t.Errorf("%d reads failed", n)
				}
				r.leave()
			})
		}
	}
}

// An edge that never comes back: nobody waits for ever, nobody sees zeros, and the
// keepers end when the mounts are gone.
func TestAbandonedReadersFail(t *testing.T) {
	for _, mode := range []lazy.Mode{lazy.Fanotify, lazy.FUSE} {
		t.Run(string(mode), func(t *testing.T) {
			r := newCrashRig(t, mode, 1, 48<<20, 0, 300*time.Millisecond)
			if err := r.readers[0].check(0, 1<<20); err != nil {
				t.Fatal(err)
			}
			stop := make(chan struct{})
			wg := r.load(stop, 16)
			time.Sleep(20 * time.Millisecond)
			r.killEdge()
			waitFor(t, func() bool { return r.errors.Load() > 16 })
			close(stop)
			wg.Wait()
			r.report()
			r.readers[0].forget()
			if err := r.readers[0].check(0, 1<<20); err != nil {
				t.Errorf("what was filled is not served: %v", err)
			}
			// It does come back: all is well.
			r.startEdge()
			if err := r.readers[0].check(0, int64(len(r.layers[0].content))); err != nil {
				t.Error(err)
			}
			r.killEdge()
			for _, rd := range r.readers {
				rd.f.Close()
			}
			for _, m := range r.mounts {
				m.Close()
			}
			k, err := keeper.Connect(t.Context(), r.spec.keeper())
			if err != nil {
				t.Fatal(err)
			}
			k.Drop(t.Context(), "test/mount/0")
			k.Close()
			waitFor(t, func() bool { return len(r.keepers()) == 0 })
		})
	}
}
