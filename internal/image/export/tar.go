package export

import (
	"context"
	"fmt"
	"io"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

const (
	phase = "image.export"

	// Only files with holes of more than this in all are written as sparse: the
	// OCI specification advises against it, and the rest compresses well.
	defaultSparse = 64 << 20

	whiteoutPrefix = ".wh."
	opaqueName     = ".wh..wh..opq"
	copyBuf        = 256 << 10
)

// TarOptions steer [Tar]; the zero value is usable.
type TarOptions struct {
	// Diff says that the (one) layer lies over others: overlayfs' marks of what it
	// removes become those of OCI layers. Without it they are entries as any others.
	Diff bool
	// SparseMin is how many bytes of holes make a file sparse in the tar (default
	// 64 MiB; negative: never). Docker, containerd and GNU tar read such files.
	SparseMin int64
}

// Stats of a written tar.
type Stats struct {
	Entries int64
	Bytes   int64            // of file contents
	Skipped map[string]int64 // what a tar cannot hold and was left out, by kind
}

// Tar writes the layers, lowest first, as one tar stream. Several are merged as
// overlayfs would show them. The same layers give the same bytes.
//
// Errors: image_corrupt (the layers), image_unsupported (what no OCI layer can
// say, such as a file whose name begins with ".wh."), request_canceled, and
// whatever w returns.
func Tar(ctx context.Context, w io.Writer, opts TarOptions, layers ...*layer.Reader) (Stats, error) {
	if opts.SparseMin == 0 {
		opts.SparseMin = defaultSparse
	}
	if opts.Diff && len(layers) != 1 || len(layers) == 0 {
		return Stats{}, errs.New(errs.InternalError, phase, fmt.Sprintf("%d layers to write as one", len(layers)))
	}
	t := &tarrer{
		ctx: ctx, w: w, opts: opts, layers: layers, merged: len(layers) > 1,
		links: map[fileID]string{}, seen: map[fileID]bool{},
		stats: Stats{Skipped: map[string]int64{}}, buf: make([]byte, copyBuf),
	}
	var roots []file
	for i := range layers {
		root, err := layers[i].Root()
		if err != nil {
			return t.stats, err
		}
		roots = append(roots, file{layer: i, Entry: root})
	}
	err := t.dir("", roots)
	if err == nil {
		_, err = w.Write(make([]byte, 2*block))
	}
	return t.stats, err
}

type fileID struct {
	layer int
	id    uint64
}

// file is an entry and the layer it is in.
type file struct {
	layer int
	*layer.Entry
	whiteout bool
}

type tarrer struct {
	ctx    context.Context
	w      io.Writer
	opts   TarOptions
	layers []*layer.Reader
	merged bool
	links  map[fileID]string // files with several names, by the first written
	seen   map[fileID]bool   // directories, which have one name
	stats  Stats
	buf    []byte
}

// dir writes the directory that dirs, lowest first, are merged into.
func (t *tarrer) dir(path string, dirs []file) error {
	if err := t.ctx.Err(); err != nil {
		return errs.Wrap(errs.RequestCanceled, phase, "write tar", err)
	}
	// Below an opaque directory nothing shows.
	from := 0
	for i, d := range dirs {
		id := fileID{d.layer, d.ID}
		if t.seen[id] {
			return errs.New(errs.ImageCorrupt, phase, fmt.Sprintf("the directory %.200q is in two places", path))
		}
		t.seen[id] = true
		if t.merged && opaque(d.Entry) == "y" {
			from = i
		}
	}
	dirs = dirs[from:]
	top := dirs[len(dirs)-1]
	h, err := t.header(path+"/", top)
	if err != nil {
		return err
	}
	if path == "" {
		h.name = "./"
	}
	if err := t.put(h); err != nil {
		return err
	}
	if t.opts.Diff && opaque(top.Entry) == "y" {
		if err := t.put(&header{name: join(path, opaqueName), typ: typeReg}); err != nil {
			return err
		}
	}
	lists := make([][]layer.Name, len(dirs))
	for i, d := range dirs {
		if lists[i], err = t.layers[d.layer].List(d.Entry); err != nil {
			return fmt.Errorf("%.200q: %w", path, err)
		}
	}
	for {
		name, stack, err := t.next(dirs, lists)
		if err != nil || len(stack) == 0 {
			return err
		}
		if err := t.entry(join(path, name), name, stack); err != nil {
			return err
		}
	}
}

// next takes the least name of the lists and the files that have it, lowest first.
func (t *tarrer) next(dirs []file, lists [][]layer.Name) (string, []file, error) {
	for {
		least, some := "", false
		for _, l := range lists {
			if len(l) > 0 && (!some || l[0].Name < least) {
				least, some = l[0].Name, true
			}
		}
		if !some {
			return "", nil, nil
		}
		var stack []file
		for i, l := range lists {
			if len(l) == 0 || l[0].Name != least {
				continue
			}
			lists[i] = l[1:]
			e, err := t.layers[dirs[i].layer].Entry(l[0].ID)
			if err != nil {
				return "", nil, fmt.Errorf("%.200q: %w", least, err)
			}
			f := file{layer: dirs[i].layer, Entry: e, whiteout: isWhiteout(dirs[i].Entry, e)}
			if !isDir(e) || len(stack) == 0 || !isDir(stack[len(stack)-1].Entry) {
				stack = stack[:0] // it hides what is below
			}
			stack = append(stack, f)
		}
		if !t.merged || !stack[len(stack)-1].whiteout {
			return least, stack, nil
		}
	}
}

func (t *tarrer) entry(path, name string, stack []file) error {
	f := stack[len(stack)-1]
	if t.opts.Diff && f.whiteout {
		dir := strings.TrimSuffix(path, name)
		return t.put(&header{name: dir + whiteoutPrefix + name, typ: typeReg})
	}
	if strings.HasPrefix(name, whiteoutPrefix) {
		return errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("%.200q: an OCI layer cannot hold a file whose name begins with %s", path, whiteoutPrefix))
	}
	if isDir(f.Entry) {
		return t.dir(path, stack)
	}
	h, err := t.header(path, f)
	if err != nil {
		return err
	}
	if f.Nlink > 1 {
		id := fileID{f.layer, f.ID}
		if first, ok := t.links[id]; ok {
			h.typ, h.link, h.attr.Xattrs = typeLink, first, nil
			return t.put(h)
		}
		t.links[id] = path
	}
	switch f.Type() {
	case unix.S_IFREG:
		h.typ = typeReg
		return t.file(h, f)
	case unix.S_IFLNK:
		h.typ, h.link = typeSymlink, f.Target
	case unix.S_IFCHR:
		h.typ, h.major, h.minor = typeChar, f.Major, f.Minor
	case unix.S_IFBLK:
		h.typ, h.major, h.minor = typeBlock, f.Major, f.Minor
	case unix.S_IFIFO:
		h.typ = typeFifo
	default:
		t.stats.Skipped["socket"]++
		return nil
	}
	return t.put(h)
}

