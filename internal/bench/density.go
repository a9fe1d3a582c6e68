package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	v1 "dsec/api/v1"
	"dsec/client"
)

// DensityOptions says what Density does besides the creates.
type DensityOptions struct {
	Images       []string      // of the sandboxes, in turn
	Points       int           // how often memory is read on the way
	Execs        int           // commands on random sandboxes while all live
	ExecParallel int           // of them at once
	Settle       time.Duration // wait before memory is read at rest
	MinFree      int64         // no more sandboxes are made when less memory is available
	Seed         uint64        // of the choice of sandboxes
	Peek         Peek
	Audit        func(ids []string) error // looks for what is left of those that were made; nil: there is none
	Progress     func(stage string, done, total int64)
}

// Peek is how Density looks at the machine that the server runs on.
type Peek interface {
	// Memory of the machine by category, in bytes.
	Memory() (MemoryState, error)
	// Guests looks at the guests of some sandboxes.
	Guests(ids []string) (GuestMemory, error)
}

// Density is what a machine full of sandboxes costs, and how it answers.
type Density struct {
	Host      Host           `json:"host"`
	Images    []string       `json:"images"`
	Asked     int            `json:"asked"`
	Live      int            `json:"live"`
	Stopped   string         `json:"stopped,omitempty"` // why fewer are live than were asked for
	Parallel  int            `json:"parallel"`
	Memory    []Category     `json:"memory"`
	UsedBytes int64          `json:"used_bytes"` // by the whole machine, with all live
	Each      int64          `json:"bytes_per_sandbox"`
	Guests    GuestMemory    `json:"guests"`
	Server    ServerMemory   `json:"server"`
	Points    []DensityPoint `json:"points"`
	First     float64        `json:"creates_per_s_first_tenth"`
	Last      float64        `json:"creates_per_s_last_tenth"`
	Create    Result         `json:"create"`
	Exec      Result         `json:"exec"`
	Histogram []Bucket       `json:"exec_histogram"`
	Remove    Result         `json:"remove"`
	After     int64          `json:"used_bytes_after"` // by the machine, once all are removed
	Audit     string         `json:"audit"`            // "clean", what is left, or "none"
}

// Category is one kind of memory of the machine before the first sandbox and with all live.
type Category struct {
	Name   string `json:"name"`
	Before int64  `json:"before"`
	With   int64  `json:"with"`
}

// DensityPoint is how things stood when Count sandboxes had been created.
type DensityPoint struct {
	Count     int     `json:"count"`
	Seconds   float64 `json:"seconds"` // since the first create began
	UsedBytes int64   `json:"used_bytes"`
	Each      int64   `json:"bytes_per_sandbox"`
	Rate      float64 `json:"creates_per_s"`     // since the point before
	Latency   Latency `json:"create_latency_ms"` // likewise
}

// Bucket counts the commands that took up to so many milliseconds, and longer than the bucket before.
type Bucket struct {
	UpTo  float64 `json:"up_to_ms"` // 0: any longer
	Count int     `json:"count"`
}

// ServerMemory is the resident memory of the server's process.
type ServerMemory struct {
	Before int64 `json:"before"`
	With   int64 `json:"with"`
}

// Err tells whether all that was asked for was live and answered, and nothing is left.
func (d *Density) Err() error {
	switch {
	case d.Stopped != "":
		return fmt.Errorf("%d of %d sandboxes were made: %s", d.Live, d.Asked, d.Stopped)
	case d.Create.Errors+d.Exec.Errors+d.Remove.Errors > 0:
		return fmt.Errorf("%d creates, %d commands and %d removals failed", d.Create.Errors, d.Exec.Errors, d.Remove.Errors)
	case d.Audit != auditClean && d.Audit != auditNone:
		return fmt.Errorf("the audit after the run: %s", d.Audit)
	}
	return nil
}

const (
	auditClean = "clean"
	auditNone  = "none"
)

// density is one run.
type density struct {
	d    DSec
	o    DensityOptions
	out  *Density
	made []made

	mu  sync.Mutex
	ids []string
}

// made is one create.
type made struct {
	end  time.Duration // since the first began
	took time.Duration
}

