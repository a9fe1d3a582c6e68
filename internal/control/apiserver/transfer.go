package apiserver

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
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

// outcome is the trailer of an export: "ok", or a Problem in base64. Without it the answer broke off.
const outcome = "Dsec-Outcome"

type exportInput struct {
	Name   string `query:"name" required:"true" minLength:"1" maxLength:"255" doc:"Name or digest."`
	Format string `query:"format" enum:"docker,oci,snapshot" doc:"docker (the default) and oci are read by docker load, podman and skopeo, and by our own import; snapshot has the layers of a snapshot as they are."`
}

// exportImage is GET /v1/export.
func (s *Server) exportImage(ctx context.Context, req *request, _ *http.Request, in *exportInput) error {
	img, err := s.catalog.resolve(in.Name)
	if err != nil {
		return err
	}
	node, err := s.readNode(img.Digest)
	if err != nil {
		return err
	}
	ask := v1.EdgeExport{Image: img, Format: in.Format}
	if ask.Format == "" {
		ask.Format = v1.ExportDocker
	}
	out := s.newLines(req, "application/x-tar")
	defer out.end()
	req.Header().Set("Trailer", outcome)
	err = s.cfg.Edges.Export(ctx, node, &ask, rawWriter{out})
	switch {
	case err == nil:
		req.Header().Set(outcome, "ok")
	case req.status == 0:
		req.Header().Del("Trailer")
	default:
		if raw, jerr := json.Marshal(problemOf(req, err)); jerr == nil {
			req.Header().Set(outcome, base64.StdEncoding.EncodeToString(raw))
		}
	}
	return err
}

type rawWriter struct{ l *lines }

func (w rawWriter) Write(p []byte) (int, error) {
	if err := w.l.raw(p); err != nil {
		return 0, err
	}
	return len(p), nil
}

var _ io.Writer = rawWriter{}

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
