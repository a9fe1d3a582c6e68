package lazy_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"sync"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/lazy"

	"golang.org/x/sys/unix"
)

// Both modes pass the same tests.
func TestConformance(t *testing.T) {
	needRoot(t)
	for _, mode := range []lazy.Mode{lazy.Fanotify, lazy.FUSE} {
		t.Run(string(mode), func(t *testing.T) {
			for _, c := range []struct {
				name string
				run  func(*testing.T, lazy.Mode)
			}{
				{"EveryByte", testEveryByte},
				{"OneFetchForMany", testOneFetchForMany},
				{"DeadStore", testDeadStore},
				{"TwoBlobs", testTwoBlobs},
				{"RestartKeeps", testRestartKeeps},
				{"EvictionUnderLoad", testEvictionUnderLoad},
				{"WholeBlobsFirst", testWholeBlobsFirst},
				{"WarmReplays", testWarmReplays},
				{"FillAndRelease", testFillAndRelease},
				{"BadFiller", testBadFiller},
				{"CloseWhileMounted", testCloseWhileMounted},
				{"FullDisk", testFullDisk},
				{"CountsByReader", testCountsByReader},
				{"ReadAhead", testReadAhead},
				{"Groups", testGroups},
				{"GuardLost", testGuardLost},
				{"Overlay", testOverlay},
			} {
				t.Run(c.name, func(t *testing.T) { c.run(t, mode) })
			}
		})
	}
}

type rig struct {
	t     *testing.T
	c     *lazy.Cache
	l     *testLayer
	src   *source
	fill  lazy.Filler // something around src; nil: src
	h     *lazy.Blob
	mount int
	r     *reader
}

func newRig(t *testing.T, opts lazy.Options, size int) *rig {
	t.Helper()
	l := buildLayer(t, size, 1)
	r := &rig{t: t, l: l, src: newSource(l.data, 1), c: openCache(t, t.TempDir(), opts)}
	r.open()
	t.Cleanup(r.close)
	return r
}

func (r *rig) open() {
	var err error
	fill := r.fill
	if fill == nil {
		fill = r.src
	}
	if r.h, err = r.c.Blob(r.t.Context(), r.l.digest, int64(len(r.l.data)), fill); err != nil {
		r.t.Fatal(err)
	}
	r.mount = mountBlob(r.t, r.l, r.h.Path())
	r.r = openBig(r.t, r.l, r.mount)
}

func (r *rig) unmount() {
	r.r.f.Close()
	unix.Close(r.mount)
	r.h.Close()
}

func (r *rig) close() {
	r.unmount()
	for i := 0; ; i++ {
		err := r.c.Close()
		if err == nil {
			return
		}
		if i > 50 {
			r.t.Error(err)
			return
		}
		time.Sleep(20 * time.Millisecond) // the kernel lets go of the file a little later
	}
}

func testEveryByte(t *testing.T, mode lazy.Mode) {
	r := newRig(t, lazy.Options{Mode: mode}, 8<<20)
	var wg sync.WaitGroup
	for k := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(uint64(k), 2))
			for range 50 {
				off := rnd.Int64N(int64(len(r.l.content)) - 1)
				if err := r.r.check(off, min(1+rnd.Int64N(200<<10), int64(len(r.l.content))-off)); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
	if err := r.r.check(0, int64(len(r.l.content))); err != nil {
		t.Error(err)
	}
	if p := r.h.Progress(); p.Left != 0 || p.Filled != p.Total {
		t.Errorf("progress %+v", p)
	}
	for k, n := range r.src.perPart {
		if n != 1 {
			t.Errorf("chunk %d was fetched %d times", k, n)
		}
	}
	if s := r.h.Stats(); s.Fetched != int64(len(r.l.data)) || s.Failed != 0 || s.Reads == 0 {
		t.Errorf("stats %+v", s)
	}
}

