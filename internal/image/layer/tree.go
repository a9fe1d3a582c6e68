package layer

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

const (
	phase = "image.layer"

	nameMax    = 255
	targetMax  = 4095
	maxHops    = 40 // symlinks followed in one path, as the kernel's limit
	permBits   = 0o7777
	defDirPerm = 0o755
	noID       = ^uint32(0)
	nobody     = 65534
)

// Attr is what every entry has besides its content.
type Attr struct {
	Perm     uint32 // permission bits with setuid, setgid and sticky
	UID, GID uint32
	Sec      int64 // modification time
	Nsec     uint32
	Xattrs   []Xattr
}

// Xattr is one extended attribute, with its full name.
type Xattr struct {
	Name  string
	Value []byte
}

// Options bound a build. Zero values mean the defaults.
type Options struct {
	InlineMax    int   // contents up to this many bytes are inlined (default 1 KiB; negative: none)
	InlineBudget int64 // in all at most this many (default 32 MiB); later small files go to the data blob
	MaxBytes     int64 // logical bytes of all files (default 1 TiB)
	MaxEntries   int64 // entries (default 8 Mi)
	MaxMemory    int64 // bytes of memory that the tree may take, about (default 1 GiB: some two million files)
	// Progress, if set, is told bytes and entries taken in so far.
	Progress func(bytes, entries int64)
}

func (o *Options) fill() {
	if o.InlineMax == 0 {
		o.InlineMax = 1 << 10
	}
	if o.InlineMax > blockSize/2 {
		o.InlineMax = blockSize / 2
	}
	if o.InlineBudget == 0 {
		o.InlineBudget = 32 << 20
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 1 << 40
	}
	if o.MaxEntries == 0 {
		o.MaxEntries = 8 << 20
	}
	if o.MaxMemory == 0 {
		o.MaxMemory = 1 << 30
	}
}

// inode is one file of any type; several nodes may name it.
type inode struct {
	mode     uint32 // type and permissions
	uid, gid uint32
	rdev     uint32
	sec      int64
	nsec     uint32
	xattrs   []Xattr
	size     int64
	small    []byte // inlined content, or a symlink's target
	extent   extent // content in the data blob

	place place // set by the encoder
}

type node struct {
	name     string
	parent   *node
	ino      *inode
	children map[string]*node // nil unless a directory
	gen      int              // image layer that last set it
}

// Builder collects one layer. It is not safe for concurrent use.
//
// Paths are slash-separated and relative to the layer's root; a leading slash or
// "./" is dropped, ".." is refused. A parent that is a symlink is followed inside
// the tree only, as in a chroot. Missing parents are made (0755, root, time 0).
// An entry replaces what had its name before, except that a directory over a
// directory keeps the children.
type Builder struct {
	opts    Options
	root    *node
	data    *dataWriter
	gen     int
	entries int64
	bytes   int64
	loose   bool // what was counted is of files that have no name yet
	inlined int64
	memory  int64 // what the tree takes, about; what is replaced counts on
	skipped map[string]int64
}

// NewBuilder starts a layer whose contents are written to data.
func NewBuilder(data Blob, opts Options) *Builder {
	opts.fill()
	return &Builder{
		opts:    opts,
		root:    newDir("", nil, 0),
		data:    newDataWriter(data),
		skipped: map[string]int64{},
	}
}

func newDir(name string, parent *node, gen int) *node {
	return &node{
		name: name, parent: parent, gen: gen,
		ino:      &inode{mode: unix.S_IFDIR | defDirPerm},
		children: map[string]*node{},
	}
}

// Entries and Bytes are what was taken in so far.
func (b *Builder) Entries() int64 { return b.entries }

// Bytes returns the logical bytes of all files taken in so far.
func (b *Builder) Bytes() int64 { return b.bytes }

// Skipped counts what an image cannot hold and was left out, by kind.
func (b *Builder) Skipped() map[string]int64 { return b.skipped }

// Skip records that something of the given kind was left out.
func (b *Builder) Skip(kind string) { b.skipped[kind]++ }

