package source

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

const phase = "image.source"

// Format says what a source is.
type Format string

// Formats. Auto looks at the source.
const (
	Auto   Format = ""
	Dir    Format = "dir"
	Tar    Format = "tar"
	Docker Format = "docker" // what docker save writes
	OCI    Format = "oci"    // an OCI layout, as a directory or in a tar
)

// Options steer reading. The zero value is usable.
type Options struct {
	Format   Format
	Ref      string // which image, where the source holds several: a name:tag or digest
	Platform string // os/arch, where an index offers several (default: linux on this machine's CPU)
	SpoolDir string // where an image archive that arrives as a stream is kept meanwhile
	MaxBytes int64  // limit on what a compressed stream may unpack to (default 2 TiB)
}

func (o *Options) fill() error {
	switch o.Format {
	case Auto, Dir, Tar, Docker, OCI:
	default:
		return errs.New(errs.BadRequest, phase, fmt.Sprintf("image format %q: use dir, tar, docker or oci", o.Format))
	}
	if o.Platform == "" {
		o.Platform = "linux/" + runtime.GOARCH
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = 2 << 40
	}
	return nil
}

// Result is what reading a source told besides the tree.
type Result struct {
	Format Format
	Config image.Config
}

// Path reads the directory or file at path into b.
func Path(ctx context.Context, path string, b *layer.Builder, opts Options) (Result, error) {
	if err := opts.fill(); err != nil {
		return Result{}, err
	}
	st, err := os.Stat(path)
	if err != nil {
		code := errs.BadRequest
		if errors.Is(err, fs.ErrNotExist) {
			code = errs.PathNotFound
		}
		return Result{}, errs.Wrap(code, phase, "find image source", err)
	}
	if st.IsDir() {
		return directory(ctx, path, b, opts)
	}
	if !st.Mode().IsRegular() && st.Mode()&fs.ModeNamedPipe == 0 {
		return Result{}, errs.New(errs.ImageUnsupported, phase, path+" is neither a file nor a directory")
	}
	f, err := os.Open(path)
	if err != nil {
		return Result{}, errs.Wrap(errs.BadRequest, phase, "open image source", err)
	}
	defer f.Close()
	return stream(ctx, f, f, b, opts)
}

func directory(ctx context.Context, path string, b *layer.Builder, opts Options) (Result, error) {
	format := opts.Format
	if format == Auto {
		format = Dir
		if isFile(filepath.Join(path, ociMarker)) && isFile(filepath.Join(path, ociIndex)) {
			format = OCI
		}
	}
	switch format {
	case Dir:
		return Result{Format: Dir}, readDir(ctx, path, b)
	case OCI:
		root, err := os.OpenRoot(path)
		if err != nil {
			return Result{}, errs.Wrap(errs.BadRequest, phase, "open OCI layout", err)
		}
		defer root.Close()
		return readOCI(ctx, rootFiles{root}, b, opts)
	}
	return Result{}, errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("%s is a directory, not a %s archive", path, format))
}

func isFile(p string) bool {
	st, err := os.Lstat(p)
	return err == nil && st.Mode().IsRegular()
}

// Stream reads a tar, or an archive of an image, from r into b. An image archive
// is kept in SpoolDir while it is read.
func Stream(ctx context.Context, r io.Reader, b *layer.Builder, opts Options) (Result, error) {
	if err := opts.fill(); err != nil {
		return Result{}, err
	}
	return stream(ctx, r, nil, b, opts)
}

// stream reads r; file, if there is one, is what r reads from its beginning.
func stream(ctx context.Context, r io.Reader, file *os.File, b *layer.Builder, opts Options) (Result, error) {
	if opts.Format == Dir {
		return Result{}, errs.New(errs.ImageUnsupported, phase, "the source is a stream, not a directory")
	}
	raw := bufio.NewReaderSize(ctxReader{ctx, r}, readBuf)
	plain, closer, kind, err := decompress(raw, opts.MaxBytes)
	if err != nil {
		return Result{}, err
	}
	defer closer()
	head, err := plain.Peek(sniffLen)
	if err != nil && !errors.Is(err, io.EOF) {
		return Result{}, streamError("read the source's beginning", err)
	}
	if err := checkTar(head); err != nil {
		return Result{}, err
	}
	if opts.Format == Tar || opts.Format == Auto && !mayBeImage(head) {
		return Result{Format: Tar}, plainTar(ctx, plain, b)
	}
	at, size, done, err := seekable(file, kind, plain, opts.SpoolDir)
	if err != nil {
		return Result{}, err
	}
	defer done()
	return archive(ctx, at, size, b, opts)
}

// archive reads the tar in at as the image it holds, or as it is if it holds none.
func archive(ctx context.Context, at io.ReaderAt, size int64, b *layer.Builder, opts Options) (Result, error) {
	files, err := indexTar(ctx, io.NewSectionReader(at, 0, size))
	if err != nil {
		return Result{}, err
	}
	format := opts.Format
	if format == Auto {
		switch {
		case looksDocker(files):
			format = Docker
		case files.has(ociMarker) && files.has(ociIndex):
			format = OCI
		default:
			format = Tar
		}
	}
	switch format {
	case Docker:
		return readDocker(ctx, files, b, opts)
	case OCI:
		return readOCI(ctx, files, b, opts)
	}
	return Result{Format: Tar}, plainTar(ctx, bufio.NewReaderSize(io.NewSectionReader(at, 0, size), readBuf), b)
}

// seekable gives random access to the rest of the stream, by the file it comes
// from or by a copy without a name.
func seekable(file *os.File, kind string, plain io.Reader, dir string) (io.ReaderAt, int64, func(), error) {
	if file != nil && kind == "" {
		if st, err := file.Stat(); err == nil && st.Mode().IsRegular() {
			return file, st.Size(), func() {}, nil
		}
	}
	tmp, err := os.CreateTemp(dir, "spool-*")
	if err != nil {
		return nil, 0, nil, layer.DiskError("make spool file", err)
	}
	if err := unix.Unlink(tmp.Name()); err != nil {
		tmp.Close()
		return nil, 0, nil, errs.Wrap(errs.InternalError, phase, "unlink spool file", err)
	}
	n, err := copySpool(tmp, plain)
	if err != nil {
		tmp.Close()
		return nil, 0, nil, err
	}
	return tmp, n, func() { tmp.Close() }, nil
}

func copySpool(dst io.Writer, src io.Reader) (int64, error) {
	var total int64
	for buf := make([]byte, readBuf); ; {
		n, rerr := src.Read(buf)
		if _, err := dst.Write(buf[:n]); err != nil {
			return total, layer.DiskError("write spool file", err)
		}
		total += int64(n)
		if rerr == io.EOF {
			return total, nil
		}
		if rerr != nil {
			return total, streamError("read the archive", rerr)
		}
	}
}
