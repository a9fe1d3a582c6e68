package watcher

import (
	"cmp"
	"slices"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// NodeLoad is an edge as placement sees it.
type NodeLoad struct {
	Node   *v1.Node            // shared, do not change
	Used   v1.Resources        // by the sandboxes that the registry knows, creates of this moment included
	Images map[string]struct{} // digests present; shared, do not change
}

// view returns n's document with its present readiness.
func (r *Registry) view(n *nodeState) v1.Node { return *n.shown }

// show renews n.shown; it is called after every change of n.
func (n *nodeState) show() {
	doc := n.node
	doc.Ready = n.ready()
	n.shown = &doc
}

func (n *nodeState) ready() bool { return n.declared && n.connected }

// Nodes returns all registered edges, ordered by id.
func (r *Registry) Nodes() []v1.Node {
	r.mu.RLock()
	defer r.mu.RUnlock()
	out := make([]v1.Node, 0, len(r.nodes))
	for _, n := range r.nodes {
		out = append(out, r.view(n))
	}
	slices.SortFunc(out, func(a, b v1.Node) int { return cmp.Compare(a.ID, b.ID) })
	return out
}

// Node returns one edge; errs.NodeNotFound.
func (r *Registry) Node(id string) (v1.Node, error) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	n := r.nodes[id]
	if n == nil {
		return v1.Node{}, errs.New(errs.NodeNotFound, "node.get", "no node "+id+" is registered")
	}
	return r.view(n), nil
}

// Loads returns all edges with their load.
func (r *Registry) Loads() []NodeLoad {
	r.mu.RLock()
	defer r.mu.RUnlock()
	out := make([]NodeLoad, 0, len(r.nodes))
	for _, n := range r.nodes {
		out = append(out, NodeLoad{Node: n.shown, Used: n.used, Images: n.images})
	}
	return out
}

// Known says whether the registry counts a sandbox (so that it is part of Used).
func (r *Registry) Known(id string) bool {
	r.mu.RLock()
	defer r.mu.RUnlock()
	_, ok := r.sandboxes[id]
	return ok || r.removed.has(id)
}

// SetImage records that a digest is, or is no longer, present on a node.
func (r *Registry) SetImage(node, digest string, present bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.nodes[node]
	if n == nil {
		return
	}
	images := make(map[string]struct{}, len(n.images)+1) // Loads hands the old one out
	for d := range n.images {
		images[d] = struct{}{}
	}
	if present {
		images[digest] = struct{}{}
	} else {
		delete(images, digest)
	}
	n.images = images
}

func (r *Registry) setImages(node v1.Node, list []v1.Image) {
	images := make(map[string]struct{}, len(list))
	for _, img := range list {
		images[img.Digest] = struct{}{}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.nodes[node.ID]; n != nil && n.node.Epoch == node.Epoch {
		n.images = images
	}
}

// nodeUp takes a registration, and says whether its watch has to be started afresh.
func (r *Registry) nodeUp(doc v1.Node) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.nodes[doc.ID]
	fresh := n == nil || n.node.Epoch != doc.Epoch || n.node.Address != doc.Address
	switch {
	case n == nil:
		n = &nodeState{}
		r.nodes[doc.ID] = n
		n.node, n.declared = doc, doc.Ready
		r.recount(n)
	case n.node.Epoch != doc.Epoch:
		r.loseOf(n.node, "node "+doc.ID+" started afresh")
		*n = nodeState{node: doc, declared: doc.Ready, stream: n.stream}
		r.recount(n)
	default:
		load := n.node // keep the load, which the watch tells better
		n.node = doc
		n.node.Allocated, n.node.Sandboxes, n.node.CreatesOK, n.node.CreatesFail = load.Allocated, load.Sandboxes, load.CreatesOK, load.CreatesFail
		n.node.Paused, n.node.Swap, n.node.Pressure = load.Paused, load.Swap, load.Pressure
		same := n.declared == doc.Ready && !fresh
		n.declared = doc.Ready
		n.show()
		if same {
			return false
		}
	}
	n.show()
	r.emitNode(n)
	return fresh
}

// recount makes n.used of the sandboxes known (a node that was lost is back).
func (r *Registry) recount(n *nodeState) {
	n.used = v1.Resources{}
	for _, e := range r.sandboxes {
		if e.sb.Node == n.node.ID && holdsResources(e.sb.State) && ownedBy(e.sb.ID, &n.node) {
			n.use(e.sb, 1)
		}
	}
}

