package file

import (
	"errors"
	"io"
	"strconv"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/guest/tarball"

	"golang.org/x/sys/unix"
)

// UnpackOptions says how a tar is unpacked.
type UnpackOptions struct {
	KeepOwner bool // owners as in the tar; else everything is the user's
	Parents   bool // make the destination if it is missing
}

// Unpack unpacks the tar in r below the directory path. Whatever the tar holds, nothing
// outside that directory is touched: names lose a leading slash, "..", and links that
// lead out of the destination, are refused (errs.BadPath). Existing files are replaced,
// directories are merged, devices are skipped. A broken tar is errs.BadRequest; what
// came before the broken place stays.
func (fs *FS) Unpack(r io.Reader, path, user string, o UnpackOptions) (entries, bytes uint64, err error) {
	who, err := fs.resolve(path, user)
	if err != nil {
		return 0, 0, err
	}
	u := unpacker{t: tarball.NewReader(r), o: o, who: who}
	err = who.Do(func() error {
		if o.Parents {
			if err := makeAll(who.path, 0o755); err != nil {
				return err
			}
		}
		u.root, err = open(unix.AT_FDCWD, who.path, unix.O_PATH|unix.O_DIRECTORY, 0, 0)
		if err != nil {
			return fail("open", who.path, err)
		}
		defer unix.Close(u.root)
		err := u.all()
		u.leave("") // also after an error: what is there gets its times and modes
		return err
	})
	if errors.Is(err, tarball.ErrFormat) {
		err = errs.New(errs.BadRequest, phase, "the tar cannot be unpacked after "+strconv.FormatUint(u.entries, 10)+" entries").Because(err)
	}
	return u.entries, u.bytes, err
}

type unpacker struct {
	t    *tarball.Reader
	o    UnpackOptions
	who  who
	root int
	buf  []byte
	open []pending // directories around the current entry, outermost first

	entries, bytes uint64
}

// pending is a directory whose mode and time are set after what is in it.
type pending struct {
	name string
	h    *tarball.Header
}

func (u *unpacker) all() error {
	for {
		h, err := u.t.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		name, err := clean(h.Name)
		if err != nil {
			return err
		}
		u.leave(name)
		if err := u.entry(h, name); err != nil {
			return err
		}
	}
}

// clean makes an entry's name relative. The empty name is the destination itself.
func clean(name string) (string, error) {
	var parts []string
	for part := range strings.SplitSeq(name, "/") {
		switch part {
		case "", ".":
			continue
		case "..":
			return "", errs.New(errs.BadPath, phase, "the tar's entry "+strconv.Quote(shorten(name))+" would leave the destination")
		}
		parts = append(parts, part)
	}
	return strings.Join(parts, "/"), nil
}

// leave finishes the directories that do not hold name.
func (u *unpacker) leave(name string) {
	for n := len(u.open); n > 0; n-- {
		d := u.open[n-1]
		if name != "" && strings.HasPrefix(name, d.name+"/") {
			return
		}
		if fd, err := u.beneath(d.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW); err == nil {
			unix.Fchmod(fd, d.h.Mode)
			setTime(fd, "", d.h)
			unix.Close(fd)
		}
		u.open = u.open[:n-1]
	}
}

// beneath opens a name inside the destination; the kernel refuses to leave it.
func (u *unpacker) beneath(name string, flags int) (int, error) {
	if name == "" {
		name = "."
	}
	return open(u.root, name, flags, 0, unix.RESOLVE_BENEATH)
}

// parentOf opens the directory of an entry, and makes it if the tar has not.
func (u *unpacker) parentOf(name string) (dir int, base string, err error) {
	i := strings.LastIndexByte(name, '/')
	base = name[i+1:]
	above := ""
	if i >= 0 {
		above = name[:i]
	}
	const flags = unix.O_PATH | unix.O_DIRECTORY
	dir, err = u.beneath(above, flags)
	if err != unix.ENOENT || above == "" {
		return dir, base, err
	}
	up, last, err := u.parentOf(above)
	if err != nil {
		return -1, "", err
	}
	defer unix.Close(up)
	if err := unix.Mkdirat(up, last, 0o755); err != nil && err != unix.EEXIST {
		return -1, "", err
	}
	dir, err = u.beneath(above, flags)
	return dir, base, err
}

func (u *unpacker) entry(h *tarball.Header, name string) error {
	if h.Kind == tarball.Char || h.Kind == tarball.Block {
		return nil
	}
	if name == "" {
		if h.Kind == tarball.Directory {
			return nil // the destination keeps its own mode and owner
		}
		return errs.New(errs.BadPath, phase, "the tar has an entry without a name")
	}
	dir, base, err := u.parentOf(name)
	if err != nil {
		return u.fail("open the directory of", name, err)
	}
	defer unix.Close(dir)
	u.entries++
	switch h.Kind {
	case tarball.Directory:
		err = u.directory(dir, base, name, h)
	case tarball.Regular:
		err = u.file(dir, base, h)
	case tarball.Symlink:
		err = u.replace(dir, base, func() error { return unix.Symlinkat(h.Link, dir, base) })
		if err == nil {
			err = u.own(dir, base, h)
			setTime(dir, base, h)
		}
	case tarball.HardLink:
		return u.hardLink(dir, base, h)
	case tarball.FIFO:
		err = u.replace(dir, base, func() error { return unix.Mknodat(dir, base, unix.S_IFIFO|h.Mode, 0) })
		if err == nil {
			err = u.own(dir, base, h)
			setTime(dir, base, h)
		}
	default:
		u.entries-- // an extension that is no file, such as a volume's name
		return nil
	}
	return u.fail("unpack", name, err)
}

