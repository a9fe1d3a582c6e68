package layer

import (
	"path"
	"strings"
)

// Names by which an image layer says what it removes from the layers below.
const (
	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	metaPrefix     = ".wh..wh." // bookkeeping of the format's origin; not content
)

// NextLayer begins the next layer of an image: removals from here on concern
// only what earlier layers set.
func (b *Builder) NextLayer() { b.gen++ }

// Whiteout applies p if it is a removal marker of an image layer and reports
// whether it was one.
func (b *Builder) Whiteout(p string) (bool, error) {
	dir, name := path.Split(strings.TrimRight(p, "/"))
	if !strings.HasPrefix(name, whiteoutPrefix) {
		return false, nil
	}
	if err := b.count(p); err != nil {
		return true, err
	}
	parts, err := split(dir)
	if err != nil {
		return true, err
	}
	if name != opaqueName && strings.HasPrefix(name, metaPrefix) {
		return true, nil
	}
	n, err := b.resolve(p, parts, false)
	if err != nil || n == nil {
		return true, err
	}
	if name == opaqueName {
		b.purgeChildren(n)
		return true, nil
	}
	victim := name[len(whiteoutPrefix):]
	if victim == "" || victim == "." || victim == ".." {
		return true, corrupt(p, "whiteout of no name", nil)
	}
	if c := n.children[victim]; c != nil && b.purge(c) {
		delete(n.children, victim)
	}
	return true, nil
}

func (b *Builder) purgeChildren(n *node) {
	for name, c := range n.children {
		if b.purge(c) {
			delete(n.children, name)
		}
	}
}

// purge removes what earlier layers set at n and below; it reports whether
// nothing is left of n.
func (b *Builder) purge(n *node) bool {
	b.purgeChildren(n)
	if n.gen == b.gen {
		return false
	}
	if len(n.children) > 0 { // a parent of this layer's entries, without its own
		*n = node{name: n.name, parent: n.parent, ino: newDir("", nil, 0).ino, children: n.children, gen: b.gen}
		return false
	}
	return true
}
