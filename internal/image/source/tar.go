package source

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

const (
	paxXattr = "SCHILY.xattr."
	// What may follow a tar's end marker: padding of some writers.
	maxTrailer = 1 << 30
)

// plainTar reads a tar as the root file system it holds. Removal markers mean
// nothing in it: they are files like any others.
func plainTar(ctx context.Context, r io.Reader, b *layer.Builder) error {
	tail := &tailReader{r: r}
	if err := readTar(ctx, tail, b, false); err != nil {
		return err
	}
	if tail.zeros < blockLen {
		return errs.New(errs.ImageCorrupt, phase, "the tar is cut off: it has no end marker")
	}
	return drain(r)
}

// tailReader counts the zero bytes that the last reads ended with.
type tailReader struct {
	r     io.Reader
	zeros int
}

func (t *tailReader) Read(p []byte) (int, error) {
	n, err := t.r.Read(p)
	trim := n
	for trim > 0 && p[trim-1] == 0 && n-trim < blockLen {
		trim--
	}
	if trim > 0 {
		t.zeros = n - trim
	} else {
		t.zeros = min(t.zeros+n, blockLen)
	}
	return n, err
}

// drain reads to the end, so that checksums at the end of the stream are checked.
func drain(r io.Reader) error {
	n, err := io.CopyN(io.Discard, r, maxTrailer)
	switch {
	case errors.Is(err, io.EOF):
		return nil
	case err != nil:
		return streamError("read the end of the tar", err)
	}
	return errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("more than %d bytes follow the tar's end", n))
}

// readTar adds the entries of one tar to b, applying removal markers if it is an
// image's layer.
func readTar(ctx context.Context, r io.Reader, b *layer.Builder, whiteouts bool) error {
	tr := tar.NewReader(r)
	last := "the beginning"
	for {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.RequestCanceled, phase, "read tar", err)
		}
		h, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil && !(errors.Is(err, tar.ErrInsecurePath) && h != nil) { // names are checked by the builder
			return streamError("read the tar's entry after "+last, err)
		}
		last = fmt.Sprintf("%.200q", h.Name)
		if h.Typeflag == tar.TypeXGlobalHeader || h.Typeflag == 'V' {
			continue // comments and volume labels
		}
		if whiteouts {
			if done, err := b.Whiteout(h.Name); done || err != nil {
				if err != nil {
					return err
				}
				continue
			}
		}
		if err := addEntry(ctx, h, tr, b); err != nil {
			return err
		}
	}
}

func addEntry(ctx context.Context, h *tar.Header, r io.Reader, b *layer.Builder) error {
	a, err := tarAttr(h, b)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeReg, '\x00', tar.TypeCont, tar.TypeGNUSparse:
		return b.File(ctx, h.Name, a, h.Size, r)
	case tar.TypeDir, 'D':
		return b.Dir(h.Name, a)
	case tar.TypeSymlink:
		return b.Symlink(h.Name, h.Linkname, a)
	case tar.TypeLink:
		return b.Link(h.Name, h.Linkname)
	case tar.TypeChar, tar.TypeBlock:
		if h.Devmajor < 0 || h.Devminor < 0 || h.Devmajor > math.MaxInt32 || h.Devminor > math.MaxInt32 {
			return badEntry(h, "device number out of range")
		}
		typ := uint32(unix.S_IFCHR)
		if h.Typeflag == tar.TypeBlock {
			typ = unix.S_IFBLK
		}
		return b.Special(h.Name, typ, uint32(h.Devmajor), uint32(h.Devminor), a)
	case tar.TypeFifo:
		return b.Special(h.Name, unix.S_IFIFO, 0, 0, a)
	}
	return errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("%.200q: tar entry of type %q", h.Name, h.Typeflag))
}

func tarAttr(h *tar.Header, b *layer.Builder) (layer.Attr, error) {
	a := layer.Attr{
		Perm: uint32(h.Mode & 0o7777),
		Sec:  h.ModTime.Unix(),
		Nsec: uint32(h.ModTime.Nanosecond()),
	}
	for _, id := range []struct {
		from int
		to   *uint32
	}{{h.Uid, &a.UID}, {h.Gid, &a.GID}} {
		// Some writers store an unsigned id as a negative number.
		if id.from < math.MinInt32 || id.from > math.MaxUint32 {
			return a, badEntry(h, fmt.Sprintf("owner %d out of range", id.from))
		}
		*id.to = uint32(id.from)
	}
	for k, v := range h.PAXRecords {
		name, ok := strings.CutPrefix(k, paxXattr)
		if ok {
			a.Xattrs = append(a.Xattrs, layer.Xattr{Name: name, Value: []byte(v)})
			continue
		}
		for key, xattr := range map[string]string{"SCHILY.acl.access": "system.posix_acl_access", "SCHILY.acl.default": "system.posix_acl_default"} {
			if k != key || h.PAXRecords[paxXattr+xattr] != "" {
				continue
			}
			acl, err := parseACL(v)
			if err != nil {
				b.Skip("ACL (" + err.Error() + ")")
				continue
			}
			a.Xattrs = append(a.Xattrs, layer.Xattr{Name: xattr, Value: acl})
		}
	}
	return a, nil
}

func badEntry(h *tar.Header, what string) error {
	return errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("%.200q: %s", h.Name, what))
}
