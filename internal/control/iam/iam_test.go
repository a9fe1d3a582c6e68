package iam

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/store"
	"dsec/internal/control/store/storetest"
)

const rootSecret = "root-secret-0123456789"

// clock is a settable time.
type clock struct {
	mu sync.Mutex
	t  time.Time
}

func (c *clock) now() time.Time          { c.mu.Lock(); defer c.mu.Unlock(); return c.t }
func (c *clock) advance(d time.Duration) { c.mu.Lock(); defer c.mu.Unlock(); c.t = c.t.Add(d) }

func start(t *testing.T, tokens store.Tokens) (*IAM, *clock) {
	t.Helper()
	c := &clock{t: time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)}
	m := New(Config{Tokens: tokens, Now: c.now})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("Run ended with %v", err)
		}
	})
	<-m.Ready()
	if err := m.EnsureRoot(ctx, rootSecret); err != nil {
		t.Fatal(err)
	}
	return m, c
}

func TestRights(t *testing.T) {
	t.Parallel()
	all := []v1.Right{v1.RightRead, v1.RightSandbox, v1.RightImage, v1.RightAdmin}
	want := map[v1.Right]string{
		v1.RightRead: "read", v1.RightSandbox: "read sandbox", v1.RightImage: "read image", v1.RightAdmin: "read sandbox image admin",
	}
	for has, may := range want {
		p := Principal{Name: "x", rights: []v1.Right{has}}
		for _, r := range all {
			allowed := strings.Contains(may, string(r))
			if p.Has(r) != allowed {
				t.Errorf("a token with %q has %q: %v", has, r, p.Has(r))
			}
			err := p.Require(r)
			if allowed != (err == nil) {
				t.Errorf("Require(%q) of %q gives %v", r, has, err)
			}
			if err != nil && (!errors.Is(err, errs.MissingRight) || errs.Of(err).Details["right"] != string(r)) {
				t.Errorf("the error does not name the right %q: %v", r, err)
			}
		}
	}
}

func TestTokenLife(t *testing.T) {
	t.Parallel()
	ctx := t.Context()
	mem := storetest.NewMemory("seed")
	m, c := start(t, mem)
	other, _ := start(t, mem) // another apiserver's

	root, err := m.Authenticate(rootSecret)
	if err != nil || !root.Has(v1.RightAdmin) || root.Project != RootProject {
		t.Fatal(root, err)
	}
	tok, err := m.Create(ctx, RootProject, v1.TokenRequest{Name: "ci", Rights: []v1.Right{v1.RightSandbox, v1.RightSandbox}, TTL: 60})
	if err != nil {
		t.Fatal(err)
	}
	if len(tok.Rights) != 1 || !strings.HasPrefix(tok.Secret, "dsec_") {
		t.Errorf("token %+v", tok)
	}
	if p, err := m.Authenticate(tok.Secret); err != nil || p.TokenID != tok.ID {
		t.Fatal(p, err)
	}
	eventually(t, "the other server knows the token", func() bool { _, err := other.Authenticate(tok.Secret); return err == nil })
	for _, l := range m.List() {
		if l.Secret != "" {
			t.Errorf("the list shows the secret of %s", l.ID)
		}
	}
	c.advance(59 * time.Second)
	if _, err := m.Authenticate(tok.Secret); err != nil {
		t.Errorf("refused before its time: %v", err)
	}
	c.advance(time.Second)
	if _, err := m.Authenticate(tok.Secret); !errors.Is(err, errs.BadToken) {
		t.Errorf("an expired token gives %v", err)
	}

	tok, err = m.Create(ctx, RootProject, v1.TokenRequest{Name: "ci", Rights: []v1.Right{v1.RightRead}})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the other server knows it", func() bool { _, err := other.Authenticate(tok.Secret); return err == nil })
	if err := m.Revoke(ctx, tok.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Authenticate(tok.Secret); !errors.Is(err, errs.BadToken) {
		t.Errorf("a revoked token gives %v", err)
	}
	eventually(t, "the other server refuses it", func() bool { _, err := other.Authenticate(tok.Secret); return errors.Is(err, errs.BadToken) })
	if err := m.Revoke(ctx, tok.ID); !errors.Is(err, errs.TokenNotFound) {
		t.Errorf("revoking twice gives %v", err)
	}
}

func TestRevokedTokenIsNotBroughtBackByALatePut(t *testing.T) {
	t.Parallel()
	m, _ := start(t, storetest.NewMemory("seed"))
	tok, err := m.Create(t.Context(), RootProject, v1.TokenRequest{Name: "ci", Rights: []v1.Right{v1.RightRead}})
	if err != nil {
		t.Fatal(err)
	}
	m.mu.RLock()
	rec := m.byID[tok.ID].record
	m.mu.RUnlock()
	m.mu.Lock()
	m.revoked[tok.ID] = struct{}{}
	m.drop(tok.ID)
	m.mu.Unlock()
	m.apply(store.Change[store.TokenRecord]{Put: map[string]store.TokenRecord{tok.ID: rec}})
	if _, err := m.Authenticate(tok.Secret); !errors.Is(err, errs.BadToken) {
		t.Errorf("it came back: %v", err)
	}
}

func TestRootTokenIsReplacedByAnother(t *testing.T) {
	t.Parallel()
	m, _ := start(t, storetest.NewMemory("seed"))
	if err := m.EnsureRoot(t.Context(), "another-root-secret"); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Authenticate(rootSecret); !errors.Is(err, errs.BadToken) {
		t.Errorf("the old root token still works: %v", err)
	}
	if _, err := m.Authenticate("another-root-secret"); err != nil {
		t.Error(err)
	}
	if err := m.Revoke(t.Context(), "root"); !errors.Is(err, errs.BadRequest) {
		t.Errorf("revoking root gives %v", err)
	}
	for _, weak := range []string{"", "short", " padded-with-white-space"} {
		if err := m.EnsureRoot(t.Context(), weak); !errors.Is(err, errs.BadRequest) {
			t.Errorf("root token %q gives %v", weak, err)
		}
	}
}

func TestBadTokenRequests(t *testing.T) {
	t.Parallel()
	m, _ := start(t, storetest.NewMemory("seed"))
	for field, req := range map[string]v1.TokenRequest{
		"name":   {Rights: []v1.Right{v1.RightRead}},
		"rights": {Name: "x", Rights: []v1.Right{"fly"}},
		"ttl_s":  {Name: "x", Rights: []v1.Right{v1.RightRead}, TTL: -1},
	} {
		_, err := m.Create(t.Context(), RootProject, req)
		if !errors.Is(err, errs.BadRequest) || errs.Of(err).Details["field"] != field {
			t.Errorf("%+v gives %v", req, err)
		}
	}
}

func BenchmarkAuthenticate(b *testing.B) {
	m := New(Config{Tokens: storetest.NewMemory("seed")})
	if err := m.EnsureRoot(b.Context(), rootSecret); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := m.Authenticate(rootSecret); err != nil {
			b.Fatal(err)
		}
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}
