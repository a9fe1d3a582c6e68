package registry

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime"
	"time"

	"dsec/api/v1/errs"
)

// Phases, as progress and errors name them.
const (
	PhaseResolve  = "resolve"  // log in, find the manifest
	PhaseDownload = "download" // layers, in bytes as the registry stores them
	PhaseConvert  = "convert"  // the same bytes, read into the builder
	PhasePush     = "push"     // layers, in bytes as they are sent
)

const phasePrefix = "image.registry."

// Options of talking to a registry; the zero value is usable.
type Options struct {
	// Platform is os/arch or os/arch/variant, where an index offers several
	// (default: linux on this machine's CPU).
	Platform string
	Auth     Auth

	PlainHTTP  bool   // talk HTTP instead of HTTPS; registries on loopback addresses may without it
	SkipVerify bool   // do not check the registry's certificate
	CAFile     string // certificates to trust besides the system's, as PEM

	Parallel int    // layers downloaded at once (default 3)
	SpoolDir string // where downloaded bytes lie until they are converted (default: the system's)
	SpoolMax int64  // and how many at most (default 512 MiB, at least 4 MiB)
	MaxBytes int64  // limit on what one layer may unpack to (default: package source's)

	Retry           Retry
	ResolveTimeout  time.Duration // of logging in and finding the manifest (default 1 min)
	TransferTimeout time.Duration // of all layers, or of a whole push (default 1 h)
	IdleTimeout     time.Duration // without a byte from the registry (default 30 s)

	// Progress is called from several goroutines, one at a time, at every change
	// of phase and every few hundred KiB.
	Progress func(Progress)

	// Dial, if set, makes the connections.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)

	// For tests: the clock, waiting, and a number in [0,1) that spreads retries.
	Now   func() time.Time
	Sleep func(ctx context.Context, d time.Duration) error
	Rand  func() float64
}

// Retry says how often and how fast a registry is tried again.
type Retry struct {
	Attempts int           // failures in a row without progress before giving up (default 5; negative: none is tried again)
	Resumes  int           // broken connections of one layer in all (default 100)
	Base     time.Duration // wait after the first failure, doubled for each (default 200 ms)
	Max      time.Duration // longest wait; a registry that asks for a longer one is given up (default 1 min)
}

// Progress of a pull or push.
type Progress struct {
	Phase string
	Done  int64 // bytes
	Total int64 // 0: not known yet
}

func (o *Options) fill() error {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	if o.Platform == "" {
		o.Platform = "linux/" + runtime.GOARCH
	}
	if o.Parallel == 0 {
		o.Parallel = 3
	}
	if o.SpoolMax == 0 {
		o.SpoolMax = 512 << 20
	}
	o.SpoolMax = max(o.SpoolMax, 4<<20)
	if o.Retry.Attempts == 0 {
		o.Retry.Attempts = 5
	}
	o.Retry.Attempts = max(1, o.Retry.Attempts)
	if o.Retry.Resumes == 0 {
		o.Retry.Resumes = 100
	}
	def(&o.Retry.Base, 200*time.Millisecond)
	def(&o.Retry.Max, time.Minute)
	def(&o.ResolveTimeout, time.Minute)
	def(&o.TransferTimeout, time.Hour)
	def(&o.IdleTimeout, 30*time.Second)
	if o.Dial == nil {
		o.Dial = (&net.Dialer{Timeout: min(dialTimeout, o.IdleTimeout)}).DialContext
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Sleep == nil {
		o.Sleep = sleep
	}
	if o.Rand == nil {
		o.Rand = rand.Float64
	}
	if o.Parallel < 0 || o.ResolveTimeout < 0 || o.TransferTimeout < 0 || o.IdleTimeout < 0 {
		return errs.New(errs.BadRequest, phasePrefix+PhaseResolve, fmt.Sprintf("negative limit: %d parallel, deadlines %s, %s, %s",
			o.Parallel, o.ResolveTimeout, o.TransferTimeout, o.IdleTimeout))
	}
	return nil
}

// backoff is the wait after the given number of failures in a row: half of it
// fixed, half by chance, so that many clients do not return together.
func (o *Options) backoff(failures int) time.Duration {
	d := o.Retry.Base << min(failures-1, 20)
	if d > o.Retry.Max || d <= 0 {
		d = o.Retry.Max
	}
	return d/2 + time.Duration(o.Rand()*float64(d/2))
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