func (r *Registry) emitNode(n *nodeState) {
	r.emit(v1.Event{Type: v1.EventNode, Node: n.shown})
}

// nodeLost forgets an edge; its sandboxes become lost.
func (r *Registry) nodeLost(doc v1.Node) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.nodes[doc.ID]
	if r.held || n == nil || n.node.Epoch != doc.Epoch {
		return false
	}
	n.connected = false
	n.show()
	r.loseOf(n.node, "node "+doc.ID+" is gone")
	r.emitNode(n)
	delete(r.nodes, doc.ID)
	return true
}

// Hold keeps what is known of nodes that leave from here on: a server that stops together with
// its node must not tell anybody that the sandboxes are lost, which go on running.
func (r *Registry) Hold() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.held = true
}

// loseOf marks all sandboxes of a node's epoch lost.
func (r *Registry) loseOf(doc v1.Node, why string) {
	now := r.cfg.Now()
	for _, e := range r.sandboxes {
		if e.sb.Node != doc.ID || !e.lostAt.IsZero() {
			continue
		}
		r.uncount(e)
		cause := errs.New(errs.SandboxLost, "watcher", why)
		cause.Node, cause.Sandbox = doc.ID, e.sb.ID
		sb := *e.sb
		ended := now.UTC()
		sb.State, sb.EndedAt, sb.Error = v1.StateLost, &ended, v1.ProblemOf(cause)
		e.sb, e.lostAt = &sb, now
		r.count(e)
		r.emit(v1.Event{Type: v1.EventState, Sandbox: e.sb})
	}
}

// sweep drops what has been lost for long. Its ids still read as lost, by their epoch.
func (r *Registry) sweep(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for id, e := range r.sandboxes {
		if !e.lostAt.IsZero() && now.Sub(e.lostAt) >= r.cfg.KeepLost {
			r.drop(id, false)
		}
	}
}

// streamOpened is called before an edge's watch is asked for. resumed: the edge answers,
// and what it told before still counts.
func (r *Registry) streamOpened(doc v1.Node, resumed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.nodes[doc.ID]
	if n == nil || n.node.Epoch != doc.Epoch {
		return
	}
	n.stream++
	n.reset = nil
	if resumed {
		n.connected = true
		n.show()
		if n.ready() {
			r.emitNode(n)
		}
	}
}

func (r *Registry) streamClosed(doc v1.Node) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.nodes[doc.ID]
	if n == nil || n.node.Epoch != doc.Epoch {
		return
	}
	was := n.ready()
	n.connected, n.synced = false, true
	n.show()
	if was {
		r.emitNode(n)
	}
	r.poke()
}

// applyEdge takes one event of an edge's watch.
func (r *Registry) applyEdge(doc v1.Node, ev v1.EdgeEvent) {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := r.nodes[doc.ID]
	if n == nil || n.node.Epoch != doc.Epoch {
		return
	}
	if ev.Reset {
		n.reset = make(map[string]struct{}, len(ev.Sandboxes))
	}
	for _, sb := range ev.Sandboxes {
		sb.Node = doc.ID
		if n.reset != nil {
			n.reset[sb.ID] = struct{}{}
		}
		r.put(sb, 0)
	}
	if n.reset != nil && !ev.More {
		r.endReset(n)
	}
	for _, id := range ev.Removed {
		r.drop(id, true)
	}
	was := n.ready()
	if ev.Node != nil {
		n.declared = ev.Node.Ready
		load := *ev.Node
		load.ID, load.Epoch, load.Address = n.node.ID, n.node.Epoch, n.node.Address
		n.node = load
	}
	// Of one that has just begun to tell what it has, lists would show a part.
	n.connected = n.connected || n.reset == nil
	n.show()
	if n.ready() != was {
		r.emitNode(n)
	}
	r.poke()
}

// endReset drops what an edge did not tell in its Reset. What was answered after this
// watch began may be younger than the Reset; its own event follows.
func (r *Registry) endReset(n *nodeState) {
	for id, e := range r.sandboxes {
		if _, told := n.reset[id]; !told && e.stream < n.stream && ownedBy(id, &n.node) {
			r.drop(id, true)
		}
	}
	n.reset, n.synced = nil, true
}