func testOneFetchForMany(t *testing.T, mode lazy.Mode) {
	r := newRig(t, lazy.Options{Mode: mode, Readahead: -1}, 4<<20)
	r.src.delay.Store(int64(100 * time.Millisecond))
	fd := int(r.r.f.Fd())
	unix.Fadvise(fd, 0, 0, unix.FADV_RANDOM) // no read-ahead of the kernel's
	var wg sync.WaitGroup
	for range 64 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			if err := r.r.check(1<<20, 100); err != nil {
				t.Error(err)
			}
		}()
	}
	wg.Wait()
	if n := r.src.fetches.Load(); n != 1 {
		t.Errorf("%d fetches", n)
	}
}

func testDeadStore(t *testing.T, mode lazy.Mode) {
	r := newRig(t, lazy.Options{Mode: mode, Deadline: 800 * time.Millisecond, RetryPause: 5 * time.Millisecond, Readahead: -1}, 4<<20)
	dead := errs.New(errs.ServerUnreachable, "test", "store is dead")
	r.src.setFail(func(i, j int) error { return dead })
	start := time.Now()
	if err := r.r.check(1<<20, 5000); !errors.Is(err, unix.EIO) {
		t.Errorf("read of a dead store: %v", err)
	}
	if took := time.Since(start); took > 3*time.Second || took < 400*time.Millisecond {
		t.Errorf("took %v", took)
	}
	// Whoever asks again at once does not wait as long again.
	start = time.Now()
	for range 20 {
		if err := r.r.check(1<<20, 5000); !errors.Is(err, unix.EIO) {
			t.Errorf("read of a dead store: %v", err)
		}
	}
	if took := time.Since(start); took > 8*time.Second {
		t.Errorf("twenty more took %v", took)
	}
	if n := r.src.fetches.Load(); n < 4 {
		t.Errorf("only %d attempts", n)
	}
	// What is damaged is not asked for again, and told at once.
	r.src.setFail(func(i, j int) error { return errs.New(errs.ImageCorrupt, "test", "bad chunk") })
	start = time.Now()
	if err := r.r.check(2<<20, 5000); !errors.Is(err, unix.EIO) {
		t.Errorf("read of a damaged chunk: %v", err)
	}
	if took := time.Since(start); took > 300*time.Millisecond {
		t.Errorf("took %v", took)
	}
	// And works again when the store does; a fault in between is not noticed.
	n := 0
	r.src.setFail(func(i, j int) error {
		if n++; n == 1 {
			return dead
		}
		return nil
	})
	for _, off := range []int64{1 << 20, 2 << 20, 0} {
		if err := r.r.check(off, 5000); err != nil {
			t.Error(err)
		}
	}
}

func testTwoBlobs(t *testing.T, mode lazy.Mode) {
	c := openCache(t, t.TempDir(), lazy.Options{Mode: mode})
	var rs []*rig
	for k := range 2 {
		l := buildLayer(t, 4<<20, uint64(40+k))
		r := &rig{t: t, c: c, l: l, src: newSource(l.data, 7)}
		r.open()
		rs = append(rs, r)
	}
	var wg sync.WaitGroup
	for k := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(uint64(k/2), 2))
			for range 40 {
				if err := rs[k%2].r.check(rnd.Int64N(3<<20), 100<<10); err != nil {
					t.Error(err)
				}
			}
		}()
	}
	wg.Wait()
	rs[0].unmount()
	rs[1].close()
}

func testRestartKeeps(t *testing.T, mode lazy.Mode) {
	dir := t.TempDir()
	l := buildLayer(t, 4<<20, 3)
	boot := "boot one"
	for round := range 3 {
		src := newSource(l.data, 1)
		if round == 2 {
			boot = "boot two" // what Close saved still counts
		}
		r := &rig{t: t, c: openCache(t, dir, lazy.Options{Mode: mode, Readahead: -1, BootID: boot}), l: l, src: src}
		r.open()
		if err := r.r.check(0, 1<<20); err != nil {
			t.Error(err)
		}
		if n := src.fetches.Load(); round == 0 && n == 0 || round > 0 && n != 0 {
			t.Errorf("round %d: %d fetches", round, n)
		}
		r.close()
	}
}

