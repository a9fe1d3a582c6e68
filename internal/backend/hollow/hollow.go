// Package hollow is the backend that runs nothing. It keeps the state of as many
// sandboxes as one likes, so that the control plane can be tested at a scale that no
// machine could run; its guests answer guest.info and refuse everything else. It
// passes the same conformance suite as the real backends.
package hollow

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// Backend implements backend.Backend. A sandbox is one file in its directory, so that it outlives an edge like
// a real one: empty, or with the word that it is paused.
type Backend struct {
	dir    string
	server *aether.Server

	mu        sync.Mutex
	instances map[string]*instance
}

var _ backend.Backend = (*Backend)(nil)

// New keeps its sandboxes in dir.
func New(dir string) (*Backend, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	server := aether.NewServer(aether.ServerConfig{
		Handlers: map[string]aether.Handler{
			"guest.info": aether.Unary(func(context.Context, *aether.Stream, *msg.Empty) (*msg.GuestInfo, error) {
				return &msg.GuestInfo{Version: "hollow"}, nil
			}),
		},
		Fallback: func(_ context.Context, s *aether.Stream) (aether.Message, error) {
			return nil, errs.New(errs.NotSupported, "hollow.guest", "a hollow sandbox runs nothing: "+s.Method())
		},
		KeepAlive: -1,
	})
	return &Backend{dir: dir, server: server, instances: map[string]*instance{}}, nil
}

// Kind implements backend.Backend.
func (b *Backend) Kind() v1.Backend { return v1.BackendHollow }

// Check implements backend.Backend.
func (b *Backend) Check(context.Context) error { return nil }

func (b *Backend) path(id string) string { return filepath.Join(b.dir, id) }

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, spec backend.Spec, _ backend.StepReport) (backend.Instance, error) {
	if err := ctx.Err(); err != nil {
		return nil, errs.Wrap(errs.InternalError, "hollow.create", "create", err)
	}
	b.mu.Lock()
	i, ok := b.instances[spec.ID]
	b.mu.Unlock()
	if ok && i.handle.Generation == spec.Generation {
		return i, nil
	}
	if err := os.WriteFile(b.path(spec.ID), nil, 0o600); err != nil {
		return nil, errs.Wrap(errs.InternalError, "hollow.create", "keep the sandbox", err)
	}
	return b.enter(spec), nil
}

func (b *Backend) enter(spec backend.Spec) *instance {
	i := &instance{b: b, id: spec.ID, handle: handle{spec.Generation}, done: make(chan struct{})}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.instances[spec.ID] = i
	return i
}

// Adopt implements backend.Backend.
func (b *Backend) Adopt(_ context.Context, spec backend.Spec, raw json.RawMessage) (backend.Instance, error) {
	var h handle
	if err := json.Unmarshal(raw, &h); err != nil || h.Generation != spec.Generation {
		return nil, errs.New(errs.SandboxLost, "hollow.adopt", "its handle is of another generation").Because(err)
	}
	if _, err := os.Lstat(b.path(spec.ID)); err != nil {
		return nil, errs.New(errs.SandboxLost, "hollow.adopt", "it is gone").Because(err)
	}
	i := b.enter(spec)
	if err := i.write(spec.Paused); err != nil {
		return nil, errs.Wrap(errs.InternalError, "hollow.adopt", "keep whether the sandbox is paused", err)
	}
	return i, nil
}

// Delete implements backend.Backend.
func (b *Backend) Delete(_ context.Context, id string) error {
	if err := os.Remove(b.path(id)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return errs.Wrap(errs.InternalError, "hollow.delete", "remove the sandbox", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if i, ok := b.instances[id]; ok {
		delete(b.instances, id)
		close(i.done)
	}
	return nil
}

// List implements backend.Backend.
func (b *Backend) List(context.Context) ([]string, error) {
	entries, err := os.ReadDir(b.dir)
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, e := range entries {
		ids = append(ids, e.Name())
	}
	return ids, nil
}

// Audit implements backend.Backend.
func (b *Backend) Audit(ctx context.Context) ([]backend.Resource, error) {
	ids, err := b.List(ctx)
	var out []backend.Resource
	for _, id := range ids {
		out = append(out, backend.Resource{Kind: "file", Name: b.path(id), Sandbox: id})
	}
	return out, err
}

// Close implements backend.Backend.
func (b *Backend) Close() error { return b.server.Close() }

type handle struct {
	Generation uint64 `json:"generation"`
}

type instance struct {
	b      *Backend
	id     string
	handle handle
	done   chan struct{}

	mu     sync.Mutex
	conns  map[*gate]bool
	paused bool
}

var _ backend.Pauser = (*instance)(nil)

func (i *instance) ID() string            { return i.id }
func (i *instance) Done() <-chan struct{} { return i.done }

func (i *instance) Handle() json.RawMessage {
	raw, err := json.Marshal(i.handle)
	if err != nil {
		panic(err) // a number always marshals
	}
	return raw
}

// pausedWord is what the file of a paused sandbox holds.
const pausedWord = "paused"

// write keeps whether the sandbox is paused, and lets what its connections carry wait or pass.
func (i *instance) write(paused bool) error {
	word := ""
	if paused {
		word = pausedWord
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	f, err := os.OpenFile(i.b.path(i.id), os.O_WRONLY|os.O_TRUNC, 0) // not one that was removed
	if err != nil {
		return err
	}
	_, err = f.WriteString(word)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	i.paused = paused
	for g := range i.conns {
		g.set(paused)
	}
	return nil
}

// Pause implements backend.Pauser.
func (i *instance) Pause(ctx context.Context) (backend.Paused, error) {
	if err := ctx.Err(); err != nil {
		return backend.Paused{}, errs.Wrap(errs.RequestCanceled, "hollow.pause", "pause", err)
	}
	return backend.Paused{}, errs.Wrap(errs.InternalError, "hollow.pause", "keep that the sandbox is paused", i.write(true))
}

// Resume implements backend.Pauser.
func (i *instance) Resume(context.Context, time.Duration) error {
	return errs.Wrap(errs.InternalError, "hollow.resume", "keep that the sandbox runs", i.write(false))
}

func (i *instance) Usage(context.Context) (v1.Usage, error) { return v1.Usage{}, nil }

// DialGuest serves the other end of a pipe until either side closes it.
func (i *instance) DialGuest(context.Context) (net.Conn, error) {
	ours, theirs := net.Pipe()
	g := newGate(theirs)
	i.mu.Lock()
	g.set(i.paused)
	if i.conns == nil {
		i.conns = map[*gate]bool{}
	}
	i.conns[g] = true
	i.mu.Unlock()
	go func() { // ends with the connection; its error is the client's too
		_ = i.b.server.ServeConn(context.Background(), g)
		i.mu.Lock()
		defer i.mu.Unlock()
		delete(i.conns, g)
	}()
	return ours, nil
}
