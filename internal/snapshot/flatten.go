package snapshot

import (
	"context"
	"errors"
	"io"
	"sort"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// FlattenOptions steer Flatten.
type FlattenOptions struct {
	// Layers are the mounts of neighbouring layers, lowest first; they stay the caller's.
	Layers []int
	// Bottom says that no layer is below the lowest: nothing is left to hide then, and
	// the result is a plain tree.
	Bottom bool

	Blob     layer.Blob
	Meta     io.Writer
	Limits   Limits
	Progress func(bytes, entries int64)
}

// Flatten merges neighbouring layers into one that shows the same, whatever layers it is
// put on (those that the lowest was on, or others) and whatever is put on it. Only link counts
// may differ: an overlay shows those of a layer, also of names that layers above removed.
//
// It resolves names as overlayfs does (ovl_lookup in the kernel), redirects included. Errors are those of Pack,
// and image_unsupported for marks that no sandbox's overlay makes.
func Flatten(ctx context.Context, o FlattenOptions) (layer.Result, Manifest, error) {
	if len(o.Layers) == 0 {
		return layer.Result{}, Manifest{}, errs.New(errs.BadRequest, phase, "no layers to flatten")
	}
	w := newWriter(o.Blob, IDs{}, o.Limits, o.Progress)
	defer w.dirs.close()
	f := &flattener{writer: w, links: map[inodeKey]layer.Handle{}}
	for _, fd := range o.Layers {
		root, err := w.dirs.root(fd)
		if err != nil {
			return layer.Result{}, Manifest{}, err
		}
		f.roots = append(f.roots, root)
	}
	f.bottom, f.sparse = o.Bottom, true
	if err := f.walk(ctx); err != nil {
		return layer.Result{}, f.man, err
	}
	return w.finish(o.Meta)
}

// flattener walks the merged tree of several layers.
type flattener struct {
	*writer
	roots  []*dir // by layer, lowest first
	bottom bool
	links  map[inodeKey]layer.Handle
	frames []*mergedFrame
}

type inodeKey struct {
	layer int
	ino   uint64
}

// merged is a directory of the merged tree: the directories of the layers that make it, the
// highest first, and where it goes on in the layers below all of them.
type merged struct {
	dirs  []*dir
	below *place
}

// place is a path in the layers below; nil is nowhere. It is kept as a chain of names, since
// trees may be deep.
type place struct {
	parent *place // nil: abs is the path
	name   string
	abs    string
}

func (p *place) String() string {
	var names []string
	for ; p.parent != nil; p = p.parent {
		names = append(names, p.name)
	}
	var b strings.Builder
	b.WriteString(strings.TrimSuffix(p.abs, "/"))
	for i := len(names) - 1; i >= 0; i-- {
		b.WriteString("/" + names[i])
	}
	return b.String()
}

// redirectFrom returns the redirect by which a directory called name in the merged directory
// that is at up gets to p.
func (p *place) redirectFrom(up *place, name string) string {
	switch {
	case p == nil:
		return ""
	case p.parent == nil || p.parent != up:
		return p.String()
	case p.name == name:
		return ""
	}
	return p.name
}

type mergedFrame struct {
	merged
	out   layer.Dir
	items []mergedItem
}

// mergedItem is a name and the highest of the directory's parts that has it.
type mergedItem struct {
	item
	top int
}

func (f *flattener) walk(ctx context.Context) error {
	root := merged{}
	for i := len(f.roots) - 1; i >= 0; i-- {
		root.dirs = append(root.dirs, f.roots[i])
	}
	if !f.bottom {
		root.below = &place{abs: "/"}
	}
	if err := f.enter(nil, "", root); err != nil {
		return err
	}
	for len(f.frames) > 0 {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.RequestCanceled, phase, "flatten", err)
		}
		fr := f.frames[len(f.frames)-1]
		if len(fr.items) == 0 {
			f.frames = f.frames[:len(f.frames)-1]
			continue
		}
		it := fr.items[0]
		fr.items = fr.items[1:]
		if err := f.entry(ctx, fr, it); err != nil {
			return wrap(fr.dirs[it.top], it.name, "flatten", err)
		}
	}
	return nil
}

func (f *flattener) entry(ctx context.Context, fr *mergedFrame, it mergedItem) error {
	d := fr.dirs[it.top]
	if it.typ == unix.S_IFDIR {
		m, err := f.lookup(fr.merged, it.name, it.top)
		if err != nil {
			return err
		}
		return f.enter(fr, it.name, m)
	}
	if it.typ == unix.S_IFCHR {
		white, err := f.isWhiteout(d, it.name)
		if err != nil {
			return err
		}
		if white {
			if fr.below == nil { // nothing there to hide
				return nil
			}
			return f.whiteout(fr.out, it.name)
		}
	}
	fl, err := f.open(d, it.item)
	if err != nil {
		return err
	}
	defer fl.close()
	key := inodeKey{d.layer, fl.st.Ino}
	if fl.st.Nlink > 1 {
		if e, ok := f.links[key]; ok {
			f.man.HardLinks++
			return fr.out.Link(it.name, e)
		}
	}
	a, m, err := f.attrs.attr(fl.fd, &fl.st, fl.opath)
	if err != nil {
		return err
	}
	if m.metacopy {
		return foreignMarks()
	}
	e, err := f.add(ctx, fr.out, it.name, fl, a)
	if err == nil && fl.st.Nlink > 1 {
		f.links[key] = e
	}
	return err
}

