package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/httpupgrade"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
)

// rest does one raw request over the API's socket.
func rest(t *testing.T, b *bed.Bed, method, path, token string, body io.Reader) (*http.Response, v1.Problem) {
	t.Helper()
	hc := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", b.Sock)
	}}}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://dsec"+path, body)
	if err != nil {
		t.Fatal(err)
	}
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := hc.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var p v1.Problem
	if resp.StatusCode >= 400 {
		if err := json.Unmarshal(data, &p); err != nil {
			t.Fatalf("%s %s: status %d, and no problem but %q", method, path, resp.StatusCode, data)
		}
	}
	return resp, p
}

func TestRefusedRequests(t *testing.T) {
	t.Parallel()
	root := shared.Token(t)
	reader, err := shared.Client(t).CreateToken(t.Context(), v1.TokenRequest{Name: "reader", Rights: []v1.Right{v1.RightRead}})
	if err != nil {
		t.Fatal(err)
	}
	gone := shared.Must(t, "create", bed.Image)
	shared.Must(t, "rm", gone)
	never := neverExisted(gone)
	node, _, err := v1.ParseSandboxID(gone)
	if err != nil {
		t.Fatal(err)
	}
	const image = `"image":"` + bed.Image + `"`
	for _, c := range []struct {
		name, method, path, token, body string
		status                          int
		code                            errs.Code
		field                           string // that the details name
	}{
		{"unknown image", "POST", "/v1/sandboxes", root, `{"image":"nosuch"}`, 404, errs.ImageNotFound, ""},
		{"no image", "POST", "/v1/sandboxes", root, `{}`, 400, errs.BadSpec, "image"},
		{"unknown backend", "POST", "/v1/sandboxes", root, `{"backend":"nosuch",` + image + `}`, 400, errs.UnknownBackend, "backend"},
		{"a backend to come", "POST", "/v1/sandboxes", root, `{"backend":"microvm",` + image + `}`, 400, errs.UnknownBackend, "backend"},
		{"memory below what can start", "POST", "/v1/sandboxes", root, `{` + image + `,"memory_bytes":1048576}`, 400, errs.BadSpec, "memory_bytes"},
		{"negative memory", "POST", "/v1/sandboxes", root, `{` + image + `,"memory_bytes":-1}`, 400, errs.BadRequest, ""},
		{"processes below what can start", "POST", "/v1/sandboxes", root, `{` + image + `,"pids":2}`, 400, errs.BadSpec, "pids"},
		{"a host name that is none", "POST", "/v1/sandboxes", root, `{` + image + `,"hostname":"a b"}`, 400, errs.BadSpec, "hostname"},
		{"a relative directory", "POST", "/v1/sandboxes", root, `{` + image + `,"work_dir":"tmp"}`, 400, errs.BadSpec, "work_dir"},
		{"an unknown field", "POST", "/v1/sandboxes", root, `{` + image + `,"memroy":1}`, 400, errs.BadRequest, ""},
		{"a wrong type", "POST", "/v1/sandboxes", root, `{"image":7}`, 400, errs.BadRequest, ""},
		{"no JSON", "POST", "/v1/sandboxes", root, `{"image`, 400, errs.BadRequest, ""},
		{"count on the wrong route", "POST", "/v1/sandboxes", root, `{` + image + `,"count":2}`, 400, errs.BadRequest, "count"},
		{"count of zero", "POST", "/v1/sandboxes/batch", root, `{` + image + `,"count":-1}`, 400, errs.BadRequest, ""},
		{"a body too large", "POST", "/v1/sandboxes", root, `{` + image + `,"labels":{"k":"` + strings.Repeat("x", 2<<20) + `"}}`, 413, errs.BodyTooLarge, ""},
		{"no token", "GET", "/v1/sandboxes", "", "", 401, errs.BadToken, ""},
		{"a wrong token", "GET", "/v1/sandboxes", "wrong", "", 401, errs.BadToken, ""},
		{"a wrong token on create", "POST", "/v1/sandboxes", "wrong", `{` + image + `}`, 401, errs.BadToken, ""},
		{"create without the right", "POST", "/v1/sandboxes", reader.Secret, `{` + image + `}`, 403, errs.MissingRight, ""},
		{"remove without the right", "DELETE", "/v1/sandboxes/" + never, reader.Secret, "", 403, errs.MissingRight, ""},
		{"import without the right", "POST", "/v1/images?name=x", reader.Secret, "x", 403, errs.MissingRight, ""},
		{"tokens without the right", "GET", "/v1/tokens", reader.Secret, "", 403, errs.MissingRight, ""},
		{"an id that never existed", "GET", "/v1/sandboxes/" + never, root, "", 404, errs.SandboxNotFound, ""},
		{"remove an id that never existed", "DELETE", "/v1/sandboxes/" + never, root, "", 404, errs.SandboxNotFound, ""},
		{"an id that is none", "GET", "/v1/sandboxes/..%2f..%2fetc", root, "", 404, errs.SandboxNotFound, ""},
		{"an id that is gone", "GET", "/v1/sandboxes/" + gone, root, "", 410, errs.SandboxGone, ""},
		{"remove an id that is gone", "DELETE", "/v1/sandboxes/" + gone, root, "", 410, errs.SandboxGone, ""},
		{"an id of a later epoch", "GET", "/v1/sandboxes/" + v1.SandboxID(node, 77, 1), root, "", 404, errs.SandboxNotFound, ""},
		{"an id of an old epoch", "GET", "/v1/sandboxes/" + v1.SandboxID(node, 0, 1), root, "", 410, errs.SandboxLost, ""},
		{"a page that is none", "GET", "/v1/sandboxes?limit=-1", root, "", 400, errs.BadRequest, ""},
		{"a state that is none", "GET", "/v1/sandboxes?state=nosuch", root, "", 400, errs.BadRequest, ""},
		{"an unknown image to remove", "DELETE", "/v1/images/nosuch", root, "", 404, errs.ImageNotFound, ""},
		{"an image name that is none", "POST", "/v1/images?name=..%2Fx", root, "x", 400, errs.BadRequest, "name"},
		{"an unknown format", "POST", "/v1/images?name=x&format=zip", root, "x", 400, errs.BadRequest, "format"},
		{"an unknown path", "GET", "/v1/nosuch", root, "", 404, errs.RouteNotFound, ""},
		{"a wrong method", "PUT", "/v1/sandboxes", root, "", 405, errs.MethodNotAllowed, ""},
		{"Aether without upgrade", "GET", "/v1/aether", root, "", 400, errs.BadRequest, ""},
		{"events from the future", "GET", "/v1/events?from=99999999999999999", root, "", 410, errs.RevisionCompacted, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			var body io.Reader
			if c.body != "" {
				body = strings.NewReader(c.body)
			}
			resp, p := rest(t, shared, c.method, c.path, c.token, body)
			if resp.StatusCode != c.status || p.Code != string(c.code) || p.Status != c.status || p.Message == "" || p.Hint == "" {
				t.Errorf("status %d, want %d; problem %+v, want %s", resp.StatusCode, c.status, p, c.code)
			}
			if c.field != "" && p.Details["field"] != c.field {
				t.Errorf("the details name %v, want the field %s", p.Details, c.field)
			}
			if resp.Header.Get("X-Request-Id") == "" || p.RequestID != resp.Header.Get("X-Request-Id") {
				t.Errorf("request id %q in the header, %q in the problem", resp.Header.Get("X-Request-Id"), p.RequestID)
			}
		})
	}
}

