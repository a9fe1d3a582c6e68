// Package storetest holds the conformance suite of store.Store and an in-memory
// implementation for tests of what stands on it.
package storetest

import (
	"context"
	"errors"
	"reflect"
	"sync"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/store"
)

// Run checks an implementation. open returns an empty store; the suite closes nothing.
func Run(t *testing.T, open func(t *testing.T) store.Store) {
	t.Run("epochs are unique and grow", func(t *testing.T) { testEpochs(t, open(t)) })
	t.Run("registration", func(t *testing.T) { testRegistration(t, open(t)) })
	t.Run("tokens", func(t *testing.T) { testTokens(t, open(t)) })
	t.Run("images", func(t *testing.T) { testImages(t, open(t)) })
	t.Run("one signing key", func(t *testing.T) { testSigningKey(t, open(t)) })
	t.Run("one object store", func(t *testing.T) { testObjectStore(t, open(t)) })
	t.Run("one claim at a time", func(t *testing.T) { testClaims(t, open(t)) })
	t.Run("a claim is waited for", func(t *testing.T) { testClaimWaits(t, open(t)) })
	t.Run("a follower's failure ends the follow", func(t *testing.T) { testFollowFails(t, open(t)) })
}

func testEpochs(t *testing.T, s store.Store) {
	ctx := t.Context()
	const n = 20
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		seen = map[uint64]bool{}
	)
	for range n {
		wg.Go(func() {
			e, err := s.AllocateEpoch(ctx, "epocha", 0)
			mu.Lock()
			defer mu.Unlock()
			if err != nil || seen[e] {
				t.Errorf("epoch %d, err %v, seen before: %v", e, err, seen[e])
			}
			seen[e] = true
		})
	}
	wg.Wait()
	for e := uint64(1); e <= n; e++ {
		if !seen[e] {
			t.Errorf("epoch %d was never given", e)
		}
	}
	for _, c := range []struct{ above, want uint64 }{{0, 1}, {7, 8}, {3, 9}, {0, 10}} {
		if e, err := s.AllocateEpoch(ctx, "epochb", c.above); err != nil || e != c.want {
			t.Errorf("another node's epoch above %d is %d, %v, want %d", c.above, e, err, c.want)
		}
	}
}

func testRegistration(t *testing.T, s store.Store) {
	ctx := t.Context()
	first := v1.Node{ID: "nodeaa", Epoch: 2, Address: "unix:/a", Ready: true}
	reg, err := s.Register(ctx, first)
	if err != nil {
		t.Fatal(err)
	}
	view := Follow(t, s.FollowNodes)
	view.Want(t, "the registered node", func(m map[string]v1.Node) bool { return reflect.DeepEqual(m["nodeaa"], first) })

	changed := first
	changed.Address = "unix:/b"
	if err := reg.Update(ctx, changed); err != nil {
		t.Fatal(err)
	}
	view.Want(t, "the update", func(m map[string]v1.Node) bool { return m["nodeaa"].Address == "unix:/b" })

	other := changed
	other.Epoch = 3
	if err := reg.Update(ctx, other); !errors.Is(err, errs.BadRequest) {
		t.Errorf("an update to another epoch gives %v", err)
	}
	older := first
	older.Epoch = 1
	if _, err := s.Register(ctx, older); !errors.Is(err, errs.StateConflict) {
		t.Errorf("registering an older epoch gives %v", err)
	}
	again, err := s.Register(ctx, changed) // a restarted edge, before its old lease ended
	if err != nil {
		t.Fatal(err)
	}
	if err := again.Withdraw(ctx); err != nil {
		t.Fatal(err)
	}
	view.Want(t, "no node", func(m map[string]v1.Node) bool { return len(m) == 0 })
	if err := again.Withdraw(ctx); err != nil {
		t.Errorf("a second withdraw gives %v", err)
	}
	if err := reg.Withdraw(ctx); err != nil {
		t.Errorf("withdrawing a registration that was replaced gives %v", err)
	}
	if _, err := s.Register(ctx, v1.Node{}); !errors.Is(err, errs.BadRequest) {
		t.Errorf("registering without an id gives %v", err)
	}
}

