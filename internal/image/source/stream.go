package source

import (
	"archive/tar"
	"bufio"
	"bytes"
	"compress/bzip2"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strconv"
	"strings"

	"dsec/api/v1/errs"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

const (
	readBuf   = 256 << 10
	sniffLen  = 16 << 10
	blockLen  = 512
	zstdWindw = 128 << 20
)

// ctxReader stops reading when ctx ends.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

// decompress looks at the stream's first bytes and unpacks gzip, zstd and bzip2.
// kind is "" for a stream that is not compressed. The limit is on what comes out.
func decompress(r *bufio.Reader, limit int64) (plain *bufio.Reader, done func(), kind string, err error) {
	head, err := r.Peek(6)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, "", streamError("read the source's beginning", err)
	}
	is := func(magic string) bool { return bytes.HasPrefix(head, []byte(magic)) }
	var out io.Reader
	done = func() {}
	switch {
	case is("\x1f\x8b"):
		kind = "gzip"
		out, err = gzip.NewReader(r)
	case is("\x28\xb5\x2f\xfd"), len(head) >= 4 && head[0]&0xf0 == 0x50 && is(string(head[:1])+"\x2a\x4d\x18"):
		kind = "zstd"
		var z *zstd.Decoder
		z, err = zstd.NewReader(r, zstd.WithDecoderMaxWindow(zstdWindw), zstd.WithDecoderConcurrency(2))
		if err == nil {
			out, done = z, z.Close
		}
	case is("BZh"):
		kind = "bzip2"
		out = bzip2.NewReader(r)
	case is("\xfd7zXZ\x00"):
		return nil, nil, "", errs.New(errs.ImageUnsupported, phase, "xz compression: unpack it first, or use gzip or zstd")
	default:
		return r, done, "", nil
	}
	if err != nil {
		return nil, nil, "", streamError("begin unpacking "+kind, err)
	}
	limited := &limitReader{r: out, left: limit, limit: limit}
	return bufio.NewReaderSize(limited, readBuf), done, kind, nil
}

// limitReader fails, instead of ending, when more than limit bytes come.
type limitReader struct {
	r           io.Reader
	left, limit int64
}

func (l *limitReader) Read(p []byte) (int, error) {
	n, err := l.r.Read(p)
	if l.left -= int64(n); l.left < 0 {
		return 0, errs.New(errs.BodyTooLarge, phase, fmt.Sprintf("the source unpacks to more than the limit of %d bytes", l.limit))
	}
	return n, err
}

// streamError types what goes wrong in a stream: damage, unless it has a type.
func streamError(action string, err error) error {
	return errs.Wrap(errs.ImageCorrupt, phase, action, err)
}

// checkTar refuses early and clearly what is no tar at all.
func checkTar(head []byte) error {
	if len(head) == 0 {
		return errs.New(errs.ImageCorrupt, phase, "the source is empty")
	}
	if len(head) < blockLen {
		return errs.New(errs.ImageUnsupported, phase, "the source is not a tar: shorter than one block")
	}
	block := head[:blockLen]
	if bytes.Equal(block, make([]byte, blockLen)) {
		return nil // an archive of nothing
	}
	field := strings.Trim(string(block[148:156]), " \x00")
	want, err := strconv.ParseInt(field, 8, 64)
	var unsigned, signed int64
	for i, c := range block {
		if i >= 148 && i < 156 {
			c = ' '
		}
		unsigned += int64(c)
		signed += int64(int8(c))
	}
	if err != nil || want != unsigned && want != signed {
		return errs.New(errs.ImageUnsupported, phase, "the source is not a tar: its first header has a wrong checksum")
	}
	return nil
}

// mayBeImage guesses from the first names whether the tar holds an image rather
// than a root file system; indexing it then tells for sure.
func mayBeImage(head []byte) bool {
	tr := tar.NewReader(bytes.NewReader(head))
	for {
		h, err := tr.Next()
		if err != nil && !errors.Is(err, tar.ErrInsecurePath) || h == nil {
			return false
		}
		top, _, _ := strings.Cut(clean(h.Name), "/")
		switch top {
		case "":
			continue // the root itself
		case "blobs", dockerManifest, ociIndex, ociMarker, "repositories":
			return true
		}
		// Digests: of a layer's directory or file, or of the config.
		top, _, _ = strings.Cut(strings.TrimPrefix(top, "sha256:"), ".")
		return len(top) == 64 && strings.Trim(top, "0123456789abcdef") == ""
	}
}

// clean makes a name inside an archive comparable: no "./", no leading slash.
func clean(name string) string { return strings.TrimPrefix(path.Clean("/"+name), "/") }
