package apiserver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/iam"
	"dsec/internal/control/placement"
	"dsec/internal/control/watcher"
)

const (
	batchParallel = 16
)

type createInput struct {
	IdempotencyKey string `header:"Idempotency-Key" doc:"1 to 255 visible ASCII characters, without quotation mark and backslash. The same key within 5 minutes gives the same sandbox; with another request it is an error. A failed create frees the key."`
	Body           v1.CreateRequest
}

// check refuses a key that cannot be one. None is none.
func (in *createInput) check() error {
	if in.IdempotencyKey == "" {
		return nil
	}
	return v1.CheckIdempotencyKey(in.IdempotencyKey)
}

type sandboxOutput struct{ Body *v1.Sandbox }

// createOne is POST /v1/sandboxes.
func (s *Server) createOne(ctx context.Context, req *request, in *createInput) (*sandboxOutput, error) {
	if in.Body.Count > 1 {
		return nil, badField("count", "more than one sandbox is asked for with POST /v1/sandboxes/batch")
	}
	if err := in.check(); err != nil {
		return nil, err
	}
	sb, err := s.create(ctx, req.principal, wanted{in.Body.Spec, in.Body.SecretEnv}, in.IdempotencyKey)
	if err != nil {
		return nil, err
	}
	return &sandboxOutput{sb}, nil
}

// createBatch is POST /v1/sandboxes/batch: count sandboxes, a few at a time, each told
// as it is ready. What could not be told to the client is removed again.
func (s *Server) createBatch(ctx context.Context, req *request, _ *http.Request, in *createInput) error {
	if err := in.check(); err != nil {
		return err
	}
	count := max(in.Body.Count, 1)
	spec := in.Body.Spec
	spec.SetDefaults()
	if err := spec.Validate(); err != nil {
		return err // once, not count times
	}
	if err := v1.CheckEnv("secret_env", in.Body.SecretEnv); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	out := s.newLines(req, "application/x-ndjson")
	defer out.end()
	results := make(chan v1.CreateResult)
	next := make(chan int)
	var wg sync.WaitGroup
	for range min(batchParallel, count) {
		wg.Go(func() {
			for i := range next {
				key := in.IdempotencyKey
				if key != "" {
					key = fmt.Sprintf("%s#%d", key, i)
				}
				sb, err := s.create(ctx, req.principal, wanted{spec, in.Body.SecretEnv}, key)
				r := v1.CreateResult{Sandbox: sb}
				if err != nil {
					r.Error = problemOf(req, err)
				}
				results <- r
			}
		})
	}
	go func() {
		defer close(results)
		defer wg.Wait()
		defer close(next)
		for i := range count {
			select {
			case next <- i:
			case <-ctx.Done():
				return
			}
		}
	}()
	var failed error
	for r := range results {
		if failed == nil {
			failed = out.write(r)
		}
		if failed != nil {
			cancel()
			if r.Sandbox != nil && in.IdempotencyKey == "" {
				s.reaper.reap(r.Sandbox.Node, r.Sandbox.ID)
			}
		}
	}
	return failed
}

// wanted is a sandbox to be made, and what must not be kept of it.
type wanted struct {
	spec      v1.Spec
	secretEnv map[string]string
}

// create makes one sandbox, or finds the one that key made.
func (s *Server) create(ctx context.Context, p *iam.Principal, w wanted, key string) (*v1.Sandbox, error) {
	start := time.Now()
	sb, err := s.createKeyed(ctx, p, w, key)
	s.metrics.create(err, time.Since(start))
	return sb, err
}

func (s *Server) createKeyed(ctx context.Context, p *iam.Principal, w wanted, key string) (*v1.Sandbox, error) {
	w.spec.SetDefaults()
	if err := w.spec.Validate(); err != nil {
		return nil, err
	}
	if err := v1.CheckEnv("secret_env", w.secretEnv); err != nil {
		return nil, err
	}
	if key == "" {
		sb, _, err := s.createNow(ctx, w, "")
		if err == nil && ctx.Err() != nil {
			// Made, but its owner will never hear of it.
			s.reaper.reap(sb.Node, sb.ID)
			err = errs.Wrap(errs.RequestCanceled, "sandbox.create", "the client went away", ctx.Err())
		}
		return sb, err
	}
	k := watcher.Key{Fingerprint: fingerprint(&w.spec), Scope: p.Project + ":" + key}
	return s.flights.do(ctx, k, s, w)
}

// fingerprint tells requests apart that use one key.
func fingerprint(spec *v1.Spec) string {
	raw, err := json.Marshal(spec)
	if err != nil {
		panic(err) // strings, numbers and maps of strings
	}
	sum := sha256.Sum256(raw)
	return hex.EncodeToString(sum[:12])
}

// createNow places a valid spec and has the edge make it. What an edge may have made although it
// did not say so is on its way out: removals are the ends of that.
func (s *Server) createNow(ctx context.Context, w wanted, key string) (_ *v1.Sandbox, removals []removal, err error) {
	if s.drain.Err() != nil {
		return nil, nil, errs.New(errs.ShuttingDown, "sandbox.create", "the server is stopping")
	}
	spec := w.spec
	ask := v1.EdgeCreate{IdempotencyKey: key, Spec: spec, SecretEnv: w.secretEnv}
	need := placement.Need{
		Backend: spec.Backend, Resources: v1.Resources{Slots: 1, CPUMillis: spec.CPUMillis, MemoryBytes: spec.MemoryBytes},
	}
	if spec.Image != "" {
		img, err := s.catalog.compose(&spec)
		if err != nil {
			return nil, nil, err
		}
		s.buildUsed(ctx, append([]string{spec.Image, spec.Workspace}, spec.Toolkits...)...)
		ask.Image, need.Digests = img, img.Digests()
		ask.Spec.Labels = snapshotLabels(spec.Labels, img)
	}
	var made v1.Sandbox
	err = s.placer.Place(ctx, need, func(ctx context.Context, node v1.Node, id string) error {
		ask.ID = id
		sb, err := s.cfg.Edges.Create(ctx, node, &ask)
		if err != nil {
			if uncertain(err) {
				removals = append(removals, s.reaper.reap(node.ID, id))
			}
			return err
		}
		sb.Node = node.ID
		s.cfg.Registry.Apply(sb)
		made = sb
		return nil
	})
	if err != nil {
		return nil, removals, err
	}
	made.IdempotencyKey = ""
	return &made, removals, nil
}

// snapshotLabels are a sandbox's: those that it is given, over those of the sandbox that its
// snapshot was made of.
func snapshotLabels(given map[string]string, img *v1.Image) map[string]string {
	if img.Snapshot == nil || len(img.Snapshot.Labels) == 0 {
		return given
	}
	all := maps.Clone(img.Snapshot.Labels)
	maps.Copy(all, given)
	return all
}

// uncertain says whether an edge may have made, or still be making, what it was asked for
// although err was returned.
func uncertain(err error) bool {
	e := errs.Of(err)
	switch e.Class() {
	case errs.Canceled, errs.Deadline, errs.Internal:
		return true
	case errs.Unavailable:
		return e.Phase != "edge.dial"
	}
	return e.Code == errs.ProtocolError
}

func badField(field, why string) error {
	return errs.New(errs.BadRequest, "request.validate", field+": "+why).With("field", field)
}
