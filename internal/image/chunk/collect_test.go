package chunk

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
	"dsec/internal/image/object/objecttest"
)

// atOnce has no grace and no settling: a local directory is never behind.
func atOnce() CollectOptions {
	return CollectOptions{Grace: -1, Settle: -1, PackSize: 256 << 10, LeaseTTL: time.Minute, MergeFrom: 1000}
}

func rootsOf(layers ...Layer) func(context.Context) ([]Layer, error) {
	return func(context.Context) ([]Layer, error) { return layers, nil }
}

func collect(t testing.TB, s object.Store, passes int, o CollectOptions, layers ...Layer) (all Report) {
	t.Helper()
	c := NewCollector(s, o)
	for range passes {
		r, err := c.Collect(t.Context(), rootsOf(layers...))
		if err != nil {
			t.Fatal(err)
		}
		if len(r.Damaged) > 0 {
			t.Fatalf("damaged: %v", r.Damaged)
		}
		all.Condemned += r.Condemned
		all.Deleted += r.Deleted
		all.Spared += r.Spared
		all.Rewritten += r.Rewritten
		all.Expired += r.Expired
		all.Waiting = r.Waiting
	}
	return all
}

// What no layer needs goes, all of it, and the rest stays.
func TestGarbageGoes(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	w := newWriter(t, d, small())
	one, two := randomBlocks(1, 1000), randomBlocks(2, 1000)
	a, _ := putLayer(t, w, []byte("a"), one)
	b, _ := putLayer(t, w, []byte("b"), append(bytes.Clone(one[:500*block]), two...))
	if r := collect(t, d, 4, atOnce(), a, b); r.Condemned+r.Deleted+r.Rewritten+r.Waiting > 0 {
		t.Errorf("with nothing to do: %+v", r)
	}
	r := collect(t, d, 3, atOnce(), b)
	if r.Deleted == 0 {
		t.Errorf("nothing was deleted: %+v", r)
	}
	wantData(t, d, b, append(bytes.Clone(one[:500*block]), two...))
	if _, err := LoadMap(t.Context(), d, a.Map); !errors.Is(err, errs.ObjectNotFound) {
		t.Errorf("the map of a deleted layer: %v", err)
	}
	// It can be put again, and all comes back.
	a, st := putLayer(t, w, []byte("a"), one)
	if st.NewChunks == 0 {
		t.Error("nothing had to be stored again")
	}
	wantData(t, d, a, one)
	wantData(t, d, b, append(bytes.Clone(one[:500*block]), two...))
	collect(t, d, 8, atOnce())
	if n := count(t, d, ""); n > 0 {
		t.Errorf("%d objects are left of nothing", n)
	}
}

// Grace and settling keep things for their time, by the store's clock.
func TestGraceAndSettling(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	w := newWriter(t, d, small())
	putLayer(t, w, []byte("a"), randomBlocks(1, 100))
	o := atOnce()
	o.Grace = time.Hour
	if r := collect(t, d, 3, o); r.Condemned > 0 {
		t.Errorf("within the grace: %+v", r)
	}
	o.Grace, o.Settle = -1, time.Hour
	if r := collect(t, d, 3, o); r.Condemned == 0 || r.Deleted > 0 || r.Waiting == 0 {
		t.Errorf("while settling: %+v", r)
	}
	if r := collect(t, d, 2, atOnce()); r.Deleted == 0 {
		t.Errorf("after it: %+v", r)
	}
}