// Dir adds a directory, or sets the attributes of an existing one.
func (b *Builder) Dir(path string, a Attr) error {
	ino, err := b.newInode(path, unix.S_IFDIR, a)
	if err != nil {
		return err
	}
	parts, err := split(path)
	if err != nil {
		return err
	}
	if len(parts) == 0 {
		b.root.ino, b.root.gen = ino, b.gen
		return nil
	}
	parent, err := b.parentOf(path, parts)
	if err != nil {
		return err
	}
	name := strings.Clone(parts[len(parts)-1])
	if old := parent.children[name]; old != nil && old.children != nil {
		old.ino, old.gen = ino, b.gen
		return nil
	}
	parent.children[name] = &node{name: name, parent: parent, ino: ino, gen: b.gen, children: map[string]*node{}}
	return nil
}

// File adds a regular file of size bytes read from r. If r is a [Sparse], its
// holes are skipped instead of read.
func (b *Builder) File(ctx context.Context, path string, a Attr, size int64, r io.Reader) error {
	ino, err := b.newInode(path, unix.S_IFREG, a)
	if err != nil {
		return err
	}
	parent, name, err := b.place(path)
	if err != nil {
		return err
	}
	if err := b.fill(ctx, path, ino, size, r); err != nil {
		return err
	}
	b.set(parent, name, ino)
	return nil
}

// fill takes in a regular file's content.
func (b *Builder) fill(ctx context.Context, path string, ino *inode, size int64, r io.Reader) (err error) {
	if size < 0 {
		return corrupt(path, "negative size", nil)
	}
	if size > b.opts.MaxBytes-b.bytes {
		return errs.New(errs.BodyTooLarge, phase, fmt.Sprintf("image holds more than the limit of %d bytes at %s", b.opts.MaxBytes, quote(path)))
	}
	ino.size = size
	progress := func(n int64) {
		b.bytes += n
		if b.opts.Progress != nil {
			b.opts.Progress(b.bytes, b.entries)
		}
	}
	if size > 0 && size <= int64(b.opts.InlineMax) && b.inlined+size <= b.opts.InlineBudget {
		ino.small = make([]byte, size)
		if _, err := io.ReadFull(r, ino.small); err != nil {
			return readError(path, err)
		}
		b.inlined += size
		progress(size)
		return b.hold(path, size)
	}
	if ino.extent, err = b.data.put(ctx, path, size, r, progress); err != nil {
		return err
	}
	ino.extent.chunks = slices.Clip(ino.extent.chunks)
	return b.hold(path, 4*int64(len(ino.extent.chunks)))
}

// Symlink adds a symbolic link.
func (b *Builder) Symlink(path, target string, a Attr) error {
	if err := checkTarget(path, target); err != nil {
		return err
	}
	a.Perm = 0o777
	ino, err := b.newInode(path, unix.S_IFLNK, a)
	if err != nil {
		return err
	}
	if err := b.hold(path, int64(len(target))); err != nil {
		return err
	}
	ino.small, ino.size = []byte(target), int64(len(target))
	return b.put(path, ino)
}

func checkTarget(path, target string) error {
	switch {
	case target == "":
		return corrupt(path, "symlink without a target", nil)
	case len(target) > targetMax:
		return corrupt(path, fmt.Sprintf("symlink target of %d bytes (limit %d)", len(target), targetMax), nil)
	case strings.IndexByte(target, 0) >= 0:
		return corrupt(path, "symlink target with a NUL byte", nil)
	}
	return nil
}

// Special adds a device, fifo or socket; typ is its S_IF bits.
func (b *Builder) Special(path string, typ, major, minor uint32, a Attr) error {
	rdev, err := deviceNumber(path, typ, major, minor)
	if err != nil {
		return err
	}
	ino, err := b.newInode(path, typ, a)
	if err != nil {
		return err
	}
	ino.rdev = rdev
	return b.put(path, ino)
}

