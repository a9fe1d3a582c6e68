package lazy

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"dsec/api/v1/errs"
)

type cut struct {
	bounds []int64
	hole   map[int]bool
}

func (c cut) Bounds() []int64 { return c.bounds }
func (c cut) Hole(i int) bool { return c.hole[i] }
func (c cut) Fetch(context.Context, int, int, func(int64, []byte) error) error {
	return errors.ErrUnsupported
}

func drawTable(t *rapid.T) *table {
	c := cut{bounds: []int64{0}, hole: map[int]bool{}}
	for i := range rapid.IntRange(1, 40).Draw(t, "chunks") {
		c.bounds = append(c.bounds, c.bounds[i]+4096*rapid.Int64Range(1, 64).Draw(t, "blocks"))
		c.hole[i] = rapid.Bool().Draw(t, "hole")
	}
	tab, err := newTable(c, c.bounds[len(c.bounds)-1])
	if err != nil {
		t.Fatal(err)
	}
	return tab
}

func TestTable(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		tab := drawTable(t)
		again, err := decodeTable(tab.encode())
		if err != nil || !again.is(tab) || string(again.hole) != string(tab.hole) {
			t.Fatalf("decoded as %+v, %v", again, err)
		}
		off := rapid.Int64Range(0, tab.size()-1).Draw(t, "off")
		n := rapid.Int64Range(1, tab.size()-off).Draw(t, "n")
		i, j := tab.chunks(off, n)
		if tab.bounds[i] > off || tab.bounds[i+1] <= off || tab.bounds[j] < off+n || tab.bounds[j-1] >= off+n {
			t.Fatalf("%d bytes at %d: chunks %d to %d of %v", n, off, i, j, tab.bounds)
		}
		if i, j := tab.chunks(off, 1<<62); j != tab.n() || i >= j {
			t.Fatalf("to the end: %d to %d", i, j)
		}
	})
	for _, b := range [][]int64{nil, {0}, {0, 5, 5, 10}, {1, 10}, {0, 9}} {
		if _, err := newTable(cut{bounds: b}, 10); !errors.Is(err, errs.ImageCorrupt) {
			t.Errorf("%v: %v", b, err)
		}
	}
}

// A dying process loses nothing, a crash of the machine what was not synced, and
// nothing is ever claimed that was not written.
func TestStateAcrossCrashes(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp(t.TempDir(), "blob-")
		if err != nil {
			rt.Fatal(err)
		}
		tab := drawTable(rt)
		data, err := os.Create(filepath.Join(dir, dataFile))
		if err != nil {
			rt.Fatal(err)
		}
		defer data.Close()
		boot := "boot 0"
		s, err := createState(dir, boot, tab, newBitmap(tab.n()))
		if err != nil {
			rt.Fatal(err)
		}
		now, saved := newBitmap(tab.n()), newBitmap(tab.n())
		for step := range rapid.IntRange(1, 30).Draw(rt, "steps") {
			k := rapid.IntRange(0, tab.n()-1).Draw(rt, "chunk")
			switch rapid.IntRange(0, 4).Draw(rt, "what") {
			case 0, 1:
				now.set(k)
				err = s.note(now, k, k+1)
			case 2:
				err = s.save(data, func() bitmap { return append(bitmap(nil), now...) })
				copy(saved, now)
			case 3: // the process dies
				s.live.Close()
				var got bitmap
				if s, got, err = loadState(dir, boot); err == nil && string(got) != string(now) {
					rt.Fatalf("%x was filled, %x is known", now, got)
				}
			case 4: // the machine dies
				s.live.Close()
				boot = "boot " + string(rune('a'+step))
				var got bitmap
				if s, got, err = loadState(dir, boot); err == nil && string(got) != string(saved) {
					rt.Fatalf("%x was saved, %x is known", saved, got)
				}
				copy(now, saved)
			}
			if err != nil {
				rt.Fatal(err)
			}
		}
		s.live.Close()
		os.RemoveAll(dir)
	})
}

