package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	ggcr "github.com/google/go-containerregistry/pkg/registry"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

// newRegistry runs one that wants a password, and returns its address.
func newRegistry(t *testing.T, before func(r *http.Request)) string {
	t.Helper()
	inner := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, password, _ := r.BasicAuth(); user != "me" || password != "secret" {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		before(r)
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	return strings.TrimPrefix(s.URL, "http://")
}

// What is pushed to a registry, and exported to a file, is there again when it is pulled or
// imported; credentials come from stdin or Docker's file.
func TestPushPullExport(t *testing.T) {
	t.Parallel()
	host := newRegistry(t, func(*http.Request) {})
	name := func(s string) string { return strings.ToLower(t.Name()) + s }
	id := begin(t, "--env", "KEPT=yes", bed.Image)
	sh(t, id, "mkdir -p /data/sub; echo content >/data/file; ln /data/file /data/sub/link; rm -rf /home; mv /root /moved")
	snap(t, id, name(""))
	ref := host + "/team/env:1"

	shared.Fails(t, 1, "registry_denied", "image", "push", "snap:"+name(""), ref)
	config := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(config, fmt.Appendf(nil, `{"auths":{%q:{"auth":%q}}}`, host, base64.StdEncoding.EncodeToString([]byte("me:secret"))), 0o600); err != nil {
		t.Fatal(err)
	}
	pushed := bed.JSON[v1.Pushed](t, shared, "image", "push", "--auth-file", config, "--json", "snap:"+name(""), ref)
	if pushed.Ref != ref || pushed.Sent != 2 || !strings.HasPrefix(pushed.Digest, "sha256:") {
		t.Errorf("pushed %+v", pushed)
	}
	again := bed.JSON[v1.Pushed](t, shared, "image", "push", "--auth-file", config, "--json", "snap:"+name(""), ref)
	if again.Sent != 0 || again.Digest != pushed.Digest {
		t.Errorf("pushed again: %+v", again)
	}

	shared.Fails(t, 1, "registry_denied", "image", "pull", ref, name("-pulled"))
	shared.MustIn(t, "secret\n", "image", "pull", "--username", "me", "--password-stdin", ref, name("-pulled"))
	shared.Must(t, "image", "pull", "--auth-file", config, ref)
	if img := bed.JSON[v1.Image](t, shared, "image", "inspect", ref, "--json"); img.Name != ref || img.Snapshot != nil {
		t.Errorf("by default it is called %+v", img)
	}
	file := filepath.Join(t.TempDir(), "image.tar")
	shared.Must(t, "image", "export", "--format", "oci", "snap:"+name(""), file)
	shared.Must(t, "image", "import", name("-file"), file)
	archive := shared.Must(t, "image", "export", "--format", "docker", "snap:"+name(""), "-")
	shared.MustIn(t, archive+"\n", "image", "import", name("-stdin"), "-")
	const look = `cat /data/file /data/sub/link; stat -c %h /data/file; echo $KEPT; ls -d /home /root /moved 2>/dev/null || true`
	want := sh(t, begin(t, "snap:"+name("")), look)
	for _, img := range []string{name("-pulled"), ref, name("-file"), name("-stdin")} {
		if got := shared.Must(t, "run", img, "--", "sh", "-ec", look); got != want {
			t.Errorf("%s: %q, want %q", img, got, want)
		}
		shared.Must(t, "image", "rm", img)
	}

	shared.Fails(t, 1, "registry_not_found", "image", "pull", "--auth-file", config, host+"/team/none:1")
	shared.Fails(t, 1, "bad_request", "image", "pull", "--auth-file", config, ref, "snap:x")
	shared.Fails(t, 1, "image_not_found", "image", "push", "--auth-file", config, "none-such", ref)
	shared.Fails(t, 2, "", "image", "pull", "--username", "me", ref)
	shared.Fails(t, 1, "image_not_found", "image", "export", "none-such", file+"2")
	shared.Fails(t, 2, "", "image", "export", "--format", "zip", bed.Image, file+"2")
	if left, _ := filepath.Glob(file + "2*"); len(left) > 0 {
		t.Errorf("a failed export left %v", left)
	}
}

// What goes wrong at a registry ends a pull with the error that says so, and with nothing of the image; what
// comes right when it is asked for again does not.
func TestRegistryFaults(t *testing.T) {
	t.Parallel()
	var fault atomic.Pointer[func(w http.ResponseWriter, r *http.Request, next http.Handler)]
	inner := ggcr.New(ggcr.Logger(log.New(io.Discard, "", 0)))
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if f := fault.Load(); f != nil {
			(*f)(w, r, inner)
			return
		}
		inner.ServeHTTP(w, r)
	}))
	t.Cleanup(s.Close)
	ref := strings.TrimPrefix(s.URL, "http://") + "/faulty:1"
	shared.Must(t, "image", "push", bed.Image, ref)
	rec := httptest.NewRecorder()
	inner.ServeHTTP(rec, httptest.NewRequest(http.MethodGet, "/v2/faulty/manifests/1", nil))
	var manifest struct{ Config struct{ Digest string } }
	if err := json.Unmarshal(rec.Body.Bytes(), &manifest); err != nil || manifest.Config.Digest == "" {
		t.Fatalf("%s: %v", rec.Body, err)
	}
	layer := func(r *http.Request) bool {
		return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") && !strings.HasSuffix(r.URL.Path, manifest.Config.Digest)
	}
	// answer has a layer's answer, damaged by edit, of which cut leaves half.
	answer := func(w http.ResponseWriter, r *http.Request, next http.Handler, edit func(p []byte), cut bool) {
		rec := httptest.NewRecorder()
		next.ServeHTTP(rec, r)
		p := append([]byte(nil), rec.Body.Bytes()...)
		edit(p)
		maps.Copy(w.Header(), rec.Header())
		w.Header().Set("Content-Length", fmt.Sprint(len(p)))
		w.WriteHeader(rec.Code)
		if !cut {
			_, _ = w.Write(p)
			return
		}
		_, _ = w.Write(p[:len(p)/2])
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}
	same := func([]byte) {}
	var cuts atomic.Int64
	for _, c := range []struct {
		name, code, says string
		fault            func(w http.ResponseWriter, r *http.Request, next http.Handler)
	}{
		{"401", "registry_denied", "credentials", func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
			w.WriteHeader(http.StatusUnauthorized)
		}},
		{"404", "registry_not_found", "has no tag 1", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if strings.Contains(r.URL.Path, "/manifests/") {
				w.WriteHeader(http.StatusNotFound)
				fmt.Fprint(w, `{"errors":[{"code":"MANIFEST_UNKNOWN","message":"which?"}]}`)
				return
			}
			next.ServeHTTP(w, r)
		}},
		{"a layer is gone", "registry_not_found", "", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if layer(r) {
				http.NotFound(w, r)
				return
			}
			next.ServeHTTP(w, r)
		}},
		{"429", "registry_busy", "slow down", func(w http.ResponseWriter, r *http.Request, _ http.Handler) {
			w.Header().Set("Retry-After", "3600")
			w.WriteHeader(http.StatusTooManyRequests)
			fmt.Fprint(w, `{"errors":[{"code":"TOOMANYREQUESTS","message":"slow down"}]}`)
		}},
		{"always cut", "registry_unavailable", "broke off", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if layer(r) {
				r.Header.Del("Range") // no progress by going on where it broke
				rec := httptest.NewRecorder()
				next.ServeHTTP(rec, r)
				maps.Copy(w.Header(), rec.Header())
				w.WriteHeader(rec.Code)
				w.(http.Flusher).Flush()
				panic(http.ErrAbortHandler)
			}
			next.ServeHTTP(w, r)
		}},
		{"wrong bytes", "image_corrupt", "digest", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if layer(r) {
				answer(w, r, next, func(p []byte) { p[len(p)/2] ^= 1 }, false)
				return
			}
			next.ServeHTTP(w, r)
		}},
		{"cut three times", "", "", func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			if layer(r) && cuts.Add(1) <= 3 {
				answer(w, r, next, same, true)
				return
			}
			next.ServeHTTP(w, r)
		}},
		{"busy for a moment", "", "", func() func(w http.ResponseWriter, r *http.Request, next http.Handler) {
			var busy atomic.Int64
			return func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				if busy.Add(1) == 2 {
					w.Header().Set("Retry-After", "1")
					w.WriteHeader(http.StatusTooManyRequests)
					return
				}
				next.ServeHTTP(w, r)
			}
		}()},
	} {
		fault.Store(&c.fault)
		name := strings.ToLower(t.Name()) + "-" + strings.ReplaceAll(c.name, " ", "-")
		if c.code == "" {
			shared.Must(t, "image", "pull", ref, name)
			if got := shared.Must(t, "run", name, "--", "echo", "works"); got != "works" {
				t.Errorf("%s: %q", c.name, got)
			}
			shared.Must(t, "image", "rm", name)
			continue
		}
		if r := shared.Fails(t, 1, c.code, "image", "pull", ref, name); !strings.Contains(r.Stderr, c.says) {
			t.Errorf("%s: it says %s", c.name, r.Stderr)
		}
		shared.Fails(t, 1, "image_not_found", "image", "inspect", name)
	}
	if cuts.Load() < 3 {
		t.Errorf("%d answers were cut", cuts.Load())
	}
}