// The limit is a third of the blob and everything is read over and over: chunks
// are punched out all the time between a reader's being let through and its copy.
func testEvictionUnderLoad(t *testing.T, mode lazy.Mode) {
	const size = 12 << 20
	r := newRig(t, lazy.Options{Mode: mode, Limit: size / 3, ColdAfter: time.Nanosecond, Readahead: 1 << 20, SaveEvery: 50 * time.Millisecond}, size)
	stop := time.Now().Add(6 * time.Second)
	var wg sync.WaitGroup
	for k := range 8 {
		wg.Add(1)
		go func() {
			defer wg.Done()
			rnd := rand.New(rand.NewPCG(uint64(k), 2))
			for time.Now().Before(stop) {
				off := rnd.Int64N(size - 300<<10)
				if err := r.r.check(off, 1+rnd.Int64N(300<<10)); err != nil {
					t.Error(err)
					return
				}
				if rnd.IntN(4) == 0 {
					r.r.forget()
				}
			}
		}()
	}
	wg.Wait()
	s := r.h.Stats()
	t.Logf("stats %+v", s)
	if s.Evicted < 2*size || s.Failed > 0 {
		t.Errorf("little was evicted: %+v", s)
	}
}

func testWholeBlobsFirst(t *testing.T, mode lazy.Mode) {
	const size = 4 << 20
	c := openCache(t, t.TempDir(), lazy.Options{Mode: mode, Limit: 3 * size, ColdAfter: time.Hour})
	var rs []*rig
	for k := range 5 {
		l := buildLayer(t, size, uint64(60+k))
		r := &rig{t: t, c: c, l: l, src: newSource(l.data, 7)}
		r.open()
		if err := r.h.Fill(t.Context()); err != nil {
			t.Fatal(err)
		}
		if k != 1 {
			r.unmount()
		}
		rs = append(rs, r)
	}
	waitFor(t, func() bool { return c.Used() <= 3*size })
	if p := rs[1].h.Progress(); p.Left != 0 {
		t.Errorf("a mounted blob lost chunks: %+v", p)
	}
	if err := rs[1].r.check(0, size); err != nil {
		t.Error(err)
	}
	// The oldest went, and comes back when it is wanted.
	src := newSource(rs[0].l.data, 7)
	rs[0].src = src
	rs[0].open()
	if err := rs[0].r.check(0, size); err != nil {
		t.Error(err)
	}
	if src.bytes.Load() == 0 {
		t.Error("the oldest blob was still there")
	}
	rs[0].unmount()
	rs[1].close()
}

func testWarmReplays(t *testing.T, mode lazy.Mode) {
	r := newRig(t, lazy.Options{Mode: mode, Readahead: -1}, 8<<20)
	rec := r.h.Record(time.Minute)
	for _, off := range []int64{5 << 20, 1 << 20, 3 << 20} {
		if err := r.r.check(off, 200<<10); err != nil {
			t.Fatal(err)
		}
	}
	trace := rec.Stop()
	if len(trace) < 3 || trace[0].Off > 5<<20 || trace[0].Off < 4<<20 {
		t.Fatalf("trace %+v", trace)
	}
	r2 := newRig(t, lazy.Options{Mode: mode, Readahead: -1}, 8<<20)
	trace = append(trace, lazy.Range{Off: 1 << 40, Len: 5}, lazy.Range{Off: -1, Len: 5}, lazy.Range{Off: 0, Len: -5})
	if err := r2.h.Warm(t.Context(), trace); err != nil {
		t.Fatal(err)
	}
	n := r2.src.fetches.Load()
	for _, off := range []int64{5 << 20, 1 << 20, 3 << 20} {
		if err := r2.r.check(off, 200<<10); err != nil {
			t.Fatal(err)
		}
	}
	if k := r2.src.fetches.Load(); k != n {
		t.Errorf("%d fetches after warming", k-n)
	}
}

func testFillAndRelease(t *testing.T, mode lazy.Mode) {
	r := newRig(t, lazy.Options{Mode: mode, SaveEvery: 10 * time.Millisecond}, 8<<20)
	if err := r.h.Fill(t.Context()); err != nil {
		t.Fatal(err)
	}
	if mode == lazy.Fanotify {
		waitFor(t, func() bool { return r.h.Path() != "" && !lazy.Guarded(r.h) })
	}
	if err := r.r.check(0, 8<<20); err != nil {
		t.Error(err)
	}
	if s := r.h.Stats(); mode == lazy.Fanotify && s.Reads != 0 {
		t.Errorf("a complete blob still has events: %+v", s)
	}
	if n := r.src.peak.Load(); n > 16 {
		t.Errorf("%d fetches at once", n)
	}
}

