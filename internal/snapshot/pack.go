package snapshot

import (
	"context"
	"io"
	"maps"
	"slices"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// Options of a Packing.
type Options struct {
	Upper int        // descriptor of the upper directory (O_PATH is enough); stays the caller's
	Blob  layer.Blob // takes file contents, from start to end
	Meta  io.Writer  // takes the metadata, at the end
	IDs   IDs        // whose the files are

	// LeaveOut are patterns of paths that the layer must not have. Of "/etc/app.key" the
	// exact path; "*", "?" and "[a-z]" stand for characters of one name, "**" for any number
	// of names; without a leading slash a pattern holds at any depth ("*.pem", ".aws/credentials"),
	// with a trailing one for directories only. What is in a directory that matches is left out with it.
	//
	// Left out is the change: what the layers below have at the path shows again, and
	// what the sandbox removed stays removed. All other names of a file go with the one that
	// matches. A file that came with a layer below is in that, not in the pack, and stays
	// there, also under a directory's new name.
	LeaveOut []string

	// Since is what the last Pack of this upper saw, if the layer is to go on top of that
	// one's (with nothing between that changes what it shows): only what changed since is in
	// it. ErrWhole if that cannot be done, as with other patterns to leave out; the layer is of
	// no use then.
	Since *Seen
	// Next, if set, is filled with what this Pack sees.
	Next  *Seen
	Still Still // for Pack; the zero value: nothing can be relied upon later, so that Next stays empty

	Platform Platform
	Limits   Limits
	// Progress, if set, is told bytes and entries so far, often.
	Progress func(bytes, entries int64)
}

// Packing makes a layer of the upper directory of an overlay: mounted on top of the layers that
// the overlay had, it shows what the overlay showed, to any sandbox.
//
// Its steps are Begin, as often as it is worth it Mark and ReadAhead, then Mark, Walk, Finish, and
// always Close. Nothing in the sandbox should run during Mark, and from the last one to the end of
// Walk (package freeze); anything may during the others. If
// something does, the result is one of: the layer, of a state that may never have been at any one
// moment but in which each file is whole, with a note if something vanished; or state_conflict,
// retryable, if a file was written while it was read. (Writes through a shared mapping cannot be
// seen.) What the sandbox does can never lead a walk out of the upper.
//
// Files' data is neither flushed nor synchronised; that is the caller's. The overlay must
// not have been mounted with metacopy=on: not_supported. Other errors: bad_request (a
// pattern), body_too_large (a limit), disk_full, request_canceled, internal_error.
type Packing struct {
	*packer
	meta     io.Writer
	root     *dir
	states   []state
	platform *platformNode
}

// Begin starts a Packing. After an error there is nothing to close.
func Begin(o Options) (*Packing, error) {
	states, err := compileLeaveOut(o.LeaveOut)
	if err != nil {
		return nil, err
	}
	w := newWriter(o.Blob, o.IDs, o.Limits, o.Progress)
	p := &packer{writer: w, links: map[uint64]*link{}, remember: len(states) > 0, memory: o.memory()}
	if p.since != nil && !slices.Equal(p.since.patterns, o.LeaveOut) {
		return nil, ErrWhole
	}
	root, err := w.dirs.root(o.Upper)
	if err != nil {
		w.dirs.close()
		return nil, err
	}
	return &Packing{packer: p, meta: o.Meta, root: root, states: states, platform: o.Platform.tree()}, nil
}

// Mark says that all stands still.
func (k *Packing) Mark(s Still) { k.still = still{s.Since.Add(-racy), mappedBelow(k.root, s.Mapped)} }

// Walk reads the upper, but for the contents that were read ahead and are as they were.
func (k *Packing) Walk(ctx context.Context) error {
	k.b.Named()
	if k.mapped == nil { // nothing can be relied upon later
		k.next = nil
	}
	return k.walk(ctx, k.root, k.states, k.platform)
}

// Finish writes the metadata of what Walk has read.
func (k *Packing) Finish() (layer.Result, Manifest, error) {
	res, man, err := k.finish(k.meta)
	if err == nil {
		k.keep(k.top)
	}
	return res, man, err
}

// Close lets go of the upper.
func (k *Packing) Close() { k.dirs.close() }

// Pack is a Packing of what stands still all the time.
func Pack(ctx context.Context, o Options) (layer.Result, Manifest, error) {
	k, err := Begin(o)
	if err != nil {
		return layer.Result{}, Manifest{}, err
	}
	defer k.Close()
	if !o.Still.Since.IsZero() {
		k.Mark(o.Still)
	}
	if err := k.Walk(ctx); err != nil {
		return layer.Result{}, k.man, err
	}
	return k.Finish()
}

// packer walks one upper.
type packer struct {
	*writer
	memory
	ahead    map[uint64]*readAhead // files' contents, by inode
	top      *seenNode
	links    map[uint64]*link // files with several names, by inode
	remember bool             // names may have to be taken back
	frames   []*frame
}

// link is what is known of a file with several names.
type link struct {
	entry layer.Handle
	known bool // entry is set
	out   bool // one of its names is left out, and so all are
	below bool // it is in the layer below, by a name that is the same: no other name can be added to it
	names []named
}

type named struct {
	dir  layer.Dir
	seen *seenNode
	name string
}

// frame is a directory on the way to where the walk is.
type frame struct {
	dir      *dir
	st       unix.Stat_t
	items    []item
	out      layer.Dir
	states   []state
	platform *platformNode
	opaque   bool
	ours     bool      // the platform's own, if nothing comes into it
	was      *seenNode // the same directory in the layer below, if that has it
	now      *seenNode
	has      map[string]bool // names, where the layer below has the directory
	left     bool            // left out with all that is in it
}

// walk goes through the tree without recursion: its depth is the sandbox's choice.
func (p *packer) walk(ctx context.Context, root *dir, states []state, platform *platformNode) error {
	if err := p.enter(nil, root, states, platform, false); err != nil {
		return err
	}
	for len(p.frames) > 0 {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.RequestCanceled, phase, "pack", err)
		}
		f := p.frames[len(p.frames)-1]
		if len(f.items) == 0 {
			if err := p.leave(f); err != nil {
				return err
			}
			continue
		}
		it := f.items[0]
		f.items = f.items[1:]
		if err := p.entry(ctx, f, it); vanished(err) {
			p.attrs.note("vanished while it was packed (the sandbox was not frozen)")
		} else if err != nil {
			return wrap(f.dir, it.name, "pack", err)
		}
	}
	return nil
}

