package object

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
	"unsafe"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// The directory's layout:
//
//	DIR/<first segment>/<xx>/<rest of the key, '/' as '%'>
//	DIR/_/<xx>/<key>                                         a key of one segment
//	DIR/_tmp/<random>                                        a Put under way
//
// xx are two hex digits of the hash of the key up to its first dot: a store of 10⁶
// objects has 4,000 in a directory, and a prefix with a dot is looked for in one.
const (
	plainDir = "_"
	tmpDir   = "_tmp"

	// staleAfter is the age at which an unfinished Put is taken for a dead one's. A
	// Put that writes touches its file more often.
	staleAfter = 24 * time.Hour
)

// Dir is a store in a directory.
type Dir struct {
	root  string
	inode uint64 // of root

	mu   sync.Mutex
	made map[string]bool // directories known to be durable
}

// OpenDir opens the store in the directory root, made if absent, and removes what
// Puts that died more than a day ago have left. Errors: disk_full, store_denied
// (permissions), store_unavailable.
func OpenDir(ctx context.Context, root string) (*Dir, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, fileError("find "+root, "", err)
	}
	if err := os.MkdirAll(filepath.Join(root, tmpDir), 0o755); err != nil {
		return nil, fileError("make store directory "+root, "", err)
	}
	for _, d := range []string{root, filepath.Dir(root)} {
		if err := syncDir(d); err != nil {
			return nil, fileError("sync "+d, "", err)
		}
	}
	var st unix.Stat_t
	if err := unix.Stat(root, &st); err != nil {
		return nil, fileError("look at store directory "+root, "", err)
	}
	d := &Dir{root: root, inode: st.Ino, made: map[string]bool{}}
	return d, d.clean(ctx, staleAfter)
}

// here is store_unavailable if the directory is not the one that was opened: it is often on
// another machine, and when that is unmounted what lies below must not be taken for a store
// that lost its objects, nor get any. A file system may number its directories anew when it is
// mounted again: a cluster's store, which has a key of one segment as its mark, is known by that.
func (d *Dir) here() error {
	var st unix.Stat_t
	err := unix.Stat(d.root, &st)
	if err == nil && st.Ino != d.inode {
		err = unix.Stat(filepath.Join(d.root, plainDir), &st)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return errs.New(errs.StoreUnavailable, phase, "the store "+d.root+" is gone: is it not mounted?").Because(err)
	}
	return fileError("look at store directory "+d.root, "", err)
}

// missing is fileError for something that is not there only if the store is.
func (d *Dir) missing(action, key string, err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		if err := d.here(); err != nil {
			return err
		}
	}
	return fileError(action, key, err)
}

// clean removes temporary files older than age by the store's own clock.
func (d *Dir) clean(ctx context.Context, age time.Duration) error {
	entries, err := os.ReadDir(filepath.Join(d.root, tmpDir))
	if err != nil {
		return fileError("list unfinished objects", "", err)
	}
	if len(entries) == 0 {
		return nil
	}
	probe, err := os.CreateTemp(filepath.Join(d.root, tmpDir), "now-")
	if err != nil {
		return fileError("ask the store for its time", "", err)
	}
	defer os.Remove(probe.Name())
	defer probe.Close()
	st, err := probe.Stat()
	if err != nil {
		return fileError("ask the store for its time", "", err)
	}
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.StoreUnavailable, phase, "remove unfinished objects", err)
		}
		fi, err := e.Info()
		if err != nil || st.ModTime().Sub(fi.ModTime()) < age {
			continue // it has just been finished, or may yet be
		}
		if err := os.Remove(filepath.Join(d.root, tmpDir, e.Name())); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fileError("remove unfinished object "+e.Name(), "", err)
		}
	}
	return nil
}

func (d *Dir) path(key string) string {
	class, rest, ok := strings.Cut(key, "/")
	if !ok {
		class, rest = plainDir, key
	}
	return filepath.Join(d.root, class, shardOf(rest), strings.ReplaceAll(rest, "/", "%"))
}

func shardOf(rest string) string {
	stem, _, _ := strings.Cut(rest, ".")
	h := sha256.Sum256([]byte(stem))
	return hex.EncodeToString(h[:1])
}

