package client

import (
	"context"
	"crypto/tls"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"dsec/api/v1/errs"
)

// DefaultURL is where 'dsec up' listens when nothing else is said.
const DefaultURL = "http://127.0.0.1:7070"

// Options of a Client.
type Options struct {
	// URL of the server: http://, https:// or unix:///path/to/socket. Empty: [DefaultURL].
	URL   string
	Token string
	// HTTPClient is used for REST; nil: one of our own. The Aether connection uses its
	// Transport's DialContext and TLSClientConfig if it is an *http.Transport.
	HTTPClient *http.Client
	// Connections is how many Aether connections sandboxes are spread over; 0: 1. One
	// carries thousands of streams; more help when its encryption or one core is the limit.
	Connections int
	// Agent names the program in the server's log.
	Agent string
	// ReattachFor bounds how long a Process tries to reach its sandbox again after the
	// connection broke; 0: 30 s, negative: not at all.
	ReattachFor time.Duration
}

// Client talks to one server. Make it with [New] or [FromEnv].
type Client struct {
	base     *url.URL // http or https; a Unix socket's has a made-up host
	token    string
	agent    string
	http     *http.Client
	ownHTTP  bool
	socket   string // of a Unix socket: its path
	dial     func(ctx context.Context, network, addr string) (net.Conn, error)
	tls      *tls.Config
	conns    []link
	reattach time.Duration
}

// New makes a Client. Nothing is dialled before the first call.
func New(o Options) (*Client, error) {
	if o.URL == "" {
		o.URL = DefaultURL
	}
	u, err := url.Parse(o.URL)
	if err != nil {
		return nil, badURL(o.URL, "it cannot be read")
	}
	c := &Client{token: o.Token, agent: o.Agent, http: o.HTTPClient, reattach: o.ReattachFor}
	if c.agent == "" {
		c.agent = "dsec-go"
	}
	if c.reattach == 0 {
		c.reattach = reattachDefault
	}
	switch u.Scheme {
	case "http", "https":
		if u.Host == "" {
			return nil, badURL(o.URL, "it has no host")
		}
		c.base = u
		c.base.Path = strings.TrimRight(u.Path, "/")
		c.dial = (&net.Dialer{Timeout: 10 * time.Second}).DialContext
	case "unix":
		path := u.Path
		if u.Host != "" || path == "" {
			return nil, badURL(o.URL, "a socket is written unix:///path")
		}
		c.socket, c.base = path, &url.URL{Scheme: "http", Host: "dsec.sock"}
		c.dial = func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, "unix", path)
		}
	default:
		return nil, badURL(o.URL, "use http://, https:// or unix:///path")
	}
	if c.http == nil {
		c.ownHTTP = true
		c.http = &http.Client{Transport: &http.Transport{
			DialContext:         c.dial,
			Proxy:               nil, // the data plane could not take the same way
			MaxIdleConnsPerHost: 256, // a batch of parallel creates keeps its connections
			IdleConnTimeout:     90 * time.Second,
			DisableCompression:  true,
		}}
	} else if t, ok := o.HTTPClient.Transport.(*http.Transport); ok {
		c.tls = t.TLSClientConfig
		if t.DialContext != nil && u.Scheme != "unix" {
			c.dial = t.DialContext
		}
	}
	c.conns = make([]link, max(1, o.Connections))
	return c, nil
}

// FromEnv makes a Client for DSEC_URL and DSEC_TOKEN, or for the server of the context
// file that 'dsec up' wrote.
func FromEnv() (*Client, error) {
	o, err := OptionsFromEnv("")
	if err != nil {
		return nil, err
	}
	return New(o)
}

// URL returns the server's address as in Options.
func (c *Client) URL() string {
	if c.socket != "" {
		return "unix://" + c.socket
	}
	return c.base.String()
}

// Local says whether the server's address is this machine's own: a Unix socket or loopback.
func (c *Client) Local() bool {
	if c.socket != "" {
		return true
	}
	ip := net.ParseIP(c.base.Hostname())
	return c.base.Hostname() == "localhost" || ip != nil && ip.IsLoopback()
}

// Close ends the Aether connections; running calls fail. The sandboxes live on.
func (c *Client) Close() error {
	for i := range c.conns {
		c.conns[i].close()
	}
	if c.ownHTTP {
		c.http.CloseIdleConnections()
	}
	return nil
}

func badURL(u, why string) error {
	return errs.New(errs.BadRequest, "client.url", "server URL "+u+": "+why).With("field", "url").
		Advise("write it like http://127.0.0.1:7070 or unix:///path/to/socket, in DSEC_URL or --url")
}