func TestRefusedCommandLines(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		code int
		err  string
		args []string
	}{
		{2, "", []string{"nosuchverb"}},
		{2, "", []string{"create", "--memroy", "1g", bed.Image}},
		{2, "", []string{"create"}},
		{2, "", []string{"create", "--memory", "lots", bed.Image}},
		{2, "", []string{"create", "--count", "0", bed.Image}},
		{2, "", []string{"run", bed.Image}},
		{2, "", []string{"run", "-it", bed.Image, "--", "true"}},
		{2, "", []string{"exec", "--timeout", "-1s", "id", "--", "true"}},
		{2, "", []string{"rm"}},
		{2, "", []string{"rm", "--all"}},
		{1, "image_not_found", []string{"create", "nosuch"}},
		{125, "image_not_found", []string{"run", "nosuch", "--", "true"}},
		{125, "unknown_backend", []string{"run", "--backend", "nosuch", bed.Image, "--", "true"}},
		{125, "bad_spec", []string{"run", "--memory", "1MiB", bed.Image, "--", "true"}},
		{1, "spec_too_large", []string{"create", "--memory", "9999g", bed.Image}}, // whatever the overcommit
		{1, "spec_too_large", []string{"create", "--cpu", "100000", bed.Image}},
		{125, "sandbox_not_found", []string{"exec", "nosuch", "--", "true"}},
		{1, "sandbox_not_found", []string{"rm", "nosuch"}},
		{1, "sandbox_not_found", []string{"inspect", "nosuch"}},
		{1, "server_unreachable", []string{"ls", "--url", "unix:///no/such/socket"}},
		{1, "bad_token", []string{"ls", "--token", "wrong"}},
		{1, "bad_request", []string{"ls", "--url", "ftp://x"}},
	} {
		t.Run(strings.Join(c.args, " "), func(t *testing.T) {
			t.Parallel()
			r := shared.Fails(t, c.code, c.err, c.args...)
			if strings.Count(r.Stderr, "dsec: ") != 1 || r.Stdout != "" {
				t.Errorf("one error is wanted: %s%s", r.Stdout, r.Stderr)
			}
		})
	}
	if r := shared.CLI(t, "create", "--memroy", "1g", bed.Image); !strings.Contains(r.Stderr, "--memory") {
		t.Errorf("no suggestion: %s", r.Stderr)
	}
}

