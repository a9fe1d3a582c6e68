package layer

import (
	"context"
	"fmt"
	"io"
	"slices"
	"sort"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// Dir is a directory of the tree being built. Its methods are the Builder's for callers
// that walk a tree themselves: they take one name instead of a path, follow no symlink,
// and cost the same at any depth. A name is any bytes but NUL and "/".
type Dir struct {
	b *Builder
	n *node
}

// Handle is something in the tree that can get more names.
type Handle struct{ ino *inode }

// Root sets the attributes of the tree's root and returns it.
func (b *Builder) Root(a Attr) (Dir, error) {
	if err := b.Dir("", a); err != nil {
		return Dir{}, err
	}
	return Dir{b, b.root}, nil
}

// Dir adds a directory to d.
func (d Dir) Dir(name string, a Attr) (Dir, error) {
	ino, err := d.newInode(name, unix.S_IFDIR, a)
	if err != nil {
		return Dir{}, err
	}
	n := &node{name: name, parent: d.n, ino: ino, gen: d.b.gen, children: map[string]*node{}}
	d.n.children[name] = n
	return Dir{d.b, n}, nil
}

// File adds a regular file, as [Builder.File].
func (d Dir) File(ctx context.Context, name string, a Attr, size int64, r io.Reader) (Handle, error) {
	ino, err := d.newInode(name, unix.S_IFREG, a)
	if err != nil {
		return Handle{}, err
	}
	if err := d.b.fill(ctx, name, ino, size, r); err != nil {
		return Handle{}, err
	}
	d.b.set(d.n, name, ino)
	return Handle{ino}, nil
}

// Symlink adds a symbolic link.
func (d Dir) Symlink(name, target string, a Attr) (Handle, error) {
	if err := checkTarget(name, target); err != nil {
		return Handle{}, err
	}
	a.Perm = 0o777
	ino, err := d.newInode(name, unix.S_IFLNK, a)
	if err != nil {
		return Handle{}, err
	}
	ino.small, ino.size = []byte(target), int64(len(target))
	d.b.set(d.n, name, ino)
	return Handle{ino}, nil
}

// Special adds a device, fifo or socket, as [Builder.Special].
func (d Dir) Special(name string, typ, major, minor uint32, a Attr) (Handle, error) {
	rdev, err := deviceNumber(name, typ, major, minor)
	if err != nil {
		return Handle{}, err
	}
	ino, err := d.newInode(name, typ, a)
	if err != nil {
		return Handle{}, err
	}
	ino.rdev = rdev
	d.b.set(d.n, name, ino)
	return Handle{ino}, nil
}

// Link adds another name of e.
func (d Dir) Link(name string, e Handle) error {
	if err := checkName(name); err != nil {
		return err
	}
	if err := d.b.count(name); err != nil {
		return err
	}
	d.b.set(d.n, name, e.ino)
	return nil
}

// SetXattr sets one more xattr of the directory itself.
func (d Dir) SetXattr(name string, value []byte) error {
	ino := d.n.ino
	at := sort.Search(len(ino.xattrs), func(i int) bool { return ino.xattrs[i].Name >= name })
	if at < len(ino.xattrs) && ino.xattrs[at].Name == name {
		ino.xattrs[at].Value = value
	} else {
		ino.xattrs = slices.Insert(slices.Clip(ino.xattrs), at, Xattr{Name: name, Value: value})
	}
	if _, _, ok := xattrIndex(name); !ok {
		return errs.New(errs.ImageUnsupported, phase, "xattr "+quote(name))
	}
	if _, err := xattrSize(ino.xattrs); err != nil {
		return errs.New(errs.ImageUnsupported, phase, "xattrs of "+quote(d.n.name)).Because(err)
	}
	return nil
}

// Loose takes in a regular file that has no name yet, for [Dir.Place]. Content of one that gets
// none is cut out of the data blob by Finish, as after [Dir.Remove]. If it fails, also because
// something of the file would have to be left out, the file is forgotten and the builder good for
// more, unless the error is of the blob or of a limit.
//
// All loose files are taken in before anything else is. They count against the limits of
// entries and bytes twice, on their own and when they are placed.
func (b *Builder) Loose(ctx context.Context, name string, a Attr, size int64, r io.Reader) (Handle, error) {
	if !b.loose && b.entries > 0 {
		return Handle{}, errs.New(errs.InternalError, phase, "a file without a name, after others")
	}
	b.loose = true
	skipped := b.skipped
	b.skipped = map[string]int64{}
	ino, err := b.newInode(name, unix.S_IFREG, a)
	if err == nil && len(b.skipped) > 0 {
		err = errs.New(errs.ImageUnsupported, phase, "something of "+quote(name))
	}
	b.skipped = skipped
	if err != nil {
		return Handle{}, err
	}
	if err := b.fill(ctx, name, ino, size, r); err != nil {
		if perr := b.data.pad(); perr != nil { // the next begins at a block
			err = perr
		}
		return Handle{}, err
	}
	return Handle{ino}, nil
}

// Named ends the taking in of loose files.
func (b *Builder) Named() {
	if b.loose {
		b.entries, b.bytes, b.loose = 0, 0, false
	}
}

// Place gives a loose file its first name.
func (d Dir) Place(name string, e Handle) error {
	if err := d.Link(name, e); err != nil {
		return err
	}
	if e.ino.size > d.b.opts.MaxBytes-d.b.bytes {
		return errs.New(errs.BodyTooLarge, phase, fmt.Sprintf("image holds more than the limit of %d bytes at %s", d.b.opts.MaxBytes, quote(name)))
	}
	d.b.bytes += e.ino.size
	return nil
}

// Remove takes a name away again. Content that no name is left of is cut out of the data
// blob by Finish, which then has to read the rest of it back.
func (d Dir) Remove(name string) { delete(d.n.children, name) }

// Len is how many names d has.
func (d Dir) Len() int { return len(d.n.children) }

func (d Dir) newInode(name string, typ uint32, a Attr) (*inode, error) {
	if err := checkName(name); err != nil {
		return nil, err
	}
	return d.b.newInode(name, typ, a)
}

// checkName refuses what is not one name.
func checkName(name string) error {
	parts, err := split(name)
	if err == nil && (len(parts) != 1 || parts[0] != name) {
		err = corrupt(name, "not a name of a file", nil)
	}
	return err
}
