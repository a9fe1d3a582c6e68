package httpupgrade

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"dsec/api/v1/errs"
)

// maxErrorBody bounds what is read of a refusal.
const maxErrorBody = 64 << 10

// Dial connects to an http or https URL and upgrades the connection. Header is sent with
// the request; tlsConfig is for https and may be nil. A refusal whose body is the
// platform's JSON error is returned as that error.
func Dial(ctx context.Context, rawURL string, header http.Header, tlsConfig *tls.Config) (net.Conn, error) {
	u, err := url.Parse(rawURL)
	if err != nil || u.Host == "" || (u.Scheme != "http" && u.Scheme != "https") {
		return nil, errs.New(errs.BadRequest, phase, "want an http or https URL").With("url", rawURL)
	}
	conn, err := dial(ctx, u, tlsConfig)
	if err != nil {
		return nil, errs.Wrap(errs.EdgeUnreachable, phase, "connect to "+u.Host, err)
	}
	return Client(ctx, conn, u, header)
}

// Client upgrades a connection that the caller has made, such as one to a Unix socket.
// On error conn is closed.
func Client(ctx context.Context, conn net.Conn, u *url.URL, header http.Header) (net.Conn, error) {
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	up, err := request(conn, u, header)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, errs.Wrap(errs.ConnectionLost, phase, "upgrade at "+u.Host, err)
	}
	return up, nil
}

func dial(ctx context.Context, u *url.URL, cfg *tls.Config) (net.Conn, error) {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	addr := net.JoinHostPort(u.Hostname(), port)
	if u.Scheme == "http" {
		return new(net.Dialer).DialContext(ctx, "tcp", addr)
	}
	if cfg = cfg.Clone(); cfg == nil {
		cfg = new(tls.Config)
	}
	cfg.NextProtos = []string{"http/1.1"} // HTTP/2 has no upgrade
	return (&tls.Dialer{Config: cfg}).DialContext(ctx, "tcp", addr)
}

func request(conn net.Conn, u *url.URL, header http.Header) (net.Conn, error) {
	req := &http.Request{Method: http.MethodGet, URL: u, Host: u.Host, Header: header.Clone(), ProtoMajor: 1, ProtoMinor: 1}
	if req.Header == nil {
		req.Header = http.Header{}
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", Protocol)
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	br := bufio.NewReader(conn)
	resp, err := http.ReadResponse(br, req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols || !hasToken(resp.Header, "Upgrade", Protocol) {
		defer resp.Body.Close()
		return nil, refusal(resp)
	}
	return withBuffered(conn, br), nil
}

// refusal makes an error of an answer that is not 101.
func refusal(resp *http.Response) error {
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	var e struct {
		Code    string `json:"code"`
		Message string `json:"message"`
		Phase   string `json:"phase"`
	}
	if json.Unmarshal(body, &e) == nil && e.Code != "" {
		return errs.New(errs.Code(e.Code), e.Phase, e.Message)
	}
	code := errs.EdgeUnreachable
	for _, row := range errs.Table {
		if row.HTTP == resp.StatusCode {
			code = row.Code
			break
		}
	}
	text := strings.TrimSpace(string(body))
	return errs.New(code, phase, "the server answered "+resp.Status).With("body", text[:min(len(text), 500)])
}
