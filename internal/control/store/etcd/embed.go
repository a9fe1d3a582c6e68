package etcd

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
)

const (
	quotaBytes    = 512 << 20 // the whole of it: a few thousand small records
	compactEvery  = "10m"
	reserveBytes  = 16 << 20 // of disk, kept for the database
	startTimeout  = 60 * time.Second
	maxSocketPath = 107 // sun_path without its terminating NUL
)

// Server is an embedded, single-member etcd.
type Server struct {
	etcd    *embed.Etcd
	socket  string
	tmp     string // directory of the socket where dir's path is too long for one
	closing atomic.Bool
}

// StartServer runs etcd on dir and returns once it serves. Clients reach it over a
// Unix socket in dir; only its peer port, which a single member never uses but etcd
// insists on, is on the loopback device.
func StartServer(ctx context.Context, dir string, log *slog.Logger) (*Server, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, errs.Wrap(errs.InternalError, "store.start", "make "+dir, err)
	}
	s := &Server{socket: filepath.Join(dir, "client.sock")}
	if len(s.socket) > maxSocketPath {
		tmp, err := os.MkdirTemp("", "dsec-etcd-")
		if err != nil {
			return nil, errs.Wrap(errs.InternalError, "store.start", "make a directory for the socket", err)
		}
		s.tmp, s.socket = tmp, filepath.Join(tmp, "client.sock")
	}
	if err := s.start(ctx, dir, log); err != nil {
		s.Close()
		if errors.Is(err, errDamaged) {
			return nil, errs.New(errs.DataCorrupt, "store.start", "the database "+filepath.Join(dir, "etcd")+" is damaged").Because(err)
		}
		return nil, errs.Wrap(errs.InternalError, "store.start", "start etcd on "+dir, err)
	}
	return s, nil
}

func (s *Server) start(ctx context.Context, dir string, log *slog.Logger) error {
	// A socket left by a killed process would refuse the bind.
	if err := os.Remove(s.socket); err != nil && !os.IsNotExist(err) {
		return err
	}
	cfg := embed.NewConfig()
	cfg.Name = "dsec"
	cfg.Dir = filepath.Join(dir, "etcd")
	client := url.URL{Scheme: "unix", Path: s.socket}
	peer := url.URL{Scheme: "http", Host: "127.0.0.1:0"}
	cfg.ListenClientUrls, cfg.AdvertiseClientUrls = []url.URL{client}, []url.URL{client}
	cfg.ListenPeerUrls, cfg.AdvertisePeerUrls = []url.URL{peer}, []url.URL{peer}
	cfg.InitialCluster = cfg.InitialClusterFromName(cfg.Name)
	cfg.QuotaBackendBytes = quotaBytes
	cfg.AutoCompactionMode, cfg.AutoCompactionRetention = embed.CompactorModePeriodic, compactEvery
	// A single member elects itself: short ticks only make its start quick.
	cfg.TickMs, cfg.ElectionMs = 20, 200
	hook := &fatalHook{}
	hook.starting.Store(true)
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.New(newSlogCore(log, &s.closing), zap.WithFatalHook(hook)))
	if err := checkDatabase(filepath.Join(cfg.Dir, "member", "snap", "db")); err != nil {
		return err
	}
	e, err := startEtcd(cfg)
	hook.starting.Store(false)
	if errors.Is(err, unix.ENOSPC) {
		return errs.Wrap(errs.DiskFull, "store.start", "no space to open the control plane's records", err)
	}
	if err != nil && damaged(err) {
		err = fmt.Errorf("%w: %w", errDamaged, err)
	}
	if err != nil {
		return err
	}
	s.etcd = e
	t := time.NewTimer(startTimeout)
	defer t.Stop()
	select {
	case <-e.Server.ReadyNotify():
		reserve(filepath.Join(cfg.Dir, "member", "snap", "db"), log)
		return nil
	case err := <-e.Err():
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return fmt.Errorf("not ready after %s", startTimeout)
	}
}

// fatalHook is what etcd's logger does after a fatal line: without one it ends the process.
type fatalHook struct{ starting atomic.Bool }

// fatal is what startEtcd is to return.
type fatal struct{ err error }

// OnWrite implements zapcore.CheckWriteHook. It must not return.
func (h *fatalHook) OnWrite(e *zapcore.CheckedEntry, fields []zapcore.Field) {
	if !h.starting.Load() {
		os.Exit(1)
	}
	err := errors.New(e.Message)
	for _, f := range fields {
		if cause, ok := f.Interface.(error); ok {
			err = fmt.Errorf("%s: %w", e.Message, cause)
		}
	}
	panic(fatal{err})
}

// startEtcd turns what etcd ends the process for while it starts into an error.
func startEtcd(cfg *embed.Config) (_ *embed.Etcd, err error) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case fatal:
			err = r.err
		default:
			panic(r)
		}
	}()
	return embed.StartEtcd(cfg)
}

// checkDatabase opens the file as etcd will, which panics if it cannot.
func checkDatabase(path string) error {
	if _, err := os.Stat(path); os.IsNotExist(err) {
		return nil
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{ReadOnly: true, Timeout: time.Second})
	if err != nil && damaged(err) {
		err = fmt.Errorf("%w: %w", errDamaged, err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return db.Close()
}

var errDamaged = errors.New("its files cannot be read")

// damaged tells whether etcd's files, and not their surroundings, kept it from starting.
// Most of its errors about files have no type, those of the system have.
func damaged(err error) bool {
	var errno syscall.Errno
	return !errors.As(err, &errno) && !errors.Is(err, berrors.ErrTimeout)
}

// reserve gives the database its disk space now: it is sparse, and a write that finds the
// disk full ends etcd, and us. Leases that run out and compactions write at any time.
// (The log comes with its space.)
func reserve(db string, log *slog.Logger) {
	fd, err := unix.Open(db, unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Fallocate(fd, unix.FALLOC_FL_KEEP_SIZE, 0, reserveBytes)
		unix.Close(fd)
	}
	if err != nil {
		log.Warn("no disk space could be reserved for etcd", "err", err)
	}
}

// Endpoints is what Open takes.
func (s *Server) Endpoints() []string { return []string{"unix://" + s.socket} }

// Failed delivers the error that stopped the server, if one does.
func (s *Server) Failed() <-chan error { return s.etcd.Err() }

// Close stops the server; what was written stays.
func (s *Server) Close() {
	s.closing.Store(true)
	if s.etcd != nil {
		s.etcd.Close()
	}
	if s.tmp != "" {
		os.RemoveAll(s.tmp)
	}
}
