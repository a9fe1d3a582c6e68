package clienttest

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/httpupgrade"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Token is what the server accepts.
const Token = "test-token"

// Node is the id of the one node.
const Node = "testaa"

// Server is the fake.
type Server struct {
	URL string

	dir     string
	http    *httptest.Server
	aether  *aether.Server
	mu      sync.Mutex
	next    uint64
	rev     uint64
	boxes   map[string]*box
	gone    map[string]bool
	keys    map[string]string
	images  map[string]v1.Image
	tokens  map[string]v1.Token
	events  []v1.Event
	changed chan struct{} // closed at each event
	conns   map[net.Conn]bool
	fail    map[string][]error
	hooks   map[string]func()
	dials   int
	frozen  time.Time // when usage was read last, for ever; zero: it is read each time
	usages  int       // readings of the usage of many
}

type box struct {
	info  v1.Sandbox
	guest *guest
}

// New starts a server that ends with the test. It has the image "busybox".
func New(t testing.TB) *Server {
	t.Helper()
	s := start(t.TempDir())
	t.Cleanup(s.stop)
	return s
}

// Standalone starts a server for an example, which has no testing.TB.
func Standalone() (s *Server, stop func()) {
	dir, err := os.MkdirTemp("", "dsec-example-")
	if err != nil {
		panic(err)
	}
	s = start(dir)
	return s, func() {
		s.stop()
		os.RemoveAll(dir)
	}
}

func start(dir string) *Server {
	s := &Server{
		dir: dir, boxes: map[string]*box{}, gone: map[string]bool{}, keys: map[string]string{},
		images:  map[string]v1.Image{"busybox": {Name: "busybox", Digest: "sha256:" + strings.Repeat("ab", 32), CreatedAt: time.Now(), Files: 12, Bytes: 2 << 20}},
		tokens:  map[string]v1.Token{},
		changed: make(chan struct{}), conns: map[net.Conn]bool{}, fail: map[string][]error{}, hooks: map[string]func(){},
	}
	s.aether = aether.NewServer(aether.ServerConfig{Fallback: s.operation, Node: Node})
	mux := http.NewServeMux()
	for pattern, h := range map[string]func(http.ResponseWriter, *http.Request) error{
		"POST /v1/sandboxes": s.create, "POST /v1/sandboxes/batch": s.createMany, "GET /v1/sandboxes": s.list,
		"GET /v1/sandboxes/{id}": s.get, "DELETE /v1/sandboxes/{id}": s.remove, "POST /v1/sandboxes/{id}/renew": s.renew, "POST /v1/sandboxes/delete": s.removeMany,
		"POST /v1/sandboxes/pause": s.turnMany(v1.StatePaused), "POST /v1/sandboxes/resume": s.turnMany(v1.StateRunning),
		"POST /v1/sandboxes/{id}/pause": s.turnOne(v1.StatePaused), "POST /v1/sandboxes/{id}/resume": s.turnOne(v1.StateRunning),
		"POST /v1/sandboxes/{id}/hint": s.hint, "GET /v1/sandboxes/usage": s.usage,
		"GET /v1/events": s.watch, "POST /v1/images": s.importImage, "GET /v1/images": s.listImages,
		"GET /v1/images/{name...}": s.getImage, "DELETE /v1/images/{name...}": s.removeImage,
		"POST /v1/sandboxes/{id}/snapshot": s.snapshot, "POST /v1/sandboxes/{id}/fork": s.fork,
		"GET /v1/snapshots": s.listSnapshots, "DELETE /v1/snapshots/{name}": s.removeSnapshot,
		"GET /v1/nodes": s.nodes, "GET /v1/nodes/{id}": s.node,
		"POST /v1/tokens": s.createToken, "GET /v1/tokens": s.listTokens, "DELETE /v1/tokens/{id}": s.removeToken,
		"GET /v1/health": s.health, "GET /metrics": s.metrics, "GET /v1/aether": s.upgrade,
	} {
		mux.HandleFunc(pattern, s.wrap(pattern, h))
	}
	s.http = httptest.NewServer(mux)
	s.URL = s.http.URL
	return s
}

func (s *Server) stop() {
	s.aether.Close()
	s.http.CloseClientConnections()
	s.http.Close()
	for _, b := range s.boxes {
		b.guest.close()
	}
}

// Break cuts all connections of the data plane.
func (s *Server) Break() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		c.Close()
	}
	clear(s.conns)
}

// Dials says how often the data plane was connected to.
func (s *Server) Dials() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.dials
}

// Fail makes the next requests of a pattern, such as "POST /v1/sandboxes", or of a
// method, such as "file.stat", fail with err, times times.
func (s *Server) Fail(what string, times int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for range times {
		s.fail[what] = append(s.fail[what], err)
	}
}

