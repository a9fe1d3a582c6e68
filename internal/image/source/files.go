package source

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"dsec/api/v1/errs"
)

const (
	maxMembers = 1 << 20  // files of an image archive
	maxNames   = 64 << 20 // bytes of their names and of what links point to
	maxJSON    = 16 << 20
)

// files is random access to the members of an image's directory or archive.
type files interface {
	// open returns a member and its size; fs.ErrNotExist if there is none.
	open(name string) (io.ReadCloser, int64, error)
}

// rootFiles are a directory's; links out of it are refused.
type rootFiles struct{ root *os.Root }

func (r rootFiles) open(name string) (io.ReadCloser, int64, error) {
	f, err := r.root.OpenFile(name, os.O_RDONLY, 0)
	if err != nil {
		return nil, 0, err
	}
	st, err := f.Stat()
	if err == nil && !st.Mode().IsRegular() {
		err = errors.New("not a regular file")
	}
	if err != nil {
		f.Close()
		return nil, 0, err
	}
	return f, st.Size(), nil
}

// tarFiles are a tar's, by their offsets.
type tarFiles struct {
	at    io.ReaderAt
	files map[string]span
	links map[string]string
}

type span struct{ off, size int64 }

func indexTar(ctx context.Context, r *io.SectionReader) (*tarFiles, error) {
	t := &tarFiles{at: r, files: map[string]span{}, links: map[string]string{}}
	tr := tar.NewReader(r)
	names := 0
	for {
		if err := ctx.Err(); err != nil {
			return nil, errs.Wrap(errs.RequestCanceled, phase, "index archive", err)
		}
		h, err := tr.Next()
		if err == io.EOF {
			return t, nil
		}
		if err != nil && !(errors.Is(err, tar.ErrInsecurePath) && h != nil) {
			return nil, streamError("index archive", err)
		}
		if len(t.files)+len(t.links) >= maxMembers {
			return nil, errs.New(errs.BodyTooLarge, phase, fmt.Sprintf("archive with more than %d members", maxMembers))
		}
		if names += len(h.Name) + len(h.Linkname); names > maxNames {
			return nil, errs.New(errs.BodyTooLarge, phase, fmt.Sprintf("archive whose names take more than %d bytes", maxNames))
		}
		name := strings.Clone(clean(h.Name)) // not the whole header that it is cut out of
		switch h.Typeflag {
		case tar.TypeReg, '\x00', tar.TypeCont:
			off, err := r.Seek(0, io.SeekCurrent)
			if err != nil {
				return nil, streamError("index archive", err)
			}
			t.files[name] = span{off, h.Size}
		case tar.TypeSymlink: // older docker save shares layers by them
			t.links[name] = clean(path.Join(path.Dir("/"+name), h.Linkname))
		case tar.TypeLink:
			t.links[name] = strings.Clone(clean(h.Linkname))
		}
	}
}

func (t *tarFiles) has(name string) bool { _, ok := t.files[name]; return ok }

func (t *tarFiles) open(name string) (io.ReadCloser, int64, error) {
	name = clean(name)
	for range 8 {
		if s, ok := t.files[name]; ok {
			return io.NopCloser(io.NewSectionReader(t.at, s.off, s.size)), s.size, nil
		}
		to, ok := t.links[name]
		if !ok {
			break
		}
		name = to
	}
	return nil, 0, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
}

// readJSON reads a small member whole.
func readJSON(f files, name string) ([]byte, error) {
	r, size, err := f.open(name)
	if err != nil {
		return nil, errs.Wrap(errs.ImageCorrupt, phase, "open "+fmt.Sprintf("%.200q", name), err)
	}
	defer r.Close()
	if size > maxJSON {
		return nil, errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("%.200q has %d bytes (limit %d)", name, size, maxJSON))
	}
	p, err := io.ReadAll(io.LimitReader(r, maxJSON))
	if err != nil {
		return nil, streamError("read "+name, err)
	}
	return p, nil
}
