package control

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/capability"
	"dsec/internal/control/apiserver"
	"dsec/internal/control/edges"
	"dsec/internal/control/iam"
	"dsec/internal/control/store"
	"dsec/internal/control/store/etcd"
	"dsec/internal/control/watcher"
)

const (
	startTimeout   = 30 * time.Second
	edgeCredential = 5 * time.Minute // only a connection's handshake needs it
)

// Config of a control plane. Listen, RootToken and one of DataDir, Endpoints and Store
// are needed.
type Config struct {
	Listen    string   // "host:port", or "unix:/path"
	RootToken string   // secret of the root token
	DataDir   string   // of the embedded etcd
	Endpoints []string // of an external etcd, instead of the embedded one
	StoreTLS  *tls.Config
	Store     store.Store // instead of either; the caller closes it
	Objects   Objects     // where images are; without a Store nothing is collected or measured

	TLS     *tls.Config // of the apiserver; nil: plain HTTP
	EdgeTLS *tls.Config // towards edges reached over TCP; nil: plain
	Metrics *prometheus.Registry
	Log     *slog.Logger
	Version string
	Watcher watcher.Config

	// Edges are to be ready before the first request is taken, or startTimeout to have passed: until then clients'
	// connections wait. A server whose edge is in the same process would else know nothing, for a moment after each start, of
	// the sandboxes that run.
	Edges int

	StreamTimeout   time.Duration // of readers of streams of lines; 0: 30 s
	BodyTimeout     time.Duration // for a request's JSON to come; 0: 10 s
	UploadTimeout   time.Duration // for an upload to send something; 0: apiserver's default
	Imports         int           // at a time; 0: apiserver's default
	TokenConns      int           // kept open by one token; 0: apiserver's default
	BuildCacheAge   time.Duration // what builds keep goes when it was not used for so long; 0: never
	BuildCacheBytes int64         // and beyond so many bytes of it; 0: never
	CollapseBelow   int64         // small layers are merged if they are smaller; 0: never
	CollapseEvery   time.Duration // between looks for such; 0: apiserver's default
	TokenStreams    int           // Aether streams of one token; 0: apiserver's default
}

// Control is a running control plane.
type Control struct {
	cfg      Config
	embedded *etcd.Server
	store    store.Store
	pool     *edges.Pool
	api      *apiserver.Server
	registry *watcher.Registry
	listener net.Listener

	cancel context.CancelFunc
	wg     sync.WaitGroup
	closed sync.Once
	failed chan error // the first failure of a part
}

// Start runs a control plane and returns once it answers requests, or will when Config.Edges are ready. ctx limits the start
// only; Close ends what it started.
func Start(ctx context.Context, cfg Config) (*Control, error) {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	if cfg.Metrics == nil {
		cfg.Metrics = prometheus.NewRegistry()
	}
	c := &Control{cfg: cfg, failed: make(chan error, 1)}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := c.start(ctx); err != nil {
		_ = c.Close(ctx) // the first error says more
		return nil, err
	}
	return c, nil
}

func (c *Control) start(ctx context.Context) error {
	if err := c.openStore(ctx); err != nil {
		return err
	}
	if o := c.cfg.Objects; o.Store != nil {
		if err := bind(ctx, c.store, o.Store, o.Name, o.Own, fmt.Sprintf("%016x%016x", rand.Uint64(), rand.Uint64())); err != nil {
			return err
		}
	}
	key, err := c.store.SigningKey(ctx)
	if err != nil {
		return err
	}
	signer, err := capability.NewSigner(key, nil)
	if err != nil {
		return err
	}
	access := iam.New(iam.Config{Tokens: c.store})
	c.registry = watcher.NewRegistry(c.cfg.Watcher)
	c.pool = edges.New(edges.Config{Token: edgeToken(signer), Agent: "dsec apiserver " + c.cfg.Version, TLS: c.cfg.EdgeTLS, Log: c.cfg.Log})
	c.api = apiserver.New(apiserver.Config{
		BuildCacheAge: c.cfg.BuildCacheAge, BuildCacheBytes: c.cfg.BuildCacheBytes,
		CollapseBelow: c.cfg.CollapseBelow,
		CollapseEvery: c.cfg.CollapseEvery,
		Objects:       c.cfg.Objects.Store, ObjectsBehind: c.cfg.Objects.Behind,
		Images: c.store, Claims: c.store, Ping: c.store.Ping, IAM: access, Registry: c.registry, Edges: c.pool, Signer: signer,
		Metrics: c.cfg.Metrics, Log: c.cfg.Log, Version: c.cfg.Version, TLS: c.cfg.TLS, StreamTimeout: c.cfg.StreamTimeout, BodyTimeout: c.cfg.BodyTimeout,
		UploadTimeout: c.cfg.UploadTimeout, Imports: c.cfg.Imports, TokenConns: c.cfg.TokenConns, TokenStreams: c.cfg.TokenStreams,
	})
	run, cancel := context.WithCancel(context.WithoutCancel(ctx))
	c.cancel = cancel
	c.run(run, "iam", access.Run)
	c.run(run, "watcher", watcher.New(c.registry, c.store, c.pool, c.cfg.Log).Run)
	c.run(run, "apiserver", c.api.Run)

	select {
	case <-access.Ready():
	case err := <-c.failed:
		return err
	case <-ctx.Done():
		return errs.Wrap(errs.DeadlineExceeded, "control.start", "read the tokens", ctx.Err())
	}
	if err := access.EnsureRoot(ctx, c.cfg.RootToken); err != nil {
		return err
	}
	if err := c.api.Ready(ctx); err != nil {
		return err
	}
	if c.listener, err = listen(ctx, c.cfg.Listen); err != nil {
		return err
	}
	c.run(run, "listener", func(ctx context.Context) error {
		if err := c.awaitEdges(ctx); err != nil {
			return errors.Join(err, c.listener.Close())
		}
		return c.api.Serve(c.listener)
	})
	c.cfg.Log.Info("control plane is up", "listen", c.listener.Addr().String())
	return nil
}

