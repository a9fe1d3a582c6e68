package apiserver_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
	"dsec/internal/image/chunk"
	"dsec/internal/image/object"
)

// stock is an object store with layers in it.
type stock struct {
	t       *testing.T
	objects object.Store
	writer  *chunk.Writer
}

func newStock(t *testing.T) *stock {
	objects, err := object.OpenDir(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	w := chunk.NewWriter(objects, chunk.Options{})
	t.Cleanup(w.Close)
	return &stock{t, objects, w}
}

// put stores a layer whose content n decides.
func (s *stock) put(n byte) v1.Layer {
	s.t.Helper()
	session, err := s.writer.Begin(s.t.Context())
	if err != nil {
		s.t.Fatal(err)
	}
	meta, data := bytes.Repeat([]byte{n}, 4096), bytes.Repeat([]byte{n, 1}, 64<<10)
	l, _, err := session.PutLayer(s.t.Context(), chunk.Blob{R: bytes.NewReader(meta), Size: 4096}, chunk.Blob{R: bytes.NewReader(data), Size: 128 << 10})
	if err == nil {
		err = session.Commit(s.t.Context())
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return v1.Layer{
		Kind: v1.KindBase, MetaDigest: fmt.Sprintf("%064d", n), MetaBytes: 4096, DataDigest: fmt.Sprintf("%063dd", n), DataBytes: 128 << 10,
		MetaObject: l.Meta, MapObject: l.Map,
	}
}

// has says whether a layer's objects are in the store.
func (s *stock) has(l v1.Layer) bool {
	s.t.Helper()
	_, merr := s.objects.Stat(s.t.Context(), l.MetaObject)
	_, derr := s.objects.Stat(s.t.Context(), l.MapObject)
	for _, err := range []error{merr, derr} {
		if err != nil && !errors.Is(err, errs.ObjectNotFound) {
			s.t.Fatal(err)
		}
	}
	return merr == nil && derr == nil
}

func over(s *stock) option {
	return func(c *control.Config, _ *controltest.Config) {
		c.Objects = control.Objects{Store: s.objects, Name: "test"}
	}
}

func TestACollectionKeepsWhatCatalogueAndNodesNeed(t *testing.T) {
	t.Parallel()
	s := newStock(t)
	w := newWorld(t, over(s))
	catalogued, held, unneeded := s.put(1), s.put(2), s.put(3)
	img := v1.Image{Name: "one", Digest: "sha256:" + fmt.Sprintf("%064d", 1), Layers: []v1.Layer{catalogued}}
	if _, err := w.store.PutImage(t.Context(), img); err != nil {
		t.Fatal(err)
	}
	w.edge.Need(held)

	// A node that does not answer keeps everything.
	w.edge.Stop()
	w.problem("edge_unreachable", "POST", "/v1/store/collect?grace_s=0", nil)
	w.edge.Serve()
	w.awaitEdges(1)
	if !s.has(unneeded) {
		t.Error("a collection that failed has deleted something")
	}

	// One at a time.
	claim, _, err := w.store.Claim(t.Context(), "image-collect", "another server")
	if err != nil {
		t.Fatal(err)
	}
	w.problem("state_conflict", "POST", "/v1/store/collect?grace_s=0", nil)
	if err := claim.Release(t.Context()); err != nil {
		t.Fatal(err)
	}

	// What is young stays.
	_, _, raw := w.do("POST", "/v1/store/collect", nil)
	if r := lines[v1.CollectReport](t, raw); len(r) != 1 || !r[0].Done || r[0].Condemned != 0 {
		t.Errorf("%+v", r)
	}
	_, _, raw = w.do("POST", "/v1/store/collect?grace_s=0", nil)
	r := lines[v1.CollectReport](t, raw)
	if len(r) != 3 || !r[2].Done || r[0].Layers != 2 || r[0].Condemned == 0 {
		t.Errorf("%+v", r)
	}
	for l, stays := range map[v1.Layer]bool{catalogued: true, held: true, unneeded: false} {
		if s.has(l) != stays {
			t.Errorf("layer %s stays: %v", l.MetaDigest, !stays)
		}
	}
	keep := w.edge.Kept()
	if keep == nil || !slices.Contains(keep.Images, img.Digest) || !slices.Contains(keep.Layers, catalogued.MetaDigest) || !slices.Contains(keep.Layers, held.MetaDigest) ||
		slices.Contains(keep.Layers, unneeded.MetaDigest) {
		t.Errorf("the node was told to keep %+v", keep)
	}
}

func TestUsageWarmAndEvict(t *testing.T) {
	t.Parallel()
	s := newStock(t)
	shared, own := s.put(1), s.put(2)
	one := v1.Image{Name: "one", Digest: "sha256:" + fmt.Sprintf("%064d", 1), Layers: []v1.Layer{shared}}
	two := v1.Image{Name: "two", Digest: "sha256:" + fmt.Sprintf("%064d", 2), Layers: []v1.Layer{shared, own}}
	w := newWorld(t, over(s), func(_ *control.Config, e *controltest.Config) { e.Images = append(e.Images, two) })
	for _, img := range []v1.Image{one, two} {
		if _, err := w.store.PutImage(t.Context(), img); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, "the catalogue is followed", func() bool {
		status, _, _ := w.do("GET", "/v1/images/two", nil)
		return status == 200
	})
	u := want[v1.ImageUsage](w, 200, "GET", "/v1/store/usage", nil)
	if len(u.Items) != 3 || len(u.Nodes) != 1 || u.StoredBytes == 0 {
		t.Fatalf("%+v", u)
	}
	for _, i := range u.Items {
		switch i.Name {
		case "one":
			if i.OwnStored != 0 || i.SharedStored == 0 || i.Cached["fakeaa"] != 100 {
				t.Errorf("%+v", i)
			}
		case "two":
			if i.OwnStored == 0 || i.SharedStored == 0 || i.Cached["fakeaa"] != 200 || i.Bytes != 2*(4096+128<<10) {
				t.Errorf("%+v", i)
			}
		}
	}
	_, _, raw := w.do("POST", "/v1/store/warm?image=two", nil)
	p := lines[v1.WarmProgress](t, raw)
	if last := p[len(p)-1]; len(p) != 2 || !last.End || !last.Trace || last.Node != "fakeaa" || last.Done != 2 {
		t.Errorf("%+v", p)
	}
	if r := want[v1.EvictReports](w, 200, "POST", "/v1/store/evict?image=two", nil); len(r.Items) != 1 || r.Items[0].FreedBytes != 200 {
		t.Errorf("%+v", r)
	}
	for _, path := range []string{"/v1/store/warm?image=none", "/v1/store/evict?image=none"} {
		w.problem("image_not_found", "POST", path, nil)
	}
	w.problem("node_not_found", "POST", "/v1/store/evict?image=two&node=nobody", nil)
}

func TestWithoutAnObjectStoreNothingIsMeasured(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.problem("not_supported", "GET", "/v1/store/usage", nil)
	w.problem("not_supported", "POST", "/v1/store/collect", nil)
}

// What an import had stored when the disk was full goes at once, however young it is; what is needed
// stays.
func TestAFullDiskIsCleanedUp(t *testing.T) {
	t.Parallel()
	s := newStock(t)
	w := newWorld(t, over(s))
	needed, left := s.put(1), s.put(2)
	w.edge.Need(needed)
	fail := func(code errs.Code) {
		w.edge.OnImport(func(context.Context, *aether.Stream, *msg.ImageImportRequest) (v1.Image, error) {
			return v1.Image{}, errs.New(code, "test", "it fails")
		})
		w.problem(string(code), "POST", "/v1/images?name=a", strings.NewReader("x"))
	}
	fail(errs.StoreUnavailable)
	time.Sleep(100 * time.Millisecond)
	if !s.has(left) {
		t.Error("garbage was collected for another failure than a full disk")
	}
	fail(errs.DiskFull)
	eventually(t, "what was stored is gone", func() bool { return !s.has(left) })
	if !s.has(needed) {
		t.Error("what a node needs is gone")
	}
}