// Put implements [Store].
func (d *Dir) Put(ctx context.Context, key string, size int64, r io.Reader) (err error) {
	if err := checkPut(key, size); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return errs.Wrap(errs.StoreUnavailable, phase, "put object "+key, err)
	}
	if err := d.here(); err != nil {
		return err
	}
	path := d.path(key)
	if err := d.makeDirs(filepath.Dir(path)); err != nil {
		return fileError("make directory for object "+key, key, err)
	}
	tmp := filepath.Join(d.root, tmpDir, rand.Text())
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if errors.Is(err, fs.ErrNotExist) { // the directory was emptied under our feet
		if err := os.MkdirAll(filepath.Dir(tmp), 0o755); err != nil {
			return fileError("make object "+key, key, err)
		}
		f, err = os.OpenFile(tmp, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	}
	if err != nil {
		return fileError("make object "+key, key, err)
	}
	defer func() {
		f.Close()
		if err != nil {
			os.Remove(tmp)
		}
	}()
	if err := copyExactly(ctx, f, key, size, r); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return fileError("sync object "+key, key, err)
	}
	// NFS reports some write errors only here.
	if err := f.Close(); err != nil {
		return fileError("write object "+key, key, err)
	}
	if err := os.Rename(tmp, path); err != nil {
		return fileError("name object "+key, key, err)
	}
	if err := syncDir(filepath.Dir(path)); err != nil {
		return fileError("sync directory of object "+key, key, err)
	}
	return nil
}

// makeDirs makes an object's directory durable, once per process.
func (d *Dir) makeDirs(dir string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.made[dir] {
		if _, err := os.Stat(dir); err == nil {
			return nil
		}
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	class := filepath.Dir(dir)
	for _, p := range []string{class, filepath.Dir(class)} {
		if err := syncDir(p); err != nil {
			return err
		}
	}
	d.made[dir] = true
	return nil
}

// What is at least this long is written past the page cache where the file system can do
// that: it is synced anyway, and rarely read soon (five times the speed of writing and
// syncing on the reference machine).
const directMin = 1 << 20

func copyExactly(ctx context.Context, f *os.File, key string, size int64, r io.Reader) error {
	buf := alignedBuffer(int(min(max(size, 1), 4<<20)))
	direct := size >= directMin && setDirect(f, true) == nil
	write := func(p []byte) error {
		if whole := len(p) &^ (directAlign - 1); direct && whole > 0 {
			_, err := f.Write(p[:whole])
			switch {
			case err == nil:
				p = p[whole:]
			case !errors.Is(err, unix.EINVAL):
				return err
			} // else it takes the flag and not the write
		}
		if len(p) == 0 {
			return nil
		}
		if direct {
			direct = false
			if err := setDirect(f, false); err != nil {
				return err
			}
		}
		_, err := f.Write(p)
		return err
	}
	for left := size; ; {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.StoreUnavailable, phase, "put object "+key, err)
		}
		n, err := io.ReadFull(r, buf)
		if int64(n) > left {
			return wrongSize(key, size, true)
		}
		if werr := write(buf[:n]); werr != nil {
			return fileError("write object "+key, key, werr)
		}
		left -= int64(n)
		switch {
		case err == nil:
		case err != io.EOF && err != io.ErrUnexpectedEOF:
			return errs.Wrap(errs.InternalError, phase, "read what to put as object "+key, err)
		case left > 0:
			return wrongSize(key, size, false)
		default:
			return nil
		}
	}
}

// directAlign is what memory, offset and length of a write past the page cache are
// multiples of: no block size in use is larger.
const directAlign = 4 << 10

// alignedBuffer returns n bytes that begin at a multiple of directAlign.
func alignedBuffer(n int) []byte {
	b := make([]byte, n+directAlign)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(b))) & (directAlign - 1))
	return b[skip : skip+n : skip+n]
}

func setDirect(f *os.File, on bool) error {
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return err
	}
	if flags &^= unix.O_DIRECT; on {
		flags |= unix.O_DIRECT
	}
	_, err = unix.FcntlInt(f.Fd(), unix.F_SETFL, flags)
	return err
}

// Get implements [Store].
func (d *Dir) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if err := checkRange(key, off); err != nil {
		return nil, err
	}
	if err := ctx.Err(); err != nil {
		return nil, errs.Wrap(errs.StoreUnavailable, phase, "get object "+key, err)
	}
	f, err := os.Open(d.path(key))
	if err != nil {
		return nil, d.missing("open object "+key, key, err)
	}
	fi, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, fileError("look at object "+key, key, err)
	}
	left := max(fi.Size()-off, 0)
	if n >= 0 {
		left = min(left, n)
	}
	return &dirBody{ctx: ctx, key: key, f: f, off: off, left: left}, nil
}

