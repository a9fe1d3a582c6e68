package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strconv"
	"unicode/utf8"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

const phase = "snapshot.pack"

// Limits bound what one layer takes; zero values mean the defaults.
type Limits struct {
	Entries int64 // names (default 8 Mi)
	Bytes   int64 // of all files, holes included (default 1 TiB)
	// Data bounds the data blob (default: as Bytes). A sparse file is stored in pieces of
	// at least 64 KiB, so one that is nothing but scattered bytes grows by as much.
	Data int64
}

// writer turns entries of read trees into those of a layer.
type writer struct {
	b     *layer.Builder
	dirs  *dirs
	attrs *attrReader
	man   Manifest
	white layer.Handle // the one inode of all whiteouts
	// The trees are EROFS, which tells of holes when asked, but not in a file's stat.
	sparse bool
	xbuf   []byte
}

func newWriter(blob layer.Blob, ids IDs, limits Limits, progress func(bytes, entries int64)) *writer {
	if limits.Data == 0 {
		limits.Data = limits.Bytes
	}
	if limits.Data == 0 {
		limits.Data = 1 << 40
	}
	return &writer{
		b: layer.NewBuilder(&bounded{Blob: blob, left: limits.Data, limit: limits.Data}, layer.Options{
			MaxEntries: limits.Entries, MaxBytes: limits.Bytes, Progress: progress,
		}),
		dirs:  newDirs(),
		attrs: newAttrReader(ids),
		xbuf:  make([]byte, 4097),
	}
}

// bounded is a blob of limited size.
type bounded struct {
	layer.Blob
	left, limit int64
}

func (b *bounded) Write(p []byte) (int, error) {
	if b.left -= int64(len(p)); b.left < 0 {
		return 0, errs.New(errs.BodyTooLarge, phase, fmt.Sprintf("the data takes more than the limit of %d bytes", b.limit))
	}
	return b.Blob.Write(p)
}

// finish writes the metadata.
func (w *writer) finish(meta io.Writer) (layer.Result, Manifest, error) {
	res, err := w.b.Finish(meta)
	if err != nil {
		return res, w.man, err
	}
	w.man.Bytes, w.man.Entries = res.Bytes, res.Files
	w.man.addNotes(w.attrs.notes)
	w.man.addNotes(w.b.Skipped())
	return res, w.man, nil
}

// file is an entry other than a directory, opened.
type file struct {
	fd    int
	opath bool // not for reading
	st    unix.Stat_t
	ahead *readAhead // its content is known, and fd is -1
}

func (f *file) close() {
	if f.fd >= 0 {
		unix.Close(f.fd)
	}
}

// open opens what the name is in d. Only regular files are opened for reading.
func (w *writer) open(d *dir, it item) (*file, error) {
	dirfd, err := w.dirs.fd(d)
	if err != nil {
		return nil, err
	}
	f := &file{opath: it.typ != unix.S_IFREG}
	flags := uint64(unix.O_RDONLY)
	if f.opath {
		flags = unix.O_PATH
	}
	if f.fd, err = openBelow(dirfd, it.name, flags); err != nil {
		return nil, err
	}
	if err := unix.Fstat(f.fd, &f.st); err != nil {
		f.close()
		return nil, err
	}
	if f.st.Mode&unix.S_IFMT != it.typ {
		f.close()
		return nil, errReplaced
	}
	return f, nil
}

// isWhiteout tells whether the name, of a character device, is a whiteout.
func (w *writer) isWhiteout(d *dir, name string) (bool, error) {
	dirfd, err := w.dirs.fd(d)
	if err != nil {
		return false, err
	}
	var st unix.Stat_t
	if err := unix.Fstatat(dirfd, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return false, err
	}
	return whiteout(&st), nil
}

func whiteout(st *unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0 }

// whiteout adds a whiteout. All share one inode: a layer may have 10^5 of them.
//
// The directory gets an origin, "unknown": where it is the only part of a merged directory (it is
// on other layers, say, that do not have it), the kernel looks for whiteouts in it only then,
// and otherwise lists their names (ovl_get_inode, "non-merge dir that may have whiteouts").
func (w *writer) whiteout(out layer.Dir, name string) (err error) {
	if err := out.SetXattr(overlayPrefix+"origin", nil); err != nil {
		return err
	}
	w.man.Whiteouts++
	if w.man.Whiteouts == 1 {
		w.white, err = out.Special(name, unix.S_IFCHR, 0, 0, layer.Attr{})
		return err
	}
	return out.Link(name, w.white)
}

