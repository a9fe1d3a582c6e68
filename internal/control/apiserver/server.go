package apiserver

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"
	"github.com/prometheus/client_golang/prometheus"

	"dsec/aether"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/capability"
	"dsec/internal/control/edges"
	"dsec/internal/control/iam"
	"dsec/internal/control/placement"
	"dsec/internal/control/store"
	"dsec/internal/control/watcher"
	"dsec/internal/image/object"
)

// Config of a Server. All parts are needed unless they say otherwise.
type Config struct {
	Images store.Images
	Claims store.Claims
	// Objects is the object store with the catalogue's images; nil: nothing is collected or
	// measured. ObjectsBehind says that its listings may be behind.
	Objects       object.Store
	ObjectsBehind bool
	Ping          func(context.Context) error // of the store, for health
	IAM           *iam.IAM
	Registry      *watcher.Registry
	Edges         *edges.Pool
	Signer        *capability.Signer
	Metrics       *prometheus.Registry
	Log           *slog.Logger
	Version       string

	TLS *tls.Config      // nil: plain HTTP
	Now func() time.Time // nil: time.Now
	// Random feeds sandbox ids, request ids and placement; nil: seeded by the system.
	Random rand.Source
	// StreamTimeout is how long a reader of an answer may take for a part of it, or for some of a
	// stream's lines; 0: 30 s.
	StreamTimeout time.Duration
	// BodyTimeout is how long the body of a request of JSON may take to come; 0: 10 s.
	BodyTimeout time.Duration
	// CollectEvery is the time between collections of garbage; 0: an hour.
	CollectEvery time.Duration
	// BuildCacheAge and BuildCacheBytes bound what builds keep for later ones: how long it stays without
	// use, and how much all of it may take. 0: no bound.
	BuildCacheAge   time.Duration
	BuildCacheBytes int64
	// CollapseBelow is the size in bytes below which neighbouring layers are merged without
	// being asked; 0: none are. CollapseEvery is the time between looks; 0: ten minutes.
	CollapseBelow int64
	CollapseEvery time.Duration
	// KeyTTL is the life of an idempotency key; 0: 5 min.
	KeyTTL time.Duration
	// UploadTimeout is how long an upload may send nothing; 0: 5 min.
	UploadTimeout time.Duration
	// Imports is how many images are imported at a time; 0: 2.
	Imports int
	// TokenConns bounds what one token keeps open at a time: Aether connections and followers
	// of events. 0: 1024.
	TokenConns int
	// TokenStreams bounds the Aether streams of one token over all its connections; 0: 8192.
	TokenStreams int
}

// Server is one apiserver.
type Server struct {
	cfg     Config
	api     huma.API
	mux     *http.ServeMux
	http    *http.Server
	relay   *aether.Server
	placer  *placement.Placer
	catalog *catalog
	naming  names
	flights *flights
	reaper  *reaper
	quotas  *quotas
	imports *imports
	metrics *metrics
	random  *lockedSource

	ctx      context.Context // of everything that outlives a request
	cancel   context.CancelFunc
	drain    context.Context // ends when a shutdown begins: nothing new is made, followers of events end
	stop     context.CancelFunc
	sessions sessions
	wg       sync.WaitGroup
}

