package client_test

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/internal/clienttest"
)

// connect returns a fake server and a client of it.
func connect(t *testing.T) (*clienttest.Server, *client.Client) {
	t.Helper()
	s := clienttest.New(t)
	c, err := client.New(client.Options{URL: s.URL, Token: clienttest.Token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return s, c
}

// sandbox returns a new sandbox of a fake server.
func sandbox(t *testing.T) (*clienttest.Server, *client.Sandbox) {
	t.Helper()
	s, c := connect(t)
	sb, err := c.Create(t.Context(), client.Spec{Image: "busybox"})
	if err != nil {
		t.Fatal(err)
	}
	return s, sb
}

func TestCreateListGetDelete(t *testing.T) {
	t.Parallel()
	s, c := connect(t)
	ctx := t.Context()
	sb, err := c.Create(ctx, client.Spec{Image: "busybox", Labels: map[string]string{"job": "a"}})
	if err != nil {
		t.Fatal(err)
	}
	if sb.Info().State != v1.StateRunning || sb.Info().Node != clienttest.Node {
		t.Errorf("created %+v", sb.Info())
	}
	if _, err := c.Create(ctx, client.Spec{Image: "busybox", Labels: map[string]string{"job": "b"}}); err != nil {
		t.Fatal(err)
	}
	l, err := c.List(ctx, client.ListOptions{Labels: map[string]string{"job": "a"}})
	if err != nil || len(l.Items) != 1 || l.Items[0].ID != sb.ID() {
		t.Errorf("list by label: %+v, %v", l, err)
	}
	got, err := sb.Get(ctx)
	if err != nil || got.Usage == nil || got.Usage.PeakMemoryBytes != 2<<20 {
		t.Errorf("get: %+v, %v", got, err)
	}
	if err := sb.Delete(ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := sb.Get(ctx); !errors.Is(err, client.ErrGone) || !errors.Is(err, errs.SandboxGone) {
		t.Errorf("get after delete: %v", err)
	}
	if n := len(s.Sandboxes()); n != 1 {
		t.Errorf("%d sandboxes left, want 1", n)
	}
}

func TestAllReadsEveryPage(t *testing.T) {
	t.Parallel()
	s, c := connect(t)
	for range 7 {
		if _, err := c.Create(t.Context(), client.Spec{Image: "busybox"}); err != nil {
			t.Fatal(err)
		}
	}
	var ids []string
	for sb, err := range c.All(t.Context(), client.ListOptions{Limit: 3}) {
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.ID)
	}
	if want := s.Sandboxes(); strings.Join(ids, " ") != strings.Join(want, " ") {
		t.Errorf("pages gave %v, want %v", ids, want)
	}
}

func TestIdempotencyKeyReachesTheServer(t *testing.T) {
	t.Parallel()
	s, c := connect(t)
	a, err := c.Create(t.Context(), client.Spec{Image: "busybox"}, client.IdempotencyKey("k"))
	if err != nil {
		t.Fatal(err)
	}
	b, err := c.Create(t.Context(), client.Spec{Image: "busybox"}, client.IdempotencyKey("k"))
	if err != nil || a.ID() != b.ID() || len(s.Sandboxes()) != 1 {
		t.Errorf("second create: %v %v, want %s", b, err, a.ID())
	}
}

func TestCreateManyYieldsEachOutcome(t *testing.T) {
	t.Parallel()
	s, c := connect(t)
	s.Fail("one of batch", 2, errs.New(errs.NodeFull, "edge.admit", "memory is used up").After(time.Second))
	ok, full := 0, 0
	for sb, err := range c.CreateMany(t.Context(), client.Spec{Image: "busybox"}, 10) {
		switch {
		case err == nil && sb.ID() != "":
			ok++
		case errors.Is(err, errs.NodeFull) && client.ErrorOf(err).RetryAfter == time.Second:
			full++
		default:
			t.Errorf("unexpected result %v, %v", sb, err)
		}
	}
	if ok != 8 || full != 2 {
		t.Errorf("%d created and %d refused, want 8 and 2", ok, full)
	}
}

func TestCreateManyReportsAShortAnswer(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Write([]byte(`{"error":{"code":"node_full","message":"x"}}` + "\n"))
	}))
	defer srv.Close()
	c, err := client.New(client.Options{URL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	var last error
	for _, err := range c.CreateMany(t.Context(), client.Spec{}, 3) {
		last = err
	}
	if !errors.Is(last, errs.ConnectionLost) {
		t.Errorf("an answer with 1 of 3 results ended with %v", last)
	}
}

func TestDeleteMany(t *testing.T) {
	t.Parallel()
	s, c := connect(t)
	for range 3 {
		if _, err := c.Create(t.Context(), client.Spec{Image: "busybox", Labels: map[string]string{"job": "x"}}); err != nil {
			t.Fatal(err)
		}
	}
	n := 0
	for id, err := range c.DeleteMany(t.Context(), v1.DeleteRequest{Labels: map[string]string{"job": "x"}}) {
		if err != nil || id == "" {
			t.Errorf("%q: %v", id, err)
		}
		n++
	}
	if n != 3 || len(s.Sandboxes()) != 0 {
		t.Errorf("%d outcomes, %d left", n, len(s.Sandboxes()))
	}
	for id, err := range c.DeleteMany(t.Context(), v1.DeleteRequest{IDs: []string{"nothing"}}) {
		if id != "nothing" || !errors.Is(err, client.ErrNotFound) {
			t.Errorf("unknown id: %q %v", id, err)
		}
	}
}

func TestErrorsKeepTheirClass(t *testing.T) {
	t.Parallel()
	s, c := connect(t)
	ctx := t.Context()
	if _, err := c.Create(ctx, client.Spec{Image: "none"}); !errors.Is(err, client.ErrNotFound) || !errors.Is(err, errs.ImageNotFound) {
		t.Errorf("unknown image: %v", err)
	}
	if _, err := c.Create(ctx, client.Spec{Image: "busybox", MemoryBytes: 1}); !errors.Is(err, errs.BadSpec) || client.ErrorOf(err).Details["request_id"] != "req-1" {
		t.Errorf("memory below the minimum: %v", err)
	}
	bad, err := client.New(client.Options{URL: s.URL, Token: "wrong"})
	if err != nil {
		t.Fatal(err)
	}
	defer bad.Close()
	if _, err := bad.Nodes(ctx); !errors.Is(err, client.ErrUnauthenticated) {
		t.Errorf("wrong token over REST: %v", err)
	}
	if _, err := bad.Sandbox("x").Run(ctx, "true"); !errors.Is(err, errs.BadToken) {
		t.Errorf("wrong token over Aether: %v", err)
	}
	s.Fail("GET /v1/nodes", 1, errs.New(errs.MissingRight, "auth", "right admin is missing"))
	if _, err := c.Nodes(ctx); !errors.Is(err, client.ErrForbidden) {
		t.Errorf("missing right: %v", err)
	}
}

func TestNamesCannotLeaveTheirPath(t *testing.T) {
	t.Parallel()
	_, c := connect(t)
	ctx := t.Context()
	for _, name := range []string{"", "..", "../nodes", "a/../b", "/"} {
		if _, err := c.Get(ctx, name); !errors.Is(err, errs.SandboxNotFound) {
			t.Errorf("get %q: %v", name, err)
		}
		if err := c.Delete(ctx, name); !errors.Is(err, errs.SandboxNotFound) {
			t.Errorf("delete %q: %v", name, err)
		}
		if _, err := c.Image(ctx, name); !errors.Is(err, errs.ImageNotFound) {
			t.Errorf("image %q: %v", name, err)
		}
		if err := c.DeleteToken(ctx, name); !errors.Is(err, errs.TokenNotFound) {
			t.Errorf("token %q: %v", name, err)
		}
		if _, err := c.Node(ctx, name); !errors.Is(err, errs.NodeNotFound) {
			t.Errorf("node %q: %v", name, err)
		}
	}
	for _, name := range []string{"a/b:1", "a?b", "50%", "sha256:00"} {
		if _, err := c.Import(ctx, name, strings.NewReader(string(make([]byte, 1024))), client.ImportOptions{}); err != nil {
			t.Fatal(err)
		}
		if img, err := c.Image(ctx, name); err != nil || img.Name != name {
			t.Errorf("image %q: %+v, %v", name, img, err)
		}
	}
}

func TestForeignAnswersAreNamed(t *testing.T) {
	t.Parallel()
	for status, want := range map[int]errs.Code{404: errs.UnknownMethod, 502: errs.ServerUnreachable, 401: errs.BadToken, 500: errs.InternalError, 413: errs.BodyTooLarge} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "<html>nginx</html>", status) }))
		c, err := client.New(client.Options{URL: srv.URL})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Health(t.Context()); !errors.Is(err, want) || !strings.Contains(err.Error(), "nginx") {
			t.Errorf("status %d: %v, want %s", status, err, want)
		}
		srv.Close()
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Write([]byte("<html>")) }))
	defer srv.Close()
	c, err := client.New(client.Options{URL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Health(t.Context()); !errors.Is(err, errs.ProtocolError) {
		t.Errorf("200 with HTML: %v", err)
	}
}

func TestUnreachableServer(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(nil)
	srv.Close()
	c, err := client.New(client.Options{URL: srv.URL})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Nodes(t.Context()); !errors.Is(err, errs.ServerUnreachable) {
		t.Errorf("REST: %v", err)
	}
	if _, err := c.Sandbox("x").Run(t.Context(), "true"); !errors.Is(err, errs.ServerUnreachable) {
		t.Errorf("Aether: %v", err)
	}
	for _, err := range c.Events(t.Context(), client.EventOptions{Follow: true}) {
		if !errors.Is(err, errs.ServerUnreachable) {
			t.Errorf("events: %v", err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := c.Nodes(ctx); !errors.Is(err, errs.RequestCanceled) || !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}

func TestBadURLs(t *testing.T) {
	t.Parallel()
	for _, u := range []string{"ftp://x", "http://", "unix://host/x", "unix:", "://"} {
		if _, err := client.New(client.Options{URL: u}); !errors.Is(err, client.ErrInvalid) {
			t.Errorf("%q: %v", u, err)
		}
	}
}

func TestEventsResumeWithoutLossOrRepeat(t *testing.T) {
	t.Parallel()
	s, c := connect(t)
	s.Fail("watch ends", 2, errs.New(errs.ShuttingDown, "watch", "restart"))
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	const n = 5
	go func() {
		for range n {
			c.Create(ctx, client.Spec{Image: "busybox"})
		}
	}()
	var revs []uint64
	for e, err := range c.Events(ctx, client.EventOptions{Follow: true}) {
		if err != nil {
			t.Fatal(err)
		}
		if revs = append(revs, e.Revision); len(revs) == n {
			break
		}
	}
	for i, r := range revs {
		if r != uint64(i+1) {
			t.Fatalf("revisions %v, want 1 to %d", revs, n)
		}
	}
	var some int
	for range c.Events(ctx, client.EventOptions{From: 3}) {
		some++
	}
	if some != n-3 {
		t.Errorf("%d events after revision 3, want %d", some, n-3)
	}
}

func TestManagement(t *testing.T) {
	t.Parallel()
	_, c := connect(t)
	ctx := t.Context()
	tok, err := c.CreateToken(ctx, v1.TokenRequest{Name: "ci", Rights: []v1.Right{v1.RightRead}, TTL: 60})
	if err != nil || tok.Secret == "" || tok.ExpiresAt == nil {
		t.Fatalf("token: %+v, %v", tok, err)
	}
	list, err := c.Tokens(ctx)
	if err != nil || len(list) != 1 || list[0].Secret != "" {
		t.Errorf("tokens: %+v, %v", list, err)
	}
	if err := c.DeleteToken(ctx, tok.ID); err != nil {
		t.Error(err)
	}
	if err := c.DeleteToken(ctx, tok.ID); !errors.Is(err, errs.TokenNotFound) {
		t.Errorf("second revoke: %v", err)
	}
	nodes, err := c.Nodes(ctx)
	if err != nil || len(nodes) != 1 || nodes[0].ID != clienttest.Node {
		t.Errorf("nodes: %+v, %v", nodes, err)
	}
	if n, err := c.Node(ctx, clienttest.Node); err != nil || !n.Ready {
		t.Errorf("node: %+v, %v", n, err)
	}
	if h, err := c.Health(ctx); err != nil || !h.OK {
		t.Errorf("health: %+v, %v", h, err)
	}
	if m, err := c.Metrics(ctx); err != nil || !strings.Contains(string(m), "process_resident_memory_bytes") {
		t.Errorf("metrics: %s, %v", m, err)
	}
}

func TestContextFile(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_CONFIG_HOME", dir)
	t.Setenv("DSEC_URL", "")
	t.Setenv("DSEC_TOKEN", "")
	if o, err := client.OptionsFromEnv(""); err != nil || o.URL != "" {
		t.Errorf("without a file: %+v, %v", o, err)
	}
	path, err := client.ContextPath()
	if err != nil || path != filepath.Join(dir, "dsec", "context.json") {
		t.Fatalf("path %s, %v", path, err)
	}
	want := client.Context{URL: "http://a:1", Token: "t"}
	if err := client.SaveContext(path, want); err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(path); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("the file with the token has mode %v, %v", fi.Mode(), err)
	}
	if o, err := client.OptionsFromEnv(""); err != nil || o.URL != want.URL || o.Token != want.Token {
		t.Errorf("from the file: %+v, %v", o, err)
	}
	t.Setenv("DSEC_URL", "http://other:1")
	if o, err := client.OptionsFromEnv(""); err != nil || o.URL != "http://other:1" || o.Token != "" {
		t.Errorf("a token went to a server that it is not for: %+v, %v", o, err)
	}
	t.Setenv("DSEC_URL", want.URL+"/")
	if o, err := client.OptionsFromEnv(""); err != nil || o.Token != want.Token {
		t.Errorf("of the same server, with a slash: %+v, %v", o, err)
	}
	t.Setenv("DSEC_URL", "http://other:1")
	if _, err := client.OptionsFromEnv(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a named file that does not exist: %v", err)
	}
	if o, err := client.OptionsFromEnv(path); err != nil || o.URL != want.URL {
		t.Errorf("a named file goes before the environment: %+v, %v", o, err)
	}
	os.WriteFile(path, []byte("{"), 0o600)
	if _, err := client.LoadContext(path); err == nil {
		t.Error("a damaged file was read")
	}
}

func TestManyGoroutinesShareOneConnection(t *testing.T) {
	t.Parallel()
	s, sb := sandbox(t)
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			if _, err := sb.Guest(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if n := s.Dials(); n != 1 {
		t.Errorf("%d connections for 200 calls, want 1", n)
	}
	s.Break()
	if err := sb.Files().Mkdir(t.Context(), "/tmp/after", 0o755); err != nil && !errors.Is(err, errs.ConnectionLost) {
		t.Fatal(err) // the break may not have been noticed before the call
	}
	if _, err := sb.Guest(t.Context()); err != nil {
		t.Errorf("after a break: %v", err)
	}
	if n := s.Dials(); n != 2 {
		t.Errorf("%d connections after one break, want 2", n)
	}
}

// Messages name the socket, not the host that its requests are made up with.
func TestURLNamesTheSocket(t *testing.T) {
	t.Parallel()
	url := "unix://" + filepath.Join(t.TempDir(), "none.sock")
	c, err := client.New(client.Options{URL: url})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if c.URL() != url || !c.Local() {
		t.Errorf("%s, local %v", c.URL(), c.Local())
	}
	if _, err := c.Health(t.Context()); !errors.Is(err, errs.ServerUnreachable) || !strings.Contains(err.Error(), "no answer from "+url) {
		t.Errorf("%v", err)
	}
}

// A key that no server would take is refused before anything is sent.
func TestInvalidIdempotencyKeyIsNotSent(t *testing.T) {
	t.Parallel()
	s, c := connect(t)
	var sent atomic.Bool
	s.Before("POST /v1/sandboxes", func() { sent.Store(true) })
	for _, key := range []string{"", "two words", "line\nbreak", "\u00e9", "\x00", strings.Repeat("k", 256)} {
		_, err := c.Create(t.Context(), client.Spec{Image: "busybox"}, client.IdempotencyKey(key))
		if e := client.ErrorOf(err); e.Code != errs.BadRequest || e.Retryable || !strings.Contains(e.Message, "1 to 255 visible ASCII") || sent.Load() {
			t.Errorf("key %q: %v, sent: %v", key, err, sent.Load())
		}
	}
	if _, err := c.Create(t.Context(), client.Spec{Image: "busybox"}, client.IdempotencyKey(strings.Repeat("k", 255))); err != nil || !sent.Load() {
		t.Errorf("a key of 255 characters: %v, sent: %v", err, sent.Load())
	}
}