// A session's layer is safe from the first byte on, whatever collectors do, and so are
// the packs of dead layers that it relies on.
func TestSessionsAreSafe(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	w := newWriter(t, d, small())
	old := randomBlocks(1, 600)
	putLayer(t, w, []byte("dead"), old) // in no root
	s := begin(t, w)
	collect(t, d, 3, atOnce()) // condemns it; the session holds it up
	l, st, err := s.PutLayer(t.Context(), blob([]byte("live")), blob(append(bytes.Clone(old), randomBlocks(2, 300)...)))
	if err != nil {
		t.Fatal(err)
	}
	if st.NewBytes > 300*block+4*maxChunk {
		t.Errorf("what was there when the session began was put again: %+v", st)
	}
	if r := collect(t, d, 3, atOnce()); r.Deleted > 0 {
		t.Errorf("deleted under a session: %+v", r)
	}
	// One that begins now does not rely on what is condemned.
	late := begin(t, w)
	ll, st, err := late.PutLayer(t.Context(), blob([]byte("dead")), blob(old))
	if err != nil {
		t.Fatal(err)
	}
	if st.NewBytes < int64(len(old)) {
		t.Errorf("condemned chunks were relied on: %+v", st)
	}
	if err := s.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if r := collect(t, d, 1, atOnce(), l); r.Spared == 0 {
		t.Errorf("nothing was spared: %+v", r)
	}
	wantData(t, d, l, append(bytes.Clone(old), randomBlocks(2, 300)...))
	if err := late.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	collect(t, d, 6, atOnce(), l, ll)
	wantData(t, d, l, append(bytes.Clone(old), randomBlocks(2, 300)...))
	wantData(t, d, ll, old)
}

// A writer that falls silent is not waited for for ever, and cannot commit afterwards.
func TestSilentWriters(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	// A store that does not let this writer's renewals through.
	var cut sync.Map
	s := objecttest.Faulty(d, func(op objecttest.Op, key string) *objecttest.Fault {
		if _, ok := cut.Load("on"); ok && op == objecttest.Put && strings.HasPrefix(key, leaseClass) {
			return &objecttest.Fault{Err: errs.New(errs.StoreUnavailable, "test", "cut off")}
		}
		return nil
	})
	o := small()
	o.LeaseTTL = 200 * time.Millisecond
	frozen := time.Now()
	o.Now = func() time.Time { return frozen } // its clock does not warn it
	w := newWriter(t, s, o)
	ses := begin(t, w)
	if _, _, err := ses.PutLayer(t.Context(), blob([]byte("a")), blob(randomBlocks(1, 300))); err != nil {
		t.Fatal(err)
	}
	time.Sleep(500 * time.Millisecond)
	if r := collect(t, d, 3, atOnce()); r.Deleted > 0 || r.Expired > 0 {
		t.Errorf("a writer that renews its lease: %+v", r)
	}
	cut.Store("on", true)
	time.Sleep(time.Second)
	if r := collect(t, d, 3, atOnce()); r.Expired != 1 || r.Deleted == 0 {
		t.Errorf("a silent writer: %+v", r)
	}
	wantCode(t, "commit while cut off", ses.Commit(t.Context()), errs.LeaseLost)
	cut.Delete("on")
	time.Sleep(200 * time.Millisecond) // it renews again
	wantCode(t, "commit", ses.Commit(t.Context()), errs.LeaseLost)
	wantCode(t, "put", func() error { _, _, err := ses.PutData(t.Context(), blob(randomBlocks(2, 30))); return err }(), errs.LeaseLost)
	ses.Close(t.Context())
	// With a clock it gives up by itself.
	o.Now = time.Now
	ses = begin(t, newWriter(t, s, o))
	cut.Store("on", true)
	time.Sleep(400 * time.Millisecond)
	wantCode(t, "commit", ses.Commit(t.Context()), errs.LeaseLost)
}

