package snapshot

import (
	"errors"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Seen is what a Pack saw of an upper, so that the next one of the same upper, whose layer
// goes on top of the first's, has only what changed since: files are known by inode, time of
// change and size, and those that are the same are not even opened. Its zero value knows
// nothing. It is for one goroutine.
type Seen struct {
	root     *seenNode
	patterns []string // what was left out: another choice changes what the layer has
	entries  int
}

// Entries is how many names it remembers; 0: it is of no use.
func (s *Seen) Entries() int {
	if s == nil || s.root == nil {
		return 0
	}
	return s.entries
}

// ErrWhole says that what changed since a Seen cannot be told as a layer on top of its own,
// such as directories that were renamed: pack without it.
var ErrWhole = errors.New("the changes since the last snapshot cannot be told by themselves")

// Bounds of a Seen: what it remembers takes about 150 bytes a name.
const maxSeen = 200_000

// racy is how long before the sandbox stood still a file's time of change cannot be relied
// upon: the kernel's clock for it moves in steps of up to 10 ms, so that a write afterwards may
// not change it.
const racy = 50 * time.Millisecond

// seenNode is a name that a layer has.
type seenNode struct {
	ino      uint64
	ctime    unix.Timespec
	size     int64
	typ      uint32 // S_IF bits
	white    bool   // a whiteout
	unsure   bool   // it may change without a trace
	opaque   bool
	redirect string
	below    map[string]*seenNode // of directories
}

func (n *seenNode) isDir() bool { return n != nil && n.typ == unix.S_IFDIR }

func (n *seenNode) child(name string) *seenNode {
	if n == nil {
		return nil
	}
	return n.below[name]
}

// same tells whether the file is as it was.
func (n *seenNode) same(st *unix.Stat_t) bool {
	return n != nil && !n.unsure && n.typ == st.Mode&unix.S_IFMT && n.ino == st.Ino && n.ctime == st.Ctim && n.size == st.Size
}

// memory is the part of a pack that looks back and remembers.
type memory struct {
	next  *Seen // nil: nothing is remembered
	since *Seen // nil: the layer has all
	still
	forgets bool // there is too much
}

// Still says what stands still: since when nothing in the sandbox was written, and the files
// (absolute paths) that programs have mapped to write to, whose memory changes without a trace
// in the file's times. The path "" stands for files that have a name which is not known.
type Still struct {
	Since  time.Time
	Mapped map[string]bool
}

// still is a moment in which nothing in the sandbox ran.
type still struct {
	before time.Time // a file whose time of change is earlier shows every write since
	mapped *mapped
}

// unsure tells whether the file may have changed since, or change, without a trace.
func (s *still) unsure(st *unix.Stat_t) bool {
	return !time.Unix(st.Ctim.Sec, st.Ctim.Nsec).Before(s.before) || st.Mode&unix.S_IFMT == unix.S_IFREG && s.mapped.has(st.Ino)
}

// mapped are the inodes of files that programs have mapped to write to.
type mapped struct {
	all    bool // which they are is not known
	inodes map[uint64]bool
}

func (m *mapped) has(ino uint64) bool { return m != nil && (m.all || m.inodes[ino]) }

// mappedBelow finds the inodes of paths in the upper of root. What is not there has not been
// written to, or has no name.
func mappedBelow(root *dir, paths map[string]bool) *mapped {
	m := &mapped{inodes: map[uint64]bool{}}
	for path := range paths {
		rel := strings.TrimPrefix(path, "/")
		if rel == "" {
			m.all = true
			continue
		}
		fd, err := openBelow(root.fd, rel, unix.O_PATH)
		if err == nil {
			var st unix.Stat_t
			err = unix.Fstat(fd, &st)
			unix.Close(fd)
			m.inodes[st.Ino] = true
		}
		if err != nil && !vanished(err) && err != unix.ENOTDIR {
			m.all = true
		}
	}
	return m
}

func (o *Options) memory() memory {
	m := memory{next: o.Next}
	if o.Since.Entries() > 0 {
		m.since = o.Since
	}
	if m.next != nil {
		*m.next = Seen{patterns: slices.Clone(o.LeaveOut)}
	}
	return m
}

// node is what to remember of a file.
func (m *memory) node(st *unix.Stat_t) *seenNode {
	return &seenNode{ino: st.Ino, ctime: st.Ctim, size: st.Size, typ: st.Mode & unix.S_IFMT, unsure: m.unsure(st)}
}

// see remembers that a directory has the name.
func (m *memory) see(dir *seenNode, name string, n *seenNode) {
	if dir == nil || m.forgets {
		return
	}
	if m.next.entries++; m.next.entries > maxSeen {
		m.forgets = true
		return
	}
	if dir.below == nil {
		dir.below = map[string]*seenNode{}
	}
	dir.below[strings.Clone(name)] = n
}

func (m *memory) keep(root *seenNode) {
	if m.next != nil && !m.forgets {
		m.next.root = root
	}
}
