package build

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"
)

// copy takes a file or tree from beside the recipe into the root. Both ends are
// opened as roots, so links lead out of neither.
func (b *builder) copy(ctx context.Context, c Copy) error {
	perm, err := c.perm()
	if err != nil {
		return errs.New(errs.BadRequest, phase, err.Error())
	}
	from, err := os.OpenRoot(b.recipe.dir)
	if err != nil {
		return errs.Wrap(errs.BadRequest, phase, "open the recipe's directory", err)
	}
	defer from.Close()
	to, err := os.OpenRoot(b.root)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "open root directory", err)
	}
	defer to.Close()
	dest := path.Clean(c.Dest)[1:]
	if dest == "" {
		dest = "."
	}
	err = fs.WalkDir(from.FS(), path.Clean(filepath.ToSlash(c.Src)), func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return errs.Wrap(errs.BadRequest, phase, "copy "+p, err)
		}
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.RequestCanceled, phase, "copy "+p, err)
		}
		rel, err := filepath.Rel(path.Clean(c.Src), p)
		if err != nil {
			return errs.Wrap(errs.InternalError, phase, "copy "+p, err)
		}
		return copyOne(from, to, p, path.Join(dest, rel), d, perm, c.User)
	})
	return err
}

func copyOne(from, to *os.Root, src, dest string, d fs.DirEntry, perm uint32, uid int) error {
	info, err := d.Info()
	if err != nil {
		return errs.Wrap(errs.BadRequest, phase, "copy "+src, err)
	}
	if err := to.MkdirAll(path.Dir(dest), 0o755); err != nil {
		return layer.DiskError("copy "+src, err)
	}
	switch {
	case d.IsDir():
		if err := to.MkdirAll(dest, 0o755); err != nil {
			return layer.DiskError("copy "+src, err)
		}
	case info.Mode().IsRegular():
		mode := info.Mode().Perm()
		if perm != 0 {
			mode = fs.FileMode(perm & 0o777)
		}
		return copyRegular(from, to, src, dest, mode, perm, uid)
	case info.Mode()&fs.ModeSymlink != 0:
		target, err := from.Readlink(src)
		if err == nil {
			_ = to.Remove(dest) // what is there, if anything; Symlink tells if it stays
			err = to.Symlink(target, dest)
		}
		if err != nil {
			return layer.DiskError("copy "+src, err)
		}
	default:
		return errs.New(errs.BadRequest, phase, fmt.Sprintf("copy %s: neither file, directory nor symlink", src))
	}
	return layer.DiskError("copy "+src, to.Lchown(dest, uid, uid))
}

func copyRegular(from, to *os.Root, src, dest string, mode fs.FileMode, perm uint32, uid int) error {
	in, err := from.Open(src)
	if err != nil {
		return errs.Wrap(errs.BadRequest, phase, "copy "+src, err)
	}
	defer in.Close()
	_ = to.Remove(dest) // what is there, if anything; O_EXCL tells if it stays
	out, err := to.OpenFile(dest, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o600)
	if err != nil {
		return layer.DiskError("copy "+src, err)
	}
	for bit, m := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if perm&bit != 0 {
			mode |= m
		}
	}
	_, err = out.ReadFrom(in)
	if cerr := out.Chown(uid, uid); err == nil {
		err = cerr
	}
	if cerr := out.Chmod(mode); err == nil { // after chown, which clears setuid
		err = cerr
	}
	if cerr := out.Close(); err == nil {
		err = cerr
	}
	return layer.DiskError("copy "+src, err)
}
