package chunk

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/object/objecttest"

	"pgregory.net/rapid"
)

// genBlob draws runs of blocks of all kinds, and an end within a block at times.
func genBlob(rt *rapid.T) []byte {
	var b []byte
	for range rapid.IntRange(0, 12).Draw(rt, "runs") {
		n := rapid.SampledFrom([]int{1, 2, 3, 7, 8, 9, 20, 63, 64, 65, 130, 600}).Draw(rt, "blocks")
		seed := rapid.Uint64Range(0, 3).Draw(rt, "seed")
		switch rapid.IntRange(0, 3).Draw(rt, "kind") {
		case 0:
			b = append(b, make([]byte, n*block)...)
		case 1:
			b = append(b, randomBlocks(seed, n)...)
		case 2:
			b = append(b, bytes.Repeat([]byte(fmt.Sprintf("%07d\n", seed)), n*block/8)...)
		case 3: // small files
			for i := range n {
				f := make([]byte, block)
				copy(f, fmt.Sprintf("file %d of %d", i, seed))
				b = append(b, f...)
			}
		}
	}
	if len(b) > block {
		b = b[:len(b)-rapid.SampledFrom([]int{0, 0, 1, 100, 4095}).Draw(rt, "short")]
	}
	return b
}

// Whatever a blob is, it comes back; its map is well formed, does not depend on how it
// was read, and putting it again writes nothing.
func TestAnyBlobComesBack(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	w := newWriter(t, d, small())
	dir := t.TempDir()
	rapid.Check(t, func(rt *rapid.T) {
		b := genBlob(rt)
		l, st := putLayer(t, w, []byte("meta"), b)
		got, err := readData(t.Context(), d, newReader(t, d), l)
		if err != nil || !bytes.Equal(got, b) {
			rt.Fatalf("other bytes came back, or %v", err)
		}
		if l.Map == "" {
			return
		}
		m, err := LoadMap(t.Context(), d, l.Map)
		if err != nil {
			rt.Fatal(err)
		}
		checkMap(rt, m, b)
		if st.Chunks != m.Len() || st.Bytes != int64(len(b)+len("meta")) {
			rt.Fatalf("stats %+v of a map of %d chunks", st, m.Len())
		}
		// The same from a sparse file.
		f, err := os.Create(filepath.Join(dir, "blob"))
		if err != nil {
			rt.Fatal(err)
		}
		defer f.Close()
		for off := 0; off < len(b); off += block {
			if p := b[off:min(off+block, len(b))]; !isZero(p) {
				f.WriteAt(p, int64(off))
			}
		}
		f.Truncate(int64(len(b)))
		s := begin(t, w)
		name, again, err := s.PutData(t.Context(), Blob{R: f, Size: int64(len(b))})
		if err != nil {
			rt.Fatal(err)
		}
		s.Close(t.Context())
		if name != l.Map || again.NewChunks != 0 || again.Stored != 0 {
			rt.Fatalf("the same blob as a sparse file has another map, or was stored again: %+v", again)
		}
		if again.HoleBytes != st.HoleBytes {
			rt.Fatalf("%d bytes of holes instead of %d", again.HoleBytes, st.HoleBytes)
		}
		// The same while it is written, in steps of any size.
		steps := rapid.SliceOfN(rapid.IntRange(1, 70*block), 1, 8).Draw(rt, "steps")
		have, turn := 0, 0
		s = begin(t, w)
		defer s.Close(t.Context())
		name, grown, err := s.PutData(t.Context(), Blob{R: bytes.NewReader(b), Grow: func(context.Context, int64) (int64, bool, error) {
			have = min(have+steps[turn%len(steps)], len(b))
			turn++
			return int64(have), have == len(b) && turn%2 == 0, nil
		}})
		if err != nil || name != l.Map || grown.NewChunks != 0 || grown.Bytes != int64(len(b)) || grown.HoleBytes != st.HoleBytes {
			rt.Fatalf("the same blob as it grows: %+v, another map or %v", grown, err)
		}
	})
}

func checkMap(t interface{ Fatalf(string, ...any) }, m *Map, b []byte) {
	end := int64(0)
	for i := range m.Len() {
		c := m.Chunk(i)
		if c.Off < end || c.Off%block != 0 || c.Len <= 0 || c.Len > maxChunk {
			t.Fatalf("chunk %d: %+v after %d", i, c, end)
		}
		if !isZeroAll(b[end:c.Off]) {
			t.Fatalf("data before chunk %d is in none", i)
		}
		end = c.Off + int64(c.Len)
		for _, off := range []int64{c.Off, c.Off + 1, end - 1} {
			if k, j := m.Range(off, 1); k != i || j != i+1 {
				t.Fatalf("byte %d is in chunk %d, found in %d to %d", off, i, k, j)
			}
		}
	}
	if !isZeroAll(b[end:]) {
		t.Fatalf("data behind the last chunk is in none")
	}
	if i, j := m.Range(0, -1); i != 0 || j != m.Len() {
		t.Fatalf("the whole range is %d to %d", i, j)
	}
}

