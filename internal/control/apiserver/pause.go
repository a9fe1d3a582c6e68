package apiserver

import (
	"context"
	"net/http"

	v1 "dsec/api/v1"
)

type pauseInput struct{ Body v1.PauseRequest }

// pauses is the operation of pause and of resume.
func (s *Server) pauses(req *request, ask func(context.Context, v1.Node, []string, func(v1.EdgePaused) error) error) batch[v1.EdgePaused, v1.PauseResult] {
	return batch[v1.EdgePaused, v1.PauseResult]{
		ask: ask,
		id:  func(r v1.EdgePaused) string { return r.ID },
		take: func(node v1.Node, r v1.EdgePaused) v1.PauseResult {
			if sb := r.Sandbox; sb != nil {
				sb.Node = node.ID
				s.cfg.Registry.Apply(*sb)
			}
			s.completeProblem(req, node, r.ID, r.Error)
			return r.PauseResult
		},
		fail: func(id string, err error) v1.PauseResult { return v1.PauseResult{ID: id, Error: problemOf(req, err)} },
	}
}

// pauseMany is POST /v1/sandboxes/pause.
func (s *Server) pauseMany(ctx context.Context, req *request, _ *http.Request, in *pauseInput) error {
	ids, err := s.chosen(in.Body.IDs, in.Body.Labels)
	if err != nil {
		return err
	}
	return answerEach(ctx, s, req, ids, s.pauses(req, s.cfg.Edges.Pause))
}

// resumeMany is POST /v1/sandboxes/resume.
func (s *Server) resumeMany(ctx context.Context, req *request, _ *http.Request, in *pauseInput) error {
	ids, err := s.chosen(in.Body.IDs, in.Body.Labels)
	if err != nil {
		return err
	}
	return answerEach(ctx, s, req, ids, s.pauses(req, s.cfg.Edges.Resume))
}

type pauseOutput struct{ Body v1.PauseResult }

// one does an operation on a sandbox that could be done on many.
func one(ctx context.Context, s *Server, id string, b batch[v1.EdgePaused, v1.PauseResult]) (*pauseOutput, error) {
	out := new(pauseOutput)
	err := onEdges(ctx, s, []string{id}, b, func(r v1.PauseResult) error {
		out.Body = r
		return nil
	})
	if err == nil {
		err = out.Body.Error.Err()
	}
	if err != nil {
		return nil, err
	}
	return out, nil
}

// pauseOne is POST /v1/sandboxes/{id}/pause.
func (s *Server) pauseOne(ctx context.Context, req *request, in *idInput) (*pauseOutput, error) {
	return one(ctx, s, in.ID, s.pauses(req, s.cfg.Edges.Pause))
}

// resumeOne is POST /v1/sandboxes/{id}/resume.
func (s *Server) resumeOne(ctx context.Context, req *request, in *idInput) (*pauseOutput, error) {
	return one(ctx, s, in.ID, s.pauses(req, s.cfg.Edges.Resume))
}

type hintInput struct {
	ID   string `path:"id" maxLength:"64" doc:"Sandbox id."`
	Body v1.HintRequest
}

type hintOutput struct{ Body v1.HintResult }

// hint is POST /v1/sandboxes/{id}/hint.
func (s *Server) hint(ctx context.Context, _ *request, in *hintInput) (*hintOutput, error) {
	if in.Body.NextCall > v1.MaxTime {
		return nil, badField("next_call_s", "is at most 10 years")
	}
	node, _, err := s.cfg.Registry.Locate(in.ID)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	r, err := s.cfg.Edges.Hint(ctx, node, &v1.EdgeHint{ID: in.ID, HintRequest: in.Body})
	if err != nil {
		s.noteGone(in.ID, err)
		return nil, err
	}
	if sb := r.Sandbox; sb != nil {
		sb.Node = node.ID
		s.cfg.Registry.Apply(*sb)
		sb.IdempotencyKey = ""
	}
	return &hintOutput{r}, nil
}
