package build

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"
)

// Steps can be done by someone else, such as in a sandbox: what is here says what each needs, and
// which of an earlier build's results can be used again.

// keyVersion changes when steps come to mean something else.
const keyVersion = 1

// UponImage tells whether the recipe starts from an image of the catalogue, From.
func (r *Recipe) UponImage() bool {
	switch r.From {
	case FromDebian, FromBusybox, FromScratch:
		return false
	}
	return true
}

// Base is the recipe without its steps and what concerns running them.
func (r *Recipe) Base() *Recipe {
	return &Recipe{From: r.From, Suite: r.Suite, Packages: r.Packages, dir: r.dir}
}

// BaseKey is over what Base is made from: the same key, the same recipe.
func (r *Recipe) BaseKey() string { return keyOf("base", keyVersion, r.From, r.Suite, r.Packages) }

// Keys are those of the results after each step, on a base with the given key or digest: over that, the
// environment, and the steps so far with the files that they copy.
func (r *Recipe) Keys(ctx context.Context, base string) ([]string, error) {
	key := keyOf("env", keyVersion, base, r.Env)
	keys := make([]string, 0, len(r.Steps))
	for _, s := range r.Steps {
		files := ""
		if s.Copy != nil {
			var err error
			if files, err = r.digest(ctx, s.Copy.Src); err != nil {
				return nil, err
			}
		}
		key = keyOf("step", key, s, files)
		keys = append(keys, key)
	}
	return keys, nil
}

func keyOf(v ...any) string {
	raw, err := json.Marshal(v) // maps are marshalled sorted
	if err != nil {
		panic(err) // strings, numbers, and lists and maps of them
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:])
}

// digest is over a file or tree beside the recipe, as far as a copy step copies it.
func (r *Recipe) digest(ctx context.Context, src string) (string, error) {
	from, err := os.OpenRoot(r.dir)
	if err != nil {
		return "", errs.Wrap(errs.BadRequest, phase, "open the recipe's directory", err)
	}
	defer from.Close()
	h := sha256.New()
	err = fs.WalkDir(from.FS(), path.Clean(filepath.ToSlash(src)), func(p string, d fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		var info fs.FileInfo
		if err == nil {
			info, err = d.Info()
		}
		if err != nil {
			return errs.Wrap(errs.BadRequest, phase, "read "+p, err)
		}
		fmt.Fprintf(h, "%q %o %d\n", p, info.Mode(), info.Size())
		switch {
		case info.Mode().IsRegular():
			f, err := from.Open(p)
			if err != nil {
				return errs.Wrap(errs.BadRequest, phase, "read "+p, err)
			}
			defer f.Close()
			_, err = io.Copy(h, f)
			return errs.Wrap(errs.BadRequest, phase, "read "+p, err)
		case info.Mode()&fs.ModeSymlink != 0:
			target, err := from.Readlink(p)
			fmt.Fprintf(h, "%q\n", target)
			return errs.Wrap(errs.BadRequest, phase, "read "+p, err)
		}
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)), err
}

// CopyTarget is the directory in which what CopyTar writes is unpacked: the destination of a directory,
// or the one that the file's is in.
func (r *Recipe) CopyTarget(c Copy) (string, error) {
	from, err := os.OpenRoot(r.dir)
	if err != nil {
		return "", errs.Wrap(errs.BadRequest, phase, "open the recipe's directory", err)
	}
	defer from.Close()
	fi, err := from.Lstat(c.Src)
	if err != nil {
		return "", errs.Wrap(errs.BadRequest, phase, "read "+c.Src, err)
	}
	dest := path.Clean(c.Dest)
	switch {
	case fi.IsDir():
		return dest, nil
	case dest == "/":
		return "", errs.New(errs.BadRequest, phase, "copy "+c.Src+": a file needs a name in dest")
	}
	return path.Dir(dest), nil
}

// CopyTar writes what a copy step brings as a tar with its owners and modes: what is in a directory, or
// the file by its name at the destination.
func (r *Recipe) CopyTar(ctx context.Context, c Copy, out io.Writer, opts Options) error {
	tmp, err := os.MkdirTemp(opts.TempDir, "dsec-copy-")
	if err != nil {
		return layer.DiskError("make build directory", err)
	}
	defer os.RemoveAll(tmp)
	dir, err := r.CopyTarget(c)
	if err != nil {
		return err
	}
	if c.Dest = path.Clean(c.Dest); dir != c.Dest {
		c.Dest = "/" + path.Base(c.Dest)
	} else {
		c.Dest = "/"
	}
	b := &builder{recipe: r, root: tmp, tell: func(string) {}}
	if err := b.copy(ctx, c); err != nil {
		return err
	}
	return writeTree(ctx, tmp, out)
}
