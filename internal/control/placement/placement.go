package placement

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/watcher"
)

const (
	sample      = 3 // power of k choices
	maxAttempts = 8
	retryAfter  = time.Second // when our own count says full
)

// Nodes is what placement reads; the registry implements it.
type Nodes interface {
	Loads() []watcher.NodeLoad
	// Known says whether a sandbox is already part of a node's load.
	Known(id string) bool
}

// Need is what a sandbox wants of its node.
type Need struct {
	Backend v1.Backend
	Digests []string // of the images it is composed of
	v1.Resources
}

// Attempt asks one edge to create the sandbox under id. An error of class Capacity,
// Unavailable or NoSpace lets the next edge be asked; any other is final.
type Attempt func(ctx context.Context, node v1.Node, id string) error

// Placer places sandboxes for one apiserver.
type Placer struct {
	nodes Nodes
	newID func(v1.Node) string

	mu       sync.Mutex
	rand     *rand.Rand
	inFlight map[string]map[string]v1.Resources // node → sandbox id → what it will use
}

// New returns a Placer. newID makes the id of a sandbox on a node; random spreads the load.
func New(nodes Nodes, newID func(v1.Node) string, random rand.Source) *Placer {
	return &Placer{nodes: nodes, newID: newID, rand: rand.New(random), inFlight: map[string]map[string]v1.Resources{}}
}

// Place finds an edge on which attempt succeeds. The error names the last sandbox id tried.
// Errors: errs.NoNode; errs.NodeFull with the resource that is short; errs.SpecTooLarge
// if no node could take it if it were empty; attempt's.
func (p *Placer) Place(ctx context.Context, need Need, attempt Attempt) error {
	var refused refusals
	tried := map[string]bool{}
	for range maxAttempts {
		node, id, err := p.reserve(need, tried)
		if err != nil {
			return refused.report(err)
		}
		err = attempt(ctx, node, id)
		p.release(node.ID, id)
		if err == nil {
			return nil
		}
		e := errs.Of(err)
		if e.Sandbox == "" || e.Node == "" {
			e = withPlace(e, node.ID, id)
		}
		if ctx.Err() != nil || !elsewhere(e) {
			return e
		}
		refused.add(e)
		tried[node.ID] = true
	}
	return refused.report(nil)
}

// withPlace returns a copy of e that names node and sandbox.
func withPlace(e *errs.Error, node, sandbox string) *errs.Error {
	c := *e
	if c.Node == "" {
		c.Node = node
	}
	if c.Sandbox == "" {
		c.Sandbox = sandbox
	}
	return &c
}

func elsewhere(e *errs.Error) bool {
	switch e.Class() {
	case errs.Capacity, errs.Unavailable, errs.NoSpace:
		return true
	}
	return e.Code == errs.SpecTooLarge // for that node, by what it says of itself
}

// reserve chooses among the nodes not tried yet and counts the sandbox there.
func (p *Placer) reserve(need Need, tried map[string]bool) (v1.Node, string, error) {
	loads := p.nodes.Loads()
	p.mu.Lock()
	defer p.mu.Unlock()
	cands, err := p.filter(loads, need, tried)
	if err != nil {
		return v1.Node{}, "", err
	}
	k := min(sample, len(cands))
	for i := range k { // a partial shuffle draws k without repetition
		j := i + p.rand.IntN(len(cands)-i)
		cands[i], cands[j] = cands[j], cands[i]
	}
	best := slices.MinFunc(cands[:k], func(a, b candidate) int {
		if c := cmp(a.fill, b.fill); c != 0 {
			return c
		}
		return 0 // the shuffle has already decided
	})
	id := p.newID(*best.node)
	if p.inFlight[best.node.ID] == nil {
		p.inFlight[best.node.ID] = map[string]v1.Resources{}
	}
	p.inFlight[best.node.ID][id] = need.Resources
	return *best.node, id, nil
}

func cmp(a, b float64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

func (p *Placer) release(node, id string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.inFlight[node], id)
	if len(p.inFlight[node]) == 0 {
		delete(p.inFlight, node)
	}
}