func TestCommandsThatCannotRun(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	for code, path := range map[int]string{127: "/no/such", 126: "/etc/hosts"} {
		res, err := sb.Run(t.Context(), path)
		want := map[int]errs.Code{127: errs.CommandNotFound, 126: errs.CommandNotExec}[code]
		if err != nil || res.Code != code || !errors.Is(res.Err, want) {
			t.Errorf("%s: %+v, %v", path, res, err)
		}
		if _, err := sb.StartDetached(t.Context(), client.Command(path)); !errors.Is(err, want) {
			t.Errorf("%s, detached: %v", path, err)
		}
	}
	for want, cmd := range map[errs.Code]client.Cmd{
		errs.CwdNotFound: {Path: "true", Dir: "/no/such"},

		errs.UserNotFound: {Path: "true", User: "nosuch"},
		errs.BadRequest:   {Path: ""},
	} {
		if _, err := sb.Exec(t.Context(), cmd); !errors.Is(err, want) {
			t.Errorf("exec %+v: %v, want %s", cmd, err, want)
		}
		if _, err := sb.Start(t.Context(), cmd, client.IO{}); !errors.Is(err, want) {
			t.Errorf("start %+v: %v, want %s", cmd, err, want)
		}
	}
	if _, err := sb.Exec(t.Context(), client.Cmd{Path: "true", Dir: "/etc/hosts"}); !errors.Is(err, errs.CwdNotFound) {
		t.Errorf("a file as the directory: %v", err)
	}
	for want, o := range map[errs.Code]client.SessionOptions{
		errs.CwdNotFound: {Dir: "/no/such"}, errs.UserNotFound: {User: "nosuch"}, errs.NotSupported: {Shell: "/no/such"},
	} {
		if _, err := sb.OpenSession(t.Context(), o); !errors.Is(err, want) {
			t.Errorf("session %+v: %v, want %s", o, err, want)
		}
	}
	if l, err := sb.Sessions(t.Context()); err != nil || len(l) != 0 {
		t.Errorf("sessions left: %v, %v", l, err)
	}
}

