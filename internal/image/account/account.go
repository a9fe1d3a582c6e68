// Package account sums what owners of processes read of a node's image data. It knows an
// owner by the PID namespace of its processes, and must not know what a sandbox is. A
// [Book] is the Accountant of a cache (package lazy).
package account

import (
	"bytes"
	"cmp"
	"fmt"
	"os"
	"slices"
	"strconv"
	"sync"
	"time"

	"dsec/internal/image/lazy"

	"golang.org/x/sys/unix"
)

// threadTime is how long whose a thread is stays known. Its number is not another thread's
// so soon: that takes as many new threads as there are numbers, 32768 at least.
const (
	threadTime = 100 * time.Millisecond
	maxThreads = 4096
)

// Book holds the accounts. It is safe for concurrent use.
type Book struct {
	now func() time.Time
	own uint64 // this process's PID namespace

	mu      sync.Mutex
	owners  map[uint64]string // by PID namespace
	open    map[string]*entry
	threads map[int]thread
	changed map[string]struct{} // owners that used more since somebody was told
	owned   lazy.Use            // of all owners since New, those that are closed too
	others  lazy.Use
}

type entry struct {
	space uint64
	use   lazy.Use
}

type thread struct {
	owner string
	at    time.Time
}

// New makes a book without owners.
func New(now func() time.Time) (*Book, error) {
	own, err := space(os.Getpid())
	if err != nil {
		return nil, fmt.Errorf("find this process's PID namespace: %w", err)
	}
	return &Book{now: now, own: own, owners: map[uint64]string{}, open: map[string]*entry{}, threads: map[int]thread{}, changed: map[string]struct{}{}}, nil
}

// Open begins an account: all processes in the PID namespace of pid, and below it, are
// owner's, who has used before already. A namespace has one owner, the last.
func (b *Book) Open(owner string, pid int, before lazy.Use) error {
	s, err := space(pid)
	if err != nil {
		return fmt.Errorf("find the PID namespace of %d: %w", pid, err)
	}
	if s == b.own {
		return fmt.Errorf("process %d has no PID namespace of its own", pid)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.close(owner)
	b.owners[s], b.open[owner] = owner, &entry{s, before}
	clear(b.threads)
	return nil
}

// Close ends an account. What its readers still cause is nobody's.
func (b *Book) Close(owner string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.close(owner)
	clear(b.threads)
}

func (b *Book) close(owner string) {
	e := b.open[owner]
	if e == nil {
		return
	}
	delete(b.open, owner)
	delete(b.changed, owner)
	if b.owners[e.space] == owner { // the number may be another's namespace by now
		delete(b.owners, e.space)
	}
}

// Of returns what an owner used; zeros without an account.
func (b *Book) Of(owner string) lazy.Use {
	b.mu.Lock()
	defer b.mu.Unlock()
	if e := b.open[owner]; e != nil {
		return e.use
	}
	return lazy.Use{}
}

// Totals returns what was used since New, by all owners and by nobody that is known.
func (b *Book) Totals() (owned, others lazy.Use) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.owned, b.others
}

// Used is what one owner used.
type Used struct {
	Owner string
	lazy.Use
}

// Most returns the open accounts for which most was fetched, n at most.
func (b *Book) Most(n int) []Used {
	b.mu.Lock()
	all := make([]Used, 0, len(b.open))
	for owner, e := range b.open {
		if e.use.Read > 0 || e.use.Fetched > 0 {
			all = append(all, Used{owner, e.use})
		}
	}
	b.mu.Unlock()
	slices.SortFunc(all, func(x, y Used) int {
		return cmp.Or(cmp.Compare(y.Fetched, x.Fetched), cmp.Compare(y.Read, x.Read), cmp.Compare(x.Owner, y.Owner))
	})
	return all[:min(n, len(all))]
}

// Owner implements lazy.Accountant. It reads /proc/PID/ns/pid, which unlike a process's
// control groups is told without a lock of the whole machine.
func (b *Book) Owner(pid int) string {
	if pid <= 0 {
		return ""
	}
	now := b.now()
	b.mu.Lock()
	t, ok := b.threads[pid]
	b.mu.Unlock()
	if age := now.Sub(t.at); ok && age >= 0 && age < threadTime {
		return t.owner
	}
	s, err := space(pid)
	if err != nil {
		return ""
	}
	b.mu.Lock()
	owner, ok := b.owners[s]
	b.mu.Unlock()
	if !ok && s != b.own {
		owner = b.above(pid)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.threads) >= maxThreads {
		clear(b.threads)
	}
	b.threads[pid] = thread{owner, now}
	return owner
}

// above finds whose a process is that has a namespace within an owner's.
func (b *Book) above(pid int) string {
	fd, err := unix.Open(path(pid), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	for err == nil { // a namespace has at most 32 above it; this process's is the last that it may see
		var st unix.Stat_t
		if err := unix.Fstat(fd, &st); err != nil {
			break
		}
		b.mu.Lock()
		owner, ok := b.owners[st.Ino]
		b.mu.Unlock()
		if ok {
			unix.Close(fd)
			return owner
		}
		up, uerr := unix.IoctlRetInt(fd, unix.NS_GET_PARENT)
		unix.Close(fd)
		fd, err = up, uerr
	}
	if err == nil {
		unix.Close(fd)
	}
	return ""
}

// Count implements lazy.Accountant.
func (b *Book) Count(owner, _ string, u lazy.Use) {
	b.mu.Lock()
	defer b.mu.Unlock()
	e := b.open[owner]
	if e == nil {
		b.others.Add(u)
		return
	}
	e.use.Add(u)
	b.owned.Add(u)
	b.changed[owner] = struct{}{}
}

// Changed calls told for each owner that used more since it returned true for it. It looks at no others:
// most sandboxes read nothing for most of the time.
func (b *Book) Changed(told func(owner string) bool) {
	b.mu.Lock()
	changed := b.changed
	b.changed = map[string]struct{}{}
	b.mu.Unlock()
	for owner := range changed {
		if told(owner) {
			continue
		}
		b.mu.Lock()
		if b.open[owner] != nil {
			b.changed[owner] = struct{}{}
		}
		b.mu.Unlock()
	}
}

func path(pid int) string { return "/proc/" + strconv.Itoa(pid) + "/ns/pid" }

// space is the PID namespace that a process is in.
func space(pid int) (uint64, error) {
	var buf [64]byte
	n, err := unix.Readlink(path(pid), buf[:])
	if err != nil {
		return 0, err
	}
	s, ok := bytes.CutPrefix(buf[:n], []byte("pid:["))
	if !ok {
		return 0, fmt.Errorf("unexpected %s: %s", path(pid), buf[:n])
	}
	return strconv.ParseUint(string(bytes.TrimSuffix(s, []byte("]"))), 10, 64)
}