func (p *packer) entry(ctx context.Context, f *frame, it item) error {
	if it.typ == unix.S_IFCHR {
		white, err := p.isWhiteout(f.dir, it.name)
		if err != nil {
			return err
		}
		if white {
			if f.left {
				return nil
			}
			if f.now != nil {
				p.see(f.now, it.name, &seenNode{white: true})
			}
			if prev := f.was.child(it.name); prev != nil && prev.white {
				return nil
			}
			return p.whiteout(f.out, it.name)
		}
	}
	states, left := match(f.states, it.name, it.typ == unix.S_IFDIR)
	if left && !f.left {
		p.man.leaveOut(f.dir, it.name)
	}
	left = left || f.left
	if left && f.was.child(it.name) != nil {
		return ErrWhole // it is in the layer below
	}
	if it.typ == unix.S_IFDIR {
		return p.enter(f, child(f.dir, it.name), states, f.platform.child(it.name), left)
	}
	if left && !p.remember {
		return nil
	}
	if same, err := p.unchanged(f, it.name); same || err != nil {
		return err
	}
	fl, err := p.known(f.dir, it, f.platform.child(it.name))
	if fl == nil && err == nil {
		fl, err = p.open(f.dir, it)
	}
	if err != nil {
		return err
	}
	defer fl.close()
	var known *link
	if fl.st.Nlink > 1 {
		if known = p.links[fl.st.Ino]; known == nil {
			known = &link{}
			p.links[fl.st.Ino] = known
		}
	}
	switch {
	case known != nil && known.below:
		return ErrWhole
	case left:
		if known != nil {
			return p.banish(known)
		}
		return nil
	case known != nil && known.out:
		p.man.leaveOut(f.dir, it.name)
		if f.was.child(it.name) != nil {
			return ErrWhole
		}
		return nil
	case known != nil && known.known:
		p.man.HardLinks++
		p.seeFile(f, it.name, &fl.st)
		err = f.out.Link(it.name, known.entry)
	default:
		err = p.content(ctx, f, it.name, fl, known)
	}
	if err == nil && known != nil && p.remember {
		known.names = append(known.names, named{f.out, f.now, it.name})
	}
	return err
}

// content adds a file that is seen for the first time.
func (p *packer) content(ctx context.Context, f *frame, name string, fl *file, known *link) error {
	if fl.ahead != nil {
		p.man.Regular++
		p.seeFile(f, name, &fl.st)
		if known != nil {
			known.entry, known.known = fl.ahead.entry, true
		}
		return f.out.Place(name, fl.ahead.entry)
	}
	a, m, err := p.attrs.attr(fl.fd, &fl.st, fl.opath)
	if err != nil {
		return err
	}
	if m.metacopy {
		return errs.New(errs.NotSupported, phase, "a file's content is in another layer: the overlay was mounted with metacopy=on")
	}
	if f.platform.child(name).isFile(fl.fd, &fl.st, a.UID, a.GID, len(a.Xattrs)) {
		if f.was.child(name) != nil {
			return ErrWhole // the layer below has another one
		}
		return nil
	}
	p.seeFile(f, name, &fl.st)
	e, err := p.add(ctx, f.out, name, fl, a)
	if known != nil {
		known.entry, known.known = e, true
	}
	return err
}

// banish leaves out a file with all its names: a secret is one under every name.
func (p *packer) banish(l *link) error {
	if p.since != nil {
		return ErrWhole // the layer below may have another name of it
	}
	if !l.out && l.known {
		p.attrs.note("further names of files that were left out")
	}
	l.out = true
	for _, n := range l.names {
		n.dir.Remove(n.name)
		if n.seen != nil {
			delete(n.seen.below, n.name)
		}
	}
	l.names = nil
	return nil
}