func testBadFiller(t *testing.T, mode lazy.Mode) {
	r := newRig(t, lazy.Options{Mode: mode, Readahead: -1}, 4<<20)
	r.src.setFail(func(i, j int) error { return errs.New(errs.ImageCorrupt, "test", "digest mismatch") })
	if err := r.r.check(0, 4096); !errors.Is(err, unix.EIO) {
		t.Error(err)
	}
	r.src.setFail(nil)
	if err := r.r.check(0, 4096); err != nil {
		t.Error(err)
	}
	other := newSource(r.l.data, 99)
	if _, err := r.c.Blob(t.Context(), r.l.digest, int64(len(r.l.data)), other); !errors.Is(err, errs.ImageCorrupt) {
		t.Errorf("blob cut in another way: %v", err)
	}
	if _, err := r.c.Blob(t.Context(), "../../etc/passwd", 1, other); !errors.Is(err, errs.ImageCorrupt) {
		t.Errorf("bad digest: %v", err)
	}
}

func testCloseWhileMounted(t *testing.T, mode lazy.Mode) {
	r := newRig(t, lazy.Options{Mode: mode}, 4<<20)
	if err := r.c.Close(); !errors.Is(err, errs.StateConflict) {
		t.Errorf("close while mounted: %v", err)
	}
	if err := r.r.check(0, 4<<20); err != nil {
		t.Error(err)
	}
}

// A disk of its own that is smaller than the blob.
func smallDisk(t *testing.T, size string) string {
	dir := t.TempDir()
	img := dir + "/disk"
	mnt := dir + "/mnt"
	os.Mkdir(mnt, 0o700)
	for _, c := range [][]string{
		{"truncate", "-s", size, img},
		{"mkfs.ext4", "-q", "-O", "^has_journal", "-m", "0", img},
		{"mount", "-o", "loop", img, mnt},
	} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Skipf("%v: %s", c, out)
		}
	}
	t.Cleanup(func() {
		for range 100 {
			if unix.Unmount(mnt, 0) == nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		t.Error("small disk stays mounted")
	})
	return mnt
}

func testFullDisk(t *testing.T, mode lazy.Mode) {
	mnt := smallDisk(t, "24M")
	l := buildLayer(t, 16<<20, 1)
	c := openCache(t, mnt+"/cache", lazy.Options{Mode: mode, Readahead: -1, Deadline: 2 * time.Second})
	r := &rig{t: t, l: l, src: newSource(l.data, 1), c: c}
	r.open()
	defer r.close()
	ballast := mnt + "/ballast"
	if err := r.r.check(0, 2<<20); err != nil {
		t.Fatal(err)
	}
	b, err := os.Create(ballast)
	if err != nil {
		t.Fatal(err)
	}
	for p := make([]byte, 64<<10); ; {
		if _, err := b.Write(p); err != nil {
			break
		}
	}
	b.Close()
	failed := 0
	for off := int64(2 << 20); off < 12<<20; off += 1 << 20 {
		if err := r.r.check(off, 300<<10); errors.Is(err, unix.EIO) {
			failed++
		} else if err != nil {
			t.Error(err)
		}
	}
	if failed == 0 {
		t.Error("nothing failed on a full disk")
	}
	os.Remove(ballast)
	if err := r.r.check(0, 12<<20); err != nil {
		t.Errorf("with space again: %v", err)
	}
}

// ledger is an accountant whose owners are processes.
type ledger struct {
	mu    sync.Mutex
	names map[int]string // by pid
	uses  map[string]lazy.Use
	blobs map[string]bool
}

func (l *ledger) Owner(pid int) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.names[pid]
}

func (l *ledger) Count(owner, digest string, u lazy.Use) {
	l.mu.Lock()
	defer l.mu.Unlock()
	use := l.uses[owner]
	use.Add(u)
	l.uses[owner], l.blobs[digest] = use, true
}

func (l *ledger) of(owner string) lazy.Use {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.uses[owner]
}