// deviceNumber encodes the number of a device; fifos and sockets have none.
func deviceNumber(path string, typ, major, minor uint32) (uint32, error) {
	switch typ {
	case unix.S_IFCHR, unix.S_IFBLK:
		if major > 0xfff || minor > 0xfffff {
			return 0, corrupt(path, fmt.Sprintf("device number %d:%d out of range", major, minor), nil)
		}
		return minor&0xff | major<<8 | (minor&^0xff)<<12, nil
	case unix.S_IFIFO, unix.S_IFSOCK:
		return 0, nil
	}
	return 0, errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("file type %#o of %s", typ, quote(path)))
}

// Link adds path as another name of the file that target names.
func (b *Builder) Link(path, target string) error {
	tparts, err := split(target)
	if err != nil {
		return corrupt(path, "hard link to "+quote(target)+" outside the image", err)
	}
	old := b.root
	if len(tparts) > 0 {
		dir, err := b.resolve(target, tparts[:len(tparts)-1], false)
		if err != nil {
			return err
		}
		old = nil
		if dir != nil {
			old = dir.children[tparts[len(tparts)-1]]
		}
	}
	switch {
	case old == nil:
		return corrupt(path, "hard link to "+quote(target)+", which is not in the image", nil)
	case old.children != nil:
		return corrupt(path, "hard link to the directory "+quote(target), nil)
	}
	if err := b.count(path); err != nil {
		return err
	}
	if err := b.holdEntry(path, 0); err != nil {
		return err
	}
	return b.put(path, old.ino)
}

// What parts of the tree take of memory, the encoder's share included, as measured.
const (
	entryCost = 448 // an inode, its node and its slot in the directory
	dirCost   = 512 // a directory, beyond an entry
	xattrCost = 64  // an xattr, beyond its bytes
	nameCost  = 3   // each byte of a name: its own, and the directory's block
)

// hold counts n bytes of memory that path's entry takes.
func (b *Builder) hold(path string, n int64) error {
	if b.memory += n; b.memory > b.opts.MaxMemory {
		return errs.New(errs.BodyTooLarge, phase, fmt.Sprintf("the names and attributes of the image take more than the limit of %d bytes of memory at %s", b.opts.MaxMemory, quote(path))).
			Advise("an image holds some two million files; leave out what is not needed, or bring it into the sandbox otherwise")
	}
	return nil
}

// holdEntry counts an entry.
func (b *Builder) holdEntry(path string, typ uint32) error {
	name := strings.TrimRight(path, "/")
	name = name[strings.LastIndexByte(name, '/')+1:]
	n := int64(entryCost + nameCost*min(len(name), nameMax))
	if typ == unix.S_IFDIR {
		n += dirCost
	}
	return b.hold(path, n)
}

func (b *Builder) count(path string) error {
	if b.entries++; b.entries > b.opts.MaxEntries {
		return errs.New(errs.BodyTooLarge, phase, fmt.Sprintf("image holds more than the limit of %d entries at %s", b.opts.MaxEntries, quote(path)))
	}
	if b.opts.Progress != nil {
		b.opts.Progress(b.bytes, b.entries)
	}
	return nil
}

func (b *Builder) newInode(path string, typ uint32, a Attr) (*inode, error) {
	if err := b.count(path); err != nil {
		return nil, err
	}
	if err := b.holdEntry(path, typ); err != nil {
		return nil, err
	}
	ino := &inode{mode: typ | a.Perm&permBits, uid: a.UID, gid: a.GID, sec: a.Sec, nsec: a.Nsec}
	// The kernel has no such id, and would let no one, root included, at the file.
	for _, id := range []*uint32{&ino.uid, &ino.gid} {
		if *id == noID {
			*id = nobody
			b.Skip("owner -1 (now nobody)")
		}
	}
	if a.Nsec >= 1e9 {
		return nil, corrupt(path, "nanoseconds out of range", nil)
	}
	for _, x := range a.Xattrs {
		if _, _, ok := xattrIndex(x.Name); !ok {
			b.Skip("xattr " + xattrClass(x.Name))
			continue
		}
		if err := b.hold(path, int64(xattrCost+len(x.Name)+len(x.Value))); err != nil {
			return nil, err
		}
		ino.xattrs = append(ino.xattrs, Xattr{strings.Clone(x.Name), x.Value}) // not all that it was cut out of
	}
	sort.Slice(ino.xattrs, func(i, j int) bool { return ino.xattrs[i].Name < ino.xattrs[j].Name })
	for i := 1; i < len(ino.xattrs); i++ {
		if ino.xattrs[i].Name == ino.xattrs[i-1].Name {
			return nil, corrupt(path, "the xattr "+quote(ino.xattrs[i].Name)+" twice", nil)
		}
	}
	if _, err := xattrSize(ino.xattrs); err != nil {
		return nil, errs.New(errs.ImageUnsupported, phase, "xattrs of "+quote(path)).Because(err)
	}
	return ino, nil
}