// RunDensity makes l.N sandboxes, runs commands in random ones while all live, and removes all
// by one request. What was made is removed also when it fails or ctx ends.
func RunDensity(ctx context.Context, d DSec, l Load, o DensityOptions) (_ *Density, err error) {
	if err := l.validate(); err != nil {
		return nil, err
	}
	if l.N < 1 || len(o.Images) == 0 || o.Points < 1 || o.Execs < 0 || o.ExecParallel < 1 {
		return nil, errors.New("density needs a number of sandboxes, an image, a point and a parallel command")
	}
	if o.Progress == nil {
		o.Progress = func(string, int64, int64) {}
	}
	r := &density{d: d, o: o, out: &Density{Host: ReadHost(), Images: o.Images, Asked: l.N, Parallel: l.Parallel, Audit: auditNone}}
	// What all sandboxes of an image share is there before.
	first, err := r.first(ctx)
	defer func() { err = removed(ctx, first, d.Name(), 1, err) }()
	if err != nil {
		return nil, err
	}
	before, err := r.rest(ctx)
	if err != nil {
		return nil, err
	}
	r.out.Server.Before = r.server(ctx)
	removedAll := false
	defer func() {
		if !removedAll {
			err = errors.Join(err, r.remove(ctx))
		}
	}()
	if err := r.create(ctx, l, before); err != nil {
		return r.out, err
	}
	with, err := r.rest(ctx)
	if err != nil {
		return r.out, err
	}
	r.account(before, with)
	r.out.Server.With = r.server(ctx)
	if r.out.Guests, err = o.Peek.Guests(r.sample()); err != nil {
		return r.out, err
	}
	if err := r.exec(ctx); err != nil {
		return r.out, err
	}
	removedAll = true
	if err := r.remove(ctx); err != nil {
		return r.out, err
	}
	if err := first.drop(ctx, d.Name()); err != nil {
		return r.out, err
	}
	after, err := r.rest(ctx)
	if err != nil {
		return r.out, err
	}
	r.out.After = after.Used
	if o.Audit != nil {
		r.out.Audit = auditClean
		if err := o.Audit(r.ids); err != nil {
			r.out.Audit = err.Error()
		}
	}
	return r.out, nil
}

// drop removes the boxes, which are none afterwards.
func (b *boxes) drop(ctx context.Context, target string) error {
	err := removed(ctx, b, target, 1, nil)
	b.all = nil
	return err
}

// first makes a sandbox of each image.
func (r *density) first(ctx context.Context) (*boxes, error) {
	all := new(boxes)
	for _, image := range r.o.Images {
		b, err := fill(ctx, r.of(image), 1, 1)
		if err != nil {
			return all, err
		}
		all.all = append(all.all, b.all...)
	}
	return all, nil
}

func (r *density) of(image string) DSec {
	d := r.d
	d.Spec.Image = image
	return d
}

// rest reads memory after a while without work.
func (r *density) rest(ctx context.Context) (MemoryState, error) {
	r.o.Progress("settle", 0, 0)
	select {
	case <-time.After(r.o.Settle):
		return r.o.Peek.Memory()
	case <-ctx.Done():
		return MemoryState{}, ctx.Err()
	}
}

// server is the resident memory of the server, 0 if it does not say.
func (r *density) server(ctx context.Context) int64 {
	n, err := residentMemory(ctx, r.d.Client)
	if err != nil {
		r.out.Create.Notes = append(r.out.Create.Notes, "no server memory: "+err.Error())
	}
	return int64(n)
}

func (r *density) create(ctx context.Context, l Load, before MemoryState) error {
	begin := time.Now()
	var full atomic.Pointer[string]
	var done int
	note := func(sb *client.Sandbox, took time.Duration) error {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.ids = append(r.ids, sb.ID())
		r.made = append(r.made, made{time.Since(begin), took})
		done++
		r.o.Progress("create", int64(done), int64(l.N))
		if done*r.o.Points/l.N == (done-1)*r.o.Points/l.N && done != l.N {
			return nil
		}
		now, err := r.o.Peek.Memory()
		if err != nil {
			return err
		}
		r.point(before, now)
		if now.Available < r.o.MinFree {
			why := fmt.Sprintf("%d MiB of memory are available, and %d are to stay so", now.Available>>20, r.o.MinFree>>20)
			full.CompareAndSwap(nil, &why)
		}
		return nil
	}
	res, err := run(ctx, "create", r.d.Name(), l, func(ctx context.Context, _, i int) (time.Duration, error) {
		if full.Load() != nil {
			return 0, errEnough
		}
		var sb *client.Sandbox
		took, err := timed(func() (err error) {
			sb, err = r.d.Client.Create(ctx, r.of(r.o.Images[i%len(r.o.Images)]).Spec)
			return err
		})
		if err != nil {
			return took, err
		}
		r.d.leases.add(sb)
		return took, note(sb, took)
	})
	r.out.Live = len(r.ids)
	if why := full.Load(); why != nil {
		r.out.Stopped = *why
		res.Errors, res.ErrorSamples, res.N = 0, nil, res.OK
	}
	res.Notes = append(res.Notes, r.out.Create.Notes...)
	r.out.Create = res
	r.out.First, r.out.Last = tenths(r.made)
	return err
}

var errEnough = errors.New("enough")