func testTokens(t *testing.T, s store.Store) {
	ctx := t.Context()
	view := Follow(t, s.FollowTokens)
	exp := time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)
	rec := store.TokenRecord{
		Token: v1.Token{ID: "t1", Name: "ci", Project: "root", Rights: []v1.Right{v1.RightRead}, CreatedAt: exp.Add(-time.Hour), ExpiresAt: &exp},
		Hash:  []byte{1, 2, 3},
	}
	if err := s.PutToken(ctx, rec); err != nil {
		t.Fatal(err)
	}
	view.Want(t, "the token", func(m map[string]store.TokenRecord) bool { return reflect.DeepEqual(m["t1"], rec) })
	leaky := rec
	leaky.Token.Secret = "x"
	if err := s.PutToken(ctx, leaky); err == nil {
		t.Error("a secret was stored")
	}
	if err := s.DeleteToken(ctx, "t1"); err != nil {
		t.Fatal(err)
	}
	view.Want(t, "no token", func(m map[string]store.TokenRecord) bool { return len(m) == 0 })
	if err := s.DeleteToken(ctx, "t1"); !errors.Is(err, errs.TokenNotFound) {
		t.Errorf("a second delete gives %v", err)
	}
}

func testImages(t *testing.T, s store.Store) {
	ctx := t.Context()
	a := v1.Image{Name: "team/debian:12", Digest: "sha256:a", CreatedAt: time.Unix(5, 0).UTC()}
	if prev, err := s.PutImage(ctx, a); err != nil || prev != nil {
		t.Fatal(prev, err)
	}
	view := Follow(t, s.FollowImages)
	view.Want(t, "the image", func(m map[string]v1.Image) bool { return reflect.DeepEqual(m[a.Name], a) })
	b := a
	b.Digest = "sha256:b"
	if prev, err := s.PutImage(ctx, b); err != nil || prev == nil || prev.Digest != a.Digest {
		t.Fatalf("replacing gives %v, %v", prev, err)
	}
	view.Want(t, "the new digest", func(m map[string]v1.Image) bool { return m[a.Name].Digest == "sha256:b" })
	// A swap is of what is there, all of it or nothing.
	merged := b
	merged.Layers = []v1.Layer{{MetaDigest: "m"}}
	if err := s.SwapImage(ctx, a, merged); !errors.Is(err, errs.StateConflict) {
		t.Errorf("a swap of what was replaced gives %v", err)
	}
	if err := s.SwapImage(ctx, merged, b); !errors.Is(err, errs.StateConflict) {
		t.Errorf("a swap of other layers gives %v", err)
	}
	view.Want(t, "no swap", func(m map[string]v1.Image) bool { return reflect.DeepEqual(m[a.Name], b) })
	if err := s.SwapImage(ctx, b, merged); err != nil {
		t.Fatal(err)
	}
	view.Want(t, "the swap", func(m map[string]v1.Image) bool { return reflect.DeepEqual(m[a.Name], merged) })
	if err := s.SwapImage(ctx, v1.Image{Name: "none"}, v1.Image{Name: "none"}); !errors.Is(err, errs.ImageNotFound) {
		t.Errorf("a swap of nothing gives %v", err)
	}
	if old, err := s.DeleteImage(ctx, a.Name); err != nil || old.Digest != "sha256:b" {
		t.Fatalf("deleting gives %v, %v", old, err)
	}
	if _, err := s.DeleteImage(ctx, a.Name); !errors.Is(err, errs.ImageNotFound) {
		t.Errorf("a second delete gives %v", err)
	}
	view.Want(t, "no image", func(m map[string]v1.Image) bool { return len(m) == 0 })
}

func testSigningKey(t *testing.T, s store.Store) {
	keys := make([][]byte, 8)
	var wg sync.WaitGroup
	for i := range keys {
		wg.Go(func() {
			k, err := s.SigningKey(t.Context())
			if err != nil {
				t.Error(err)
			}
			keys[i] = k
		})
	}
	wg.Wait()
	for _, k := range keys {
		if len(k) < 32 || !reflect.DeepEqual(k, keys[0]) {
			t.Fatalf("keys differ or are short: %x and %x", k, keys[0])
		}
	}
}

func testObjectStore(t *testing.T, s store.Store) {
	for _, c := range []struct{ id, want string }{{"", ""}, {"one", "one"}, {"two", "one"}, {"", "one"}} {
		if got, err := s.ObjectStore(t.Context(), c.id); err != nil || got != c.want {
			t.Errorf("with %q: %q, %v, want %q", c.id, got, err, c.want)
		}
	}
}

