package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

const catalogTime = 10 * time.Second // to write one catalogue entry

type importInput struct {
	Name   string `query:"name" required:"true" minLength:"1" maxLength:"255" doc:"Name in the catalogue; an image that has it is replaced." example:"debian:12"`
	Format string `query:"format" enum:"auto,tar,docker-archive,oci-layout,dir" doc:"What the body is; auto (the default) looks. A directory or OCI layout is sent as a tar of it."`
}

func checkImageName(name string) error {
	for _, c := range []byte(name) {
		if c <= ' ' || c >= 0x7f || strings.IndexByte(`"\?#%*`, c) >= 0 {
			return badField("name", quoted(name)+" has a character that names may not have")
		}
	}
	if strings.HasPrefix(name, "/") || strings.HasSuffix(name, "/") || strings.Contains(name, "//") || strings.HasPrefix(name, "sha256:") {
		return badField("name", quoted(name)+" is not a name")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == "." || part == ".." {
			return badField("name", quoted(name)+" is not a name")
		}
	}
	return nil
}

// checkPlainName is for images that are no snapshots.
func checkPlainName(name string) error {
	if strings.HasPrefix(name, v1.SnapshotPrefix) {
		return badField("name", quoted(name)+" is a snapshot's name: choose one without "+v1.SnapshotPrefix)
	}
	return checkImageName(name)
}

// importImage is POST /v1/images.
func (s *Server) importImage(ctx context.Context, req *request, hr *http.Request, in *importInput) error {
	if err := checkPlainName(in.Name); err != nil {
		return err
	}
	return s.upload(ctx, req, hr, in.Format, func(v1.Image) (string, func(), error) { return in.Name, func() {}, nil })
}

// upload streams the body to one edge and its progress back, both at once. name is asked
// for what the image is to be called, which it may be until released.
func (s *Server) upload(ctx context.Context, req *request, hr *http.Request, format string, name func(v1.Image) (string, func(), error)) error {
	done, err := s.imports.begin(ctx, s.drain.Done())
	if err != nil {
		return err
	}
	defer done()
	node, err := s.importNode()
	if err != nil {
		return err
	}
	out := s.newLines(req, "application/x-ndjson")
	defer out.end()
	// Without it, net/http reads the body to its end before the first line goes out.
	if err := out.rc.EnableFullDuplex(); err != nil {
		return errs.Wrap(errs.InternalError, "image.import", "stream both ways", err)
	}
	req.Header().Set("Connection", "close") // the body may not be read to its end
	body := startUpload(hr.Body, s.cfg.UploadTimeout)
	defer body.finish(out.rc, hr.Body)
	ask := &msg.ImageImportRequest{Format: format, Size: uint64(max(0, hr.ContentLength))}
	image, err := s.cfg.Edges.Import(ctx, node, ask, body.r, body.interrupt, out.progress)
	called := ""
	if err == nil {
		var release func()
		if called, release, err = name(image); err != nil {
			s.disown(ctx, node, image.Digest)
		} else {
			defer release()
		}
	}
	return s.named(ctx, req, out, node, called, image, err)
}

// progress passes an edge's word on.
func (l *lines) progress(p *msg.ImageProgress) error {
	return l.write(v1.ImageProgress{Phase: p.Phase, Done: int64(p.Done), Total: int64(p.Total), Entries: int64(p.Entries)})
}

// named gives the image that node made its name, or tells the client that there is none.
func (s *Server) named(ctx context.Context, req *request, out *lines, node v1.Node, name string, image v1.Image, err error) error {
	if err == nil {
		image.Name = name
		if v1.KeptByBuild(name) {
			now := s.cfg.Now()
			image.UsedAt = &now // the same content may be of long ago
		}
		s.cfg.Registry.SetImage(node.ID, image.Digest, true)
		// The image is there: that its caller hangs up now, or that interrupting the
		// upload ended the request's context, is no reason to leave it nameless.
		pctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), catalogTime)
		err = s.catalog.put(pctx, image)
		cancel()
		if err != nil {
			s.disown(ctx, node, image.Digest)
		}
	}
	if err == nil {
		return out.write(v1.ImageProgress{Phase: "commit", Image: &image})
	}
	if werr := s.importFailed(req, out, err); werr != nil {
		return werr
	}
	return err
}