// place finds the directory that an entry other than a directory goes into.
func (b *Builder) place(path string) (*node, string, error) {
	parts, err := split(path)
	if err != nil {
		return nil, "", err
	}
	if len(parts) == 0 {
		return nil, "", corrupt(path, "the root is not a directory", nil)
	}
	parent, err := b.parentOf(path, parts)
	// A clone: a name that is cut out of a tar's extended header would keep all of that.
	return parent, strings.Clone(parts[len(parts)-1]), err
}

func (b *Builder) put(path string, ino *inode) error {
	parent, name, err := b.place(path)
	if err != nil {
		return err
	}
	b.set(parent, name, ino)
	return nil
}

func (b *Builder) set(parent *node, name string, ino *inode) {
	parent.children[name] = &node{name: name, parent: parent, ino: ino, gen: b.gen}
}

func (b *Builder) parentOf(path string, parts []string) (*node, error) {
	return b.resolve(path, parts[:len(parts)-1], true)
}

// resolve walks parts from the root, following symlinks inside the tree. With
// create, missing directories are made; without, nil stands for them.
func (b *Builder) resolve(path string, parts []string, create bool) (*node, error) {
	cur, hops := b.root, 0
	for len(parts) > 0 {
		p := parts[0]
		parts = parts[1:]
		if p == ".." { // only from a symlink's target
			if cur.parent != nil {
				cur = cur.parent
			}
			continue
		}
		next := cur.children[p]
		switch {
		case next == nil && !create:
			return nil, nil
		case next == nil:
			if len(p) > nameMax {
				return nil, corrupt(path, "a name longer than 255 bytes", nil)
			}
			if err := b.count(path); err != nil {
				return nil, err
			}
			if err := b.holdEntry(p, unix.S_IFDIR); err != nil {
				return nil, err
			}
			p = strings.Clone(p)
			next = newDir(p, cur, b.gen)
			cur.children[p] = next
		case next.children != nil:
		case next.ino.mode&unix.S_IFMT == unix.S_IFLNK:
			if hops++; hops > maxHops {
				return nil, corrupt(path, "too many symlinks in the path", nil)
			}
			target := string(next.ino.small)
			if target[0] == '/' {
				cur = b.root
			}
			var more []string
			for t := range strings.SplitSeq(target, "/") {
				if t != "" && t != "." {
					more = append(more, t)
				}
			}
			parts = append(more, parts...)
			continue
		default:
			return nil, corrupt(path, quote(p)+" in its path is not a directory", nil)
		}
		cur = next
	}
	return cur, nil
}

// split checks and cuts a path; the root is the empty slice.
func split(path string) ([]string, error) {
	if strings.IndexByte(path, 0) >= 0 {
		return nil, corrupt(path, "a name with a NUL byte", nil)
	}
	parts := make([]string, 0, strings.Count(path, "/")+1)
	for p := range strings.SplitSeq(path, "/") {
		switch {
		case p == "" || p == ".":
		case p == "..":
			return nil, corrupt(path, `a name with ".." in it`, nil)
		case len(p) > nameMax:
			return nil, corrupt(path, "a name longer than 255 bytes", nil)
		default:
			parts = append(parts, p)
		}
	}
	return parts, nil
}

func corrupt(path, what string, cause error) error {
	return errs.New(errs.ImageCorrupt, phase, quote(path)+": "+what).Because(cause)
}

// quote shortens and quotes a name that may hold anything.
func quote(s string) string {
	if len(s) > 200 {
		s = s[:120] + "…" + s[len(s)-60:]
	}
	return fmt.Sprintf("%q", s)
}
