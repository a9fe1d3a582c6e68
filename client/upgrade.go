package client

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"

	"dsec/aether"
	"dsec/aether/httpupgrade"
	"dsec/api/v1/errs"
)

// upgrade dials the server and turns the connection into an Aether one.
func (c *Client) upgrade(ctx context.Context) (*aether.Conn, error) {
	raw, err := c.dialServer(ctx)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	u := *c.base
	u.Path = c.base.Path + "/v1/aether"
	h := http.Header{"User-Agent": {c.agent}}
	if c.token != "" {
		h.Set("Authorization", "Bearer "+c.token)
	}
	up, err := httpupgrade.Client(ctx, raw, &u, h)
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	conn, err := aether.NewClient(ctx, up, aether.ClientConfig{Token: c.token, Agent: c.agent, Window: window})
	if err != nil {
		return nil, c.unreachable(ctx, err)
	}
	return conn, nil
}

// window is the credit of a new stream: enough for a fast local link, little enough that
// a thousand streams whose readers are slow cost no more than a fraction of a GiB.
const window = 512 << 10

func (c *Client) dialServer(ctx context.Context) (net.Conn, error) {
	port := c.base.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[c.base.Scheme]
	}
	raw, err := c.dial(ctx, "tcp", net.JoinHostPort(c.base.Hostname(), port))
	if err != nil || c.base.Scheme != "https" {
		return raw, err
	}
	cfg := c.tls.Clone()
	if cfg == nil {
		cfg = new(tls.Config)
	}
	if cfg.ServerName == "" {
		cfg.ServerName = c.base.Hostname()
	}
	cfg.NextProtos = []string{"http/1.1"} // HTTP/2 has no upgrade
	t := tls.Client(raw, cfg)
	if err := t.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, err
	}
	return t, nil
}

// refused says whether an operation was turned away by a connection that is going to
// close: nothing of it was done.
func refused(err error) bool {
	var e *errs.Error
	return errors.As(err, &e) && e.Code == errs.ShuttingDown && e.Phase == "aether.open"
}

func errClosed() error {
	return errs.New(errs.RequestCanceled, "client.connect", "the client is closed")
}
