package file

import (
	"context"
	"encoding/binary"
	"errors"
	"os"
	"strconv"
	"strings"
	"time"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// EventType is what happened, numbered as on the wire.
type EventType int

// Event types.
const (
	EventCreate EventType = 1
	EventWrite  EventType = 2
	EventRemove EventType = 3
	EventRename EventType = 4
	EventChmod  EventType = 5
)

// Event is one change below a watched directory.
type Event struct {
	Name     string // relative to it; "." is the directory itself
	Type     EventType
	Overflow bool // events were lost: look again
}

// maxWatched bounds the directories of one watch.
const maxWatched = 1 << 16

const watchMask = unix.IN_CREATE | unix.IN_MODIFY | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO |
	unix.IN_ATTRIB | unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_EXCL_UNLINK

// Watch is a running watch of a directory.
type Watch struct {
	Path string

	fs        *FS
	w         who
	recursive bool
	file      *os.File
	fd        int
	names     map[int32]string // of watched directories, relative; "" is the root
	buf       []byte
	at, n     int
	queue     []Event // found while adding directories
	ended     bool
}

// Watch starts to watch a directory; with recursive also every directory below it, those
// made later too.
func (fs *FS) Watch(path, user string, recursive bool) (*Watch, error) {
	w, err := fs.resolve(path, user)
	if err != nil {
		return nil, err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "make a watch (the user's limit of inotify instances?)", err)
	}
	x := &Watch{
		Path: w.path, fs: fs, w: w, recursive: recursive, fd: fd,
		file: os.NewFile(uintptr(fd), "inotify"), names: map[int32]string{}, buf: make([]byte, 16<<10),
	}
	if err := w.Do(func() error { return x.add("", false) }); err != nil {
		x.Close()
		return nil, err
	}
	return x, nil
}

// add watches one directory, and with recursive those below it. For a directory that
// appeared just now, what is in it is reported: it may have been made before the watch.
func (x *Watch) add(name string, report bool) error {
	path := x.join(name)
	flags := unix.O_RDONLY | unix.O_DIRECTORY
	if name != "" {
		flags |= unix.O_NOFOLLOW
	}
	dir, err := open(unix.AT_FDCWD, path, flags, 0, 0)
	if err != nil {
		return fail("watch", path, err)
	}
	defer unix.Close(dir)
	if len(x.names) >= maxWatched {
		return errs.New(errs.BodyTooLarge, phase, "more than "+strconv.Itoa(maxWatched)+" directories to watch")
	}
	wd, err := unix.InotifyAddWatch(x.fd, fdPath(dir), watchMask|unix.IN_ONLYDIR)
	if err == unix.ENOSPC {
		return errs.New(errs.BodyTooLarge, phase, "the kernel's limit of watches (fs.inotify.max_user_watches) is reached").Because(err)
	}
	if err != nil {
		return fail("watch", path, err)
	}
	x.names[int32(wd)] = name
	if !x.recursive {
		return nil
	}
	names, err := readNames(dir)
	if err != nil {
		return fail("list", path, err)
	}
	for _, base := range names {
		sub := base
		if name != "" {
			sub = name + "/" + base
		}
		if report {
			x.queue = append(x.queue, Event{Name: sub, Type: EventCreate})
		}
		var st unix.Stat_t
		if unix.Fstatat(dir, base, &st, unix.AT_SYMLINK_NOFOLLOW) != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
			continue
		}
		if err := x.add(sub, report); err != nil && fatal(err) {
			return err
		}
	}
	return nil
}

// fatal tells a limit from a directory that is gone or closed to the user.
func fatal(err error) bool {
	return errors.Is(err, errs.BodyTooLarge) || errors.Is(err, errs.InternalError)
}

func (x *Watch) join(name string) string {
	switch {
	case name == "":
		return x.w.path
	case x.w.path == "/":
		return "/" + name
	}
	return x.w.path + "/" + name
}