// candidate is a node that fits, with its fill after the sandbox is on it.
type candidate struct {
	node   *v1.Node
	fill   float64
	images bool // it has all that the sandbox is composed of
}

// filter returns the nodes that can take need, or why none can.
func (p *Placer) filter(loads []watcher.NodeLoad, need Need, tried map[string]bool) ([]candidate, error) {
	var (
		usable  []watcher.NodeLoad
		backend bool
		ready   int
		large   bool         // some node, now usable or not, has room for it when empty
		largest v1.Resources // what some node gives one sandbox, of each
	)
	for _, l := range loads {
		runs := slices.Contains(l.Node.Backends, need.Backend)
		fits := shortOf(mostOf(l.Node), v1.Resources{}, need.Resources) == nil
		if runs {
			large = large || fits
			largest = atLeast(largest, mostOf(l.Node))
		}
		if !l.Node.Ready || tried[l.Node.ID] {
			continue
		}
		ready++
		if !runs {
			continue
		}
		backend = true
		if fits {
			usable = append(usable, l)
		}
	}
	switch {
	case ready == 0 && len(tried) == 0:
		return nil, errs.New(errs.NoNode, "placement", fmt.Sprintf("no edge is ready (%d registered)", len(loads))).After(retryAfter)
	case ready == 0:
		return nil, errs.New(errs.NoNode, "placement", "no further edge is ready").After(retryAfter)
	case !backend:
		return nil, errs.New(errs.NoNode, "placement", fmt.Sprintf("no ready edge runs the backend %q", need.Backend)).With("backend", string(need.Backend)).After(retryAfter)
	case !large:
		return nil, tooLarge(largest, need.Resources)
	case len(usable) == 0:
		return nil, errs.New(errs.NodeFull, "placement", "the nodes that are large enough take nothing now").After(retryAfter)
	}

	cands := make([]candidate, 0, len(usable))
	var full *errs.Error
	for _, l := range usable {
		used := p.usedOn(l)
		short := shortOf(l.Node.Capacity, used, need.Resources)
		if short == nil {
			cands = append(cands, candidate{l.Node, fill(l.Node, used, need.Resources), hasAll(l, need.Digests)})
			continue
		}
		short.Node = l.Node.ID
		if full == nil {
			full = short
		}
	}
	if len(cands) == 0 {
		return nil, full
	}
	return near(cands), nil
}

// hasAll tells whether a node has all the images.
func hasAll(l watcher.NodeLoad, digests []string) bool {
	return !slices.ContainsFunc(digests, func(d string) bool { _, ok := l.Images[d]; return !ok })
}

// near keeps the candidates that have the images, or all of them if none has: any node can
// load an image from the object store.
func near(cands []candidate) []candidate {
	var have []candidate
	for _, c := range cands {
		if c.images {
			have = append(have, c)
		}
	}
	if len(have) == 0 {
		return cands
	}
	return have
}

// usedOn adds what is in flight from here and not yet part of the node's load.
func (p *Placer) usedOn(l watcher.NodeLoad) v1.Resources {
	used := l.Used
	for id, r := range p.inFlight[l.Node.ID] {
		if p.nodes.Known(id) {
			continue
		}
		used.Slots += r.Slots
		used.CPUMillis += r.CPUMillis
		used.MemoryBytes += r.MemoryBytes
	}
	return used
}

// shortOf returns the refusal if need does not fit, naming the resource; nil if it does.
// A capacity of 0 is no limit.
func shortOf(capacity, used, need v1.Resources) *errs.Error {
	for _, r := range []struct {
		name                 string
		capacity, used, need int64
	}{
		{"slots", capacity.Slots, used.Slots, need.Slots},
		{"memory", capacity.MemoryBytes, used.MemoryBytes, need.MemoryBytes},
		{"cpu", capacity.CPUMillis, used.CPUMillis, need.CPUMillis},
	} {
		if r.capacity == 0 || r.used+r.need <= r.capacity {
			continue
		}
		return errs.New(errs.NodeFull, "placement", fmt.Sprintf("not enough %s: %d of %d used, %d wanted", r.name, r.used, r.capacity, r.need)).
			With("resource", r.name).With("capacity", fmt.Sprint(r.capacity)).With("used", fmt.Sprint(r.used)).With("wanted", fmt.Sprint(r.need)).
			After(retryAfter)
	}
	return nil
}