// Packs of which little is needed are rewritten; maps stay as they are, readers with
// old ones go on, over any number of moves.
func TestPacksAreRewritten(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	w := newWriter(t, d, small())
	// 16 layers that share a few packs, and go one after the other.
	var layers []Layer
	var blobs [][]byte
	s := begin(t, w)
	all := randomBlocks(1, 4000)
	if _, _, err := s.PutData(t.Context(), blob(all)); err != nil {
		t.Fatal(err)
	}
	for i := range 16 {
		var b []byte
		for j := i; j < 160; j += 16 { // pieces from everywhere
			b = append(b, all[j*25*block:(j+1)*25*block]...)
		}
		l, _, err := s.PutLayer(t.Context(), blob([]byte(fmt.Sprint(i))), blob(b))
		if err != nil {
			t.Fatal(err)
		}
		layers, blobs = append(layers, l), append(blobs, b)
	}
	if err := s.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := newReader(t, d)
	maps := make([]*Map, len(layers))
	for i, l := range layers {
		var err error
		if maps[i], err = LoadMap(t.Context(), d, l.Map); err != nil {
			t.Fatal(err)
		}
	}
	rewritten := 0
	for left := 16; left > 0; left /= 2 {
		rep := collect(t, d, 3, atOnce(), layers[:left]...)
		rewritten += rep.Rewritten
		for i := range left {
			if err := r.Verify(t.Context(), maps[i]); err != nil {
				t.Fatalf("layer %d with %d left: %v", i, left, err)
			}
			wantData(t, d, layers[i], blobs[i])
		}
	}
	if rewritten == 0 || count(t, d, movedClass) == 0 {
		t.Errorf("%d packs were rewritten, %d tables", rewritten, count(t, d, movedClass))
	}
	size := int64(0)
	d.List(t.Context(), packClass, func(i object.Info) error { size += i.Size; return nil })
	if want := int64(len(blobs[0])); size > 5*want/2 {
		t.Errorf("%d bytes are kept for %d", size, want)
	}
	// What was moved is found by new writers.
	if _, st := putLayer(t, newWriter(t, d, small()), nil, blobs[0]); st.NewBytes > 0 {
		t.Errorf("moved chunks are not found: %+v", st)
	}
	collect(t, d, 8, atOnce())
	if n := count(t, d, ""); n > 0 {
		t.Errorf("%d objects are left of nothing", n)
	}
}

// Many small packs become few.
func TestSmallPacksAreMerged(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	w := newWriter(t, d, Options{})
	var layers []Layer
	for i := range 40 {
		l, _ := putLayer(t, w, nil, randomBlocks(uint64(i), 16))
		layers = append(layers, l)
	}
	o := atOnce()
	o.PackSize, o.MergeFrom = 8<<20, 20
	collect(t, d, 4, o, layers...)
	if n := count(t, d, packClass); n > 2 {
		t.Errorf("%d packs are left", n)
	}
	for i, l := range layers {
		wantData(t, d, l, randomBlocks(uint64(i), 16))
	}
}

// If anything is in doubt, nothing is deleted.
func TestDoubtDeletesNothing(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	w := newWriter(t, d, small())
	a, _ := putLayer(t, w, []byte("a"), randomBlocks(1, 300))
	putLayer(t, w, []byte("b"), randomBlocks(2, 300))
	collect(t, d, 1, atOnce(), a)
	before := count(t, d, packClass)
	c := NewCollector(flipped(d, a.Map, 50, 1, 1<<40), atOnce())
	_, err := c.Collect(t.Context(), rootsOf(a))
	wantCode(t, "a damaged map", err, errs.StoreCorrupt)
	boom := errors.New("the catalogue is away")
	if _, err := NewCollector(d, atOnce()).Collect(t.Context(), func(context.Context) ([]Layer, error) { return nil, boom }); !errors.Is(err, boom) {
		t.Errorf("no roots: %v", err)
	}
	_, err = NewCollector(d, atOnce()).Collect(t.Context(), rootsOf(Layer{Meta: contentKey(metaClass, digest{}, id{}), Map: contentKey(mapClass, digest{}, id{})}))
	wantCode(t, "a root that is not there", err, errs.ObjectNotFound)
	if n := count(t, d, packClass); n != before {
		t.Errorf("%d packs of %d are left", n, before)
	}
	// A condemnation that cannot be read: nothing is relied on, and it is made again.
	var key string
	d.List(t.Context(), condemnedClass, func(i object.Info) error { key = i.Key; return nil })
	if err := d.Put(t.Context(), key, 3, strings.NewReader("xyz")); err != nil {
		t.Fatal(err)
	}
	if _, st := putLayer(t, w, []byte("a"), randomBlocks(1, 300)); st.NewBytes != 300*block {
		t.Errorf("relied on: %+v", st)
	}
	collect(t, d, 6, atOnce(), a)
	wantData(t, d, a, randomBlocks(1, 300))
}