func TestATokenWithoutTheRightCannotUseSandboxes(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	reader, err := shared.Client(t).CreateToken(t.Context(), v1.TokenRequest{Name: "reader", Rights: []v1.Right{v1.RightRead}})
	if err != nil {
		t.Fatal(err)
	}
	c := shared.ClientAs(t, reader.Secret)
	if _, err := c.Sandbox(sb.ID()).Run(t.Context(), "true"); !errors.Is(err, errs.MissingRight) {
		t.Errorf("exec: %v", err)
	}
	if _, err := c.Get(t.Context(), sb.ID()); err != nil {
		t.Errorf("get: %v", err)
	}
	if _, err := shared.ClientAs(t, "wrong").Sandbox(sb.ID()).Run(t.Context(), "true"); !errors.Is(err, errs.BadToken) {
		t.Errorf("exec with a wrong token: %v", err)
	}
	// A revoked token's connections end.
	full, err := shared.Client(t).CreateToken(t.Context(), v1.TokenRequest{Name: "soon revoked", Rights: []v1.Right{v1.RightSandbox}})
	if err != nil {
		t.Fatal(err)
	}
	c = shared.ClientAs(t, full.Secret)
	p, err := c.Sandbox(sb.ID()).Start(t.Context(), client.Command("sleep", "1000"), client.IO{})
	if err != nil {
		t.Fatal(err)
	}
	if err := shared.Client(t).DeleteToken(t.Context(), full.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Wait(); !errors.Is(err, errs.BadToken) {
		t.Errorf("a process of a revoked token: %v", err)
	}
}

// upgraded is a raw connection that was upgraded to Aether.
func upgraded(t *testing.T) net.Conn {
	t.Helper()
	raw, err := net.Dial("unix", shared.Sock)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { raw.Close() })
	u := bed.URL("http://dsec/v1/aether")
	conn, err := httpupgrade.Client(t.Context(), raw, u, http.Header{"Authorization": {"Bearer " + shared.Token(t)}})
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

func TestGarbageEndsItsOwnConnectionOnly(t *testing.T) {
	t.Parallel()
	random := bed.Random(t)
	c := shared.Client(t)
	sb := shared.Sandbox(t, c, client.Spec{})
	alive := func(after string) {
		t.Helper()
		if res, err := sb.Run(t.Context(), "true"); err != nil || res.Code != 0 {
			t.Errorf("after %s: %v", after, err)
		}
	}
	garbage := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		return b
	}
	// The server must close what it cannot read, having said why or not.
	ends := func(what string, conn net.Conn) {
		t.Helper()
		conn.SetReadDeadline(time.Now().Add(bed.Patience))
		if _, err := io.Copy(io.Discard, conn); errors.Is(err, context.DeadlineExceeded) || isTimeout(err) {
			t.Errorf("%s: the connection stays open", what)
		}
	}
	for range 10 {
		raw, err := net.Dial("unix", shared.Sock)
		if err != nil {
			t.Fatal(err)
		}
		raw.Write(append(garbage(1000), "\r\n\r\n"...)) // the server may have closed by now
		ends("garbage on the API's port", raw)
		raw.Close()

		conn := upgraded(t)
		conn.Write(garbage(1000))
		ends("garbage instead of HELLO", conn)
	}
	alive("garbage")

	// Garbage, and valid frames that make no sense, after a good handshake.
	for what, junk := range map[string][]byte{
		"garbage":               garbage(4096),
		"a frame of zeros":      make([]byte, 25),
		"a large length":        {0xae, 0x7e, 1, 4, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0},
		"a truncated header":    {0xae, 0x7e, 1},
		"garbage in large size": garbage(3 << 20),
	} {
		conn := upgraded(t)
		ac, err := aether.NewClient(t.Context(), spliced{conn}, aether.ClientConfig{Token: shared.Token(t)})
		if err != nil {
			t.Fatal(err)
		}
		st, err := ac.Open(t.Context(), sb.ID(), "process.start", &msg.StartRequest{Cmd: "sleep", Args: []string{"1000"}})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := st.Recv(t.Context()); err != nil {
			t.Fatal(err)
		}
		conn.Write(junk)
		if what == "a truncated header" {
			conn.(interface{ CloseWrite() error }).CloseWrite()
		}
		select {
		case <-ac.Done():
		case <-time.After(bed.Patience):
			t.Errorf("%s: the connection stays open", what)
		}
		ac.Close()
		alive(what)
	}
}

// spliced hides what a connection can do beyond net.Conn, so that the client end and the
// test may both write to it.
type spliced struct{ net.Conn }

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}

func TestAFullNodeSaysWhatIsShort(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{Flags: []string{"--slots", "3"}})
	c := b.Client(t)
	var ok, full int
	for _, err := range c.CreateMany(t.Context(), client.Spec{Image: bed.Image}, 8) {
		switch e := client.ErrorOf(err); {
		case err == nil:
			ok++
		case e.Code == errs.NodeFull && e.Details["resource"] == "slots" && e.RetryAfter > 0 && e.Infra && e.Retryable:
			full++
		default:
			t.Errorf("%+v", e)
		}
	}
	if ok != 3 || full != 5 {
		t.Errorf("%d made, %d refused", ok, full)
	}
	resp, p := rest(t, b, "POST", "/v1/sandboxes", b.Token(t), bytes.NewReader([]byte(`{"image":"`+bed.Image+`"}`)))
	if resp.StatusCode != 503 || p.Code != "node_full" || resp.Header.Get("Retry-After") == "" || p.Details["resource"] != "slots" {
		t.Errorf("status %d, Retry-After %q, %+v", resp.StatusCode, resp.Header.Get("Retry-After"), p)
	}
	r := b.Fails(t, 1, "node_full", "create", bed.Image)
	if !strings.Contains(r.Stderr, "slots") || !strings.Contains(r.Stderr, "retry after") {
		t.Errorf("stderr: %s", r.Stderr)
	}
	b.Fails(t, 125, "node_full", "run", bed.Image, "--", "true")
	id := strings.Fields(b.Must(t, "ls", "-q"))[0]
	b.Must(t, "rm", id)
	b.Must(t, "run", bed.Image, "--", "true")
}
