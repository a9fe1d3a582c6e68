package edge

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// A store that was lost begins to count anew; the edge's own record keeps epochs growing,
// so that no id of an earlier one can mean a new sandbox.
func TestEpochsGrowThoughTheStoreIsLost(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	var last uint64
	for i, boot := range []string{"boot1", "boot2", "boot3", "boot4"} {
		b.boot = boot
		if i == 2 {
			b.cluster.epoch.Store(0)
		}
		e := b.start()
		if e.epoch <= last {
			t.Errorf("epoch %d of %s comes after %d", e.epoch, boot, last)
		}
		last = e.epoch
		if err := e.Close(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	b.cluster.epoch.Store(40) // and the store's, when it knows of a higher one
	b.boot = "boot5"
	if e := b.start(); e.epoch != 41 {
		t.Errorf("epoch %d, the store had 40", e.epoch)
	}
}

// A damaged or missing identity never makes another node of one that has sandboxes, whose
// processes would then be removed as unexplained.
func TestDamagedIdentityIsNeverMadeAnew(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	e := b.start()
	sb, err := b.create(b.control(e), e, nil)
	if err != nil {
		t.Fatal(err)
	}
	id := e.ID()
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(b.dir, "edge")
	path := filepath.Join(dir, "identity.json")
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(what string) {
		t.Helper()
		if _, err := b.tryStart(); !errors.Is(err, errs.DataCorrupt) || !IdentityDamaged(err) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, bad := range map[string][]byte{
		"empty": nil, "half": good[:len(good)/2], "zeros": make([]byte, len(good)), "another boot": []byte(strings.Replace(string(good), "boot1", "boot2", 1)),
		"another node": []byte(strings.Replace(string(good), id, v1.NodeID(99), 1)), "another epoch": []byte(strings.Replace(string(good), `"epoch":1`, `"epoch":2`, 1)),
	} {
		if slices.Equal(bad, good) {
			t.Fatalf("%s changes nothing", what)
		}
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		refused(what)
		if left, err := os.ReadFile(path); err != nil || !slices.Equal(left, bad) {
			t.Errorf("%s: the file was touched, %v", what, err)
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	refused("missing")

	// It can be mended.
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
	e = b.start()
	if e.ID() != id || e.get(sb.ID) == nil {
		t.Errorf("node %s, want %s with its sandbox", e.ID(), id)
	}
	if err := e.Close(t.Context()); err != nil {
		t.Fatal(err)
	}
	// Or given up, when nothing runs any more.
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Emptied(dir, time.Now(), sb.ID); err != nil {
		t.Fatal(err)
	}
	refused("while a sandbox is left")
	if err := errors.Join(Emptied(dir, time.Now()), os.Remove(filepath.Join(b.dir, "hollow", sb.ID))); err != nil {
		t.Fatal(err)
	}
	if e = b.start(); e.ID() == id {
		t.Errorf("the node is still %s", id)
	}
}