func testClaims(t *testing.T, s store.Store) {
	ctx := t.Context()
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		mine int
	)
	for range 20 {
		wg.Go(func() {
			c, held, err := s.Claim(ctx, "p:key/with more", "request")
			switch {
			case err != nil:
				t.Error(err)
			case c != nil:
				mu.Lock()
				mine++
				mu.Unlock()
				if err := c.Settle(ctx, "sa", time.Minute); err != nil {
					t.Error(err)
				}
				if err := c.Release(ctx); !errors.Is(err, errs.StateConflict) {
					t.Errorf("releasing a settled claim gives %v", err)
				}
			case held.Sandbox != "sa" || held.Request != "request":
				t.Errorf("held as %+v", held)
			}
		})
	}
	wg.Wait()
	if mine != 1 {
		t.Errorf("%d of 20 have the claim", mine)
	}
	if c, held, err := s.Claim(ctx, "p:key/with more", "another"); err != nil || c != nil || held.Request != "request" {
		t.Errorf("another request is told %+v, %v", held, err)
	}
	if c, _, err := s.Claim(ctx, "p:key", "request"); err != nil || c == nil {
		t.Errorf("another key: %v", err)
	}

	short, _, err := s.Claim(ctx, "short", "request")
	if err != nil {
		t.Fatal(err)
	}
	if c, held, err := s.Claim(ctx, "short", "another"); err != nil || c != nil || held.Request != "request" {
		t.Errorf("another request meanwhile is told %+v, %v", held, err)
	}
	if err := short.Settle(ctx, "sb", time.Millisecond); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * time.Millisecond)
	if c, held, err := s.Claim(ctx, "short", "another"); err != nil || c == nil {
		t.Errorf("after the claim's time: %+v, %v", held, err)
	}
}

func testClaimWaits(t *testing.T, s store.Store) {
	ctx := t.Context()
	first, _, err := s.Claim(ctx, "k", "request")
	if err != nil {
		t.Fatal(err)
	}
	brief, cancel := context.WithTimeout(ctx, 20*time.Millisecond)
	defer cancel()
	if _, _, err := s.Claim(brief, "k", "request"); !errors.Is(err, errs.Deadline) {
		t.Errorf("waiting too long gives %v", err)
	}
	got := make(chan store.Claim)
	go func() {
		c, _, err := s.Claim(ctx, "k", "request")
		if err != nil {
			t.Error(err)
		}
		got <- c
	}()
	select {
	case <-got:
		t.Fatal("two have the claim")
	case <-time.After(20 * time.Millisecond):
	}
	if err := first.Release(ctx); err != nil {
		t.Fatal(err)
	}
	if err := first.Settle(ctx, "sa", time.Minute); !errors.Is(err, errs.StateConflict) {
		t.Errorf("settling a released claim gives %v", err)
	}
	if c := <-got; c == nil {
		t.Error("the claim is lost")
	}
}

func testFollowFails(t *testing.T, s store.Store) {
	boom := errors.New("boom")
	err := s.FollowImages(t.Context(), func(store.Change[v1.Image]) error { return boom })
	if !errors.Is(err, boom) {
		t.Errorf("the follow ended with %v", err)
	}
}

// View is a followed set, kept up to date.
type View[T any] struct {
	mu      sync.Mutex
	items   map[string]T
	changed chan struct{}
}

// Follow runs one of the store's Follow methods until the test ends.
func Follow[T any](t *testing.T, run func(context.Context, func(store.Change[T]) error) error) *View[T] {
	v := &View[T]{items: map[string]T{}, changed: make(chan struct{}, 1)}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := run(ctx, v.apply); !errors.Is(err, context.Canceled) {
			t.Errorf("the follow ended with %v", err)
		}
	}()
	t.Cleanup(func() { cancel(); <-done })
	return v
}

func (v *View[T]) apply(c store.Change[T]) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if c.Reset {
		v.items = map[string]T{}
	}
	for id, item := range c.Put {
		v.items[id] = item
	}
	for _, id := range c.Delete {
		delete(v.items, id)
	}
	select {
	case v.changed <- struct{}{}:
	default:
	}
	return nil
}

// Want waits until the set satisfies ok.
func (v *View[T]) Want(t *testing.T, what string, ok func(map[string]T) bool) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		v.mu.Lock()
		good := ok(v.items)
		v.mu.Unlock()
		if good {
			return
		}
		select {
		case <-v.changed:
		case <-deadline:
			t.Fatalf("never saw %s; have %v", what, v.items)
		}
	}
}