// Before calls f when a request of a pattern comes, before it is served.
func (s *Server) Before(pattern string, f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.hooks[pattern] = f
}

func (s *Server) failure(what string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	q := s.fail[what]
	if len(q) == 0 {
		return nil
	}
	s.fail[what] = q[1:]
	return q[0]
}

// Sandboxes returns the ids of those alive.
func (s *Server) Sandboxes() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ids []string
	for id := range s.boxes {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	return ids
}

// Root returns the directory that stands for a sandbox's root.
func (s *Server) Root(id string) string { return filepath.Join(s.dir, id) }

func (s *Server) wrap(pattern string, h func(http.ResponseWriter, *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Request-Id", "req-1")
		s.mu.Lock()
		hook := s.hooks[pattern]
		s.mu.Unlock()
		if hook != nil {
			hook()
		}
		err := s.failure(pattern)
		if err == nil && pattern != "GET /v1/health" && r.Header.Get("Authorization") != "Bearer "+Token {
			err = errs.New(errs.BadToken, "auth", "the token is not known")
		}
		if err == nil {
			err = h(w, r)
		}
		if err != nil {
			p := v1.ProblemOf(err)
			if p.RetryAfterMS > 0 {
				w.Header().Set("Retry-After", strconv.FormatInt((p.RetryAfterMS+999)/1000, 10))
			}
			answer(w, p.Status, p)
		}
	}
}

func answer(w http.ResponseWriter, status int, v any) error {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	return json.NewEncoder(w).Encode(v)
}

func line(w http.ResponseWriter, v any) {
	json.NewEncoder(w).Encode(v)
	http.NewResponseController(w).Flush()
}

func body(r *http.Request, v any) error {
	if err := json.NewDecoder(r.Body).Decode(v); err != nil {
		return errs.New(errs.BadRequest, "decode", "the body is not JSON").Because(err)
	}
	return nil
}

// event appends under s.mu.
func (s *Server) event(t v1.EventType, sb v1.Sandbox) {
	s.rev++
	s.events = append(s.events, v1.Event{Revision: s.rev, Time: time.Now(), Type: t, Sandbox: &sb})
	close(s.changed)
	s.changed = make(chan struct{})
}

func (s *Server) make(spec v1.Spec, key string) (v1.Sandbox, error) {
	spec.SetDefaults()
	if err := spec.Validate(); err != nil {
		return v1.Sandbox{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if id, ok := s.keys[key]; ok && key != "" {
		if b, ok := s.boxes[id]; ok {
			return b.info, nil
		}
		return v1.Sandbox{}, errs.New(errs.SandboxGone, "sandbox.create", "the key's sandbox was removed")
	}
	if _, ok := s.images[spec.Image]; !ok && spec.Backend != v1.BackendHollow {
		return v1.Sandbox{}, errs.New(errs.ImageNotFound, "image.resolve", fmt.Sprintf("there is no image %q", spec.Image))
	}
	s.next++
	id := v1.SandboxID(Node, 1, s.next)
	if err := os.MkdirAll(filepath.Join(s.dir, id, "tmp"), 0o755); err != nil {
		return v1.Sandbox{}, err
	}
	now := time.Now()
	b := &box{guest: newGuest(filepath.Join(s.dir, id))}
	b.info = v1.Sandbox{ID: id, Generation: 1, State: v1.StateRunning, Node: Node, Spec: spec, CreatedAt: now, StartedAt: &now, CreateMS: 1}
	s.boxes[id] = b
	if key != "" {
		s.keys[key] = id
	}
	s.event(v1.EventState, b.info)
	return b.info, nil
}

func (s *Server) find(id string) (*box, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b, ok := s.boxes[id]; ok {
		return b, nil
	}
	if s.gone[id] {
		return nil, errs.New(errs.SandboxGone, "sandbox.find", "sandbox "+id+" was removed")
	}
	return nil, errs.New(errs.SandboxNotFound, "sandbox.find", "there is no sandbox "+id)
}

func (s *Server) drop(id string) error {
	b, err := s.find(id)
	if err != nil {
		return err
	}
	b.guest.close()
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.boxes, id)
	s.gone[id] = true
	b.info.State = v1.StateStopped
	s.event(v1.EventRemoved, b.info)
	return nil
}

func (s *Server) create(w http.ResponseWriter, r *http.Request) error {
	var req v1.CreateRequest
	if err := body(r, &req); err != nil {
		return err
	}
	sb, err := s.make(req.Spec, r.Header.Get("Idempotency-Key"))
	if err != nil {
		return err
	}
	return answer(w, http.StatusCreated, sb)
}

// fork makes children of a sandbox: some fail if that was asked for with Fail("one of batch").
func (s *Server) fork(w http.ResponseWriter, r *http.Request) error {
	var req v1.ForkRequest
	if err := body(r, &req); err != nil {
		return err
	}
	source, err := s.find(r.PathValue("id"))
	if err != nil {
		return err
	}
	for range req.Count {
		var res v1.CreateResult
		err := s.failure("one of batch")
		if err == nil {
			var sb v1.Sandbox
			if sb, err = s.make(source.info.Spec, ""); err == nil {
				sb.ForkOf = source.info.ID
				res.Sandbox = &sb
			}
		}
		res.Error = v1.ProblemOf(err)
		line(w, res)
	}
	return nil
}

func (s *Server) createMany(w http.ResponseWriter, r *http.Request) error {
	var req v1.CreateRequest
	if err := body(r, &req); err != nil {
		return err
	}
	for range req.Count {
		var res v1.CreateResult
		err := s.failure("one of batch")
		if err == nil {
			var sb v1.Sandbox
			if sb, err = s.make(req.Spec, ""); err == nil {
				res.Sandbox = &sb
			}
		}
		res.Error = v1.ProblemOf(err)
		line(w, res)
	}
	return nil
}

func (s *Server) selected(r *http.Request) []v1.Sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := []v1.Sandbox{}
	for _, b := range s.boxes {
		if matches(b.info.Spec.Labels, r.URL.Query()["label"]) && (r.FormValue("state") == "" || r.FormValue("state") == string(b.info.State)) && b.info.ID > r.FormValue("after") {
			out = append(out, b.info)
		}
	}
	slices.SortFunc(out, func(a, b v1.Sandbox) int { return strings.Compare(a.ID, b.ID) })
	return out
}

