package container

import (
	"context"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"dsec/internal/image/lazy"
)

// readers is a book of accounts that tests write.
type readers struct {
	mu   sync.Mutex
	pids map[string]int
	uses map[string]lazy.Use
	more map[string]bool // set and not told of
	asks int             // how often somebody asked for one account
}

func newReaders() *readers {
	return &readers{pids: map[string]int{}, uses: map[string]lazy.Use{}, more: map[string]bool{}}
}

func (r *readers) Open(id string, pid int, before lazy.Use) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.pids[id], r.uses[id] = pid, before
	return nil
}

func (r *readers) Of(id string) lazy.Use {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.asks++
	return r.uses[id]
}

func (r *readers) Changed(told func(string) bool) {
	r.mu.Lock()
	var ids []string
	for id := range r.more {
		ids = append(ids, id)
	}
	r.mu.Unlock()
	for _, id := range ids {
		if told(id) {
			r.mu.Lock()
			delete(r.more, id)
			r.mu.Unlock()
		}
	}
}

func (r *readers) Close(id string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.pids, id)
	delete(r.uses, id)
}

func (r *readers) set(id string, u lazy.Use) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.uses[id], r.more[id] = u, true
}

// What a sandbox read counts on when its node's process is another, also if that one was killed.
func TestReadsOutliveTheProcess(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	open := func(r *readers) *Backend {
		t.Helper()
		b := n.open(t)
		b.Close() // to be opened again with readers
		cfg := b.cfg
		cfg.Readers = r
		b, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	s := spec("sreads")
	first := newReaders()
	b1 := open(first)
	i1, err := b1.Create(t.Context(), s, nil)
	if err != nil {
		t.Fatal(err)
	}
	if pid := first.pids[s.ID]; pid != i1.(*instance).handle.PID || pid == 0 {
		t.Errorf("the account is of process %d", pid)
	}
	file := filepath.Join(n.writable, "sandboxes", s.ID, readsFile)
	used := lazy.Use{Reads: 3, Read: 4096, Waited: 1024, Wait: 2 * time.Second, Fetched: 8192}
	first.set(s.ID, used)
	for end := time.Now().Add(20 * time.Second); b1.loadReads(s.ID) != used; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("it is not saved")
		}
	}
	// As after a kill: the first process lets go of nothing.
	second := newReaders()
	b2 := open(second)
	i2, err := b2.Adopt(t.Context(), s, i1.Handle())
	if err != nil {
		t.Fatal(err)
	}
	u, err := i2.Usage(t.Context())
	if err != nil || u.ImageReadBytes != 4096 || u.ImageWaitedBytes != 1024 || u.ImageWaitSeconds != 2 || u.ImageFetchedBytes != 8192 {
		t.Errorf("%+v, %v", u, err)
	}
	// One that ends saves all that it knows.
	used.Read = 1 << 40
	second.set(s.ID, used)
	if err := b2.Close(); err != nil {
		t.Fatal(err)
	}
	if len(second.pids) != 0 {
		t.Errorf("accounts that are still open: %v", second.pids)
	}
	if got := b1.loadReads(s.ID); got != used {
		t.Errorf("%+v", got)
	}
	// Half a file is none.
	if err := os.Truncate(file, 10); err != nil {
		t.Fatal(err)
	}
	if got := b1.loadReads(s.ID); got != (lazy.Use{}) {
		t.Errorf("of half a file: %+v", got)
	}
	// A removed sandbox has no account, and no file comes back.
	first.set(s.ID, lazy.Use{Read: 5})
	if err := b1.Delete(t.Context(), s.ID); err != nil {
		t.Fatal(err)
	}
	if len(first.pids) != 0 {
		t.Errorf("accounts of removed sandboxes: %v", first.pids)
	}
	b1.saveAllReads()
	if left, err := b1.Audit(t.Context()); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
	if err := b1.Close(); err != nil {
		t.Error(err)
	}
}

// What sandboxes that read nothing did is not even looked at: thousands of them cost nothing each second.
func TestReadsOfIdleSandboxesAreNotLookedAt(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	b := n.open(t)
	b.Close() // to be opened again with readers
	cfg, r := b.cfg, newReaders()
	cfg.Readers = r
	b, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	b.stopSaving() // the test saves
	b.stopSaving = nil
	defer b.Close()
	for _, id := range []string{"sidle", "sreader"} {
		if _, err := b.Create(t.Context(), spec(id), nil); err != nil {
			t.Fatal(err)
		}
		defer b.Delete(context.Background(), id)
	}
	used := lazy.Use{Reads: 1, Read: 4096}
	r.set("sreader", used)
	r.set("screating", used) // of a create that has not ended: it is not forgotten
	for range 3 {
		b.saveAllReads()
	}
	if r.asks != 1 || b.loadReads("sreader") != used {
		t.Errorf("%d accounts were looked at, and %+v is saved", r.asks, b.loadReads("sreader"))
	}
	if !r.more["screating"] {
		t.Error("what could not be saved yet is forgotten")
	}
}
