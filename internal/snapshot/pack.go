package snapshot

import (
	"context"
	"io"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// Options of a Pack.
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

	Platform Platform
	Limits   Limits
	// Progress, if set, is told bytes and entries so far, often.
	Progress func(bytes, entries int64)
}

// Pack makes a layer of the upper directory of an overlay: mounted on top of the layers that
// the overlay had, it shows what the overlay showed, to any sandbox.
//
// Nothing in the sandbox should run meanwhile (package freeze). If something does, the result
// is one of: the layer, of a state that may never have been at any one moment but in which
// each file is whole, with a note if something vanished; or state_conflict, retryable, if a file
// was written while it was read. (Writes through a shared mapping cannot be seen.) What the
// sandbox does can never lead the walk out of the upper.
//
// Files' data is neither flushed nor synchronised; that is the caller's. The overlay must
// not have been mounted with metacopy=on: not_supported. Other errors: bad_request (a
// pattern), body_too_large (a limit), disk_full, request_canceled, internal_error.
func Pack(ctx context.Context, o Options) (layer.Result, Manifest, error) {
	states, err := compileLeaveOut(o.LeaveOut)
	if err != nil {
		return layer.Result{}, Manifest{}, err
	}
	w := newWriter(o.Blob, o.IDs, o.Limits, o.Progress)
	defer w.dirs.close()
	p := &packer{writer: w, links: map[uint64]*link{}, remember: len(states) > 0}
	root, err := w.dirs.root(o.Upper)
	if err != nil {
		return layer.Result{}, Manifest{}, err
	}
	if err := p.walk(ctx, root, states, o.Platform.tree()); err != nil {
		return layer.Result{}, p.man, err
	}
	return w.finish(o.Meta)
}

// packer walks one upper.
type packer struct {
	*writer
	links    map[uint64]*link // files with several names, by inode
	remember bool             // names may have to be taken back
	frames   []*frame
}

// link is what is known of a file with several names.
type link struct {
	entry layer.Handle
	known bool // entry is set
	out   bool // one of its names is left out, and so all are
	names []named
}

type named struct {
	dir  layer.Dir
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
	ours     bool // the platform's own, if nothing comes into it
	left     bool // left out with all that is in it
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
			return p.whiteout(f.out, it.name)
		}
	}
	states, left := match(f.states, it.name, it.typ == unix.S_IFDIR)
	if left && !f.left {
		p.man.leaveOut(f.dir, it.name)
	}
	left = left || f.left
	if it.typ == unix.S_IFDIR {
		return p.enter(f, child(f.dir, it.name), states, f.platform.child(it.name), left)
	}
	if left && !p.remember {
		return nil
	}
	fl, err := p.open(f.dir, it)
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
	case left:
		if known != nil {
			p.banish(known)
		}
		return nil
	case known != nil && known.out:
		p.man.leaveOut(f.dir, it.name)
		return nil
	case known != nil && known.known:
		p.man.HardLinks++
		err = f.out.Link(it.name, known.entry)
	default:
		err = p.content(ctx, f, it.name, fl, known)
	}
	if err == nil && known != nil && p.remember {
		known.names = append(known.names, named{f.out, it.name})
	}
	return err
}

// content adds a file that is seen for the first time.
func (p *packer) content(ctx context.Context, f *frame, name string, fl *file, known *link) error {
	a, m, err := p.attrs.attr(fl.fd, &fl.st, fl.opath)
	if err != nil {
		return err
	}
	if m.metacopy {
		return errs.New(errs.NotSupported, phase, "a file's content is in another layer: the overlay was mounted with metacopy=on")
	}
	if f.platform.child(name).isFile(fl.fd, &fl.st, a.UID, a.GID, len(a.Xattrs)) {
		return nil
	}
	e, err := p.add(ctx, f.out, name, fl, a)
	if known != nil {
		known.entry, known.known = e, true
	}
	return err
}

// banish leaves out a file with all its names: a secret is one under every name.
func (p *packer) banish(l *link) {
	if !l.out && l.known {
		p.attrs.note("further names of files that were left out")
	}
	l.out = true
	for _, n := range l.names {
		n.dir.Remove(n.name)
	}
	l.names = nil
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
	switch {
	case left:
	case parent == nil:
		f.out, err = p.b.Root(a)
	default:
		f.ours = platform.isDir(a.UID, a.GID, a.Perm, len(a.Xattrs), m)
		f.opaque = m.opaque
		f.out, err = p.dir(parent.out, d.name, a, m.opaque, m.redirect)
	}
	p.frames = append(p.frames, f)
	return err
}

// leave ends a directory.
func (p *packer) leave(f *frame) error {
	p.frames = p.frames[:len(p.frames)-1]
	defer p.dirs.drop(f.dir)
	if f.ours && f.out.Len() == 0 {
		p.man.Dirs--
		if f.opaque {
			p.man.Opaque--
		}
		p.frames[len(p.frames)-1].out.Remove(f.dir.name)
		return nil
	}
	var st unix.Stat_t
	if f.dir.fd >= 0 && (unix.Fstat(f.dir.fd, &st) != nil || st.Ctim != f.st.Ctim) {
		p.attrs.note("directories changed while they were packed (the sandbox was not frozen)")
	}
	return nil
}