func TestUsage(t *testing.T) {
	t.Parallel()
	d := openDir(t)
	w := newWriter(t, d, Options{})
	base, own := randomBlocks(1, 800), randomBlocks(2, 400)
	a, _ := putLayer(t, w, []byte("a"), base)
	b, _ := putLayer(t, w, []byte("b"), append(bytes.Clone(base), own...))
	c, _ := putLayer(t, w, []byte("c"), nil)
	u, err := MeasureUsage(t.Context(), d, []Layer{a, b, c})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct{ own, shared int }{{0, len(base)}, {len(own), len(base)}, {0, 0}} {
		l := u.Layers[i]
		if int64(want.own)-l.OwnBytes > maxChunk || l.OwnBytes-int64(want.own) > maxChunk || l.OwnBytes+l.SharedBytes != int64(want.own+want.shared) || l.MetaStored == 0 {
			t.Errorf("layer %d: %+v, want about %+v", i, l, want)
		}
	}
	if u.Bytes > int64(len(base)+len(own)+maxChunk) {
		t.Errorf("in all: %+v", u)
	}
	alone, err := MeasureUsage(t.Context(), d, []Layer{a})
	if err != nil || alone.Layers[0].SharedBytes != 0 || alone.Layers[0].OwnBytes != int64(len(base)) {
		t.Errorf("alone: %+v, %v", alone, err)
	}
}

// catalogue is a durable record of layers, as the caller has one: one file each.
type catalogue struct{ dir string }

type record struct {
	Layer Layer
	Seed  uint64 // its content is contentOf(Seed)
}

func (c catalogue) add(name string, r record) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	tmp := filepath.Join(c.dir, "tmp-"+name)
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(c.dir, name+".json"))
}

func (c catalogue) remove(name string) { os.Remove(filepath.Join(c.dir, name+".json")) }

func (c catalogue) all() (map[string]record, error) {
	names, err := filepath.Glob(filepath.Join(c.dir, "*.json"))
	if err != nil {
		return nil, err
	}
	all := map[string]record{}
	for _, n := range names {
		b, err := os.ReadFile(n)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		var r record
		if err := json.Unmarshal(b, &r); err != nil {
			return nil, err
		}
		all[strings.TrimSuffix(filepath.Base(n), ".json")] = r
	}
	return all, nil
}

func (c catalogue) roots(context.Context) ([]Layer, error) {
	all, err := c.all()
	var layers []Layer
	for _, r := range all {
		layers = append(layers, r.Layer)
	}
	return layers, err
}

// contentOf is made of a few of 40 pieces, so that layers share much.
func contentOf(seed uint64) (meta, data []byte) {
	rng := rand.New(rand.NewPCG(seed, 11))
	for range rng.IntN(6) {
		data = append(data, randomBlocks(uint64(rng.IntN(40)), 30+rng.IntN(3)*40)...)
	}
	return []byte(fmt.Sprint("meta of ", seed%50)), data
}

// churn puts, records, removes and reads layers for as long as ctx is good.
func churn(ctx context.Context, s object.Store, cat catalogue, who int, seed uint64, o Options) error {
	w := NewWriter(s, o)
	defer w.Close()
	r, err := NewReader(s, ReaderOptions{})
	if err != nil {
		return err
	}
	rng := rand.New(rand.NewPCG(seed, uint64(who)))
	mine := map[string]record{}
	for n := 0; ctx.Err() == nil; n++ {
		name := fmt.Sprintf("w%d-%d-%d", who, seed, n)
		rec := record{Seed: uint64(rng.IntN(200))}
		meta, data := contentOf(rec.Seed)
		ses, err := w.Begin(ctx)
		if err != nil {
			return err
		}
		rec.Layer, _, err = ses.PutLayer(ctx, blob(meta), blob(data))
		if err == nil && rng.IntN(8) > 0 {
			if err = cat.add(name, rec); err == nil {
				if err = ses.Commit(ctx); err != nil {
					cat.remove(name)
				}
				mine[name] = rec
			}
		}
		ses.Close(ctx)
		if errors.Is(err, errs.LeaseLost) { // a machine that is too slow: as said, again
			delete(mine, name)
			continue
		}
		if err != nil {
			return err
		}
		for name, rec := range mine {
			if err := checkRecord(ctx, s, r, rec); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if rng.IntN(3) > 0 || len(mine) > 6 {
				cat.remove(name)
				delete(mine, name)
			}
			break
		}
	}
	return ctx.Err()
}