// No flipped bit of what is kept on disk claims a chunk that is not filled: its readers would
// see zeros.
func TestDamagedStateClaimsNothing(t *testing.T) {
	t.Parallel()
	tab, err := newTable(cut{bounds: []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}}, 10)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	data, err := os.Create(filepath.Join(dir, dataFile))
	if err != nil {
		t.Fatal(err)
	}
	defer data.Close()
	s, err := createState(dir, "boot", tab, newBitmap(tab.n()))
	if err != nil {
		t.Fatal(err)
	}
	filled := newBitmap(tab.n())
	for _, k := range []int{2, 7, 9} {
		filled.set(k)
		if err := s.note(filled, k, k+1); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.save(data, func() bitmap { return filled }); err != nil {
		t.Fatal(err)
	}
	s.live.Close()
	for _, c := range []struct{ name, boot string }{{liveFile, "boot"}, {safeFile, "another"}, {tableFile, "boot"}} {
		whole := map[string][]byte{}
		for _, name := range []string{liveFile, safeFile, tableFile} {
			if whole[name], err = os.ReadFile(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
		}
		for at := range 8 * len(whole[c.name]) {
			for name, p := range whole {
				p = append([]byte(nil), p...)
				if name == c.name {
					p[at/8] ^= 1 << (at % 8)
				}
				if err := os.WriteFile(filepath.Join(dir, name), p, 0o600); err != nil {
					t.Fatal(err)
				}
			}
			s, got, err := loadState(dir, c.boot)
			if err != nil {
				continue
			}
			s.live.Close()
			for k := range tab.n() {
				if got.has(k) && !filled.has(k) {
					t.Fatalf("bit %d of %s flipped: chunk %d counts as filled", at, c.name, k)
				}
			}
		}
		for name, p := range whole {
			if err := os.WriteFile(filepath.Join(dir, name), p, 0o600); err != nil {
				t.Fatal(err)
			}
		}
	}
}

func TestGate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		order := make(chan string, 100)
		run := func(g *gate, name string, tk *ticket) {
			go func() {
				if g.enter(t.Context(), tk) != nil {
					return
				}
				order <- name
				time.Sleep(time.Second)
				g.leave()
			}()
			synctest.Wait()
		}
		tk := func(urgent bool) *ticket { return &ticket{ready: make(chan struct{}), urgent: urgent} }
		g := newGate(4) // one place is for urgent tickets alone
		for range 5 {
			run(g, "ahead", tk(false))
		}
		if len(order) != 3 || g.waiting() != 2 {
			t.Errorf("%d went ahead, %d wait", len(order), g.waiting())
		}
		run(g, "urgent", tk(true))
		if len(order) != 4 {
			t.Error("an urgent fetch waits behind those made ahead")
		}
		time.Sleep(time.Minute)
		synctest.Wait()

		for len(order) > 0 {
			<-order
		}
		one := newGate(1)
		late := tk(false)
		run(one, "a", tk(true))
		run(one, "d", tk(false))
		run(one, "c", late)
		run(one, "b", tk(true))
		one.hurry(late)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := one.enter(ctx, tk(true)); err == nil {
			t.Error("entered after the end")
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		got := ""
		for len(order) > 0 {
			got += <-order
		}
		if got != "abcd" || g.free != 4 || one.free != 1 || one.waiting() != 0 {
			t.Errorf("order %s, %d and %d free, %d waiting", got, g.free, one.free, one.waiting())
		}
	})
}

// One that came while Reopen was being asked would wait for its deadline.
func TestAllHearThatReopenFailed(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		asked := 0
		no := errs.New(errs.EdgeUnreachable, "test", "gone")
		c := &Cache{opts: Options{Reopen: func(context.Context, string, int64) (Filler, error) {
			asked++
			time.Sleep(time.Second)
			return nil, no
		}}}
		b := newBlob(c, "x")
		b.t = &table{bounds: []int64{0, 1}, hole: newBitmap(1)}
		got := make(chan error, 10)
		for range cap(got) {
			go func() {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				_, err := b.getFiller(ctx)
				got <- err
			}()
		}
		for range cap(got) {
			if err := <-got; !errors.Is(err, errs.EdgeUnreachable) {
				t.Error(err)
			}
		}
		if asked != 1 {
			t.Errorf("asked %d times", asked)
		}
	})
}

