package client

import (
	"context"
	"io/fs"
	"time"

	"dsec/aether/msg"
)

// Stat describes what is at path; a symlink is followed.
func (f Files) Stat(ctx context.Context, path string) (*Entry, error) {
	return f.stat(ctx, path, false)
}

// Lstat describes what is at path; a symlink is described itself.
func (f Files) Lstat(ctx context.Context, path string) (*Entry, error) {
	return f.stat(ctx, path, true)
}

func (f Files) stat(ctx context.Context, path string, noFollow bool) (*Entry, error) {
	e := new(Entry)
	if err := f.sb.read(ctx, "file.stat", &msg.PathRequest{Path: path, User: f.user, NoFollow: noFollow}, e); err != nil {
		return nil, about("stat", path, err)
	}
	return e, nil
}

// List describes what a directory holds, depth levels down (0 and 1: itself only), at
// most limit entries (0: the guest's limit). More says that there are more.
func (f Files) List(ctx context.Context, path string, depth int, limit int) (entries []*Entry, more bool, err error) {
	var l msg.EntryList
	if err := f.sb.read(ctx, "file.list", &msg.ListRequest{Path: path, User: f.user, Depth: uint32(max(depth, 1)), Limit: uint64(max(limit, 0))}, &l); err != nil {
		return nil, false, about("list", path, err)
	}
	return l.Entries, l.Truncated, nil
}

// Mkdir makes a directory.
func (f Files) Mkdir(ctx context.Context, path string, mode fs.FileMode) error {
	return f.mkdir(ctx, path, mode, false)
}

// MkdirAll makes a directory and those above it; one that exists is fine.
func (f Files) MkdirAll(ctx context.Context, path string, mode fs.FileMode) error {
	return f.mkdir(ctx, path, mode, true)
}

func (f Files) mkdir(ctx context.Context, path string, mode fs.FileMode, parents bool) error {
	if err := f.sb.call(ctx, "file.mkdir", &msg.MkdirRequest{Path: path, User: f.user, Mode: unixMode(mode), Parents: parents}, &msg.EntryInfo{}); err != nil {
		return about("mkdir", path, err)
	}
	return nil
}

// Move renames source, over what is at destination.
func (f Files) Move(ctx context.Context, source, destination string) error {
	if err := f.sb.call(ctx, "file.move", &msg.MoveRequest{Source: source, Destination: destination, User: f.user}, &msg.EntryInfo{}); err != nil {
		return about("move", source, err)
	}
	return nil
}

// Remove removes a file or an empty directory.
func (f Files) Remove(ctx context.Context, path string) error {
	if err := f.sb.call(ctx, "file.remove", &msg.PathRequest{Path: path, User: f.user}, &msg.Empty{}); err != nil {
		return about("remove", path, err)
	}
	return nil
}

// RemoveAll removes path and all below it; one that does not exist is fine.
func (f Files) RemoveAll(ctx context.Context, path string) error {
	if err := f.sb.call(ctx, "file.remove", &msg.PathRequest{Path: path, User: f.user, Recursive: true, MissingOk: true}, &msg.Empty{}); err != nil {
		return about("remove", path, err)
	}
	return nil
}

// Chmod changes a mode.
func (f Files) Chmod(ctx context.Context, path string, mode fs.FileMode, recursive bool) error {
	if err := f.sb.call(ctx, "file.chmod", &msg.ChmodRequest{Path: path, User: f.user, Mode: unixMode(mode), Recursive: recursive}, &msg.Empty{}); err != nil {
		return about("chmod", path, err)
	}
	return nil
}

// Chown changes the owner: a name or uid, with :group if wanted.
func (f Files) Chown(ctx context.Context, path, owner string, recursive bool) error {
	if err := f.sb.call(ctx, "file.chown", &msg.ChownRequest{Path: path, User: f.user, Owner: owner, Recursive: recursive}, &msg.Empty{}); err != nil {
		return about("chown", path, err)
	}
	return nil
}

// IsDir says whether e is a directory.
func IsDir(e *Entry) bool { return e.Type == msg.FileTypeDirectory }

// ModTime returns when e was last written.
func ModTime(e *Entry) time.Time { return time.Unix(0, e.ModifiedUnixNs) }

// unixMode returns the permission bits as the kernel has them.
func unixMode(m fs.FileMode) uint32 {
	u := uint32(m.Perm())
	for bit, fm := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if m&fm != 0 {
			u |= bit
		}
	}
	return u
}