func (u *unpacker) fail(action, name string, err error) error {
	if err == unix.EXDEV || err == unix.ELOOP {
		return errs.New(errs.BadPath, phase, action+" "+strconv.Quote(shorten(name))+": a link there leads out of the destination").Because(err)
	}
	var known *errs.Error
	if err == nil || errors.As(err, &known) || errors.Is(err, tarball.ErrFormat) {
		return err
	}
	if _, ok := err.(unix.Errno); !ok {
		return err // from the stream, not from the file system
	}
	return fail(action, name, err)
}

// replace runs make, and again after removing what is in its way.
func (u *unpacker) replace(dir int, base string, make func() error) error {
	var err error
	for range 4 {
		if err = make(); err != unix.EEXIST {
			return err
		}
		if e := unix.Unlinkat(dir, base, 0); e == unix.EISDIR {
			// An empty directory gives way; a full one is not thrown away.
			if e = unix.Unlinkat(dir, base, unix.AT_REMOVEDIR); e != nil {
				return e
			}
		} else if e != nil && e != unix.ENOENT {
			return e
		}
	}
	return err
}

func (u *unpacker) directory(dir int, base, name string, h *tarball.Header) error {
	const flags = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW
	err := unix.Mkdirat(dir, base, 0o700)
	made := err == nil
	if err != nil && err != unix.EEXIST {
		return err
	}
	fd, err := open(dir, base, flags, 0, unix.RESOLVE_BENEATH)
	if err == unix.ENOTDIR || err == unix.ELOOP {
		// A link to a directory inside the destination may stand for it.
		if in, err := open(u.root, name, unix.O_PATH|unix.O_DIRECTORY, 0, unix.RESOLVE_BENEATH); err == nil {
			return unix.Close(in)
		}
		err = u.replace(dir, base, func() error { return unix.Mkdirat(dir, base, 0o700) })
		if err != nil {
			return err
		}
		made = true
		fd, err = open(dir, base, flags, 0, unix.RESOLVE_BENEATH)
	}
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if made || u.o.KeepOwner {
		err = u.own(fd, "", h)
	}
	setXattrs(fd, h)
	if len(u.open) < maxDepth {
		u.open = append(u.open, pending{name, h})
	}
	return err
}

func (u *unpacker) file(dir int, base string, h *tarball.Header) error {
	var fd int
	err := u.replace(dir, base, func() (err error) {
		fd, err = open(dir, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600, unix.RESOLVE_BENEATH)
		return err
	})
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if u.buf == nil {
		u.buf = make([]byte, copyBuffer)
	}
	for {
		n, err := u.t.Read(u.buf)
		for b := u.buf[:n]; len(b) > 0; {
			m, err := unix.Write(fd, b)
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return err
			}
			b = b[m:]
		}
		u.bytes += uint64(n)
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
	}
	if err := u.own(fd, "", h); err != nil {
		return err
	}
	setXattrs(fd, h)
	// After the owner, which takes set-id bits away.
	if err := unix.Fchmod(fd, h.Mode); err != nil {
		return err
	}
	setTime(fd, "", h)
	return nil
}

func (u *unpacker) hardLink(dir int, base string, h *tarball.Header) error {
	target, err := clean(h.Link)
	if err != nil {
		return err
	}
	if target == "" {
		return errs.New(errs.BadPath, phase, "the tar has a hard link to nothing")
	}
	i := strings.LastIndexByte(target, '/')
	above := ""
	if i >= 0 {
		above = target[:i]
	}
	from, err := u.beneath(above, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return u.fail("link to", target, err)
	}
	defer unix.Close(from)
	var a, b unix.Stat_t
	if unix.Fstatat(from, target[i+1:], &a, unix.AT_SYMLINK_NOFOLLOW) == nil &&
		unix.Fstatat(dir, base, &b, unix.AT_SYMLINK_NOFOLLOW) == nil && a.Dev == b.Dev && a.Ino == b.Ino {
		return nil // already the same file
	}
	err = u.replace(dir, base, func() error { return unix.Linkat(from, target[i+1:], dir, base, 0) })
	return u.fail("link to", target, err)
}

// own gives an entry the tar's owner, where that was asked for; otherwise it is the
// user's already.
func (u *unpacker) own(dir int, base string, h *tarball.Header) error {
	if !u.o.KeepOwner {
		return nil
	}
	flags := unix.AT_SYMLINK_NOFOLLOW
	if base == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	if h.UID < 0 || h.GID < 0 || h.UID >= 1<<32-1 || h.GID >= 1<<32-1 {
		return errs.New(errs.BadRequest, phase, "the tar names an owner that cannot exist")
	}
	return unix.Fchownat(dir, base, int(h.UID), int(h.GID), flags)
}

// setTime is best effort: not every file system can hold every time.
func setTime(dir int, base string, h *tarball.Header) {
	flags := unix.AT_SYMLINK_NOFOLLOW
	if base == "" {
		flags |= unix.AT_EMPTY_PATH
	}
	t := unix.Timespec{Sec: h.MTimeSec, Nsec: int64(h.MTimeNS)}
	unix.UtimesNanoAt(dir, base, []unix.Timespec{t, t}, flags)
}

// setXattrs is best effort: the file system or the user may not be allowed to have them.
func setXattrs(fd int, h *tarball.Header) {
	for k, v := range h.Xattrs {
		if carried(k) {
			unix.Fsetxattr(fd, k, []byte(v), 0)
		}
	}
}
