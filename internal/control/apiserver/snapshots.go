package apiserver

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// names are those that snapshots under way will have: two of one name must not both be made.
type names struct {
	mu    sync.Mutex
	taken map[string]bool
}

// take reserves a name until release. known says whether something has it already.
func (n *names) take(name string, known func() bool) (release func(), err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.taken[name] || known() {
		return nil, errs.New(errs.NameInUse, "snapshot.name", "there is a snapshot "+quoted(name)).With("name", name)
	}
	if n.taken == nil {
		n.taken = map[string]bool{}
	}
	n.taken[name] = true
	return func() {
		n.mu.Lock()
		defer n.mu.Unlock()
		delete(n.taken, name)
	}, nil
}

// snapshotName is the name in the catalogue of what a user calls name; "" makes one up.
func (s *Server) snapshotName(name string) (string, error) {
	name = strings.TrimPrefix(name, v1.SnapshotPrefix)
	if name == "" {
		name = fmt.Sprintf("%010x", s.random.Uint64()&(1<<40-1))
	}
	if strings.Contains(name, "/") {
		return "", badField("name", quoted(name)+" has a slash")
	}
	return v1.SnapshotPrefix + name, checkImageName(name)
}

// takeSnapshotName is snapshotName, reserved until release.
func (s *Server) takeSnapshotName(name string) (_ string, release func(), err error) {
	if name, err = s.snapshotName(name); err != nil {
		return "", nil, err
	}
	release, err = s.naming.take(name, func() bool {
		_, err := s.catalog.resolve(name)
		return err == nil
	})
	return name, release, err
}

type snapshotInput struct {
	ID   string `path:"id" maxLength:"64" doc:"Sandbox id."`
	Body v1.SnapshotRequest
}

// snapshotSandbox is POST /v1/sandboxes/{id}/snapshot.
func (s *Server) snapshotSandbox(ctx context.Context, req *request, _ *http.Request, in *snapshotInput) error {
	node, _, err := s.cfg.Registry.Locate(in.ID)
	if err != nil {
		return err
	}
	name := in.Body.Image
	switch {
	case name == "" && in.Body.Config != nil:
		return badField("config", "is for an image; a snapshot has the sandbox's")
	case name != "" && in.Body.Name != "":
		return badField("image", "give the name of a snapshot or of an image, not both")
	case name != "":
		if err := errors.Join(req.principal.Require(v1.RightImage), checkPlainName(name)); err != nil {
			return err
		}
	default:
		var release func()
		if name, release, err = s.takeSnapshotName(in.Body.Name); err != nil {
			return err
		}
		defer release()
	}
	out := s.newLines(req, "application/x-ndjson")
	defer out.end()
	img, err := s.cfg.Edges.Snapshot(ctx, node, &v1.EdgeSnapshot{ID: in.ID, LeaveOut: in.Body.LeaveOut, Plain: in.Body.Image != "", Config: in.Body.Config}, out.progress)
	if err != nil {
		s.noteGone(in.ID, err)
	} else if img.Pack != nil {
		s.metrics.frozen.Observe(img.Pack.FrozenMS / 1000)
	}
	return s.named(ctx, req, out, node, name, img, err)
}

func (s *Server) listSnapshots(context.Context, *request, *struct{}) (*imageListOutput, error) {
	list := v1.ImageList{Items: []v1.Image{}}
	for _, img := range s.catalog.list("") {
		if img.Snapshot != nil {
			list.Items = append(list.Items, img)
		}
	}
	return &imageListOutput{list}, nil
}

type snapshotNameInput struct {
	Name string `path:"name" maxLength:"205" doc:"With or without snap:."`
}

func (s *Server) getSnapshot(ctx context.Context, req *request, in *snapshotNameInput) (*imageOutput, error) {
	name, err := s.snapshotName(in.Name)
	if err != nil {
		return nil, err
	}
	return s.getImage(ctx, req, &imageInput{name})
}

func (s *Server) deleteSnapshot(ctx context.Context, req *request, in *snapshotNameInput) (*noOutput, error) {
	name, err := s.snapshotName(in.Name)
	if err != nil {
		return nil, err
	}
	return s.deleteImage(ctx, req, &imageInput{name})
}