// dir adds a directory with what it shows of the layers below: nothing if it is opaque,
// what is at redirect, or by default what is at its own path.
func (w *writer) dir(out layer.Dir, name string, a layer.Attr, opaque bool, redirect string) (layer.Dir, error) {
	w.man.Dirs++
	switch {
	case opaque:
		w.man.Opaque++
		a.Xattrs = append(a.Xattrs, layer.Xattr{Name: overlayPrefix + "opaque", Value: []byte("y")})
	case redirect != "":
		w.man.Redirects++
		a.Xattrs = append(a.Xattrs, layer.Xattr{Name: overlayPrefix + "redirect", Value: []byte(redirect)})
	}
	return out.Dir(name, a)
}

// add adds the open file to out.
func (w *writer) add(ctx context.Context, out layer.Dir, name string, f *file, a layer.Attr) (layer.Handle, error) {
	switch f.st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		w.man.Regular++
		content := layer.FileReader(f.fd, &f.st)
		if w.sparse && f.st.Size > 64<<10 {
			content = layer.SparseReader(f.fd, f.st.Size)
		}
		e, err := out.File(ctx, name, a, f.st.Size, content)
		if changed := f.changed(); changed != nil && ctx.Err() == nil {
			return e, changed // rather than what came of it
		}
		return e, err
	case unix.S_IFLNK:
		w.man.Symlinks++
		n, err := unix.Readlinkat(f.fd, "", w.xbuf)
		if err != nil {
			return layer.Handle{}, err
		}
		return out.Symlink(name, string(w.xbuf[:n]), a)
	case unix.S_IFDIR:
		return layer.Handle{}, errReplaced
	}
	w.man.Special++
	return out.Special(name, f.st.Mode&unix.S_IFMT, unix.Major(f.st.Rdev), unix.Minor(f.st.Rdev), a)
}

var errChanged = errors.New("it was written meanwhile")

// changed tells whether the file was written, or its attributes set, since it was opened.
// Names that come and go do not count.
func (f *file) changed() error {
	var now unix.Stat_t
	if err := unix.Fstat(f.fd, &now); err != nil {
		return err
	}
	if now.Size != f.st.Size || now.Mtim != f.st.Mtim || now.Ctim != f.st.Ctim && now.Nlink == f.st.Nlink {
		return errChanged
	}
	return nil
}

// wrap types what went wrong with d's entry name (of d itself, if it is empty).
func wrap(d *dir, name, action string, err error) error {
	if err == nil || errors.Is(err, ErrWhole) {
		return err
	}
	path := d.path()
	if name != "" || path == "" {
		path += "/" + name
	}
	var e *errs.Error
	if errors.As(err, &e) { // knows the last name of the path only
		if errors.Is(err, unix.EIO) {
			return errs.New(errs.InternalError, phase, action+" "+shown(path)).Because(err)
		}
		return e.With("path", shown(path))
	}
	code, retry := errs.InternalError, false
	switch {
	case errors.Is(err, errReplaced), errors.Is(err, errChanged), vanished(err), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP),
		errors.Is(err, unix.ENXIO), errors.Is(err, unix.EAGAIN), errors.Is(err, unix.EXDEV):
		code, retry = errs.StateConflict, true
		action += " (the sandbox has to be frozen)"
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM):
		code, retry = errs.NodeFull, true
	case errors.Is(err, unix.E2BIG):
		code = errs.ImageUnsupported
	}
	wrapped := errs.Wrap(code, phase, action+" "+fmt.Sprintf("%.300q", path), err)
	if errors.As(wrapped, &e) && retry {
		e.Retryable = true
	}
	return wrapped
}

// vanished tells whether the entry was removed meanwhile.
func vanished(err error) bool { return errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ESTALE) }

// shown is a path in a message or list: as it is, unless that would garble it.
func shown(path string) string {
	if len(path) > 1000 {
		path = path[:500] + "…" + path[len(path)-500:]
	}
	if utf8.ValidString(path) {
		return path
	}
	return strconv.Quote(path)
}
