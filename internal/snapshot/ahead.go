package snapshot

import (
	"context"
	"errors"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// Reading ahead is worth it from either on; less is read as fast as it is looked for.
const (
	worthBytes = 16 << 20
	worthFiles = 1000
)

// readAhead is a regular file whose content and attributes were taken in before the sandbox
// stood still. They are used if its inode, time of change and size are the same then: every
// change in between would have set the time, which is why the file counts only if that was old
// when the sandbox stood still for a moment before, and if nobody had mapped it to write to
// in that moment, or has now. A mapping that was made and ended in between sets the time by its first
// write, to one that is not old.
type readAhead struct {
	ctime unix.Timespec
	size  int64
	entry layer.Handle
}

func (r *readAhead) same(st *unix.Stat_t) bool {
	return r != nil && r.ctime == st.Ctim && r.size == st.Size
}

// known returns the regular file as it was read ahead, or nil if it was not or may be another.
func (p *packer) known(d *dir, it item, platform *platformNode) (*file, error) {
	if len(p.ahead) == 0 || it.typ != unix.S_IFREG || platform != nil && platform.file != nil {
		return nil, nil
	}
	fd, err := p.dirs.fd(d)
	if err != nil {
		return nil, err
	}
	f := &file{fd: -1}
	if err := unix.Fstatat(fd, it.name, &f.st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return nil, err
	}
	f.ahead = p.ahead[f.st.Ino]
	if f.st.Mode&unix.S_IFMT != unix.S_IFREG || !f.ahead.same(&f.st) || p.mapped.has(f.st.Ino) {
		return nil, nil
	}
	return f, nil
}

// Worth tells whether there is so much to read that was not read yet that ReadAhead is worth
// it. Of what changed just now it can make no use: wait is how long until it can.
func (k *Packing) Worth(ctx context.Context, now time.Time) (worth bool, wait time.Duration, err error) {
	var files, bytes, fresh int64
	err = k.scan(ctx, func(_ *dir, _ string, st *unix.Stat_t) error {
		if k.ahead[st.Ino].same(st) {
			return nil
		}
		n := min(st.Size, st.Blocks*512)
		files++
		bytes += n
		if !time.Unix(st.Ctim.Sec, st.Ctim.Nsec).Before(now.Add(-racy)) {
			fresh += n
		}
		return nil
	})
	if fresh >= worthBytes/2 {
		wait = racy + racy/5
	}
	return bytes >= worthBytes || files >= worthFiles, wait, err
}

// ReadAhead takes in what there is, while the sandbox runs: what Walk finds unchanged it does not
// read again. Mark was called before. Files that change meanwhile, or cannot be read, are left to
// Walk. It reads no file that is newer than the mark, so it ends whatever the sandbox does.
func (k *Packing) ReadAhead(ctx context.Context) error {
	if k.ahead == nil {
		k.ahead = map[uint64]*readAhead{}
	}
	return k.scan(ctx, func(d *dir, name string, st *unix.Stat_t) error {
		if k.unsure(st) || k.ahead[st.Ino].same(st) {
			return nil
		}
		delete(k.ahead, st.Ino)
		f, err := k.open(d, item{name, unix.S_IFREG})
		if err != nil {
			return nil
		}
		defer f.close()
		if k.unsure(&f.st) {
			return nil
		}
		attrs := newAttrReader(k.attrs.ids)
		a, m, err := attrs.attr(f.fd, &f.st, false)
		if err != nil || m.metacopy || len(attrs.notes) > 0 { // Walk says so
			return nil
		}
		e, err := k.b.Loose(ctx, name, a, f.st.Size, layer.FileReader(f.fd, &f.st))
		var of *errs.Error
		switch {
		case err != nil && (!errors.As(err, &of) || of.Code != errs.ImageCorrupt && of.Code != errs.ImageUnsupported):
			return wrap(d, name, "read ahead", err) // the blob's, or a limit
		case err == nil && f.changed() == nil:
			k.ahead[f.st.Ino] = &readAhead{f.st.Ctim, f.st.Size, e}
		}
		return nil
	})
}

// scanned is a directory on the way to where a scan is.
type scanned struct {
	dir      *dir
	items    []item
	states   []state
	platform *platformNode
	was      *seenNode
}

// maxScan is how many names a scan looks at: a sandbox that runs could make more and more.
const maxScan = 8 << 20

// scan calls f for the regular files that a layer would have to have, if nothing changed.
func (k *Packing) scan(ctx context.Context, f func(d *dir, name string, st *unix.Stat_t) error) error {
	var way []scanned
	names := 0
	enter := func(d *dir, states []state, platform *platformNode, was *seenNode) {
		if items, err := k.dirs.list(d); err == nil {
			way = append(way, scanned{d, items, states, platform, was})
		}
	}
	var was *seenNode
	if k.since != nil {
		was = k.since.root
	}
	enter(k.root, k.states, k.platform, was)
	for len(way) > 0 {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.RequestCanceled, phase, "read ahead", err)
		}
		at := &way[len(way)-1]
		if len(at.items) == 0 {
			k.dirs.drop(at.dir)
			way = way[:len(way)-1]
			continue
		}
		it := at.items[0]
		at.items = at.items[1:]
		if names++; names > maxScan {
			return nil
		}
		isDir := it.typ == unix.S_IFDIR
		if !isDir && it.typ != unix.S_IFREG {
			continue
		}
		states, left := match(at.states, it.name, isDir)
		platform := at.platform.child(it.name)
		if left || platform != nil && platform.file != nil {
			continue
		}
		fd, err := k.dirs.fd(at.dir)
		if err != nil {
			at.items = nil // it was removed, or moved
			continue
		}
		var st unix.Stat_t
		if unix.Fstatat(fd, it.name, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || st.Mode&unix.S_IFMT != it.typ {
			continue
		}
		prev := at.was.child(it.name)
		switch {
		case isDir && (prev == nil || prev.ino != st.Ino):
			enter(child(at.dir, it.name), states, platform, nil)
		case isDir:
			enter(child(at.dir, it.name), states, platform, prev)
		case !prev.same(&st):
			if err := f(at.dir, it.name, &st); err != nil {
				return err
			}
		}
	}
	return nil
}
