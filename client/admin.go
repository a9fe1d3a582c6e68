package client

import (
	"context"
	"fmt"
	"io"
	"net/http"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Nodes returns all registered edges.
func (c *Client) Nodes(ctx context.Context) ([]Node, error) {
	var l v1.NodeList
	if err := c.call(ctx, http.MethodGet, "/v1/nodes", nil, nil, &l); err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	return l.Items, nil
}

// Node returns one edge.
func (c *Client) Node(ctx context.Context, id string) (*Node, error) {
	if err := element(id, false, errs.NodeNotFound); err != nil {
		return nil, err
	}
	var n Node
	if err := c.call(ctx, http.MethodGet, "/v1/nodes/"+id, nil, nil, &n); err != nil {
		return nil, about("get node", id, err)
	}
	return &n, nil
}

// CreateToken makes a token; its secret is in this answer only.
func (c *Client) CreateToken(ctx context.Context, req v1.TokenRequest) (*Token, error) {
	var t Token
	if err := c.call(ctx, http.MethodPost, "/v1/tokens", nil, req, &t); err != nil {
		return nil, fmt.Errorf("create token: %w", err)
	}
	return &t, nil
}

// Tokens returns all tokens, without secrets.
func (c *Client) Tokens(ctx context.Context) ([]Token, error) {
	var l v1.TokenList
	if err := c.call(ctx, http.MethodGet, "/v1/tokens", nil, nil, &l); err != nil {
		return nil, fmt.Errorf("list tokens: %w", err)
	}
	return l.Items, nil
}

// DeleteToken revokes a token.
func (c *Client) DeleteToken(ctx context.Context, id string) error {
	if err := element(id, false, errs.TokenNotFound); err != nil {
		return err
	}
	if err := c.call(ctx, http.MethodDelete, "/v1/tokens/"+id, nil, nil, nil); err != nil {
		return about("delete token", id, err)
	}
	return nil
}

// Health asks the server how it is; no token is needed.
func (c *Client) Health(ctx context.Context) (*v1.Health, error) {
	var h v1.Health
	if err := c.call(ctx, http.MethodGet, "/v1/health", nil, nil, &h); err != nil {
		return nil, fmt.Errorf("health: %w", err)
	}
	return &h, nil
}

// Metrics returns the server's metrics in Prometheus' text format.
func (c *Client) Metrics(ctx context.Context) ([]byte, error) {
	resp, err := c.send(ctx, http.MethodGet, "/metrics", nil, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, 64<<20))
	if err != nil {
		return nil, fmt.Errorf("metrics: %w", c.badAnswer(ctx, http.MethodGet, "/metrics", err))
	}
	return b, nil
}