// A pull that its user gives up leaves no image and no work.
func TestACancelledPullLeavesNothing(t *testing.T) {
	t.Parallel()
	var stall atomic.Bool
	reached := make(chan struct{}, 100)
	host := newRegistry(t, func(r *http.Request) {
		if stall.Load() && r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
			reached <- struct{}{}
			<-r.Context().Done()
		}
	})
	ref := host + "/slow:1"
	shared.MustIn(t, "secret", "image", "push", "--username", "me", "--password-stdin", bed.Image, ref)
	stall.Store(true)
	cmd := shared.Command(t.Context(), "image", "pull", "--username", "me", "--password-stdin", ref)
	cmd.Stdin = strings.NewReader("secret")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-reached
	if err := cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("an interrupted pull succeeded")
	}
	shared.Fails(t, 1, "image_not_found", "image", "inspect", ref)
	work := filepath.Join(shared.Data, "images", "tmp", "spool-*")
	var left []string
	for end := time.Now().Add(10 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if left, _ = filepath.Glob(work); len(left) == 0 {
			return
		}
	}
	t.Errorf("left: %v", left) // other tests' imports are shorter than this
}

// A snapshot's archive makes the same snapshot again, where nothing of it is; one that is
// damaged anywhere makes none.
func TestSnapshotArchive(t *testing.T) {
	t.Parallel()
	name := func(s string) string { return strings.ToLower(t.Name()) + s }
	id := begin(t, "--env", "A=b", "--label", "archived=yes", bed.Image)
	sh(t, id, "head -c 100000 /dev/urandom >/data; sha256sum /data >/sum; rm -rf /home; mv /root /moved")
	snap(t, id, name("1"))
	child := begin(t, "snap:"+name("1"))
	sh(t, child, "echo more >/more; rm /sum")
	snap(t, child, name("2"))
	file := filepath.Join(t.TempDir(), "snap.tar")
	shared.Must(t, "snapshot", "export", name("2"), file)
	before := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", name("2"), "--json")
	shared.Fails(t, 1, "name_in_use", "snapshot", "import", file)
	shared.Must(t, "snapshot", "import", file, name("3"))
	shared.Must(t, "rm", child)
	shared.Must(t, "snapshot", "rm", name("3"))
	shared.Must(t, "snapshot", "rm", name("2"), name("1"))
	shared.Must(t, "snapshot", "import", file)
	after := bed.JSON[v1.Image](t, shared, "snapshot", "inspect", name("2"), "--json")
	if after.Digest != before.Digest || after.Snapshot.Labels["archived"] != "yes" {
		t.Errorf("before %+v, after %+v", before, after)
	}
	if got := shared.Must(t, "run", "snap:"+name("2"), "--", "sh", "-c", "echo $A; cat /more; ls -d /sum /home /root /moved 2>/dev/null || true"); got != "b\nmore\n/moved" {
		t.Errorf("the imported snapshot shows %q", got)
	}
	shared.Must(t, "snapshot", "rm", name("2"))

	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	at := func(what string) int {
		i := strings.Index(string(whole), what)
		if i < 0 {
			t.Fatalf("the archive has no %q", what)
		}
		return i
	}
	for what, damage := range map[string]func(b []byte) []byte{
		"a byte of data":     func(b []byte) []byte { b[at(".data")+2000] ^= 1; return b },
		"a byte of metadata": func(b []byte) []byte { b[at(".meta")+2000] ^= 1; return b },
		"the description":    func(b []byte) []byte { b[at(`"A=b"`)+3] = 'c'; return b },
		"the chain":          func(b []byte) []byte { b[at(`"view":"`)+8] ^= 1; return b },
		"a cut":              func(b []byte) []byte { return b[:len(b)*2/3] },
		"nothing":            func([]byte) []byte { return nil },
		"another tar":        func(b []byte) []byte { copy(b, "other.json\x00\x00\x00"); return b },
	} {
		bad := file + ".bad"
		if err := os.WriteFile(bad, damage(append([]byte(nil), whole...)), 0o600); err != nil {
			t.Fatal(err)
		}
		if r := shared.Run(t.Context(), nil, "snapshot", "import", bad); r.Code != 1 || !strings.Contains(r.Stderr, "error: image_corrupt") {
			t.Errorf("%s: %+v", what, r)
		}
	}
	shared.Fails(t, 1, "image_not_found", "snapshot", "inspect", name("2"))
	shared.Fails(t, 1, "image_not_found", "snapshot", "export", "none-such", file)
}
