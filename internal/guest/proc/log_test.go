package proc

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"dsec/internal/guest/clock"

	"pgregory.net/rapid"
)

// A log behaves like the whole output, of which a suffix is kept: every reader gets, for
// each kind and from any offset, exact bytes or gaps that end where the kept bytes begin.
func TestLogAgainstModel(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.Int64Range(1, 64<<10).Draw(t, "limit")
		spillLimit := rapid.SampledFrom([]int64{0, 0, 1, 128 << 10, 1 << 20}).Draw(t, "spill")
		var now atomic.Int64
		l := newLog(limit, spillLimit, dir, time.Second, clock.New(func() time.Time { return time.Unix(0, now.Load()) }))
		defer l.Discard()
		l.release()
		var model [kinds][]byte
		next := byte(0)
		p, q, err := pipe(true, true)
		if err != nil {
			t.Fatal(err)
		}
		defer syscall.Close(p)
		defer syscall.Close(q)
		check := func(from From) {
			r := l.Read(from)
			defer r.Close()
			pos := [kinds]int64{from.Stdout, from.Stderr}
			for {
				piece, err := r.Next(t.Context())
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				k := piece.Kind
				if piece.Off != pos[k] {
					t.Fatalf("kind %d: offset %d, want %d", k, piece.Off, pos[k])
				}
				if piece.Data == nil {
					if piece.Gap <= piece.Off || piece.Gap > int64(len(model[k])) {
						t.Fatalf("gap %d to %d of %d", piece.Off, piece.Gap, len(model[k]))
					}
					if pos[k] != [kinds]int64{from.Stdout, from.Stderr}[k] {
						t.Fatal("a gap after data, with nobody writing")
					}
					pos[k] = piece.Gap
					continue
				}
				if !bytes.Equal(piece.Data, model[k][pos[k]:pos[k]+int64(len(piece.Data))]) {
					t.Fatalf("kind %d at %d: wrong bytes", k, pos[k])
				}
				pos[k] += int64(len(piece.Data))
			}
			for k := range pos {
				if want := int64(len(model[k])); pos[k] < want {
					t.Fatalf("kind %d ends at %d of %d", k, pos[k], want)
				}
			}
		}
		for range rapid.IntRange(1, 30).Draw(t, "steps") {
			k := Kind(rapid.IntRange(0, 1).Draw(t, "kind"))
			data := make([]byte, rapid.IntRange(1, 40<<10).Draw(t, "bytes"))
			for i := range data {
				data[i] = next
				next = next*31 + 7
			}
			model[k] = append(model[k], data...)
			if rapid.Bool().Draw(t, "by pipe") {
				for len(data) > 0 {
					n, err := syscall.Write(q, data)
					if err != nil && err != syscall.EAGAIN {
						t.Fatal(err)
					}
					data = data[max(n, 0):]
					for {
						if _, state := l.fill(k, p, rapid.Bool().Draw(t, "force"), 0); state != fillMore {
							if state != fillEmpty {
								t.Fatal("state", state)
							}
							break
						}
					}
				}
			} else {
				l.Append(k, data)
			}
			if m := l.Memory(); int64(m) > max(limit, minLimit)+4*maxChunk { // and the recycled buffers
				t.Fatalf("%d bytes in memory, limit %d", m, limit)
			}
			check(From{
				Stdout: rapid.Int64Range(0, int64(len(model[0]))).Draw(t, "from"),
				Stderr: rapid.Int64Range(0, int64(len(model[1]))).Draw(t, "from"), NoFollow: true,
			})
		}
		n, m := l.Sizes()
		if n != int64(len(model[0])) || m != int64(len(model[1])) {
			t.Fatal(n, m)
		}
		l.end()
		check(From{})
	})
}

// A reader whose sandbox stood still loses nothing, though the first look at it may come before the clock knows.
func TestReaderThatStoodStill(t *testing.T) {
	t.Parallel()
	var now atomic.Int64
	c := clock.New(func() time.Time { return time.Unix(0, now.Load()) })
	l := newLog(minLimit, 0, "", 30*time.Second, c)
	r := l.Read(From{})
	defer r.Close()
	room := func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.makeRoom(minLimit, false)
	}
	l.Append(Stdout, make([]byte, minLimit))
	if room() {
		t.Error("bytes that a reader needs are dropped")
	}
	for range 3 {
		now.Add(int64(time.Hour))
		if room() {
			t.Error("after a pause that nobody told of yet, they are")
		}
		c.Stood(time.Hour)
		now.Add(int64(time.Second))
		if room() {
			t.Error("after a pause, they are")
		}
	}
	now.Add(int64(30 * time.Second))
	if room() {
		t.Error("the reader is absent at first sight")
	}
	now.Add(int64(clock.Patience))
	if !room() {
		t.Error("a reader that is absent holds up the process")
	}
}

