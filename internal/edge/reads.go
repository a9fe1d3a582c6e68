package edge

import (
	"cmp"
	"slices"
	"sync"
	"time"

	v1 "dsec/api/v1"
)

// Reads counts, for each sandbox, what its programs read of image data that was not all on
// the node, and what was fetched because of it. It is told by the cache of image data, which knows
// a reader's thread and no sandboxes. Counts begin anew with the process.
type Reads struct {
	owner func(pid int) (sandbox string, ok bool)
	now   func() time.Time

	mu     sync.Mutex
	by     map[string]*v1.ImageReads
	others v1.ImageReads // of readers that are no sandbox's: a node's own, or one that has ended
	gone   v1.ImageReads // of sandboxes that were removed
	pids   map[int]reader
}

// reader is who a thread was found to be.
type reader struct {
	sandbox string // empty: no sandbox's
	at      time.Time
}

// A thread's number is not given to another within the time, and that many threads are remembered.
const (
	readerTime = time.Second
	maxReaders = 4096
)

// NewReads returns counts of nothing; owner finds the sandbox of a thread.
func NewReads(owner func(pid int) (sandbox string, ok bool), now func() time.Time) *Reads {
	return &Reads{owner: owner, now: now, by: map[string]*v1.ImageReads{}, pids: map[int]reader{}}
}

// Note counts a read. It is called while the reader waits, so that it still is who it was.
func (r *Reads) Note(pid int, read, fetched int64, waited time.Duration) {
	if r == nil {
		return
	}
	now := r.now()
	r.mu.Lock()
	who, ok := r.pids[pid]
	r.mu.Unlock()
	if !ok || now.Sub(who.at) >= readerTime {
		who = reader{at: now}
		if pid > 0 {
			who.sandbox, _ = r.owner(pid)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.pids) >= maxReaders {
		clear(r.pids)
	}
	r.pids[pid] = who
	c := r.by[who.sandbox]
	if c == nil {
		c = &r.others
	}
	c.Add(v1.ImageReads{ReadBytes: read, FetchedBytes: fetched, WaitSeconds: waited.Seconds()})
}

// begin counts for a sandbox from now on.
func (r *Reads) begin(id string) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.by[id] == nil {
		r.by[id] = &v1.ImageReads{}
	}
}

// end ends it: what the sandbox had counts as that of removed ones.
func (r *Reads) end(id string) {
	if r == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.by[id]; c != nil {
		r.gone.Add(*c)
		delete(r.by, id)
	}
}

// Of returns a sandbox's counts.
func (r *Reads) Of(id string) v1.ImageReads {
	if r == nil {
		return v1.ImageReads{}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.by[id]; c != nil {
		return *c
	}
	return v1.ImageReads{}
}

// SandboxReads are the counts of one sandbox.
type SandboxReads struct {
	Sandbox string
	v1.ImageReads
}

// Most returns the sandboxes for which most was fetched, n at most, and the sums: of all sandboxes,
// removed ones too, and of readers that are no sandbox's.
func (r *Reads) Most(n int) (most []SandboxReads, sandboxes, others v1.ImageReads) {
	r.mu.Lock()
	defer r.mu.Unlock()
	sandboxes, others = r.gone, r.others
	for id, c := range r.by {
		sandboxes.Add(*c)
		if c.ReadBytes > 0 {
			most = append(most, SandboxReads{id, *c})
		}
	}
	slices.SortFunc(most, func(a, b SandboxReads) int {
		return cmp.Or(cmp.Compare(b.FetchedBytes, a.FetchedBytes), cmp.Compare(a.Sandbox, b.Sandbox))
	})
	return most[:min(n, len(most))], sandboxes, others
}