// dd reads one block of the rig's file in a process of its own, as owner.
func (r *rig) dd(l *ledger, owner string, off, n int64) {
	r.t.Helper()
	// The child waits for a byte, so that it is known by then, and opens the file through
	// its own /proc.
	cmd := exec.Command("sh", "-c", fmt.Sprintf("read x; exec dd if=/proc/%d/fd/%d of=/dev/null bs=%d count=1 skip=%dB iflag=fullblock status=none", os.Getpid(), int(r.r.f.Fd()), n, off))
	in, err := cmd.StdinPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		r.t.Fatal(err)
	}
	l.mu.Lock()
	l.names[cmd.Process.Pid] = owner
	l.mu.Unlock()
	in.Write([]byte("go\n"))
	if err := cmd.Wait(); err != nil {
		r.t.Fatal(err)
	}
}

func testCountsByReader(t *testing.T, mode lazy.Mode) {
	l := &ledger{names: map[int]string{}, uses: map[string]lazy.Use{}, blobs: map[string]bool{}}
	r := newRig(t, lazy.Options{Mode: mode, Readahead: 1 << 20, Accountant: l}, 12<<20)
	r.src.delay.Store(int64(20 * time.Millisecond))
	warmed := r.src.bytes.Load()
	if err := r.h.Warm(t.Context(), lazy.Trace{{Off: 10 << 20, Len: 1 << 20}}); err != nil {
		t.Fatal(err)
	}
	warmed = r.src.bytes.Load() - warmed
	nobody := l.of("")
	if nobody.Fetched < 1<<20 || nobody.Fetched > warmed { // opening the file reads a little, too
		t.Errorf("warming %d bytes counts as %+v", warmed, nobody)
	}
	r.dd(l, "ann", 0, 2<<20)
	r.dd(l, "ben", 6<<20, 1<<20)
	ann, ben := l.of("ann"), l.of("ben")
	// Both have the bytes that they read, and those ahead.
	for _, c := range []struct {
		name   string
		use    lazy.Use
		wanted int64
	}{{"ann", ann, 2 << 20}, {"ben", ben, 1 << 20}} {
		if u := c.use; u.Reads == 0 || u.Read < c.wanted || u.Read > c.wanted+1<<20 || u.Waited == 0 || u.Waited > u.Read ||
			u.Wait < 20*time.Millisecond || u.Fetched < c.wanted || u.Fetched > c.wanted+2<<20 {
			t.Errorf("%s read %d bytes: %+v", c.name, c.wanted, u)
		}
	}
	// What is there already is read and not waited for, nor fetched.
	r.r.forget()
	r.dd(l, "cid", 10<<20, 512<<10)
	if u := l.of("cid"); u.Read < 512<<10 || u.Waited != 0 || u.Wait != 0 || u.Fetched > 1<<20 {
		t.Errorf("warm bytes: %+v", u)
	}
	waitFor(t, func() bool { // what was begun ahead comes in meanwhile
		var sum lazy.Use
		for _, name := range []string{"", "ann", "ben", "cid"} {
			sum.Add(l.of(name))
		}
		s := r.h.Stats()
		return sum.Reads == s.Reads && sum.Read == s.Read && sum.Fetched == s.Fetched && s.Fetched == r.src.bytes.Load()
	})
	if !l.blobs[r.l.digest] || len(l.blobs) != 1 {
		t.Errorf("blobs %v", l.blobs)
	}
}

func testReadAhead(t *testing.T, mode lazy.Mode) {
	r := newRig(t, lazy.Options{Mode: mode, Readahead: 2 << 20}, 8<<20)
	r.src.delay.Store(int64(3 * time.Millisecond))
	if err := r.r.check(0, 8<<20); err != nil {
		t.Fatal(err)
	}
	seq := r.h.Stats()
	if seq.Ahead < 4<<20 || seq.Hits == 0 {
		t.Errorf("a sequential reader was not run ahead of: %+v", seq)
	}
	q := newRig(t, lazy.Options{Mode: mode, Readahead: 2 << 20}, 8<<20)
	unix.Fadvise(int(q.r.f.Fd()), 0, 0, unix.FADV_RANDOM)
	for _, off := range []int64{7 << 20, 3 << 20, 5 << 20, 1 << 20, 6 << 20, 2 << 20} {
		if err := q.r.check(off, 4096); err != nil {
			t.Fatal(err)
		}
	}
	if s := q.h.Stats(); s.Ahead != 0 || s.Fetched > 6*512<<10 {
		t.Errorf("random reads were run ahead of: %+v", s)
	}
}

