package snapshot_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"dsec/internal/image"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/snapshot"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// packAhead packs the upper fd with a pass of reading ahead for each of meanwhile, which is called
// at the end of it.
func (w *world) packAhead(upper int, opts snapshot.Options, mark func() snapshot.Still, meanwhile ...func()) (fd int, l image.Layer, man snapshot.Manifest, err error) {
	w.tb.Helper()
	dir := w.path("ahead")
	w.must(os.Mkdir(dir, 0o700))
	data, err := os.Create(filepath.Join(dir, "data"))
	w.must(err)
	defer data.Close()
	meta, err := os.Create(filepath.Join(dir, "meta"))
	w.must(err)
	defer meta.Close()
	opts.Upper, opts.Blob, opts.Meta, opts.IDs = upper, data, meta, w.ids()
	k, err := snapshot.Begin(opts)
	w.must(err)
	defer k.Close()
	for _, f := range meanwhile {
		k.Mark(mark())
		w.must(k.ReadAhead(w.tb.Context()))
		f()
	}
	k.Mark(mark())
	if err := k.Walk(w.tb.Context()); err != nil {
		return -1, l, man, err
	}
	res, man, err := k.Finish()
	w.must(err)
	files := image.LayerFiles{Meta: meta.Name(), Data: data.Name()}
	checkResult(w.tb, files, res)
	if res.DataSize == 0 {
		files.Data = ""
	}
	fd, err = image.Mount(w.tb.Context(), files)
	w.must(err)
	w.open[fd] = true
	return fd, image.Layer{MetaDigest: res.MetaDigest, MetaSize: res.MetaSize, DataDigest: res.DataDigest, DataSize: res.DataSize}, man, nil
}

// settled is a mark at which all that was written before it is old enough, and what is written
// after it is not.
func settled() snapshot.Still {
	time.Sleep(15 * time.Millisecond)
	return snapshot.Still{Since: time.Now().Add(40 * time.Millisecond)}
}

// Whatever a sandbox does while it is read ahead, the layer shows what the sandbox showed when it
// stood still.
func TestReadAheadAndWhatChangesMeanwhile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rapid.Check(t, func(rt *rapid.T) {
		base := w.randomBase(rt)
		defer base.close()
		o := base.overlay()
		defer o.close()
		last := base
		var since *snapshot.Seen
		for step := range 2 {
			o.do(drawOps(rt, []int{40, 10}[step])...)
			var ops []op
			change := func() {
				more := drawOps(rt, 8)
				ops = append(ops, more...)
				o.do(more...)
			}
			next := &snapshot.Seen{}
			opts := snapshot.Options{Since: since, Next: next}
			fd, l, man, err := w.packAhead(o.upper, opts, settled, change, change)
			on := last
			if errors.Is(err, snapshot.ErrWhole) {
				opts.Since, on = nil, base
				fd, l, man, err = w.packAhead(o.upper, opts, settled, func() {})
			}
			w.must(err)
			s := on.push(fd, l)
			v := s.view()
			d := imagetest.Diff(comparable(describe(rt, o.root)), comparable(describe(rt, v)))
			unix.Close(v)
			if d != "" {
				for i, o := range ops {
					rt.Logf("%d %s %d %d %q", i, o.Do, o.A, o.B, o.Name)
				}
				rt.Fatalf("step %d: %s\n%+v", step, d, man)
			}
			last, since = s, next
		}
	})
}

// What was read ahead is not read again, unless it may have changed without a trace.
func TestReadAheadIsUsed(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name          string
		before, after string // what is mapped at either mark
		fresh         bool   // the file was just written
		again         bool   // it has to be read while all stands still
	}{
		{name: "not known to be mapped", before: "/other", after: "/none"},
		{name: "mapped before", before: "/f", after: "/other", again: true},
		{name: "mapped in the end", before: "/none", after: "/f", again: true},
		{name: "mapped by another name", before: "/g", after: "/none", again: true},
		{name: "mapped by a name that is not known", before: "", after: "/none", again: true},
		{name: "just written", before: "/none", after: "/none", fresh: true, again: true},
	} {
		p := newPlain(t)
		p.write("f", string(bytes.Repeat([]byte("old."), 4096)))
		p.must(unix.Link(p.dir+"/f", p.dir+"/g"))
		p.write("other", string(bytes.Repeat([]byte("more"), 4096)))
		f, err := os.OpenFile(p.dir+"/f", os.O_RDWR, 0)
		p.must(err)
		mem, err := unix.Mmap(int(f.Fd()), 0, 4, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		p.must(err)
		mem[0] = 'o' // the page may be written to from here on, without a trace
		var was, is unix.Stat_t
		p.must(unix.Fstat(int(f.Fd()), &was))
		marks := 0
		mark := func() snapshot.Still {
			at := snapshot.Still{Since: time.Now(), Mapped: map[string]bool{[]string{c.before, c.after}[marks]: true}}
			if marks++; !c.fresh {
				at.Since = settled().Since
			}
			return at
		}
		w := &world{tb: t, dir: t.TempDir(), open: map[int]bool{}}
		fd, _, man, err := w.packAhead(p.fd, snapshot.Options{}, mark, func() { copy(mem, "new!") })
		p.must(err)
		p.must(unix.Fstat(int(f.Fd()), &is))
		if was.Ctim != is.Ctim {
			t.Skip("here a mapping leaves a trace")
		}
		got, err := os.ReadFile(fmt.Sprintf("/proc/self/fd/%d/f", fd))
		p.must(err)
		want := "old."
		if c.again {
			want = "new!"
		}
		if string(got[:4]) != want || len(got) != 4*4096 || man.Regular != 2 || man.HardLinks != 1 || man.Bytes != 2*4*4096 {
			t.Errorf("%s: %q, %+v", c.name, got[:4], man)
		}
		p.must(unix.Munmap(mem))
		f.Close()
		unix.Close(fd)
	}
}