func isZeroAll(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

func cutSizes(t *testing.T, b []byte) map[digest]int {
	t.Helper()
	d := openDir(t)
	l, _ := putLayer(t, newWriter(t, d, Options{}), nil, b)
	m, err := LoadMap(t.Context(), d, l.Map)
	if err != nil {
		t.Fatal(err)
	}
	chunks := map[digest]int{}
	for i := range m.Len() {
		c := m.Chunk(i)
		chunks[c.Digest] = c.Len
		last := i == m.Len()-1 || m.Chunk(i+1).Off > c.Off+int64(c.Len)
		if c.Len < minBlocks*block && !last || c.Len > maxBlocks*block {
			t.Errorf("chunk %d has %d bytes", i, c.Len)
		}
	}
	return chunks
}

func shared(a, b map[digest]int) (n int) {
	for d, size := range a {
		if _, ok := b[d]; ok {
			n += size
		}
	}
	return n
}

// After an insert, a removal or a change, boundaries are found again soon.
func TestCutsResynchronise(t *testing.T) {
	t.Parallel()
	const blocks = 8192
	b := randomBlocks(1, blocks)
	before := cutSizes(t, b)
	if avg := len(b) / len(before); avg < 64<<10 || avg > 192<<10 {
		t.Errorf("chunks of random data have %d KiB on average", avg>>10)
	}
	for name, changed := range map[string][]byte{
		"insert at the start": append(randomBlocks(2, 1), b...),
		"insert in the middle": append(append(bytes.Clone(b[:blocks/2*block]), randomBlocks(3, 5)...),
			b[blocks/2*block:]...),
		"remove":          append(bytes.Clone(b[:1000*block]), b[1003*block:]...),
		"change a byte":   func() []byte { c := bytes.Clone(b); c[12345678]++; return c }(),
		"hole in between": append(append(bytes.Clone(b[:777*block]), make([]byte, 100*block)...), b[777*block:]...),
	} {
		if kept := shared(before, cutSizes(t, changed)); len(b)-kept > 8*maxChunk {
			t.Errorf("%s: %d KiB of %d are other chunks", name, (len(b)-kept)>>10, len(b)>>10)
		}
	}
}

// Equal files in images with other neighbours are the same chunks, small ones mostly.
func TestEqualFilesAreEqualChunks(t *testing.T) {
	t.Parallel()
	image := func(own uint64) (b []byte, common int) {
		rng := rand.New(rand.NewPCG(5, 5))
		for i := range 400 {
			if i%8 == 3 { // every eighth is its own
				b = append(b, file(own*1000+uint64(i), rng.IntN(100_000))...)
				continue
			}
			f := file(uint64(i), rng.IntN(300_000))
			common += len(f)
			b = append(b, f...)
		}
		return b, common
	}
	a, common := image(1)
	b, _ := image(2)
	got := shared(cutSizes(t, a), cutSizes(t, b))
	t.Logf("%d of %d common KiB are found again", got>>10, common>>10)
	if got < common*80/100 {
		t.Errorf("only %d of %d common KiB are found again", got>>10, common>>10)
	}
}

// file is a file as the data blob has it: padded with zeros to a block.
func file(seed uint64, size int) []byte {
	b := randomBlocks(seed+99, size/block+1)
	clear(b[size:])
	return b
}

// 10^5 small files are neither 10^5 objects nor 10^5 writes.
func TestManySmallFilesAreFewObjects(t *testing.T) {
	t.Parallel()
	s := objecttest.Counting(openDir(t))
	w := newWriter(t, s, Options{})
	b := make([]byte, 0, 100_000*block)
	for i := range 100_000 {
		f := make([]byte, block)
		copy(f, fmt.Sprintf("small file %d %x", i, i*i))
		b = append(b, f...)
	}
	l, st := putLayer(t, w, []byte("meta"), b)
	if n := s.Of(objecttest.Put, "").Calls; n > 12 {
		t.Errorf("%d objects were put", n)
	}
	wantData(t, s, l, b)
	t.Logf("%+v", st)
}

// A second writer finds what the first one put, and each finds what the other puts later.
func TestWritersShareChunks(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	o := small()
	o.Refresh = time.Nanosecond
	a, b := newWriter(t, d, o), newWriter(t, d, o)
	one, two, three := randomBlocks(1, 600), randomBlocks(2, 600), randomBlocks(3, 600)
	putLayer(t, a, nil, one)
	if _, st := putLayer(t, b, nil, append(bytes.Clone(one), two...)); st.NewBytes > int64(len(two)+4*maxChunk) {
		t.Errorf("%+v", st)
	}
	putLayer(t, a, nil, three)
	begin(t, b).Close(t.Context()) // begins to refresh in the background
	b.loads.Wait()
	l, st := putLayer(t, b, nil, append(bytes.Clone(three), two...))
	if st.NewBytes > 4*maxChunk {
		t.Errorf("%+v", st)
	}
	wantData(t, d, l, append(bytes.Clone(three), two...))
	// Content that is there twice in a blob is stored once.
	four := randomBlocks(4, 600)
	if _, st := putLayer(t, a, nil, bytes.Repeat(four, 8)); st.NewBytes > int64(len(four))+8*2*maxChunk {
		t.Errorf("%+v", st)
	}
}

// The index stays within its memory, and finds what it has.
func TestIndexIsBounded(t *testing.T) {
	t.Parallel()
	x := newIndex(openDir(t), 18*5000)
	rng := rand.New(rand.NewPCG(1, 1))
	var all []packEntry
	for p := range 20 {
		var entries []packEntry
		for range 500 {
			var e packEntry
			for i := range e.digest {
				e.digest[i] = byte(rng.Uint32())
			}
			entries = append(entries, e)
		}
		all = append(all, entries...)
		x.addPack(id{byte(p)}, 1, entries)
	}
	slots := 0
	for _, s := range x.shards {
		slots += len(s.slots)
	}
	if x.chunks > 5000 || slots*8 > 18*5000+256*16*8 {
		t.Errorf("%d chunks, %d bytes of slots", x.chunks, slots*8)
	}
	found := 0
	for _, e := range all[:5000] {
		if len(x.candidates(e.digest, nil)) > 0 {
			found++
		}
	}
	if found != 5000 {
		t.Errorf("%d of 5000 are found", found)
	}
	for p := range 20 {
		x.drop(id{byte(p)})
	}
	for _, e := range all {
		if len(x.candidates(e.digest, nil)) > 0 {
			t.Fatal("a chunk of a pack that is gone is found")
		}
	}
}

func TestPutFailures(t *testing.T) {
	t.Parallel()
	down := errs.New(errs.StoreUnavailable, "test", "down")
	b := randomBlocks(1, 2000)
	for _, class := range []string{packClass, mapClass, metaClass, leaseClass} {
		fail := true
		s := objecttest.Faulty(openDir(t), func(op objecttest.Op, key string) *objecttest.Fault {
			if fail && op == objecttest.Put && len(key) > len(class) && key[:len(class)] == class {
				return &objecttest.Fault{Err: down}
			}
			return nil
		})
		w := newWriter(t, s, small())
		ses, err := w.Begin(t.Context())
		if class == leaseClass {
			wantCode(t, "begin", err, errs.StoreUnavailable)
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		_, _, err = ses.PutLayer(t.Context(), blob([]byte("meta")), blob(b))
		wantCode(t, "put with no "+class, err, errs.StoreUnavailable)
		if !errs.Of(err).Retryable {
			t.Error("not retryable")
		}
		fail = false
		l, _, err := ses.PutLayer(t.Context(), blob([]byte("meta")), blob(b))
		if err != nil {
			t.Fatalf("put again: %v", err)
		}
		if err := ses.Commit(t.Context()); err != nil {
			t.Fatal(err)
		}
		wantData(t, s, l, b)
	}
	w := newWriter(t, openDir(t), small())
	ses := begin(t, w)
	_, _, err := ses.PutData(t.Context(), Blob{R: bytes.NewReader(b), Size: int64(len(b)) + 1})
	if !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("a reader that is too short: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, _, err = ses.PutData(ctx, Blob{R: bytes.NewReader(b), Size: int64(len(b)), Progress: func(int64) { cancel() }})
	wantCode(t, "canceled", err, errs.RequestCanceled)
}

func TestMetadata(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	w := newWriter(t, d, small())
	for _, n := range []int{0, 1, 4096, 3 << 20} {
		meta := bytes.Repeat([]byte(fmt.Sprintf("metadata %d", n)), n/8+1)[:n]
		l, st := putLayer(t, w, meta, nil)
		if n > 4096 && st.Stored > int64(n/10) {
			t.Errorf("%d bytes are stored of %d", st.Stored, n)
		}
		if again, st := putLayer(t, w, meta, nil); again != l || st.Stored != 0 {
			t.Errorf("put again: %+v, %+v", again, st)
		}
		path := filepath.Join(t.TempDir(), "meta")
		for range 2 { // also over an old one
			if err := GetMeta(t.Context(), d, l, path); err != nil {
				t.Fatal(err)
			}
			if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, meta) {
				t.Errorf("%d bytes came back as %d, %v", n, len(got), err)
			}
		}
	}
	gone := Layer{Meta: contentKey(metaClass, digest{1}, id{2}), MetaSize: 5}
	dir := t.TempDir()
	wantCode(t, "absent", GetMeta(t.Context(), d, gone, filepath.Join(dir, "meta")), errs.ObjectNotFound)
	wantCode(t, "no name", GetMeta(t.Context(), d, Layer{Meta: "meta/x"}, filepath.Join(dir, "meta")), errs.BadRequest)
	if left, _ := os.ReadDir(dir); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}