// Next returns the next event. After the directory itself was removed or moved away it
// returns errs.PathNotFound.
func (x *Watch) Next(ctx context.Context) (Event, error) {
	for {
		if len(x.queue) > 0 {
			e := x.queue[0]
			x.queue = x.queue[1:]
			return e, nil
		}
		if x.ended {
			return Event{}, errs.New(errs.PathNotFound, phase, "the watched directory "+strconv.Quote(x.w.path)+" is gone")
		}
		if x.at >= x.n {
			if err := x.fill(ctx); err != nil {
				return Event{}, err
			}
		}
		if err := x.step(); err != nil {
			return Event{}, err
		}
	}
}

// fill waits for the kernel's events.
func (x *Watch) fill(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { x.file.SetReadDeadline(past()) })
	n, err := x.file.Read(x.buf)
	stop()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "read file events", err)
	}
	x.at, x.n = 0, n
	return nil
}

// step turns the kernel's next event into queued ones.
func (x *Watch) step() error {
	if x.n-x.at < unix.SizeofInotifyEvent {
		x.at = x.n
		return nil
	}
	b := x.buf[x.at:x.n]
	wd := int32(binary.NativeEndian.Uint32(b))
	mask := binary.NativeEndian.Uint32(b[4:])
	end := unix.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(b[12:]))
	base := strings.TrimRight(string(b[unix.SizeofInotifyEvent:min(end, len(b))]), "\x00")
	x.at += end
	if mask&unix.IN_Q_OVERFLOW != 0 {
		x.queue = append(x.queue, Event{Overflow: true})
		return x.rescan()
	}
	name, ok := x.names[wd]
	if !ok {
		return nil
	}
	root := name == ""
	switch {
	case mask&unix.IN_IGNORED != 0:
		delete(x.names, wd)
		return nil
	case mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF) != 0:
		if root {
			x.queue = append(x.queue, Event{Name: ".", Type: EventRemove})
			x.ended = true
		}
		return nil // its parent tells of the others
	}
	if base != "" {
		if !root {
			name += "/"
		}
		name += base
	} else if root {
		name = "."
	}
	isDir := mask&unix.IN_ISDIR != 0
	if isDir && base == "" && !root {
		return nil // its parent tells too
	}
	t := EventType(0)
	switch {
	case mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		t = EventCreate
	case mask&unix.IN_MODIFY != 0:
		t = EventWrite
	case mask&unix.IN_DELETE != 0:
		t = EventRemove
	case mask&unix.IN_MOVED_FROM != 0:
		t = EventRename
	case mask&unix.IN_ATTRIB != 0:
		t = EventChmod
	default:
		return nil
	}
	x.queue = append(x.queue, Event{Name: name, Type: t})
	if !isDir || !x.recursive {
		return nil
	}
	switch t {
	case EventRename:
		x.forget(name)
	case EventCreate:
		err := x.w.Do(func() error { return x.add(name, true) })
		if err != nil && fatal(err) {
			return err
		}
	}
	return nil
}

// forget stops to watch a directory that was moved away, and what is below it.
func (x *Watch) forget(name string) {
	for wd, n := range x.names {
		if n == name || strings.HasPrefix(n, name+"/") {
			unix.InotifyRmWatch(x.fd, uint32(wd))
			delete(x.names, wd)
		}
	}
}

// rescan watches directories whose creation was lost in an overflow.
func (x *Watch) rescan() error {
	if !x.recursive {
		return nil
	}
	err := x.w.Do(func() error { return x.add("", false) })
	if err != nil && fatal(err) {
		return err
	}
	return nil
}

// Entry describes what an event names, or nil if it is gone.
func (x *Watch) Entry(e Event) *Entry {
	name := e.Name
	if name == "." {
		name = ""
	}
	var entry *Entry
	x.w.Do(func() (err error) {
		entry, err = x.fs.stat(x.join(name), true)
		return err
	})
	return entry
}

// Close ends the watch.
func (x *Watch) Close() { x.file.Close() }

// past is a deadline that has already passed.
func past() time.Time { return time.Unix(1, 0) }