// It is worth it for much, and what was just written is waited for.
func TestReadAheadIsWorthIt(t *testing.T) {
	t.Parallel()
	p := newPlain(t)
	k, err := snapshot.Begin(snapshot.Options{Upper: p.fd, Blob: &memBlob{}, Meta: io.Discard, LeaveOut: []string{"/left"}})
	p.must(err)
	defer k.Close()
	check := func(after string, want, waits bool) {
		t.Helper()
		now := time.Now()
		if waits { // however slow the machine is
			st, err := os.Stat(p.dir + "/big")
			p.must(err)
			now = st.ModTime().Add(10 * time.Millisecond)
		}
		worth, wait, err := k.Worth(t.Context(), now)
		if worth != want || wait > 0 != waits || err != nil {
			t.Errorf("after %s: %v, wait %v, %v", after, worth, wait, err)
		}
	}
	p.write("few/a", "a")
	p.write("left/a", string(make([]byte, 20<<20)))
	check("little", false, false)
	big := bytes.Repeat([]byte("big"), 6<<20)
	p.write("big", string(big))
	check("much", true, true)
	time.Sleep(100 * time.Millisecond)
	check("much, and time", true, false)
	k.Mark(snapshot.Still{Since: time.Now()})
	p.must(k.ReadAhead(t.Context()))
	check("reading", false, false)
	p.write("big", string(big))
	check("writing it again", true, true)
	p.must(os.Remove(p.dir + "/big"))
	for i := range 1000 {
		p.write(fmt.Sprintf("many/%d", i), "a")
	}
	check("many", true, false)
}

// A program that goes on changing many files in every way while they are read ahead: what the
// layer has is the one generation of them at which it stood still.
func TestReadAheadOfABusyProgram(t *testing.T) {
	t.Parallel()
	p := newPlain(t)
	const files = 40
	name := func(i int) string { return fmt.Sprintf("%s/d%d/f%d", p.dir, i%4, i) }
	content := func(gen, i int) []byte {
		return bytes.Repeat([]byte(fmt.Sprintf("%08d.%04d|", gen, i)), 5000+gen*131%1000)
	}
	for d := range 4 {
		p.must(os.Mkdir(fmt.Sprintf("%s/d%d", p.dir, d), 0o755))
	}
	rewrite := func(gen, i int) error {
		path, want := name(i), content(gen, i)
		switch (gen + i) % 6 {
		case 0: // replace
			return errors.Join(os.WriteFile(path+".new", want, 0o644), os.Rename(path+".new", path))
		case 1: // truncate and write
			return os.WriteFile(path, want, 0o644)
		case 2: // remove, make again
			return errors.Join(os.Remove(path), os.WriteFile(path, want, 0o644))
		case 3: // in place
			f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
			if err != nil {
				return err
			}
			defer f.Close()
			_, err = f.WriteAt(want, 0)
			return errors.Join(err, f.Truncate(int64(len(want))))
		case 4: // move away and write
			return errors.Join(os.Rename(path, path+".moved"), os.WriteFile(path+".moved", want, 0o644), os.Rename(path+".moved", path))
		default: // through a mapping
			f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
			if err != nil {
				return err
			}
			defer f.Close()
			if err := f.Truncate(int64(len(want))); err != nil {
				return err
			}
			mem, err := unix.Mmap(int(f.Fd()), 0, len(want), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				return err
			}
			copy(mem, want[:len(want)/2])
			time.Sleep(time.Millisecond)
			copy(mem, want)
			return unix.Munmap(mem)
		}
	}
	gen := 0
	for i := range files {
		p.must(os.WriteFile(name(i), content(gen, i), 0o644))
	}
	for round := range 6 {
		var running sync.WaitGroup
		var stop chan struct{}
		var failed error
		begin := func() {
			stop = make(chan struct{})
			running.Go(func() {
				for {
					gen++
					for i := range files {
						if i%10 != 9 || gen%10 == 0 { // some stay as they are for longer
							failed = errors.Join(failed, rewrite(gen, i))
						}
					}
					select {
					case <-stop:
						return
					default:
					}
				}
			})
		}
		halt := func() {
			close(stop)
			running.Wait()
		}
		w := &world{tb: t, dir: t.TempDir(), open: map[int]bool{}}
		var upper []string
		fd, _ := w.mountLayer(w.dir, func(data layer.Blob, meta io.Writer) (layer.Result, error) {
			k, err := snapshot.Begin(snapshot.Options{Upper: p.fd, Blob: data, Meta: meta})
			p.must(err)
			defer k.Close()
			for range 2 {
				time.Sleep(60 * time.Millisecond * time.Duration(round%2))
				k.Mark(snapshot.Still{Since: time.Now()})
				begin()
				time.Sleep(20 * time.Millisecond * time.Duration(round%3))
				p.must(k.ReadAhead(t.Context()))
				halt()
			}
			k.Mark(snapshot.Still{Since: time.Now()})
			p.must(k.Walk(t.Context()))
			upper = describe(t, p.fd)
			begin() // it runs on while the rest is written
			defer halt()
			res, _, err := k.Finish()
			return res, err
		})
		p.must(failed)
		if d := imagetest.Diff(upper, describe(t, fd)); d != "" {
			t.Errorf("round %d: %s", round, d)
		}
		unix.Close(fd)
	}
	if gen < 10 {
		t.Errorf("the program came to its generation %d only", gen)
	}
}