func matches(labels map[string]string, want []string) bool {
	for _, l := range want {
		k, v, _ := strings.Cut(l, "=")
		if got, ok := labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}

func (s *Server) list(w http.ResponseWriter, r *http.Request) error {
	items := s.selected(r)
	if n, err := strconv.Atoi(r.FormValue("limit")); err == nil && n < len(items) {
		items = items[:n]
	}
	s.mu.Lock()
	rev := s.rev
	s.mu.Unlock()
	return answer(w, http.StatusOK, v1.SandboxList{Revision: rev, Items: items})
}

func (s *Server) get(w http.ResponseWriter, r *http.Request) error {
	b, err := s.find(r.PathValue("id"))
	if err != nil {
		return err
	}
	s.mu.Lock()
	info := b.info
	s.mu.Unlock()
	info.Usage = used()
	return answer(w, http.StatusOK, info)
}

func (s *Server) remove(w http.ResponseWriter, r *http.Request) error {
	if err := s.drop(r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) renew(w http.ResponseWriter, r *http.Request) error {
	if _, err := s.find(r.PathValue("id")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) removeMany(w http.ResponseWriter, r *http.Request) error {
	var req v1.DeleteRequest
	if err := body(r, &req); err != nil {
		return err
	}
	for _, id := range append(req.IDs, s.labelled(req.Labels)...) {
		line(w, v1.DeleteResult{ID: id, Error: v1.ProblemOf(s.drop(id))})
	}
	return nil
}

func (s *Server) watch(w http.ResponseWriter, r *http.Request) error {
	from, _ := strconv.ParseUint(r.FormValue("from"), 10, 64)
	for {
		s.mu.Lock()
		var due []v1.Event
		for _, e := range s.events {
			if e.Revision > from && matches(e.Sandbox.Spec.Labels, r.URL.Query()["label"]) {
				due = append(due, e)
			}
		}
		changed := s.changed
		s.mu.Unlock()
		for _, e := range due {
			line(w, e)
			from = e.Revision
		}
		if r.FormValue("follow") != "true" || s.failure("watch ends") != nil {
			return nil
		}
		http.NewResponseController(w).Flush()
		select {
		case <-changed:
		case <-r.Context().Done():
			return nil
		}
	}
}

func (s *Server) upgrade(w http.ResponseWriter, r *http.Request) error {
	conn, err := httpupgrade.Upgrade(w, r)
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.conns[conn] = true
	s.dials++
	s.mu.Unlock()
	s.aether.ServeConn(context.WithoutCancel(r.Context()), conn)
	return nil
}

// operation serves a stream: the guest of the target does it.
func (s *Server) operation(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	if err := s.failure(st.Method()); err != nil {
		return nil, err
	}
	b, err := s.find(st.Target())
	if err != nil {
		return nil, err
	}
	s.turn(b.info.ID, v1.StateRunning) // it wakes
	h, ok := b.guest.methods[st.Method()]
	if !ok {
		return nil, errs.New(errs.UnknownMethod, "guest", "the fake has no "+st.Method())
	}
	return h(ctx, st)
}
