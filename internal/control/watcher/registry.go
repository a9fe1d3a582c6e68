package watcher

import (
	"fmt"
	"maps"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Config of a Registry. Zero values mean the defaults.
type Config struct {
	Now         func() time.Time
	EventsKept  int           // 65536
	RemovedKept int           // ids of removed sandboxes remembered: 100000
	KeyTTL      time.Duration // life of an idempotency key: 5 min
	Grace       time.Duration // between the loss of a lease, or our start, and the loss of sandboxes: 5 s
	KeepLost    time.Duration // how long lost sandboxes are listed: 1 h
}

func (c *Config) setDefaults() {
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.EventsKept == 0 {
		c.EventsKept = 65536
	}
	if c.RemovedKept == 0 {
		c.RemovedKept = 100000
	}
	if c.KeyTTL == 0 {
		c.KeyTTL = 5 * time.Minute
	}
	if c.Grace == 0 {
		c.Grace = 5 * time.Second
	}
	if c.KeepLost == 0 {
		c.KeepLost = time.Hour
	}
}

// Registry is what is known of sandboxes and nodes. All methods may be called from
// several goroutines. Documents that it hands out are shared and must not be changed.
type Registry struct {
	cfg     Config
	started time.Time

	mu        sync.RWMutex
	held      bool // no node counts as lost any more
	rev       uint64
	events    ring
	changed   chan struct{} // closed at the next change; nil when nobody waits
	sandboxes map[string]*entry
	all       index
	labels    map[label]*index
	states    map[v1.State]int
	nodes     map[string]*nodeState
	listed    bool // the set of registered nodes was read
	removed   *recent
	keys      map[string]string // scope of an idempotency key → sandbox id
}

type label struct{ key, value string }

// entry is one sandbox. sb is replaced, never changed, and is without its key.
type entry struct {
	sb     *v1.Sandbox
	key    Key
	stream uint64    // of the node's watch when it was last told by other means than the watch; 0: the watch told it
	lostAt time.Time // zero: not lost
}

// nodeState is one edge.
type nodeState struct {
	node      v1.Node             // as registered, with the load that the edge reports
	shown     *v1.Node            // what others see of it; replaced, never changed
	declared  bool                // Ready as registered
	connected bool                // its watch runs
	synced    bool                // its watch has told everything once, or was found not to answer
	stream    uint64              // counts watches, from 1
	reset     map[string]struct{} // ids told in a Reset that is not complete yet; nil: none is under way
	used      v1.Resources
	images    map[string]struct{}
}

// NewRegistry returns an empty registry.
func NewRegistry(cfg Config) *Registry {
	cfg.setDefaults()
	// Micro seconds: a restarted registry is ahead of its past as long as there were
	// fewer than a million changes a second, and numbers stay exact in JSON.
	now := cfg.Now()
	base := uint64(now.UnixMicro())
	return &Registry{
		cfg: cfg, started: now, rev: base, events: ring{first: base + 1, cap: cfg.EventsKept},
		sandboxes: map[string]*entry{}, labels: map[label]*index{}, states: map[v1.State]int{}, nodes: map[string]*nodeState{},
		removed: newRecent(cfg.RemovedKept), keys: map[string]string{},
	}
}

// Apply takes what an edge answered (a create's or get's), so that it is visible before
// the watch tells it. An older generation than the known one changes nothing, nor does
// a sandbox that was removed.
func (r *Registry) Apply(sb v1.Sandbox) {
	r.mu.Lock()
	defer r.mu.Unlock()
	stream := uint64(1)
	if n := r.nodes[sb.Node]; n != nil {
		stream = n.stream
	}
	r.put(sb, stream)
}

// Remove takes an edge's answer to a delete.
func (r *Registry) Remove(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drop(id, true)
}

// put stores sb. stream is 0 if the owner's watch told it.
func (r *Registry) put(sb v1.Sandbox, stream uint64) {
	if r.removed.has(sb.ID) {
		return
	}
	e := r.sandboxes[sb.ID]
	if e != nil {
		revived := stream == 0 && !e.lostAt.IsZero() && sb.Generation >= e.sb.Generation
		if !revived && sb.Generation <= e.sb.Generation {
			if stream == 0 {
				e.stream = 0
			}
			return
		}
	}
	key := ParseKey(sb.IdempotencyKey)
	sb.IdempotencyKey, sb.Usage = "", nil
	var old *v1.Sandbox
	if e == nil {
		e = &entry{}
		e.sb = &sb
		r.sandboxes[sb.ID] = e
		r.all.insert(e)
		r.indexLabels(e, sb.Spec.Labels)
	} else {
		old = e.sb
		r.uncount(e)
		if !maps.Equal(e.sb.Spec.Labels, sb.Spec.Labels) {
			r.unindexLabels(e)
			r.indexLabels(e, sb.Spec.Labels)
		}
	}
	e.sb, e.stream, e.lostAt = &sb, stream, time.Time{}
	if key.Scope != "" {
		e.key = key
		r.keys[key.Scope] = sb.ID
	}
	r.count(e)
	if old != nil && old.OOMKills < sb.OOMKills {
		r.emit(v1.Event{Type: v1.EventOOM, Sandbox: e.sb})
	}
	if old == nil || old.State != sb.State || old.OOMKills == sb.OOMKills {
		r.emit(v1.Event{Type: v1.EventState, Sandbox: e.sb})
	}
}

// drop forgets a sandbox. remember: a later request for it is told that it is gone.
func (r *Registry) drop(id string, remember bool) {
	e := r.sandboxes[id]
	if remember {
		how := v1.Ending{} // of one that vanished while nobody watched: not known here
		if e != nil && e.sb.EndReason != "" {
			how = v1.EndingOf(e.sb, r.cfg.Now())
		}
		r.removed.add(id, how)
	}
	if e == nil {
		return
	}
	r.uncount(e)
	r.unindexLabels(e)
	r.all.remove(id)
	delete(r.sandboxes, id)
	if e.key.Scope != "" && r.keys[e.key.Scope] == id {
		delete(r.keys, e.key.Scope)
	}
	r.emit(v1.Event{Type: v1.EventRemoved, Sandbox: e.sb})
}

func (r *Registry) indexLabels(e *entry, labels map[string]string) {
	for k, v := range labels {
		l := label{k, v}
		x := r.labels[l]
		if x == nil {
			x = &index{}
			r.labels[l] = x
		}
		x.insert(e)
	}
}

func (r *Registry) unindexLabels(e *entry) {
	for k, v := range e.sb.Spec.Labels {
		l := label{k, v}
		if x := r.labels[l]; x != nil {
			x.remove(e.sb.ID)
			if x.n == 0 {
				delete(r.labels, l)
			}
		}
	}
}

func (r *Registry) count(e *entry)   { r.account(e, 1) }
func (r *Registry) uncount(e *entry) { r.account(e, -1) }

func (r *Registry) account(e *entry, sign int64) {
	r.states[e.sb.State] += int(sign)
	n := r.nodes[e.sb.Node]
	if n == nil || !holdsResources(e.sb.State) || !ownedBy(e.sb.ID, &n.node) {
		return
	}
	n.use(e.sb, sign)
}

// use counts what a sandbox was promised, as its edge does: a paused one has its slot and no more.
func (n *nodeState) use(sb *v1.Sandbox, sign int64) {
	n.used.Slots += sign
	if sb.State == v1.StatePaused {
		return
	}
	n.used.CPUMillis += sign * sb.Spec.CPUMillis
	n.used.MemoryBytes += sign * sb.Spec.MemoryBytes
}

func holdsResources(s v1.State) bool {
	return s != v1.StateStopped && s != v1.StateFailed && s != v1.StateLost
}

func ownedBy(id string, n *v1.Node) bool {
	node, epoch, err := v1.ParseSandboxID(id)
	return err == nil && node == n.ID && epoch == n.Epoch
}

// Get returns a sandbox as last heard.
func (r *Registry) Get(id string) (*v1.Sandbox, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	e := r.sandboxes[id]
	if e == nil {
		return nil, false
	}
	return e.sb, true
}

// Locate returns the edge that owns a sandbox, and the sandbox if it was heard of.
// (If not, the edge decides: another apiserver may have created it this moment.)
// Errors: errs.SandboxNotFound, errs.SandboxGone, errs.SandboxLost, and errs.EdgeUnreachable
// while the edge may still be on its way back.
func (r *Registry) Locate(id string) (v1.Node, *v1.Sandbox, error) {
	failure := func(code errs.Code, message string) *errs.Error {
		e := errs.New(code, "locate", message)
		e.Sandbox = id
		return e
	}
	fail := func(code errs.Code, message string) (v1.Node, *v1.Sandbox, error) {
		return v1.Node{}, nil, failure(code, message)
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	e := r.sandboxes[id]
	if how, gone := r.removed.ids[id]; e == nil && gone {
		return v1.Node{}, nil, how.Err("locate", id)
	}
	nodeID, epoch, err := v1.ParseSandboxID(id)
	if err != nil {
		return fail(errs.SandboxNotFound, fmt.Sprintf("%q is not the id of a sandbox", id))
	}
	n := r.nodes[nodeID]
	switch {
	case n == nil && e == nil && r.cfg.Now().Sub(r.started) < r.cfg.Grace:
		return fail(errs.EdgeUnreachable, "the node "+nodeID+" of sandbox "+id+" has not registered since this server started")
	case n == nil:
		return v1.Node{}, nil, failure(errs.SandboxLost, "the node "+nodeID+" of sandbox "+id+" is not registered").
			Advise("ask the server that made it (--url, DSEC_URL); if this one did, its node is down: start it again, or create a new sandbox")
	case epoch < n.node.Epoch:
		return fail(errs.SandboxLost, "node "+nodeID+" started afresh after sandbox "+id+" was created")
	case epoch > n.node.Epoch:
		return fail(errs.SandboxNotFound, "no sandbox "+id)
	case e == nil:
		return r.view(n), nil, nil
	case !e.lostAt.IsZero():
		return fail(errs.SandboxLost, "the node "+nodeID+" of sandbox "+id+" was lost")
	}
	return r.view(n), e.sb, nil
}

// Filter selects sandboxes.
type Filter struct {
	Labels map[string]string
	State  v1.State
	After  string // an id
	Limit  int    // 0: no limit
}

func (f *Filter) match(sb *v1.Sandbox) bool {
	if f.State != "" && sb.State != f.State {
		return false
	}
	return hasLabels(sb, f.Labels)
}

func hasLabels(sb *v1.Sandbox, labels map[string]string) bool {
	for k, v := range labels {
		if got, ok := sb.Spec.Labels[k]; !ok || got != v {
			return false
		}
	}
	return true
}

// List returns a page, ordered by id. With labels it reads only the smallest of their
// indexes.
func (r *Registry) List(f Filter) v1.SandboxList {
	r.mu.RLock()
	defer r.mu.RUnlock()
	out := v1.SandboxList{Revision: r.rev, Items: []v1.Sandbox{}}
	x := &r.all
	for k, v := range f.Labels {
		l := r.labels[label{k, v}]
		if l == nil {
			return out
		}
		if l.n < x.n {
			x = l
		}
	}
	x.ascend(f.After, func(e *entry) bool {
		if f.match(e.sb) {
			out.Items = append(out.Items, *e.sb)
		}
		return f.Limit == 0 || len(out.Items) < f.Limit
	})
	return out
}

// Each calls do for each known sandbox, which must not be changed.
func (r *Registry) Each(do func(*v1.Sandbox)) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	for _, e := range r.sandboxes {
		do(e.sb)
	}
}

// States counts sandboxes by state.
func (r *Registry) States() map[v1.State]int {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return maps.Clone(r.states)
}
