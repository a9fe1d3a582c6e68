package apiserver

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/capability"
	"dsec/internal/control/watcher"
)

const (
	pageDefault    = 1000
	deleteTimeout  = 2 * time.Minute
	getTimeout     = 5 * time.Second
	capabilityLife = 10 * time.Minute
)

type idInput struct {
	ID string `path:"id" maxLength:"64" doc:"Sandbox id."`
}

type listInput struct {
	Label []string `query:"label,explode" maxItems:"16" doc:"key=value; all given must match." example:"job=train-7"`
	State string   `query:"state" enum:"creating,running,pausing,paused,resuming,stopping,stopped,failed,lost" doc:"Only sandboxes in this state."`
	Limit int      `query:"limit" minimum:"1" maximum:"10000" doc:"Most items to return; 1000 if not given."`
	After string   `query:"after" maxLength:"64" doc:"Last id of the page before; a page shorter than the limit is the last one."`
}

type listOutput struct{ Body *v1.SandboxList }

func parseLabels(list []string) (map[string]string, error) {
	if len(list) == 0 {
		return nil, nil
	}
	labels := make(map[string]string, len(list))
	for _, l := range list {
		k, v, ok := strings.Cut(l, "=")
		if !ok || k == "" {
			return nil, badField("label", quoted(l)+" is not key=value")
		}
		if old, dup := labels[k]; dup && old != v {
			return nil, badField("label", quoted(k)+" is given twice with different values")
		}
		labels[k] = v
	}
	return labels, nil
}

func (s *Server) list(_ context.Context, _ *request, in *listInput) (*listOutput, error) {
	labels, err := parseLabels(in.Label)
	if err != nil {
		return nil, err
	}
	limit := in.Limit
	if limit == 0 {
		limit = pageDefault
	}
	l := s.cfg.Registry.List(watcher.Filter{Labels: labels, State: v1.State(in.State), After: in.After, Limit: limit})
	return &listOutput{&l}, nil
}

// get asks the owner, for the sandbox's usage; what the registry has is the answer if the
// owner does not speak.
func (s *Server) get(ctx context.Context, _ *request, in *idInput) (*sandboxOutput, error) {
	node, known, err := s.cfg.Registry.Locate(in.ID)
	if err != nil {
		if sb, ok := s.cfg.Registry.Get(in.ID); ok { // lost: its document says why
			return &sandboxOutput{sb}, nil
		}
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, getTimeout)
	defer cancel()
	sb, err := s.cfg.Edges.Get(ctx, node, in.ID)
	switch {
	case err == nil:
		sb.Node = node.ID
		s.cfg.Registry.Apply(sb)
		sb.IdempotencyKey = ""
		return &sandboxOutput{&sb}, nil
	case known != nil && (errors.Is(err, errs.Unavailable) || errors.Is(err, errs.Deadline)):
		return &sandboxOutput{known}, nil
	}
	s.noteGone(in.ID, err)
	return nil, err
}

// noteGone corrects the registry by what the owner said.
func (s *Server) noteGone(id string, err error) {
	if errors.Is(err, errs.SandboxGone) || errors.Is(err, errs.SandboxNotFound) {
		if _, ok := s.cfg.Registry.Get(id); ok {
			s.cfg.Registry.Remove(id)
		}
	}
}

type noOutput struct{}

func (s *Server) deleteOne(ctx context.Context, _ *request, in *idInput) (*noOutput, error) {
	return nil, s.delete(ctx, in.ID)
}

// renew is POST /v1/sandboxes/{id}/renew.
func (s *Server) renew(ctx context.Context, _ *request, in *idInput) (*noOutput, error) {
	node, _, err := s.cfg.Registry.Locate(in.ID)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, getTimeout)
	defer cancel()
	err = s.cfg.Edges.Renew(ctx, node, in.ID)
	s.noteGone(in.ID, err)
	return nil, err
}

// forgetLost removes a sandbox of which nothing can be left, as its node was lost.
func (s *Server) forgetLost(id string) bool {
	sb, ok := s.cfg.Registry.Get(id)
	if !ok || sb.State != v1.StateLost {
		return false
	}
	s.cfg.Registry.Remove(id)
	return true
}

// delete removes a sandbox whatever its state. It is carried through even if the client
// goes away.
func (s *Server) delete(ctx context.Context, id string) error {
	node, _, err := s.cfg.Registry.Locate(id)
	if err != nil {
		if s.forgetLost(id) {
			return nil
		}
		return err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), deleteTimeout)
	defer cancel()
	last, err := s.cfg.Edges.Delete(ctx, node, id)
	if err != nil {
		s.noteGone(id, err)
		return err
	}
	s.cfg.Registry.Apply(last)
	s.cfg.Registry.Remove(id)
	return nil
}

type deleteInput struct{ Body v1.DeleteRequest }

// deleteMany is POST /v1/sandboxes/delete.
func (s *Server) deleteMany(ctx context.Context, req *request, _ *http.Request, in *deleteInput) error {
	ids, err := s.chosen(in.Body.IDs, in.Body.Labels)
	if err != nil {
		return err
	}
	return answerEach(ctx, s, req, ids, batch[v1.EdgeDeleted, v1.DeleteResult]{
		ask: s.cfg.Edges.DeleteMany,
		id:  func(r v1.EdgeDeleted) string { return r.ID },
		take: func(node v1.Node, r v1.EdgeDeleted) v1.DeleteResult {
			if r.Sandbox != nil {
				s.cfg.Registry.Apply(*r.Sandbox)
				s.cfg.Registry.Remove(r.ID)
			}
			s.completeProblem(req, node, r.ID, r.Error)
			return r.DeleteResult
		},
		fail: func(id string, err error) v1.DeleteResult {
			if s.forgetLost(id) {
				return v1.DeleteResult{ID: id}
			}
			return v1.DeleteResult{ID: id, Error: problemOf(req, err)}
		},
	})
}

// Capability lets its holder reach one sandbox at its edge directly.
type Capability struct {
	Token     string    `json:"token" doc:"For the HELLO of an Aether connection to the edge."`
	ExpiresAt time.Time `json:"expires_at" doc:"A connection opened before goes on."`
	Address   string    `json:"address" doc:"Of the edge: unix:/path, or host:port."`
}

type capabilityOutput struct{ Body Capability }

func (s *Server) capability(_ context.Context, req *request, in *idInput) (*capabilityOutput, error) {
	node, _, err := s.cfg.Registry.Locate(in.ID)
	if err != nil {
		return nil, err
	}
	exp := s.cfg.Now().Add(capabilityLife).UTC().Truncate(time.Second)
	token, err := s.cfg.Signer.Sign(capability.Claims{
		Subject: "token:" + req.principal.TokenID, Sandbox: in.ID, Rights: []v1.Right{v1.RightSandbox}, Expires: exp,
	})
	if err != nil {
		return nil, err
	}
	return &capabilityOutput{Capability{Token: token, ExpiresAt: exp, Address: node.Address}}, nil
}