func foreignMarks() error {
	return errs.New(errs.ImageUnsupported, phase, "the layer was made by an overlay with metacopy or with whiteouts as xattrs")
}

// enter begins a directory; parent is nil for the root.
func (f *flattener) enter(parent *mergedFrame, name string, m merged) error {
	fd, err := f.dirs.fd(m.dirs[0])
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	a, _, err := f.attrs.attr(fd, &st, false)
	if err != nil {
		return err
	}
	fr := &mergedFrame{merged: m}
	if parent == nil {
		fr.out, err = f.b.Root(a)
	} else {
		opaque := m.below == nil && parent.below != nil
		fr.out, err = f.dir(parent.out, name, a, opaque, m.below.redirectFrom(parent.below, name))
	}
	if err != nil {
		return err
	}
	if fr.items, err = f.merge(m.dirs); err != nil {
		return err
	}
	f.frames = append(f.frames, fr)
	return nil
}

// merge lists the names of all parts of a directory.
func (f *flattener) merge(parts []*dir) ([]mergedItem, error) {
	var all []mergedItem
	seen := map[string]bool{}
	for i, d := range parts {
		items, err := f.dirs.list(d)
		if err != nil {
			return nil, err
		}
		for _, it := range items {
			if len(parts) > 1 {
				if seen[it.name] {
					continue
				}
				seen[it.name] = true
			}
			all = append(all, mergedItem{it, i})
		}
	}
	sort.Slice(all, func(i, j int) bool { return all[i].name < all[j].name })
	return all, nil
}

// lookup finds the parts of the directory name in m, whose highest one is in m.dirs[top].
// A redirect changes the name for the layers below: in the same directory, or as a path from
// the root, which is then followed in every layer below, whether it has part of m or not.
func (f *flattener) lookup(m merged, name string, top int) (merged, error) {
	w := way{f: f, rest: []string{name}}
	for i := top; i < len(m.dirs) && !w.stop; i++ {
		if err := w.through(m.dirs[i]); err != nil {
			return merged{}, err
		}
		if !w.abs {
			continue
		}
		for l := m.dirs[i].layer - 1; l >= 0 && !w.stop; l-- {
			if err := w.through(f.roots[l]); err != nil {
				return merged{}, err
			}
		}
		break
	}
	out := merged{dirs: w.found}
	switch {
	case w.stop, f.bottom:
	case w.abs:
		out.below = &place{abs: "/" + strings.Join(w.rest, "/")}
	case m.below != nil:
		out.below = &place{parent: m.below, name: w.rest[0]}
	}
	return out, nil
}

// way is a search for a directory on its way down the layers.
type way struct {
	f     *flattener
	rest  []string // the names to it: one, or with abs all from the root
	abs   bool
	stop  bool // no layer below counts
	found []*dir
}

// through takes the search through one layer, from the directory at: names are followed as
// they were at the layer's start, and those for the next layer come out of it.
func (w *way) through(at *dir) error {
	names := w.rest
	next := append([]string(nil), names...) // for the layers below, the names not walked yet included
	for i, name := range names {
		last := i == len(names)-1
		walked := len(next) - (len(names) - i) // names in next before this one
		d := child(at, name)
		m, kind, err := w.f.probe(d)
		if err != nil {
			return err
		}
		switch kind {
		case isNothing:
			w.rest = next
			return nil
		case isOther:
			w.stop = true
			return nil
		}
		if last {
			w.found = append(w.found, d)
		}
		switch {
		case m.xwhite || m.metacopy:
			return foreignMarks()
		case m.opaque:
			w.stop = true
		case m.redirect == "":
		default:
			to, abs := strings.CutPrefix(m.redirect, "/")
			after := next[walked+1:]
			before := next[:walked]
			if abs {
				w.abs, before = true, nil
			}
			next = append(append(append([]string(nil), before...), strings.Split(to, "/")...), after...)
		}
		at = d
	}
	w.rest = next
	return nil
}

type kind int

const (
	isNothing kind = iota
	isDir
	isOther // a whiteout, or what is not a directory
)

// probe looks what d is.
func (f *flattener) probe(d *dir) (marks, kind, error) {
	fd, err := f.dirs.fd(d)
	switch {
	case errors.Is(err, unix.ENOENT):
		return marks{}, isNothing, nil
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return marks{}, isOther, nil
	case err != nil:
		return marks{}, isOther, err
	}
	var m marks
	err = f.attrs.xattrs(fd, false, func(name string, value []byte) error {
		if !strings.HasPrefix(name, overlayPrefix) {
			return nil
		}
		return f.attrs.xattr(&layer.Attr{}, &m, name, value)
	})
	if err == nil && m.redirect != "" && !m.opaque {
		if err := checkRedirect(m.redirect); err != nil {
			return m, isDir, errs.New(errs.ImageCorrupt, phase, err.Error())
		}
	}
	return m, isDir, err
}