func checkRecord(ctx context.Context, s object.Store, r *Reader, rec record) error {
	meta, data := contentOf(rec.Seed)
	got, err := readData(ctx, s, r, rec.Layer)
	if err != nil {
		return err
	}
	if !bytes.Equal(got, data) {
		return errors.New("other data came back")
	}
	f, err := os.MkdirTemp("", "chunk-meta-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(f)
	path := filepath.Join(f, "meta")
	if err := GetMeta(ctx, s, rec.Layer, path); err != nil {
		return err
	}
	if b, err := os.ReadFile(path); err != nil || !bytes.Equal(b, meta) {
		return fmt.Errorf("other metadata came back: %v", err)
	}
	return nil
}

// checkRecorded is checkCatalogue while layers are taken out.
func checkRecorded(t *testing.T, s object.Store, cat catalogue) {
	all, err := cat.all()
	if err != nil {
		t.Error(err)
		return
	}
	r, err := NewReader(s, ReaderOptions{})
	if err != nil {
		t.Error(err)
		return
	}
	for name, rec := range all {
		if err := checkRecord(t.Context(), s, r, rec); err != nil {
			if _, serr := os.Stat(filepath.Join(cat.dir, name+".json")); serr == nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

func checkCatalogue(t *testing.T, s object.Store, cat catalogue) {
	t.Helper()
	all, err := cat.all()
	if err != nil {
		t.Fatal(err)
	}
	r := newReader(t, s)
	for name, rec := range all {
		if err := checkRecord(t.Context(), s, r, rec); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// memoryDir is a directory in memory, where there is one: kills of processes do not need
// a disk, and without waiting for it much more happens in the same time.
func memoryDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "dsec-chunk-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// Writers, readers and two collectors at once: nothing that is recorded is ever missing,
// and in the end nothing is left of what is not.
func TestWritersAndCollectorsAtOnce(t *testing.T) {
	t.Parallel()
	d, err := object.OpenDir(t.Context(), memoryDir(t))
	if err != nil {
		t.Fatal(err)
	}
	cat := catalogue{t.TempDir()}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	o := small()
	o.Workers, o.Refresh = 2, time.Millisecond
	over := func(err error) bool {
		return errors.Is(err, context.DeadlineExceeded) || errors.Is(err, errs.DeadlineExceeded) || errors.Is(err, errs.RequestCanceled)
	}
	for who := range 3 {
		wg.Go(func() {
			if err := churn(ctx, d, cat, who, seed, o); !over(err) {
				t.Errorf("writer %d: %v", who, err)
			}
		})
	}
	var deleted, rewritten, spared, passes atomic.Int64
	for n := range 2 {
		wg.Go(func() {
			c := NewCollector(d, atOnce())
			for {
				r, err := c.Collect(ctx, cat.roots)
				if over(err) {
					return
				}
				// A layer that was taken out while it was marked is gone; another pass sees it.
				if err != nil && !errors.Is(err, errs.ObjectNotFound) {
					t.Errorf("collector %d: %v", n, err)
					return
				}
				// With two collectors it may be of a layer that was taken out after the roots were
				// read; not if it is recorded still.
				if len(r.Damaged) > 0 {
					checkRecorded(t, d, cat)
				}
				deleted.Add(int64(r.Deleted))
				rewritten.Add(int64(r.Rewritten))
				spared.Add(int64(r.Spared))
				passes.Add(1)
			}
		})
	}
	wg.Wait()
	t.Logf("%d passes, %d objects deleted, %d spared, %d packs rewritten", passes.Load(), deleted.Load(), spared.Load(), rewritten.Load())
	if deleted.Load() == 0 {
		t.Error("nothing was deleted while there was writing")
	}
	checkCatalogue(t, d, cat)
	layers, err := cat.roots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	collect(t, d, 6, atOnce(), layers...)
	checkCatalogue(t, d, cat)
	collect(t, d, 10, atOnce())
	if n := count(t, d, ""); n > 0 {
		d.List(t.Context(), "", func(i object.Info) error { t.Log(i.Key); return nil })
		t.Errorf("%d objects are left of nothing", n)
	}
}

// A process that writes and collects is killed at random, again and again.
func TestKilledWritersAndCollectors(t *testing.T) {
	if dir := os.Getenv("CHUNK_TEST_CHURN"); dir != "" {
		killedChild(t, dir)
		return
	}
	t.Parallel()
	dir := memoryDir(t)
	cat := catalogue{filepath.Join(dir, "catalogue")}
	if err := os.Mkdir(cat.dir, 0o755); err != nil {
		t.Fatal(err)
	}
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for round := range 8 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilledWritersAndCollectors$")
		cmd.Env = append(os.Environ(), "CHUNK_TEST_CHURN="+dir, fmt.Sprintf("CHUNK_TEST_SEED=%d", seed+uint64(round)), "TMPDIR="+t.TempDir())
		var out bytes.Buffer
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(200+rng.IntN(900)) * time.Millisecond)
		cmd.Process.Kill()
		cmd.Wait()
		if out.Len() > 0 {
			t.Errorf("round %d: the child had something to say:\n%s", round, out.String())
		}
		s, err := object.OpenDir(t.Context(), filepath.Join(dir, "store"))
		if err != nil {
			t.Fatal(err)
		}
		checkCatalogue(t, s, cat)
	}
	s, err := object.OpenDir(t.Context(), filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	time.Sleep(childTTL)
	layers, err := cat.roots(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d layers, %d objects after %v", len(layers), count(t, s, ""), "the last kill")
	collect(t, s, 8, atOnce(), layers...)
	checkCatalogue(t, s, cat)
	collect(t, s, 8, atOnce())
	if n := count(t, s, ""); n > 0 {
		t.Errorf("%d objects are left of nothing", n)
	}
}

const childTTL = 1500 * time.Millisecond

func killedChild(t *testing.T, dir string) {
	s, err := object.OpenDir(t.Context(), filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	cat := catalogue{filepath.Join(dir, "catalogue")}
	var seed uint64
	fmt.Sscan(os.Getenv("CHUNK_TEST_SEED"), &seed)
	o := small()
	o.LeaseTTL = childTTL
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for who := range 2 {
		go func() {
			if err := churn(ctx, s, cat, who, seed, o); err != nil {
				fmt.Println("writer:", err)
			}
		}()
	}
	co := atOnce()
	co.LeaseTTL = childTTL
	for ctx.Err() == nil {
		r, err := NewCollector(s, co).Collect(ctx, cat.roots)
		if err != nil && !errors.Is(err, errs.ObjectNotFound) && !errors.Is(err, errs.LeaseLost) || len(r.Damaged) > 0 {
			fmt.Println("collector:", err, r.Damaged)
		}
	}
}

// All of it on S3.
func TestOnS3(t *testing.T) {
	t.Parallel()
	s, err := object.OpenS3(t.Context(), objecttest.S3(t))
	if err != nil {
		t.Fatal(err)
	}
	defer s.CloseIdle()
	w := newWriter(t, s, small())
	one, two := randomBlocks(1, 1000), append(randomBlocks(1, 300), randomBlocks(2, 500)...)
	a, _ := putLayer(t, w, []byte("a"), one)
	b, _ := putLayer(t, w, []byte("b"), two)
	wantData(t, s, a, one)
	collect(t, s, 4, atOnce(), b)
	wantData(t, s, b, two)
	if err := GetMeta(t.Context(), s, b, filepath.Join(t.TempDir(), "meta")); err != nil {
		t.Error(err)
	}
	if _, st := putLayer(t, newWriter(t, s, small()), []byte("b"), two); st.Stored > 0 {
		t.Errorf("put again: %+v", st)
	}
	time.Sleep(1100 * time.Millisecond) // S3 has whole seconds
	collect(t, s, 8, atOnce())
	if n := count(t, s, ""); n > 0 {
		t.Errorf("%d objects are left of nothing", n)
	}
}