type dirBody struct {
	ctx       context.Context
	key       string
	f         *os.File
	off, left int64
}

func (b *dirBody) Read(p []byte) (int, error) {
	if b.left == 0 {
		return 0, io.EOF
	}
	if err := b.ctx.Err(); err != nil {
		return 0, errs.Wrap(errs.StoreUnavailable, phase, "read object "+b.key, err)
	}
	n, err := b.f.ReadAt(p[:min(int64(len(p)), b.left)], b.off)
	b.off += int64(n)
	b.left -= int64(n)
	if n > 0 {
		return n, nil
	}
	if err == io.EOF { // the file has shrunk since it was opened
		err = io.ErrUnexpectedEOF
	}
	return 0, fileError("read object "+b.key, b.key, err)
}

func (b *dirBody) Close() error { return b.f.Close() }

// Stat implements [Store].
func (d *Dir) Stat(ctx context.Context, key string) (Info, error) {
	if err := CheckKey(key); err != nil {
		return Info{}, err
	}
	if err := ctx.Err(); err != nil {
		return Info{}, errs.Wrap(errs.StoreUnavailable, phase, "look at object "+key, err)
	}
	fi, err := os.Stat(d.path(key))
	if err != nil {
		return Info{}, d.missing("look at object "+key, key, err)
	}
	return Info{Key: key, Size: fi.Size(), Modified: fi.ModTime()}, nil
}

// Delete implements [Store].
func (d *Dir) Delete(ctx context.Context, key string) error {
	if err := CheckKey(key); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return errs.Wrap(errs.StoreUnavailable, phase, "delete object "+key, err)
	}
	err := os.Remove(d.path(key))
	if errors.Is(err, fs.ErrNotExist) {
		return d.here()
	}
	return fileError("delete object "+key, key, err)
}

// List implements [Store].
func (d *Dir) List(ctx context.Context, prefix string, each func(Info) error) error {
	if err := CheckPrefix(prefix); err != nil {
		return err
	}
	if err := d.here(); err != nil { // an empty list would say that there is nothing
		return err
	}
	classes := []string{}
	if class, rest, ok := strings.Cut(prefix, "/"); ok {
		if strings.Contains(rest, ".") {
			return d.listShard(ctx, class, shardOf(rest), prefix, each)
		}
		classes = append(classes, class)
	} else {
		entries, err := os.ReadDir(d.root)
		if err != nil {
			return fileError("list store", "", err)
		}
		for _, e := range entries {
			if e.IsDir() && e.Name() != tmpDir && (e.Name() == plainDir || strings.HasPrefix(e.Name(), prefix)) {
				classes = append(classes, e.Name())
			}
		}
	}
	for _, class := range classes {
		shards, err := os.ReadDir(filepath.Join(d.root, class))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fileError("list objects "+class, "", err)
		}
		for _, shard := range shards {
			if err := d.listShard(ctx, class, shard.Name(), prefix, each); err != nil {
				return err
			}
		}
	}
	return nil
}

func (d *Dir) listShard(ctx context.Context, class, shard, prefix string, each func(Info) error) error {
	if err := ctx.Err(); err != nil {
		return errs.Wrap(errs.StoreUnavailable, phase, "list objects", err)
	}
	entries, err := os.ReadDir(filepath.Join(d.root, class, shard))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fileError("list objects "+class, "", err)
	}
	for _, e := range entries {
		key := strings.ReplaceAll(e.Name(), "%", "/")
		if class != plainDir {
			key = class + "/" + key
		}
		// A foreign file, such as NFS's of an open file that was removed, is no object.
		if !strings.HasPrefix(key, prefix) || CheckKey(key) != nil || d.path(key) != filepath.Join(d.root, class, shard, e.Name()) {
			continue
		}
		fi, err := e.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue // deleted meanwhile
		}
		if err != nil {
			return fileError("look at object "+key, key, err)
		}
		if err := each(Info{Key: key, Size: fi.Size(), Modified: fi.ModTime()}); err != nil {
			return err
		}
	}
	return nil
}

func syncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

// fileError types what a file system says.
func fileError(action, key string, err error) error {
	code := errs.StoreUnavailable
	switch {
	case err == nil:
		return nil
	case key != "" && errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ESTALE):
		return notFound(key, err)
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT), errors.Is(err, unix.EFBIG):
		code = errs.DiskFull
	case errors.Is(err, fs.ErrPermission), errors.Is(err, unix.EROFS):
		code = errs.StoreDenied
	}
	return errs.Wrap(code, phase, action, err)
}
