package local

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"hash"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/edge"
	"dsec/internal/image"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// An archive of a snapshot is a tar of its description and of the data and metadata blobs of its
// layers as they are, in the order of the layers; a layer without data has no data blob.
//
//	snapshot.json
//	HEX.data, HEX.meta   for each layer, by the digest of its metadata
const (
	archiveVersion = 1
	archiveHead    = "snapshot.json"
	maxHead        = 16 << 20
	maxArchived    = 256 // layers
	archivePhase   = "snapshot.archive"
)

// archived is the description.
type archived struct {
	Version int         `json:"version"`
	Name    string      `json:"name,omitempty"`
	Image   image.Image `json:"image"`
}

func (i *Images) writeArchive(ctx context.Context, img *v1.Image, w io.Writer) error {
	if img.Snapshot == nil {
		return errs.New(errs.BadRequest, archivePhase, "the image is no snapshot: export it as docker or oci")
	}
	head := archived{Version: archiveVersion, Name: img.Name, Image: unwire(img)}
	for n := range head.Image.Layers { // where they are here is nobody else's business
		head.Image.Layers[n].MetaObject, head.Image.Layers[n].MapObject = "", ""
	}
	raw, err := json.Marshal(head)
	if err != nil {
		return errs.Wrap(errs.InternalError, archivePhase, "encode the description", err)
	}
	tw := tar.NewWriter(w)
	if err := addFile(ctx, tw, archiveHead, bytes.NewReader(raw), int64(len(raw))); err != nil {
		return err
	}
	for _, l := range layers(img) {
		if err := i.archiveLayer(ctx, tw, l); err != nil {
			return err
		}
	}
	return tw.Close()
}

func (i *Images) archiveLayer(ctx context.Context, tw *tar.Writer, l image.Layer) error {
	meta, data, end, err := i.open(ctx, l)
	if err != nil {
		return err
	}
	defer end()
	if data != nil {
		if err := addFile(ctx, tw, l.MetaDigest+".data", data, l.DataSize); err != nil {
			return err
		}
	}
	return addFile(ctx, tw, l.MetaDigest+".meta", meta, l.MetaSize)
}

func addFile(ctx context.Context, tw *tar.Writer, name string, r io.Reader, size int64) error {
	if err := tw.WriteHeader(&tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644, Size: size}); err != nil {
		return err
	}
	_, err := io.Copy(tw, io.LimitReader(untilDone{ctx, r}, size))
	return err
}

// untilDone ends a long copy with its context.
type untilDone struct {
	ctx context.Context
	r   io.Reader
}

func (u untilDone) Read(p []byte) (int, error) {
	if err := u.ctx.Err(); err != nil {
		return 0, errs.Wrap(errs.RequestCanceled, archivePhase, "copy a layer", err)
	}
	return u.r.Read(p)
}

// readArchive makes the image that an archive holds. All of it is checked: every blob against its
// digest, the metadata's structure, the chain, and the description against the image's digest.
func (i *Images) readArchive(ctx context.Context, r io.Reader, progress func(v1.ImageProgress)) (v1.Image, error) {
	tr := tar.NewReader(untilDone{ctx, r})
	head, err := readHead(tr)
	if err != nil {
		return v1.Image{}, err
	}
	tell := edge.Thin(progress)
	var done int64
	count := func(n int64) {
		done += n
		tell(v1.ImageProgress{Phase: "read", Done: done, Total: head.Image.SizeBytes})
	}
	var added []image.Layer
	defer func() {
		for _, l := range added {
			i.store.Release(l)
		}
	}()
	for n := range head.Image.Layers {
		l := &head.Image.Layers[n]
		got, err := i.readLayer(ctx, tr, *l, count)
		if err != nil {
			return v1.Image{}, err
		}
		added = append(added, got)
		l.MetaObject, l.MapObject = got.MetaObject, got.MapObject
	}
	if _, err := tr.Next(); err != io.EOF {
		return v1.Image{}, badArchive("it goes on after its last layer", err)
	}
	described := wire(head.Image)
	if _, err := checked(&described); err != nil {
		return v1.Image{}, err
	}
	img, err := i.store.AddImage(ctx, head.Image)
	if err != nil {
		return v1.Image{}, err
	}
	out := wire(img)
	out.Name = head.Name
	return out, nil
}

func badArchive(what string, err error) error {
	return errs.New(errs.ImageCorrupt, archivePhase, "the archive is damaged or no snapshot's: "+what).Because(err)
}

func readHead(tr *tar.Reader) (archived, error) {
	var head archived
	h, err := tr.Next()
	if err != nil || h.Name != archiveHead || h.Size > maxHead {
		return head, badArchive("it does not begin with "+archiveHead, err)
	}
	if err := json.NewDecoder(tr).Decode(&head); err != nil {
		return head, badArchive("its description does not parse", err)
	}
	if head.Version != archiveVersion {
		return head, errs.New(errs.ImageUnsupported, archivePhase, fmt.Sprintf("the archive has version %d; this program reads %d", head.Version, archiveVersion))
	}
	return head, checkDescription(head.Image)
}