// awaitEdges waits for those without which no request is taken; its error is ctx's.
func (c *Control) awaitEdges(ctx context.Context) error {
	wait, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := c.WaitEdge(wait, c.cfg.Edges); err != nil && ctx.Err() == nil {
		c.cfg.Log.Warn("requests are taken without the edges that were awaited", "err", err)
	}
	return ctx.Err()
}

func (c *Control) openStore(ctx context.Context) error {
	if c.cfg.Store != nil {
		c.store = c.cfg.Store
		return nil
	}
	endpoints := c.cfg.Endpoints
	if len(endpoints) == 0 {
		if c.cfg.DataDir == "" {
			return errs.New(errs.BadRequest, "control.start", "a data directory or etcd endpoints are needed")
		}
		srv, err := etcd.StartServer(ctx, filepath.Join(c.cfg.DataDir, "control"), c.cfg.Log)
		if err != nil {
			return err
		}
		c.embedded = srv
		endpoints = srv.Endpoints()
		c.cfg.Endpoints = endpoints
	}
	conf := etcd.Config{Endpoints: endpoints, TLS: c.cfg.StoreTLS, Log: c.cfg.Log}
	if c.embedded != nil {
		conf.Dir = c.cfg.DataDir
	}
	s, err := etcd.Open(ctx, conf)
	if err != nil {
		return err
	}
	c.store = s
	return nil
}

// edgeToken makes the credential of the apiserver's own connections to edges.
func edgeToken(signer *capability.Signer) func() (string, error) {
	return func() (string, error) {
		return signer.Sign(capability.Claims{
			Subject: "apiserver", Sandbox: capability.AnySandbox, Rights: []v1.Right{v1.RightAdmin}, Expires: time.Now().Add(edgeCredential),
		})
	}
}

func listen(ctx context.Context, address string) (net.Listener, error) {
	network := "tcp"
	if path, ok := strings.CutPrefix(address, "unix:"); ok {
		network, address = "unix", "/"+strings.TrimLeft(path, "/")
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, network, address)
	if errors.Is(err, unix.EADDRINUSE) && network == "unix" && abandoned(ctx, address) {
		if err = os.Remove(address); err == nil {
			l, err = lc.Listen(ctx, network, address)
		}
	}
	code := errs.InternalError
	if errors.Is(err, unix.EADDRINUSE) {
		code = errs.AddressInUse
	}
	return l, errs.Wrap(code, "control.start", "listen on "+address, err)
}

// abandoned tells whether a socket was left by a server that was killed.
func abandoned(ctx context.Context, path string) bool {
	st, err := os.Lstat(path)
	if err != nil || st.Mode().Type() != fs.ModeSocket {
		return false
	}
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", path)
	if err == nil {
		conn.Close()
	}
	return errors.Is(err, unix.ECONNREFUSED)
}

// run keeps one part running and notes if it fails.
func (c *Control) run(ctx context.Context, part string, f func(context.Context) error) {
	c.wg.Go(func() {
		err := f(ctx)
		if err == nil || errors.Is(err, context.Canceled) && ctx.Err() != nil {
			return
		}
		c.cfg.Log.Error("part of the control plane failed", "part", part, "err", err)
		select {
		case c.failed <- err:
		default:
		}
	})
}

// Addr is where the apiserver listens.
func (c *Control) Addr() net.Addr { return c.listener.Addr() }

// Endpoints are etcd's, for edges to register at; nil with a Store of the caller.
func (c *Control) Endpoints() []string { return c.cfg.Endpoints }

// Store is the control plane's.
func (c *Control) Store() store.Store { return c.store }

// Failed delivers the first failure of a part; the control plane should then be closed.
func (c *Control) Failed() <-chan error { return c.failed }

// WaitEdge returns once at least n edges are ready.
func (c *Control) WaitEdge(ctx context.Context, n int) error {
	rev := c.registry.Revision()
	for {
		ready := 0
		for _, node := range c.registry.Nodes() {
			if node.Ready {
				ready++
			}
		}
		if ready >= n {
			return nil
		}
		if err := c.registry.WaitNodes(ctx, &rev); err != nil {
			return err
		}
	}
}

// Drain makes the apiserver refuse new work, for a process whose edge stops before Close, and
// keeps the edge's sandboxes from counting as lost.
func (c *Control) Drain() {
	if c.registry != nil {
		c.registry.Hold()
	}
	if c.api != nil {
		c.api.Drain()
	}
}

// Close drains requests until ctx ends, then stops everything. Edges and their sandboxes
// go on.
func (c *Control) Close(ctx context.Context) error {
	var err error
	c.closed.Do(func() {
		if c.api != nil {
			err = c.api.Close(ctx)
		}
		if c.cancel != nil {
			c.cancel()
		}
		c.wg.Wait()
		if c.pool != nil {
			c.pool.Close()
		}
		if c.store != nil && c.cfg.Store == nil {
			err = errors.Join(err, c.store.Close())
		}
		if c.embedded != nil {
			c.embedded.Close()
		}
	})
	return err
}
