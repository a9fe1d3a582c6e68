package apiserver

import (
	"context"
	"net/http"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

type forkInput struct {
	ID   string `path:"id" maxLength:"64" doc:"Sandbox id."`
	Body v1.ForkRequest
}

// forkSandbox is POST /v1/sandboxes/{id}/fork: a line for each child, as it is ready or has
// failed. A child that the client was not told of is removed again.
func (s *Server) forkSandbox(ctx context.Context, req *request, _ *http.Request, in *forkInput) error {
	node, _, err := s.cfg.Registry.Locate(in.ID)
	if err != nil {
		return err
	}
	if s.drain.Err() != nil {
		return errs.New(errs.ShuttingDown, "sandbox.fork", "the server is stopping")
	}
	if l := in.Body.Lease; l > v1.MaxTime || l > 0 && l < v1.MinLease {
		return badField("lease_s", "is at least 1 s and at most 10 years, or 0 for none")
	}
	if err := v1.CheckEnv("secret_env", in.Body.SecretEnv); err != nil {
		return err
	}
	ask := v1.EdgeFork{ID: in.ID, Lease: in.Body.Lease, LeaveOut: in.Body.LeaveOut, SecretEnv: in.Body.SecretEnv}
	untold := map[string]bool{}
	for range max(in.Body.Count, 1) {
		id := s.newSandboxID(node)
		ask.Children = append(ask.Children, id)
		untold[id] = true
	}
	out := s.newLines(req, "application/x-ndjson")
	defer out.end()
	err = s.cfg.Edges.Fork(ctx, node, &ask, func(r v1.CreateResult) error {
		id := ""
		if r.Error != nil {
			id = r.Error.Sandbox
			r.Error.RequestID = req.id
		} else if r.Sandbox != nil {
			id, r.Sandbox.Node = r.Sandbox.ID, node.ID
			s.cfg.Registry.Apply(*r.Sandbox)
		}
		if err := out.write(r); err != nil {
			return err
		}
		delete(untold, id)
		return nil
	})
	if err == nil {
		return nil
	}
	s.noteGone(in.ID, err)
	if uncertain(err) || req.status != 0 {
		for id := range untold {
			s.reaper.reap(node.ID, id)
		}
	}
	if req.status == 0 {
		return err
	}
	for range untold {
		if werr := out.write(v1.CreateResult{Error: problemOf(req, err)}); werr != nil {
			return werr
		}
	}
	return err
}