// checkDescription refuses what no snapshot here says of itself. The archive's writer also made the
// digest, so that it proves nothing.
func checkDescription(img image.Image) error {
	s := img.Snapshot
	if s == nil || s.Temporary {
		return badArchive("its image is no snapshot", nil)
	}
	if n := len(img.Layers); n == 0 || n > maxArchived {
		return badArchive(fmt.Sprintf("%d layers", n), nil)
	}
	if !isDigest(img.Digest) {
		return badArchive(fmt.Sprintf("the digest %.100q", img.Digest), nil)
	}
	if _, _, err := v1.ParseSandboxID(s.Source); err != nil {
		return badArchive(fmt.Sprintf("it was made of %.100q", s.Source), err)
	}
	if len(s.Parents) == 0 {
		return badArchive("it was made on nothing", nil)
	}
	if img.Files < 0 || s.Entries < 0 || s.Bytes < 0 || s.Omitted < 0 || img.CreatedUnixMS < 0 {
		return badArchive("a count is negative", nil)
	}
	if i := slices.IndexFunc(s.Parents, func(d string) bool { return !isDigest(d) }); i >= 0 {
		return badArchive(fmt.Sprintf("it was made on %.100q", s.Parents[i]), nil)
	}
	for _, l := range img.Layers {
		if !isKind(l.Kind) {
			return badArchive(fmt.Sprintf("a layer's kind is %.100q", l.Kind), nil)
		}
	}
	for i, p := range s.Parts {
		if base := p.Kind == image.KindBase; !isKind(p.Kind) || base != (i == 0) || !isDigest(p.Digest) {
			return badArchive(fmt.Sprintf("part %d of it is %.100q %.100q", i+1, p.Kind, p.Digest), nil)
		}
	}
	return nil
}

// isKind says whether layers and parts may be of the kind.
func isKind(s string) bool {
	return s == image.KindBase || s == image.KindWorkspace || s == image.KindToolkit || s == image.KindDiff
}

func isDigest(s string) bool {
	sum, ok := strings.CutPrefix(s, "sha256:")
	raw, err := hex.DecodeString(sum)
	return ok && err == nil && len(raw) == sha256.Size && strings.ToLower(sum) == sum
}

func (i *Images) readLayer(ctx context.Context, tr *tar.Reader, l image.Layer, count func(int64)) (image.Layer, error) {
	return i.store.AddLayer(ctx, l.Kind, func(data layer.Blob, meta io.Writer) (layer.Result, error) {
		res := layer.Result{MetaDigest: l.MetaDigest, MetaSize: l.MetaSize, DataDigest: l.DataDigest, DataSize: l.DataSize}
		if (l.DataDigest == "") != (l.DataSize == 0) {
			return res, badArchive("a layer's data has no digest", nil)
		}
		if l.DataDigest != "" {
			if err := readBlob(tr, l.MetaDigest+".data", l.DataDigest, l.DataSize, data, count); err != nil {
				return res, err
			}
		}
		dir, err := i.store.TempDir("meta-")
		if err != nil {
			return res, err
		}
		defer os.RemoveAll(dir)
		copied, err := os.Create(filepath.Join(dir, "meta"))
		if err != nil {
			return res, layer.DiskError("make a file for metadata", err)
		}
		defer copied.Close()
		if err := readBlob(tr, l.MetaDigest+".meta", l.MetaDigest, l.MetaSize, io.MultiWriter(meta, copied), count); err != nil {
			return res, err
		}
		return res, checkStructure(ctx, copied, l, data)
	})
}

// readBlob copies the next file of the archive, which must be the blob with that digest.
func readBlob(tr *tar.Reader, name, digest string, size int64, w io.Writer, count func(int64)) error {
	h, err := tr.Next()
	if err != nil || h.Name != name || h.Size != size || h.Typeflag != tar.TypeReg {
		return badArchive("no blob "+name, err)
	}
	sum := &counter{h: sha256.New(), tell: count}
	n, err := io.Copy(io.MultiWriter(w, sum), tr)
	if err != nil {
		return errs.Wrap(errs.ImageCorrupt, archivePhase, "read "+name, err)
	}
	if got := hex.EncodeToString(sum.h.Sum(nil)); n != size || got != digest {
		return badArchive(fmt.Sprintf("%s has the digest %s", name, got), nil)
	}
	return nil
}

type counter struct {
	h    hash.Hash
	tell func(int64)
}

func (c *counter) Write(p []byte) (int, error) {
	c.tell(int64(len(p)))
	return c.h.Write(p)
}

// maxEntries is how many names a layer of an archive may have, as those that are packed here.
const maxEntries = 8 << 20

// checkStructure reads all of a layer's metadata: its digest says that it is whole, not that
// it makes sense, and the kernel is to mount it.
func checkStructure(ctx context.Context, meta io.ReaderAt, l image.Layer, data io.ReaderAt) error {
	r, err := layer.NewReader(meta, l.MetaSize, data, l.DataSize)
	if err != nil {
		return err
	}
	root, err := r.Root()
	if err != nil {
		return err
	}
	seen := map[uint64]bool{root.ID: true}
	dirs := []*layer.Entry{root}
	for names := 0; len(dirs) > 0; {
		if err := ctx.Err(); err != nil {
			return errs.Wrap(errs.RequestCanceled, archivePhase, "check a layer", err)
		}
		dir := dirs[len(dirs)-1]
		dirs = dirs[:len(dirs)-1]
		list, err := r.List(dir)
		if err != nil {
			return err
		}
		if names += len(list); names > maxEntries {
			return badArchive("a layer has too many names", nil)
		}
		for _, n := range list {
			e, err := r.Entry(n.ID)
			if err != nil {
				return err
			}
			switch {
			case e.Type() == unix.S_IFDIR && seen[e.ID]:
				return badArchive("a directory has two names", nil)
			case e.Type() == unix.S_IFDIR:
				seen[e.ID] = true
				dirs = append(dirs, e)
			case e.Type() == unix.S_IFREG:
				if _, err := r.Content(e); err != nil {
					return err
				}
			}
		}
	}
	return nil
}
