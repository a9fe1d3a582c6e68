package apiserver

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	v1 "dsec/api/v1"
)

type nodeListOutput struct{ Body v1.NodeList }

func (s *Server) listNodes(context.Context, *request, *struct{}) (*nodeListOutput, error) {
	return &nodeListOutput{v1.NodeList{Items: s.cfg.Registry.Nodes()}}, nil
}

type nodeInput struct {
	ID string `path:"id" maxLength:"64" doc:"Node id."`
}

type nodeOutput struct{ Body v1.Node }

func (s *Server) getNode(_ context.Context, _ *request, in *nodeInput) (*nodeOutput, error) {
	n, err := s.cfg.Registry.Node(in.ID)
	if err != nil {
		return nil, err
	}
	return &nodeOutput{n}, nil
}

type tokenRequestInput struct{ Body v1.TokenRequest }

type tokenOutput struct{ Body v1.Token }

func (s *Server) createToken(ctx context.Context, req *request, in *tokenRequestInput) (*tokenOutput, error) {
	t, err := s.cfg.IAM.Create(ctx, req.principal.Project, in.Body)
	if err != nil {
		return nil, err
	}
	return &tokenOutput{t}, nil
}

type tokenListOutput struct{ Body v1.TokenList }

func (s *Server) listTokens(context.Context, *request, *struct{}) (*tokenListOutput, error) {
	return &tokenListOutput{v1.TokenList{Items: s.cfg.IAM.List()}}, nil
}

type tokenInput struct {
	ID string `path:"id" maxLength:"64" doc:"Token id, not its secret."`
}

func (s *Server) revokeToken(ctx context.Context, _ *request, in *tokenInput) (*noOutput, error) {
	return nil, s.cfg.IAM.Revoke(ctx, in.ID)
}

const healthTimeout = time.Second

type healthOutput struct {
	Status int
	Body   v1.Health
}

// health is 503 only if this server can do nothing at all; a part that is wrong makes ok
// false.
func (s *Server) health(ctx context.Context, _ *request, _ *struct{}) (*healthOutput, error) {
	out := &healthOutput{Status: http.StatusOK, Body: v1.Health{OK: true, Version: s.cfg.Version, Checks: map[string]string{}}}
	check := func(part string, bad string) {
		if bad == "" {
			out.Body.Checks[part] = "ok"
			return
		}
		out.Body.OK, out.Body.Checks[part] = false, bad
	}
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	if err := s.cfg.Ping(ctx); err != nil {
		check("store", err.Error())
		out.Status = http.StatusServiceUnavailable
	} else {
		check("store", "")
	}
	nodes := s.cfg.Registry.Nodes()
	ready := 0
	for _, n := range nodes {
		if n.Ready {
			ready++
		}
	}
	if ready == 0 {
		check("edges", fmt.Sprintf("none of %d registered edges is ready", len(nodes)))
	} else {
		check("edges", "")
	}
	return out, nil
}

func (s *Server) serveMetrics(_ context.Context, req *request, hr *http.Request, _ *struct{}) error {
	promhttp.HandlerFor(s.cfg.Metrics, promhttp.HandlerOpts{}).ServeHTTP(req, hr)
	return nil
}
