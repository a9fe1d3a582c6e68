package apiserver

import (
	"context"
	"net/http"
	"slices"
	"strings"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/watcher"
)

type registryInput struct{ Body v1.RegistryRequest }

// pullImage is POST /v1/images/pull.
func (s *Server) pullImage(ctx context.Context, req *request, _ *http.Request, in *registryInput) error {
	name := in.Body.Name
	if name == "" {
		name = in.Body.Ref
	}
	if err := checkPlainName(name); err != nil {
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
	img, err := s.cfg.Edges.Pull(ctx, node, &in.Body, out.progress)
	return s.named(ctx, req, out, node, name, img, err)
}

// pushImage is POST /v1/images/push.
func (s *Server) pushImage(ctx context.Context, req *request, _ *http.Request, in *registryInput) error {
	img, err := s.catalog.resolve(in.Body.Name)
	if err != nil {
		return err
	}
	node, err := s.readNode(img.Digest)
	if err != nil {
		return err
	}
	out := s.newLines(req, "application/x-ndjson")
	defer out.end()
	pushed, err := s.cfg.Edges.Push(ctx, node, &v1.EdgePush{Image: img, Request: in.Body}, out.progress)
	if err == nil {
		return out.write(v1.ImageProgress{Phase: "done", Pushed: &pushed})
	}
	if werr := s.importFailed(req, out, err); werr != nil {
		return werr
	}
	return err
}

// readNode chooses an edge to read an image: one that has it, if there is one.
func (s *Server) readNode(digest string) (v1.Node, error) {
	var any *v1.Node
	for _, l := range s.cfg.Registry.Loads() {
		if !l.Node.Ready {
			continue
		}
		if _, has := l.Images[digest]; has {
			return *l.Node, nil
		}
		any = l.Node
	}
	if any == nil {
		return v1.Node{}, errs.New(errs.NoNode, "image.read", "no edge is ready").After(time.Second)
	}
	return *any, nil
}

type exportInput struct {
	Name   string `query:"name" required:"true" minLength:"1" maxLength:"255" doc:"Name or digest." example:"debian:12"`
	Format string `query:"format" enum:"tar,docker,oci,snapshot" doc:"tar (the default) is the root file system, all layers merged; docker and oci are read by docker load, podman, skopeo and our own import; snapshot has the layers of a snapshot as they are."`
}

// exportImage is GET /v1/export: an image streamed from an edge.
func (s *Server) exportImage(ctx context.Context, req *request, _ *http.Request, in *exportInput) error {
	img, err := s.catalog.resolve(in.Name)
	if err != nil {
		return err
	}
	ask := v1.EdgeExport{Image: img, Format: in.Format}
	if ask.Format == "" {
		ask.Format = v1.ExportTar
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
		if failed = s.cfg.Edges.Export(ctx, *l.Node, &ask, (*rawWriter)(out)); failed == nil {
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

type snapshotImportInput struct {
	Name string `query:"name" maxLength:"205" doc:"With or without snap:; empty: the one that it had."`
}

// importSnapshot is POST /v1/snapshots.
func (s *Server) importSnapshot(ctx context.Context, req *request, hr *http.Request, in *snapshotImportInput) error {
	return s.upload(ctx, req, hr, v1.ExportSnapshot, func(img v1.Image) (name string, release func(), err error) {
		name = in.Name
		if name == "" {
			name = strings.TrimPrefix(img.Name, v1.SnapshotPrefix)
		}
		return s.takeSnapshotName(name)
	})
}