// disown removes an image that got no name, unless another name has it.
func (s *Server) disown(ctx context.Context, node v1.Node, digest string) {
	if len(s.catalog.list(digest)) > 0 {
		return
	}
	dctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), catalogTime)
	defer cancel()
	if err := s.cfg.Edges.DeleteImage(dctx, node, digest); err != nil {
		s.cfg.Log.Error("an image without a name is left", "node", node.ID, "image", digest, "err", err)
		return
	}
	s.cfg.Registry.SetImage(node.ID, digest, false)
}

// importFailed tells the client, as a plain answer if no line went out yet.
func (s *Server) importFailed(req *request, out *lines, err error) error {
	p := problemOf(req, err)
	if req.status == 0 {
		if aerr := out.arm(); aerr != nil {
			return aerr
		}
		writeProblem(req, p)
		return out.flush()
	}
	return out.write(v1.ImageProgress{Error: p})
}

// importNode chooses the ready edge with the most free disk.
func (s *Server) importNode() (v1.Node, error) {
	var best v1.Node
	for _, n := range s.cfg.Registry.Nodes() {
		if n.Ready && (best.ID == "" || n.FreeDisk > best.FreeDisk) {
			best = n
		}
	}
	if best.ID == "" {
		return best, errs.New(errs.NoNode, "image.import", "no edge is ready").After(time.Second)
	}
	return best, nil
}

const maxUsersTold = 20

// imageUnused fails if sandboxes use an image or snapshots were made on it, and names them.
func (s *Server) imageUnused(digest string) error {
	var users []string
	n := 0
	s.cfg.Registry.Each(func(sb *v1.Sandbox) {
		uses := sb.ImageDigest == digest
		for _, p := range sb.Parts {
			uses = uses || p.Digest == digest
		}
		if uses && sb.State != v1.StateLost {
			if n++; n <= maxUsersTold {
				users = append(users, sb.ID)
			}
		}
	})
	slices.Sort(users)
	if n > len(users) {
		users = append(users, fmt.Sprintf("%d more sandboxes", n-len(users)))
	}
	if users = append(users, s.catalog.madeOn(digest)...); len(users) == 0 {
		return nil
	}
	return v1.InUse("image.delete", "image", users)
}

type imageListOutput struct{ Body v1.ImageList }

func (s *Server) listImages(context.Context, *request, *struct{}) (*imageListOutput, error) {
	return &imageListOutput{v1.ImageList{Items: s.catalog.list("")}}, nil
}

type imageInput struct {
	Name string `path:"name" maxLength:"255" doc:"Name, which may hold slashes, or digest."`
}

type imageOutput struct{ Body v1.Image }

func (s *Server) getImage(_ context.Context, _ *request, in *imageInput) (*imageOutput, error) {
	img, err := s.catalog.resolve(in.Name)
	if err != nil {
		return nil, err
	}
	return &imageOutput{img}, nil
}

// deleteImage removes a name, and what it pointed at if no other name does. By digest it
// removes all names of it.
func (s *Server) deleteImage(ctx context.Context, _ *request, in *imageInput) (*noOutput, error) {
	return nil, s.removeImage(ctx, in.Name)
}

func (s *Server) removeImage(ctx context.Context, ref string) error {
	img, err := s.catalog.resolve(ref)
	if err != nil {
		return err
	}
	names := s.catalog.list(img.Digest)
	if img.Name == ref && len(names) > 1 {
		return s.catalog.delete(ctx, img.Name)
	}
	if err := s.imageUnused(img.Digest); err != nil {
		return err
	}
	// The edges first: one that still uses the image must leave the name in place.
	for _, l := range s.cfg.Registry.Loads() {
		if _, has := l.Images[img.Digest]; !has {
			continue
		}
		if err := s.cfg.Edges.DeleteImage(ctx, *l.Node, img.Digest); err != nil && !errors.Is(err, errs.ImageNotFound) {
			return err
		}
		s.cfg.Registry.SetImage(l.Node.ID, img.Digest, false)
	}
	for _, n := range names {
		if err := s.catalog.delete(ctx, n.Name); err != nil && !errors.Is(err, errs.ImageNotFound) {
			return err
		}
	}
	return nil
}