// grouped is a source whose bytes belong together by pieces of so many.
type grouped struct {
	*source
	piece int64
}

func (g grouped) Group(off int64) (first, end int64) {
	return off / g.piece * g.piece, (off/g.piece + 1) * g.piece
}

// What belongs together comes by one fetch, and nothing behind its end.
func testGroups(t *testing.T, mode lazy.Mode) {
	const piece = 256 << 10
	l := buildLayer(t, 8<<20, 9)
	r := &rig{t: t, l: l, src: newSource(l.data, 9), c: openCache(t, t.TempDir(), lazy.Options{Mode: mode, Readahead: 2 << 20})}
	r.fill = grouped{r.src, piece}
	r.open()
	t.Cleanup(r.close)
	unix.Fadvise(int(r.r.f.Fd()), 0, 0, unix.FADV_RANDOM)
	if err := r.r.check(3*piece, 4096); err != nil {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return r.h.Stats().Fetched >= piece })
	before := r.h.Stats()
	if before.Fetches > 2 || before.Fetched > piece+2*(512<<10) {
		t.Errorf("one page of a group of %d bytes: %+v", piece, before)
	}
	for off := int64(3 * piece); off < 4*piece; off += 4096 {
		if err := r.r.check(off, 4096); err != nil {
			t.Fatal(err)
		}
	}
	if after := r.h.Stats(); after.Fetches != before.Fetches {
		t.Errorf("the rest of the group was fetched by itself: %+v, %+v", before, after)
	}
}

// A file that was opened without its guard would let readers pass for ever.
func testGuardLost(t *testing.T, mode lazy.Mode) {
	dir := t.TempDir()
	l := buildLayer(t, 1<<20, 1)
	src := newSource(l.data, 1)
	c := openCache(t, dir, lazy.Options{Mode: mode})
	h, err := c.Blob(t.Context(), l.digest, int64(len(l.data)), src)
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(dir + "/blobs/" + l.digest + "/data")
	if err != nil {
		t.Fatal(err)
	}
	c = openCache(t, dir, lazy.Options{Mode: mode})
	defer c.Close()
	if _, err := c.Blob(t.Context(), l.digest, int64(len(l.data)), src); !errors.Is(err, errs.StateConflict) {
		t.Errorf("open without a guard: %v", err)
	}
	f.Close()
	h, err = c.Blob(t.Context(), l.digest, int64(len(l.data)), src)
	if err != nil {
		t.Fatal(err)
	}
	h.Close()
	if _, err := lazy.Open(t.Context(), dir, lazy.Options{Mode: mode, LockWait: 10 * time.Millisecond}); !errors.Is(err, errs.StateConflict) {
		t.Errorf("opened twice: %v", err)
	}
}

// The kernel stacks no more than two file systems: an overlay over EROFS over the
// blob's has to be possible.
func testOverlay(t *testing.T, mode lazy.Mode) {
	r := newRig(t, lazy.Options{Mode: mode}, 1<<20)
	dir := t.TempDir()
	for _, d := range []string{"upper", "work"} {
		os.Mkdir(dir+"/"+d, 0o700)
	}
	fs, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fs)
	if err := errors.Join(
		unix.FsconfigSetString(fs, "lowerdir+", fmt.Sprintf("/proc/self/fd/%d", r.mount)),
		unix.FsconfigSetString(fs, "upperdir", dir+"/upper"),
		unix.FsconfigSetString(fs, "workdir", dir+"/work"),
		unix.FsconfigCreate(fs),
	); err != nil {
		t.Fatal(err)
	}
	m, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(m)
	over := openBig(t, r.l, m)
	defer over.f.Close()
	if err := over.check(0, 1<<20); err != nil {
		t.Error(err)
	}
}

func waitFor(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it does not come true")
		}
	}
}