func TestProbe(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	r := Probe(t.TempDir())
	t.Logf("%+v", r)
	if r.Fanotify != nil || r.FUSE != nil || r.Mode != Fanotify {
		t.Skipf("not on this kernel: %+v", r)
	}
	if err := probeFan("/dev/shm"); err == nil {
		t.Log("tmpfs has pre-content events here")
	} else {
		t.Log(err)
	}
}

func FuzzTable(f *testing.F) {
	for _, c := range []cut{{bounds: []int64{0, 4096}}, {bounds: []int64{0, 4096, 70000}, hole: map[int]bool{1: true}}} {
		t, err := newTable(c, c.bounds[len(c.bounds)-1])
		if err != nil {
			f.Fatal(err)
		}
		f.Add(t.encode())
	}
	f.Add([]byte(tableMagic))
	f.Fuzz(func(t *testing.T, p []byte) {
		tab, err := decodeTable(p)
		if err != nil {
			return
		}
		for i := range tab.n() {
			if tab.len(i) <= 0 {
				t.Errorf("chunk %d of %d bytes", i, tab.len(i))
			}
		}
	})
}

func FuzzMaps(f *testing.F) {
	tab, err := newTable(cut{bounds: []int64{0, 1, 2, 3, 4, 5, 6, 7, 8, 9}}, 9)
	if err != nil {
		f.Fatal(err)
	}
	live := append([]byte(liveMagic), bootField("boot")...)
	live = binary.LittleEndian.AppendUint32(live, tab.sum)
	live = binary.LittleEndian.AppendUint32(live, 9)
	f.Add(append(live, 3, ^byte(3), 1, ^byte(1)))
	f.Add([]byte(safeMagic))
	f.Fuzz(func(t *testing.T, p []byte) {
		for _, decode := range []func() (bitmap, error){
			func() (bitmap, error) { return decodeLive(p, "boot", tab) },
			func() (bitmap, error) { return decodeSafe(p, tab) },
		} {
			if m, err := decode(); err == nil && len(m) != 2 {
				t.Errorf("map of %d bytes", len(m))
			}
		}
	})
}

func FuzzEvent(f *testing.F) {
	le := binary.LittleEndian
	p := le.AppendUint32(nil, 48)
	p = append(p, 3, 0, 24, 0)
	p = le.AppendUint64(p, fanPreAccess)
	p = le.AppendUint32(p, 7)
	p = le.AppendUint32(p, 99)
	f.Add(p)
	p = append(p, fanInfoRange, 0, 24, 0, 0, 0, 0, 0)
	p = le.AppendUint64(p, 4096)
	p = le.AppendUint64(p, 65536)
	f.Add(p)
	f.Fuzz(func(t *testing.T, p []byte) {
		for len(p) > 0 {
			e, rest, err := parseEvent(p)
			if err != nil {
				return
			}
			if e.off < 0 || e.len < 0 || len(rest) >= len(p) {
				t.Fatalf("%+v, %d of %d left", e, len(rest), len(p))
			}
			p = rest
		}
	})
}

func FuzzFuseRequest(f *testing.F) {
	head := func(op uint32, body ...byte) []byte {
		p := make([]byte, fuseInHeader)
		binary.LittleEndian.PutUint32(p, uint32(fuseInHeader+len(body)))
		binary.LittleEndian.PutUint32(p[4:], op)
		return append(p, body...)
	}
	f.Add(head(opLookup, 'a', 0))
	f.Add(head(opLookup, 'a'))
	f.Add(head(opRead, make([]byte, 40)...))
	f.Add(head(opInit, make([]byte, 64)...))
	f.Fuzz(func(t *testing.T, p []byte) {
		if r, err := parseFuse(p); err == nil && r.off < 0 {
			t.Errorf("%+v", r)
		}
	})
}

func TestErrno(t *testing.T) {
	if errno(errs.New(errs.DiskFull, "", "")).Error() == errno(errs.New(errs.InternalError, "", "")).Error() {
		t.Error("a full disk is told as any error")
	}
}
