// Package rmtree removes trees that hostile code made: of any depth and width, with a
// bounded number of descriptors, bounded memory and errors of bounded length, unlike
// os.RemoveAll. It never leaves the tree: it follows no link and enters no mount.
package rmtree

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

const (
	levels = 32  // open directories; what is deeper is first moved to the top
	batch  = 256 // names read at once
)

// Remove removes the file or tree at path, whose directory is trusted. One that does not
// exist is fine. What cannot be removed does not keep the rest; the error tells of the
// first.
func Remove(path string) error {
	dir, name := filepath.Split(filepath.Clean(path))
	parent, err := os.Open(dir)
	if err != nil {
		if errors.Is(err, unix.ENOENT) {
			return nil
		}
		return err
	}
	defer parent.Close()
	if done, err := unlink(parent, name); done || err != nil {
		return err
	}
	top, err := enter(parent, name)
	if err != nil {
		return err
	}
	defer top.Close()
	r := remover{top: top}
	for {
		r.removed, r.first = 0, nil
		r.empty(top, 1)
		err := unix.Unlinkat(int(parent.Fd()), name, unix.AT_REMOVEDIR)
		if err == nil || err == unix.ENOENT {
			return nil
		}
		if r.removed == 0 { // nothing gets better by itself
			return errors.Join(r.first, failed("remove", name, err))
		}
		if _, err := top.Seek(0, io.SeekStart); err != nil {
			return failed("read", name, err)
		}
	}
}

type remover struct {
	top     *os.File
	next    int   // number of the last tree moved to the top
	removed int   // entries removed or moved in this pass
	first   error // of this pass
}

// empty removes what is in dir, which is depth levels below the top's parent.
func (r *remover) empty(dir *os.File, depth int) {
	for {
		names, err := dir.Readdirnames(batch)
		for _, name := range names {
			r.note(r.remove(dir, name, depth))
		}
		if err == io.EOF {
			return
		}
		if err != nil {
			r.note(failed("read", dir.Name(), err))
			return
		}
	}
}

func (r *remover) note(err error) {
	if r.first == nil {
		r.first = err
	}
}

func (r *remover) remove(dir *os.File, name string, depth int) error {
	done, err := unlink(dir, name)
	if done {
		r.removed++
	}
	if done || err != nil {
		return err
	}
	if depth >= levels {
		return r.lift(dir, name)
	}
	child, err := enter(dir, name)
	if err != nil {
		return err
	}
	defer child.Close()
	for {
		before := r.removed
		r.empty(child, depth+1)
		done, err := unlink(dir, name)
		if done {
			r.removed++
		}
		// Reading while removing may have hidden some entries.
		if done || err != nil || r.removed == before {
			return err
		}
		if _, err := child.Seek(0, io.SeekStart); err != nil {
			return failed("read", name, err)
		}
	}
}

// lift moves a directory to the top, where a later pass comes to it. Every directory is
// moved once at most: what is in it is less deep then.
func (r *remover) lift(dir *os.File, name string) error {
	for {
		r.next++
		err := unix.Renameat2(int(dir.Fd()), name, int(r.top.Fd()), ".lifted-"+strconv.Itoa(r.next), unix.RENAME_NOREPLACE)
		if err == unix.EEXIST {
			continue
		}
		if err == nil {
			r.removed++
		}
		return failed("move", name, err)
	}
}

// unlink removes a file or an empty directory; false without an error: it is another.
func unlink(dir *os.File, name string) (done bool, err error) {
	err = unix.Unlinkat(int(dir.Fd()), name, 0)
	if err == unix.EISDIR || err == unix.EPERM {
		err = unix.Unlinkat(int(dir.Fd()), name, unix.AT_REMOVEDIR)
	}
	switch err {
	case nil, unix.ENOENT:
		return true, nil
	case unix.ENOTEMPTY, unix.EEXIST:
		return false, nil
	}
	return false, failed("remove", name, err)
}

// enter opens a directory of dir that is no link and no other mount.
func enter(dir *os.File, name string) (*os.File, error) {
	how := unix.OpenHow{
		Flags:   unix.O_RDONLY | unix.O_DIRECTORY | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_XDEV | unix.RESOLVE_NO_SYMLINKS,
	}
	for {
		fd, err := unix.Openat2(int(dir.Fd()), name, &how)
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		if err != nil {
			return nil, failed("open", name, err)
		}
		return os.NewFile(uintptr(fd), name), nil
	}
}

// failed names no path: those of hostile trees may be as long as they like.
func failed(what, name string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s %.64q: %w", what, name, err)
}
