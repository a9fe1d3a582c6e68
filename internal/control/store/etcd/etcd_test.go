package etcd

import (
	"context"
	"log/slog"
	"os"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/goleak"

	v1 "dsec/api/v1"
	"dsec/internal/control/store"
	"dsec/internal/control/store/storetest"
)

func TestMain(m *testing.M) {
	if dir := os.Getenv("DSEC_TEST_FULL"); dir != "" {
		startFull(dir)
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

func openOn(t *testing.T, dir string) *Store {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	srv, err := StartServer(t.Context(), dir, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(srv.Close)
	s, err := Open(t.Context(), Config{Endpoints: srv.Endpoints(), LeaseTTL: time.Second, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestConformance(t *testing.T) {
	s := openOn(t, t.TempDir())
	storetest.Run(t, func(t *testing.T) store.Store {
		if _, err := s.cli.Delete(t.Context(), "/dsec/", clientv3.WithPrefix()); err != nil {
			t.Fatal(err)
		}
		return s
	})
}

func TestWhatWasWrittenSurvivesARestart(t *testing.T) {
	dir := t.TempDir()
	var key []byte
	t.Run("write", func(t *testing.T) {
		s := openOn(t, dir)
		if _, err := s.PutImage(t.Context(), v1.Image{Name: "a", Digest: "sha256:1"}); err != nil {
			t.Fatal(err)
		}
		key, _ = s.SigningKey(t.Context())
		if e, err := s.AllocateEpoch(t.Context(), "nodeaa", 0); err != nil || e != 1 {
			t.Fatal(e, err)
		}
	})
	s := openOn(t, dir)
	storetest.Follow(t, s.FollowImages).Want(t, "the image", func(m map[string]v1.Image) bool { return m["a"].Digest == "sha256:1" })
	if again, err := s.SigningKey(t.Context()); err != nil || string(again) != string(key) || len(key) == 0 {
		t.Errorf("the signing key changed over a restart (%v)", err)
	}
	if e, err := s.AllocateEpoch(t.Context(), "nodeaa", 0); err != nil || e != 2 {
		t.Errorf("the epoch after a restart is %d, %v", e, err)
	}
}

func TestLostLeaseIsTakenAgain(t *testing.T) {
	s := openOn(t, t.TempDir())
	ctx := t.Context()
	reg, err := s.Register(ctx, v1.Node{ID: "nodeaa", Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer reg.Withdraw(context.WithoutCancel(ctx))
	r := reg.(*registration)
	r.mu.Lock()
	lease := r.lease
	r.mu.Unlock()
	if _, err := s.cli.Revoke(ctx, lease); err != nil {
		t.Fatal(err)
	}
	storetest.Follow(t, s.FollowNodes).Want(t, "the node again, under another lease", func(m map[string]v1.Node) bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return m["nodeaa"].Epoch == 1 && r.lease != lease
	})
}

func TestReplacedEdgeDoesNotComeBack(t *testing.T) {
	s := openOn(t, t.TempDir())
	ctx := t.Context()
	old, err := s.Register(ctx, v1.Node{ID: "nodeaa", Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	next, err := s.Register(ctx, v1.Node{ID: "nodeaa", Epoch: 2})
	if err != nil {
		t.Fatal(err)
	}
	r := old.(*registration)
	r.mu.Lock()
	lease := r.lease
	r.mu.Unlock()
	if _, err := s.cli.Revoke(ctx, lease); err != nil { // the old edge loses its lease and tries again
		t.Fatal(err)
	}
	select {
	case <-old.Superseded():
	case <-time.After(20 * time.Second):
		t.Fatal("the old edge was never told")
	}
	storetest.Follow(t, s.FollowNodes).Want(t, "the new epoch", func(m map[string]v1.Node) bool { return m["nodeaa"].Epoch == 2 })
	for _, reg := range []store.Registration{old, next} {
		if err := reg.Withdraw(ctx); err != nil {
			t.Error(err)
		}
	}
}
