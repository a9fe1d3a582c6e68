package peers

import (
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"dsec/internal/bench"
)

// engine answers as much of Docker's API as is used.
type engine struct {
	mu         sync.Mutex
	containers map[string]bool // started
	execs      int
	exitCode   int
	failStart  bool
	next       int
}

func serve(t *testing.T, e *engine) string {
	t.Helper()
	e.containers = map[string]bool{}
	mux := http.NewServeMux()
	reply := func(w http.ResponseWriter, code int, v any) {
		w.WriteHeader(code)
		json.NewEncoder(w).Encode(v)
	}
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) { reply(w, 200, map[string]string{"Version": "9.9"}) })
	mux.HandleFunc("GET /images/{name}/json", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("name") != "debian/x:1" {
			reply(w, 404, map[string]string{"message": "no such image"})
			return
		}
		reply(w, 200, map[string]string{})
	})
	mux.HandleFunc("POST /containers/create", func(w http.ResponseWriter, r *http.Request) {
		var spec struct{ HostConfig struct{ NetworkMode string } }
		if json.NewDecoder(r.Body).Decode(&spec); spec.HostConfig.NetworkMode != "none" {
			t.Errorf("%+v", spec)
		}
		e.mu.Lock()
		defer e.mu.Unlock()
		e.next++
		id := string(rune('a' + e.next))
		e.containers[id] = false
		reply(w, 201, map[string]string{"Id": id})
	})
	mux.HandleFunc("POST /containers/{id}/start", func(w http.ResponseWriter, r *http.Request) {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.failStart {
			reply(w, 500, map[string]string{"message": "no memory"})
			return
		}
		e.containers[r.PathValue("id")] = true
		w.WriteHeader(204)
	})
	mux.HandleFunc("POST /containers/{id}/exec", func(w http.ResponseWriter, r *http.Request) { reply(w, 201, map[string]string{"Id": "x"}) })
	mux.HandleFunc("POST /exec/x/start", func(w http.ResponseWriter, _ *http.Request) {
		e.mu.Lock()
		defer e.mu.Unlock()
		e.execs++
	})
	mux.HandleFunc("GET /exec/x/json", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, 200, map[string]any{"Running": false, "ExitCode": e.exitCode})
	})
	mux.HandleFunc("DELETE /containers/{id}", func(w http.ResponseWriter, r *http.Request) {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.containers, r.PathValue("id"))
		w.WriteHeader(204)
	})
	sock := filepath.Join(t.TempDir(), "docker.sock")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(mux)
	srv.Listener.Close()
	srv.Listener = l
	srv.Start()
	t.Cleanup(srv.Close)
	return sock
}

func TestDockerRunsTheSameSteps(t *testing.T) {
	t.Parallel()
	e := &engine{}
	d, err := NewDocker(t.Context(), serve(t, e), "debian/x:1")
	if err != nil {
		t.Fatal(err)
	}
	res, err := bench.Create(t.Context(), d, bench.Load{N: 4, Parallel: 2}, true)
	if err != nil || res[0].OK != 4 || res[1].OK != 4 || res[0].Target != "docker 9.9" || e.execs != 4 {
		t.Errorf("%+v, %v, %d execs", res, err, e.execs)
	}
	e.exitCode = 1
	if _, err := bench.Exec(t.Context(), d, bench.Load{N: 1, Parallel: 1}, 1); err == nil || !strings.Contains(err.Error(), "exit code 1") {
		t.Errorf("a failing command: %v", err)
	}
	e.failStart = true
	if _, err := d.Create(t.Context()); err == nil || !strings.Contains(err.Error(), "no memory") {
		t.Errorf("a failing start: %v", err)
	}
	if len(e.containers) != 0 {
		t.Errorf("left: %v", e.containers)
	}
}

func TestNoDocker(t *testing.T) {
	t.Parallel()
	if _, err := NewDocker(t.Context(), filepath.Join(t.TempDir(), "none"), "x"); !errors.Is(err, ErrNoDocker) {
		t.Errorf("no socket: %v", err)
	}
	sock := filepath.Join(t.TempDir(), "dead.sock")
	l, err := net.Listen("unix", sock)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	if _, err := NewDocker(t.Context(), sock, "x"); !errors.Is(err, ErrNoDocker) {
		t.Errorf("nobody behind the socket: %v", err)
	}
	if _, err := NewDocker(t.Context(), serve(t, &engine{}), "other"); err == nil || errors.Is(err, ErrNoDocker) || !strings.Contains(err.Error(), "no such image") {
		t.Errorf("no image: %v", err)
	}
}
