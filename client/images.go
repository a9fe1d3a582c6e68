package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client/internal/treetar"
)

// Formats of an image source.
const (
	FormatAuto          = "auto"
	FormatTar           = "tar"
	FormatDockerArchive = "docker-archive"
	FormatOCILayout     = "oci-layout"
	FormatDir           = "dir"
)

// ImportOptions changes an import.
type ImportOptions struct {
	Format string // one of the formats above; empty: auto
	// Progress is called from one goroutine with each report of the server.
	Progress func(v1.ImageProgress)
	// Sent is called with the bytes sent so far.
	Sent func(total int64)
}

// Import makes an image of the archive that r holds.
func (c *Client) Import(ctx context.Context, name string, r io.Reader, o ImportOptions) (*Image, error) {
	img, err := c.importStream(ctx, name, r, o)
	if err != nil {
		return nil, about("import image", name, err)
	}
	return img, nil
}

func (c *Client) importStream(ctx context.Context, name string, r io.Reader, o ImportOptions) (*Image, error) {
	if o.Format == "" {
		o.Format = FormatAuto
	}
	return c.upload(ctx, "/v1/images", url.Values{"name": {name}, "format": {o.Format}}, r, o)
}

// upload sends an archive and reads what the server says of it.
func (c *Client) upload(ctx context.Context, path string, q url.Values, r io.Reader, o ImportOptions) (*Image, error) {
	src := &source{r: r, sent: o.Sent}
	h := http.Header{"Content-Type": {"application/x-tar"}, "Accept": {"application/x-ndjson"}}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// NopCloser: an *os.File of the caller is not ours to close.
	for p, err := range streamBody[v1.ImageProgress](ctx, c, http.MethodPost, path, q, h, io.NopCloser(src)) {
		if err != nil {
			if src.err != nil {
				err = errs.Wrap(errs.BadRequest, "client.import", "the source cannot be read", src.err)
			}
			return nil, err
		}
		if p.Error != nil {
			return nil, p.Error.Err()
		}
		if o.Progress != nil {
			o.Progress(p)
		}
		if p.Image != nil {
			return p.Image, nil
		}
	}
	return nil, errs.New(errs.ConnectionLost, "client.read", "the answer ended without a result")
}

// source counts what is sent and keeps the reader's own error, which the HTTP client
// would report as a failed request.
type source struct {
	r    io.Reader
	n    int64
	sent func(int64)
	err  error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.n += int64(n)
	if n > 0 && s.sent != nil {
		s.sent(s.n)
	}
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// ImportPath makes an image of what path names: a directory tree, an OCI layout
// directory, or an archive (tar, docker-archive, OCI layout as a tar).
func (c *Client) ImportPath(ctx context.Context, name, path string, o ImportOptions) (*Image, error) {
	fi, err := os.Stat(path)
	if err != nil {
		return nil, localFile("client.import", "read "+path, err)
	}
	if !fi.IsDir() {
		f, err := os.Open(path)
		if err != nil {
			return nil, localFile("client.import", "read "+path, err)
		}
		defer f.Close()
		return c.Import(ctx, name, f, o)
	}
	if o.Format == "" || o.Format == FormatAuto {
		o.Format = FormatDir
		if _, err := os.Stat(filepath.Join(path, "oci-layout")); err == nil {
			o.Format = FormatOCILayout
		}
	}
	if o.Format != FormatDir && o.Format != FormatOCILayout {
		return nil, errs.New(errs.BadRequest, "client.import", fmt.Sprintf("%s is a directory, format %s is a file", path, o.Format)).With("field", "format")
	}
	pr, pw := io.Pipe()
	defer pr.Close() // ends the packer if the server answers early
	done := make(chan struct{})
	go func() {
		defer close(done)
		pw.CloseWithError(localFile("client.import", "read "+path, treetar.Pack(ctx, pw, path, treetar.PackOptions{})))
	}()
	img, err := c.Import(ctx, name, pr, o)
	pr.CloseWithError(errors.New("import ended"))
	<-done
	return img, err
}

// Images returns the catalogue.
func (c *Client) Images(ctx context.Context) ([]Image, error) {
	var l v1.ImageList
	if err := c.call(ctx, http.MethodGet, "/v1/images", nil, nil, &l); err != nil {
		return nil, fmt.Errorf("list images: %w", err)
	}
	return l.Items, nil
}

// Image returns one image, by name or digest.
func (c *Client) Image(ctx context.Context, name string) (*Image, error) {
	if err := element(name, true, errs.ImageNotFound); err != nil {
		return nil, err
	}
	var img Image
	if err := c.call(ctx, http.MethodGet, "/v1/images/"+name, nil, nil, &img); err != nil {
		return nil, about("get image", name, err)
	}
	return &img, nil
}

// DeleteImage removes an image's name, and its blobs when nothing else needs them.
func (c *Client) DeleteImage(ctx context.Context, name string) error {
	if err := element(name, true, errs.ImageNotFound); err != nil {
		return err
	}
	if err := c.call(ctx, http.MethodDelete, "/v1/images/"+name, nil, nil, nil); err != nil {
		return about("delete image", name, err)
	}
	return nil
}