// A reader that moves loses nothing however small the log is; one that does not move for
// the stall time is treated as absent, and the process goes on.
func TestSlowAndStalledReader(t *testing.T) {
	t.Parallel()
	const stall = 500 * time.Millisecond
	tab := newTable(t, func(c *Config) { c.Stall = stall })
	const size = 3 << 20
	// It writes when its readers are there: what nobody reads is dropped.
	ready := filepath.Join(t.TempDir(), "ready")
	spec := Spec{Cmd: "sh", Args: []string{"-c", `until [ -e "$0" ]; do sleep 0.01; done; exec head -c "$1" /dev/zero`, ready, strconv.Itoa(size)}, OutputLimit: 32 << 10}
	begin := func() {
		t.Helper()
		if err := os.WriteFile(ready, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	p := start(t, tab, spec)
	r := p.Log.Read(From{})
	begin()
	n := 0
	for {
		piece, err := r.Next(t.Context())
		if err == io.EOF {
			break
		}
		if err != nil || piece.Data == nil {
			t.Fatalf("a slow reader got a gap at %d (%v)", n, err)
		}
		if n += len(piece.Data); n%(1<<18) < maxChunk {
			time.Sleep(2 * time.Millisecond)
		}
	}
	r.Close()
	if n != size {
		t.Fatal(n)
	}
	// A stuck reader beside a fast one: the fast one gets everything after a while.
	if err := os.Remove(ready); err != nil {
		t.Fatal(err)
	}
	p = start(t, tab, spec)
	stuck, fast := p.Log.Read(From{}), p.Log.Read(From{})
	defer stuck.Close()
	defer fast.Close()
	begin()
	if _, err := stuck.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	for n = 0; ; {
		piece, err := fast.Next(t.Context())
		if err == io.EOF {
			break
		}
		if err != nil || piece.Data == nil {
			t.Fatalf("the fast reader got a gap at %d (%v)", n, err)
		}
		n += len(piece.Data)
	}
	if n != size {
		t.Fatal(n)
	}
	if e := wait(t, p); e.Code != 0 {
		t.Fatalf("%+v", e)
	}
	gap := false
	for {
		piece, err := stuck.Next(t.Context())
		if err == io.EOF {
			break
		}
		gap = gap || piece.Data == nil
	}
	if !gap {
		t.Error("the stuck reader lost nothing: the log grew beyond its limit")
	}
}

// What an idle process costs: no buffers, and after its end nothing but its log.
func TestIdleProcessHoldsNoBuffer(t *testing.T) {
	t.Parallel()
	tab := newTable(t)
	p := start(t, tab, Spec{Cmd: "sleep", Args: []string{"1000"}})
	if m := p.Log.Memory(); m != 0 {
		t.Errorf("silent process: %d bytes", m)
	}
	p = start(t, tab, sh("echo x; exec sleep 1000"))
	r := p.Log.Read(From{})
	defer r.Close()
	if _, err := r.Next(t.Context()); err != nil {
		t.Fatal(err)
	}
	if m := p.Log.Memory(); m > 1024 {
		t.Errorf("after two bytes: %d bytes", m)
	}
}

func TestCollector(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		limit := rapid.IntRange(2, 50).Draw(t, "limit")
		c := NewCollector(limit)
		var all []byte
		for _, p := range rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 0, 30), 0, 10).Draw(t, "writes") {
			c.Write(p)
			all = append(all, p...)
		}
		got, cut := c.Bytes()
		if len(all) <= limit {
			if !bytes.Equal(got, all) || cut {
				t.Fatalf("%q cut %v, want %q", got, cut, all)
			}
			return
		}
		want := append(bytes.Clone(all[:limit/2]), all[len(all)-(limit-limit/2):]...)
		if !bytes.Equal(got, want) || !cut {
			t.Fatalf("%q cut %v, want %q", got, cut, want)
		}
	})
}