// New returns a Server. It serves after Run and Serve.
func New(cfg Config) *Server {
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	if cfg.Random == nil {
		cfg.Random = rand.NewPCG(rand.Uint64(), rand.Uint64())
	}
	if cfg.StreamTimeout == 0 {
		cfg.StreamTimeout = 30 * time.Second
	}
	if cfg.BodyTimeout == 0 {
		cfg.BodyTimeout = 10 * time.Second
	}
	if cfg.KeyTTL == 0 {
		cfg.KeyTTL = 5 * time.Minute
	}
	if cfg.CollectEvery == 0 {
		cfg.CollectEvery = time.Hour
	}
	if cfg.CollapseEvery == 0 {
		cfg.CollapseEvery = 10 * time.Minute
	}
	if cfg.UploadTimeout == 0 {
		cfg.UploadTimeout = 5 * time.Minute
	}
	if cfg.Imports == 0 {
		cfg.Imports = defaultImports
	}
	if cfg.TokenConns == 0 {
		cfg.TokenConns = defaultTokenConns
	}
	if cfg.TokenStreams == 0 {
		cfg.TokenStreams = defaultTokenStreams
	}
	s := &Server{cfg: cfg, random: &lockedSource{src: cfg.Random}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.drain, s.stop = context.WithCancel(context.Background())
	s.placer = placement.New(cfg.Registry, s.newSandboxID, s.random)
	s.catalog = newCatalog(cfg.Images)
	s.flights = newFlights(cfg.Now, cfg.KeyTTL)
	s.reaper = newReaper(s)
	s.imports = newImports(cfg.Imports)
	s.quotas = newQuotas(cfg.TokenConns, cfg.TokenStreams)
	s.metrics = newMetrics(s, cfg.Metrics)
	s.relay = s.newRelay()
	s.mux = http.NewServeMux()
	s.api = newAPI(s.mux)
	s.api.UseMiddleware(s.authorize)
	s.routes()
	s.http = &http.Server{
		Handler:           s.handler(),
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(cfg.Log.Handler(), slog.LevelDebug),
	}
	return s
}

// Handler returns the HTTP handler, for tests and for embedding.
func (s *Server) Handler() http.Handler { return s.http.Handler }

// OpenAPI returns the document that describes the API.
func (s *Server) OpenAPI() *huma.OpenAPI { return s.api.OpenAPI() }

// Run follows the image catalogue and watches over long requests until ctx ends.
func (s *Server) Run(ctx context.Context) error {
	s.wg.Go(func() { s.checkSessions(ctx) })
	s.wg.Go(func() { s.forgetNodes(ctx) })
	if s.cfg.Objects != nil {
		s.wg.Go(func() { s.collectOften(ctx) })
	}
	if s.cfg.CollapseBelow > 0 {
		s.wg.Go(func() { s.collapseOften(ctx) })
	}
	err := s.catalog.run(ctx)
	s.wg.Wait()
	return err
}

// Ready returns once the image catalogue was read.
func (s *Server) Ready(ctx context.Context) error {
	select {
	case <-s.catalog.ready:
		return nil
	case <-ctx.Done():
		return errs.Wrap(errs.DeadlineExceeded, "apiserver.start", "read the image catalogue", ctx.Err())
	}
}

// Serve answers on l until Close.
func (s *Server) Serve(l net.Listener) error {
	if s.cfg.TLS != nil {
		conf := s.cfg.TLS.Clone()
		if len(conf.NextProtos) == 0 {
			conf.NextProtos = []string{"http/1.1"} // an upgrade to Aether needs it
		}
		l = tls.NewListener(l, conf)
	}
	if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return errs.Wrap(errs.InternalError, "apiserver.serve", "serve", err)
	}
	return nil
}

// Drain refuses new work from here on, as a server that is stopping. Close does it too.
func (s *Server) Drain() { s.stop() }

// Close drains: no new requests, followers of events end, Aether clients are told to go,
// and what runs may finish until ctx ends. Then everything is cut off.
func (s *Server) Close(ctx context.Context) error {
	s.stop()
	var wg sync.WaitGroup
	var herr error
	wg.Go(func() { herr = s.http.Shutdown(ctx) })
	wg.Go(func() { _ = s.relay.Shutdown(ctx) }) // its error is ctx's, as the other's
	wg.Wait()
	s.cancel()
	if herr != nil {
		_ = s.http.Close()
	}
	s.flights.wait()
	s.reaper.wait()
	return errs.Wrap(errs.DeadlineExceeded, "apiserver.close", "drain", herr)
}

// newSandboxID makes an id that names its node.
func (s *Server) newSandboxID(node v1.Node) string {
	return v1.SandboxID(node.ID, node.Epoch, s.random.Uint64())
}

// lockedSource makes a source safe for concurrent use.
type lockedSource struct {
	mu  sync.Mutex
	src rand.Source
}

// Uint64 implements rand.Source.
func (l *lockedSource) Uint64() uint64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.src.Uint64()
}

// forgetNodes closes connections to edges that are no longer registered.
func (s *Server) forgetNodes(ctx context.Context) {
	known := map[string]bool{}
	rev := s.cfg.Registry.Revision()
	for {
		now := map[string]bool{}
		for _, n := range s.cfg.Registry.Nodes() {
			now[n.ID] = true
		}
		for id := range known {
			if !now[id] {
				s.cfg.Edges.Forget(id)
			}
		}
		known = now
		if s.cfg.Registry.WaitNodes(ctx, &rev) != nil {
			return
		}
	}
}