// mostOf is what a node gives one sandbox; 0 is no limit.
func mostOf(n *v1.Node) v1.Resources {
	smaller := func(a, b int64) int64 {
		if a == 0 || b == 0 {
			return max(a, b)
		}
		return min(a, b)
	}
	return v1.Resources{
		Slots: smaller(n.Capacity.Slots, n.Largest.Slots), CPUMillis: smaller(n.Capacity.CPUMillis, n.Largest.CPUMillis),
		MemoryBytes: smaller(n.Capacity.MemoryBytes, n.Largest.MemoryBytes),
	}
}

// atLeast is the larger of each resource; 0 is no limit.
func atLeast(a, b v1.Resources) v1.Resources {
	larger := func(a, b int64) int64 {
		if a == unlimited || b == 0 {
			return unlimited
		}
		return max(a, b)
	}
	return v1.Resources{
		Slots: larger(a.Slots, b.Slots), CPUMillis: larger(a.CPUMillis, b.CPUMillis), MemoryBytes: larger(a.MemoryBytes, b.MemoryBytes),
	}
}

const unlimited = math.MaxInt64

// tooLarge says what could be asked for at most: no waiting helps.
func tooLarge(largest, need v1.Resources) *errs.Error {
	switch {
	case need.MemoryBytes > largest.MemoryBytes:
		return errs.New(errs.SpecTooLarge, "placement", fmt.Sprintf("memory: %d MiB are asked for, and the largest node gives a sandbox %d MiB at most",
			need.MemoryBytes>>20, largest.MemoryBytes>>20)).
			With("resource", "memory").With("wanted", fmt.Sprint(need.MemoryBytes)).With("largest", fmt.Sprint(largest.MemoryBytes))
	case need.CPUMillis > largest.CPUMillis:
		return errs.New(errs.SpecTooLarge, "placement", fmt.Sprintf("cpu: %g cores are asked for, and the largest node gives a sandbox %g at most",
			float64(need.CPUMillis)/1000, float64(largest.CPUMillis)/1000)).
			With("resource", "cpu").With("wanted", fmt.Sprint(need.CPUMillis)).With("largest", fmt.Sprint(largest.CPUMillis))
	}
	return errs.New(errs.SpecTooLarge, "placement", fmt.Sprintf("no node has both %d MiB of memory and %g cores", need.MemoryBytes>>20, float64(need.CPUMillis)/1000))
}

// fill is the fraction used of the scarcest resource, with need on it. What the edge
// reports counts if it is more than what we know of.
func fill(n *v1.Node, used, need v1.Resources) float64 {
	return max(
		frac(max(used.Slots, n.Allocated.Slots)+need.Slots, n.Capacity.Slots),
		frac(max(used.CPUMillis, n.Allocated.CPUMillis)+need.CPUMillis, n.Capacity.CPUMillis),
		frac(max(used.MemoryBytes, n.Allocated.MemoryBytes)+need.MemoryBytes, n.Capacity.MemoryBytes),
	)
}

func frac(used, capacity int64) float64 {
	if capacity == 0 {
		return 0
	}
	return float64(used) / float64(capacity)
}

// refusals collects why edges refused, to report the one that tells most.
type refusals struct{ best *errs.Error }

func (r *refusals) add(e *errs.Error) {
	if r.best == nil || rank(e) > rank(r.best) || rank(e) == rank(r.best) && e.RetryAfter < r.best.RetryAfter {
		r.best = e
	}
}

// report returns the report, given what ended the search.
func (r *refusals) report(end error) error {
	if r.best == nil {
		return end
	}
	if errors.Is(end, errs.NodeFull) {
		r.add(errs.Of(end))
	}
	return r.best
}

func rank(e *errs.Error) int {
	switch {
	case e.Code == errs.NodeFull && e.Details["resource"] != "":
		return 4
	case e.Code == errs.NodeFull:
		return 3
	case e.Class() == errs.NoSpace:
		return 2
	}
	return 1
}