func (t *tarrer) header(path string, f file) (*header, error) {
	h := &header{name: path, typ: typeDir, mode: f.Attr.Perm, attr: f.Attr}
	if len(f.Attr.Xattrs) == 0 {
		return h, nil
	}
	h.attr.Xattrs = nil
	for _, x := range f.Attr.Xattrs {
		if t.opts.Diff || t.merged {
			keep, err := overlayXattr(path, &x)
			if err != nil {
				return nil, err
			}
			if !keep {
				continue
			}
		}
		if strings.IndexByte(x.Name, '=') >= 0 { // the records' own separator
			t.stats.Skipped["xattr with = in its name"]++
			continue
		}
		h.attr.Xattrs = append(h.attr.Xattrs, x)
	}
	return h, nil
}

func (t *tarrer) put(h *header) error {
	t.stats.Entries++
	return h.write(t.w)
}

// file writes a regular file, as a sparse one if enough of it is holes.
func (t *tarrer) file(h *header, f file) error {
	content, err := t.layers[f.layer].Content(f.Entry)
	if err != nil {
		return fmt.Errorf("%.200q: %w", h.name, err)
	}
	t.stats.Bytes += f.Size
	h.size = f.Size
	runs, data, err := dataRuns(content, f.Size)
	if err != nil {
		return fmt.Errorf("%.200q: %w", h.name, err)
	}
	if m := sparseMap(runs, f.Size); t.opts.SparseMin > 0 && f.Size-data >= t.opts.SparseMin && len(m) <= maxSparseMap {
		h.sparse, h.size = f.Size, int64(len(m))+data
		if err := t.put(h); err != nil {
			return err
		}
		if _, err := t.w.Write(m); err != nil {
			return err
		}
	} else {
		if err := t.put(h); err != nil {
			return err
		}
		runs = []run{{0, f.Size}}
	}
	if content, err = t.layers[f.layer].Content(f.Entry); err != nil {
		return err
	}
	var pos int64
	for _, r := range runs {
		if err := content.Skip(r.off - pos); err != nil {
			return err
		}
		if err := t.copy(h.name, content, r.n); err != nil {
			return err
		}
		pos = r.off + r.n
	}
	_, err = t.w.Write(make([]byte, -h.size&(block-1)))
	return err
}

func (t *tarrer) copy(path string, from io.Reader, n int64) error {
	for n > 0 {
		if err := t.ctx.Err(); err != nil {
			return errs.Wrap(errs.RequestCanceled, phase, "write tar", err)
		}
		p := t.buf[:min(n, int64(len(t.buf)))]
		if _, err := io.ReadFull(from, p); err != nil {
			return fmt.Errorf("%.200q: %w", path, errs.Wrap(errs.ImageCorrupt, phase, "read content", err))
		}
		if _, err := t.w.Write(p); err != nil {
			return err
		}
		n -= int64(len(p))
	}
	return nil
}

// run is a piece of a file that is not a hole.
type run struct{ off, n int64 }

func dataRuns(c *layer.Content, size int64) (runs []run, data int64, err error) {
	var pos int64
	for pos < size {
		hole, err := c.Hole()
		if err != nil {
			return nil, 0, err
		}
		if err := c.Skip(hole); err != nil {
			return nil, 0, err
		}
		pos += hole
		n, err := c.Data()
		if err != nil {
			return nil, 0, err
		}
		if err := c.Skip(n); err != nil {
			return nil, 0, err
		}
		if n > 0 {
			runs = append(runs, run{pos, n})
		}
		pos, data = pos+n, data+n
	}
	return runs, data, nil
}

// sparseMap is what precedes the data of a sparse file (GNU's format 1.0).
func sparseMap(runs []run, size int64) []byte {
	if n := len(runs); n == 0 || runs[n-1].off+runs[n-1].n < size {
		runs = append(runs[:n:n], run{size, 0})
	}
	b := fmt.Appendf(nil, "%d\n", len(runs))
	for _, r := range runs {
		b = fmt.Appendf(b, "%d\n%d\n", r.off, r.n)
	}
	return append(b, make([]byte, -len(b)&(block-1))...)
}

func join(dir, name string) string {
	if dir == "" {
		return name
	}
	return dir + "/" + name
}
