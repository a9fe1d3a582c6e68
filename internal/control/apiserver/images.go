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
	"dsec/internal/control/watcher"
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

// importImage streams the body to one edge and its progress back, both at once.
func (s *Server) importImage(ctx context.Context, req *request, hr *http.Request, in *importInput) error {
	if err := checkImageName(in.Name); err != nil {
		return err
	}
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
	ask := &msg.ImageImportRequest{Name: in.Name, Format: in.Format, Size: uint64(max(0, hr.ContentLength))}
	image, err := s.cfg.Edges.Import(ctx, node, ask, body.r, body.interrupt, func(p *msg.ImageProgress) error {
		return out.write(v1.ImageProgress{Phase: p.Phase, Done: int64(p.Done), Total: int64(p.Total), Entries: int64(p.Entries)})
	})
	if err == nil {
		image.Name = in.Name
		s.cfg.Registry.SetImage(node.ID, image.Digest, true)
		// The image is there: that its caller hangs up now, or that interrupting the
		// upload ended the request's context, is no reason to leave it nameless.
		pctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), catalogTime)
		err = s.catalog.put(pctx, image)
		cancel()
	}
	if err == nil {
		return out.write(v1.ImageProgress{Phase: "commit", Image: &image})
	}
	if werr := s.importFailed(req, out, err); werr != nil {
		return werr
	}
	return err
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

// imageUnused fails if sandboxes use an image, and names them.
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
	if n == 0 {
		return nil
	}
	slices.Sort(users)
	told := strings.Join(users, " ")
	if n > len(users) {
		told += fmt.Sprintf(" and %d more", n-len(users))
	}
	return errs.New(errs.ImageInUse, "image.delete", "sandboxes use the image: "+told).With("sandboxes", told)
}

type exportInput struct {
	Name string `query:"name" required:"true" minLength:"1" maxLength:"255" doc:"Name or digest of the image." example:"debian:12"`
}

// exportImage streams the files of an image from an edge.
func (s *Server) exportImage(ctx context.Context, req *request, _ *http.Request, in *exportInput) error {
	img, err := s.catalog.resolve(in.Name)
	if err != nil {
		return err
	}
	failed := error(errs.New(errs.NoNode, "image.export", "no edge is ready").After(time.Second))
	out := s.newLines(req, "application/x-tar")
	defer out.end()
	loads := s.cfg.Registry.Loads()
	slices.SortStableFunc(loads, func(a, b watcher.NodeLoad) int { // those that have some of it first
		_, has := a.Images[img.Digest]
		_, other := b.Images[img.Digest]
		switch {
		case has && !other:
			return -1
		case other && !has:
			return 1
		}
		return 0
	})
	for _, l := range loads {
		if !l.Node.Ready {
			continue
		}
		if failed = s.cfg.Edges.Export(ctx, *l.Node, &img, (*rawWriter)(out)); failed == nil {
			return nil
		}
		if req.status != 0 { // the client has some of it: only a broken answer says that there is no more
			s.cfg.Log.Warn("an export broke off", "request", req.id, "image", img.Digest, "err", failed)
			panic(http.ErrAbortHandler)
		}
	}
	return failed
}

// rawWriter writes bytes where lines would go.
type rawWriter lines

func (w *rawWriter) Write(p []byte) (int, error) {
	if err := (*lines)(w).raw(p); err != nil {
		return 0, err
	}
	return len(p), nil
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
	img, err := s.catalog.resolve(in.Name)
	if err != nil {
		return nil, err
	}
	names := s.catalog.list(img.Digest)
	if img.Name == in.Name && len(names) > 1 {
		return nil, s.catalog.delete(ctx, img.Name)
	}
	if err := s.imageUnused(img.Digest); err != nil {
		return nil, err
	}
	// The edges first: one that still uses the image must leave the name in place.
	for _, l := range s.cfg.Registry.Loads() {
		if _, has := l.Images[img.Digest]; !has {
			continue
		}
		if err := s.cfg.Edges.DeleteImage(ctx, *l.Node, img.Digest); err != nil && !errors.Is(err, errs.ImageNotFound) {
			return nil, err
		}
		s.cfg.Registry.SetImage(l.Node.ID, img.Digest, false)
	}
	for _, n := range names {
		if err := s.catalog.delete(ctx, n.Name); err != nil && !errors.Is(err, errs.ImageNotFound) {
			return nil, err
		}
	}
	return nil, nil
}