// unchanged tells whether the layer below has the file as it is.
func (p *packer) unchanged(f *frame, name string) (bool, error) {
	prev := f.was.child(name)
	if prev == nil || prev.unsure || prev.isDir() {
		return false, nil
	}
	fd, err := p.dirs.fd(f.dir)
	if err != nil {
		return false, err
	}
	var st unix.Stat_t
	if err := unix.Fstatat(fd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil || !prev.same(&st) {
		return false, err
	}
	if st.Nlink > 1 {
		l := p.links[st.Ino]
		if l == nil {
			l = &link{}
			p.links[st.Ino] = l
		}
		if l.known || l.out {
			return false, ErrWhole
		}
		l.below = true
	}
	p.seeFile(f, name, &st)
	return true, nil
}

func (p *packer) seeFile(f *frame, name string, st *unix.Stat_t) {
	if f.now != nil {
		p.see(f.now, name, p.node(st))
	}
}

// enter begins a directory. parent is nil for the root.
func (p *packer) enter(parent *frame, d *dir, states []state, platform *platformNode, left bool) error {
	if left && !p.remember {
		return nil
	}
	f := &frame{dir: d, states: states, platform: platform, left: left}
	fd, err := p.dirs.fd(d)
	if err != nil {
		return err
	}
	if err := unix.Fstat(fd, &f.st); err != nil {
		return err
	}
	a, m, err := p.attrs.attr(fd, &f.st, false)
	if err != nil {
		return err
	}
	if m.redirect != "" && !left {
		if err := checkRedirect(m.redirect); err != nil {
			return errs.New(errs.ImageCorrupt, phase, err.Error())
		}
	}
	if f.items, err = p.dirs.list(d); err != nil {
		return err
	}
	if p.since != nil {
		f.has = make(map[string]bool, len(f.items))
		for _, it := range f.items {
			f.has[it.name] = true
		}
	}
	if !left {
		if err := p.lookBack(parent, f, m); err != nil {
			return err
		}
	}
	switch {
	case left:
	case parent == nil:
		f.out, err = p.b.Root(a)
	case f.was != nil: // the layer below says what shows of those below it
		f.out, err = p.dir(parent.out, d.name, a, false, "")
	default:
		f.ours = platform.isDir(a.UID, a.GID, a.Perm, len(a.Xattrs), m)
		f.opaque = m.opaque
		f.out, err = p.dir(parent.out, d.name, a, m.opaque, m.redirect)
	}
	p.frames = append(p.frames, f)
	return err
}

// lookBack finds the directory of frame f in the layer below, and refuses what a layer on top
// of that cannot say. Where the layer below has nothing at all, or the directory hides what is
// below it, f.was stays nil: all of it is packed.
func (p *packer) lookBack(parent, f *frame, m marks) error {
	if p.next != nil {
		f.now = p.node(&f.st)
		f.now.opaque, f.now.redirect = m.opaque, m.redirect
		if parent == nil {
			p.top = f.now
		} else {
			p.see(parent.now, f.dir.name, f.now)
		}
	}
	if p.since == nil {
		return nil
	}
	prev := p.since.root
	if parent != nil {
		prev = parent.was.child(f.dir.name)
	}
	switch {
	case prev.isDir() && prev.ino == f.st.Ino && prev.opaque == m.opaque && prev.redirect == m.redirect:
		f.was = prev
	case m.redirect != "", parent == nil, prev != nil && !m.opaque:
		return ErrWhole
	}
	return nil
}

// removed adds whiteouts for what the layer below has in the directory and the upper has not
// any more.
func (p *packer) removed(f *frame) error {
	if f.was == nil {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(f.was.below)) {
		if f.has[name] {
			continue
		}
		if f.was.below[name].white {
			return ErrWhole // what is below shows again
		}
		if err := p.whiteout(f.out, name); err != nil {
			return err
		}
	}
	return nil
}

// leave ends a directory.
func (p *packer) leave(f *frame) error {
	p.frames = p.frames[:len(p.frames)-1]
	defer p.dirs.drop(f.dir)
	if err := p.removed(f); err != nil {
		return wrap(f.dir, "", "pack", err)
	}
	if f.was != nil && len(p.frames) > 0 && f.out.Len() == 0 && f.was.same(&f.st) {
		p.man.Dirs--
		p.frames[len(p.frames)-1].out.Remove(f.dir.name)
		return nil
	}
	if f.ours && f.out.Len() == 0 {
		p.man.Dirs--
		if f.opaque {
			p.man.Opaque--
		}
		up := p.frames[len(p.frames)-1]
		up.out.Remove(f.dir.name)
		if up.now != nil {
			delete(up.now.below, f.dir.name)
		}
		if up.was.child(f.dir.name) != nil {
			return ErrWhole // the layer below has one with something in it
		}
		return nil
	}
	var st unix.Stat_t
	if f.dir.fd >= 0 && (unix.Fstat(f.dir.fd, &st) != nil || st.Ctim != f.st.Ctim) {
		p.attrs.note("directories changed while they were packed (the sandbox was not frozen)")
	}
	return nil
}