// tenths are the rates of the first and the last tenth of the creates, by when they ended.
func tenths(all []made) (first, last float64) {
	slices.SortFunc(all, func(a, b made) int { return cmp.Compare(a.end, b.end) })
	n := len(all) / 10
	if n == 0 {
		return 0, 0
	}
	rate := func(from, to time.Duration) float64 {
		if to <= from {
			return 0
		}
		return float64(n) / (to - from).Seconds()
	}
	return rate(0, all[n-1].end), rate(all[len(all)-n-1].end, all[len(all)-1].end)
}

// point notes how things stand; with mu held.
func (r *density) point(before, now MemoryState) {
	var from int
	var since float64
	if n := len(r.out.Points); n > 0 {
		from, since = r.out.Points[n-1].Count, r.out.Points[n-1].Seconds
	}
	p := DensityPoint{Count: len(r.made), Seconds: r.made[len(r.made)-1].end.Seconds(), UsedBytes: now.Used}
	var took []time.Duration
	for _, m := range r.made[from:] {
		took = append(took, m.took)
	}
	p.Latency = latencies(took)
	if p.Seconds > since {
		p.Rate = float64(p.Count-from) / (p.Seconds - since)
	}
	p.Each = (now.Used - before.Used) / int64(p.Count)
	r.out.Points = append(r.out.Points, p)
}

// account says what became more.
func (r *density) account(before, with MemoryState) {
	r.out.UsedBytes = with.Used
	if r.out.Live > 0 {
		r.out.Each = (with.Used - before.Used) / int64(r.out.Live)
	}
	for _, name := range memoryCategories {
		r.out.Memory = append(r.out.Memory, Category{name, before.By[name], with.By[name]})
	}
}

// guestSample is how many guests are looked at: the maps of each are read, and added up in the kernel.
const guestSample = 200

// sample are the ids of some sandboxes.
func (r *density) sample() []string {
	ids := slices.Clone(r.ids)
	rnd := r.random()
	rnd.Shuffle(len(ids), func(i, j int) { ids[i], ids[j] = ids[j], ids[i] })
	return ids[:min(guestSample, len(ids))]
}

func (r *density) random() *rand.Rand { return rand.New(rand.NewPCG(r.o.Seed, 0)) }

// exec runs commands in random sandboxes.
func (r *density) exec(ctx context.Context) (err error) {
	if r.o.Execs == 0 || len(r.ids) == 0 {
		return nil
	}
	rnd, took := r.random(), make([]time.Duration, r.o.Execs)
	which := make([]*client.Sandbox, r.o.Execs)
	for i := range which {
		which[i] = r.d.Client.Sandbox(r.ids[rnd.IntN(len(r.ids))])
	}
	var done atomic.Int64
	r.out.Exec, err = run(ctx, "exec", r.d.Name(), Load{N: r.o.Execs, Parallel: r.o.ExecParallel}, func(ctx context.Context, _, i int) (time.Duration, error) {
		d, err := timed(func() error { return dsecBox{sb: which[i]}.Exec(ctx, "true") })
		if err == nil {
			took[i] = d
		}
		r.o.Progress("exec", done.Add(1), int64(r.o.Execs))
		return d, err
	})
	r.out.Histogram = histogram(took)
	return err
}

// bucketEnds of the histogram, in milliseconds.
var bucketEnds = []float64{0.5, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000, 0}

// histogram counts those that succeeded, which took more than no time.
func histogram(took []time.Duration) []Bucket {
	out := make([]Bucket, len(bucketEnds))
	for i, end := range bucketEnds {
		out[i].UpTo = end
	}
	for _, d := range took {
		if d == 0 {
			continue
		}
		i := slices.IndexFunc(bucketEnds, func(end float64) bool { return end == 0 || ms(d) <= end })
		out[i].Count++
	}
	return out
}

// densityRemoveTime bounds the removal of all.
const densityRemoveTime = 10 * time.Minute

// remove removes all by one request.
func (r *density) remove(ctx context.Context) error {
	if len(r.ids) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), densityRemoveTime)
	defer cancel()
	res := Result{Name: "rm", Target: r.d.Name(), Parallel: 1, Host: r.out.Host}
	var w worker
	cpu, begin := cpuSeconds(), time.Now()
	for id, err := range r.d.Client.DeleteMany(ctx, v1.DeleteRequest{IDs: r.ids}) {
		if err != nil && id == "" {
			return fmt.Errorf("remove the sandboxes of the run: %w", err)
		}
		w.note(time.Since(begin), err)
		r.o.Progress("remove", int64(len(w.ok)+w.errors), int64(len(r.ids)))
	}
	res.Seconds, res.ClientCPUSeconds = time.Since(begin).Seconds(), cpuSeconds()-cpu
	res.sum([]worker{w})
	r.out.Remove = res
	r.d.leases.clear()
	return nil
}
