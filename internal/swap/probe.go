package swap

import (
	"context"
	"errors"
	"path/filepath"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Report is what Probe found.
type Report struct {
	Option Option  // what the first pause takes: Host, or a device of that size
	Made   bool    // it is there already
	Swap   v1.Swap // with it
}

// Probe says what the first pause of a node would take, and tries what it can of that without
// leaving anything: the errors are those of Space.Take.
func Probe(ctx context.Context, cfg Config) (r Report, err error) {
	s, err := New(cfg)
	if err != nil {
		return r, err
	}
	r.Option, err = s.plan()
	r.Made = len(s.active()) > 0
	if err != nil {
		return r, err
	}
	r.Swap = s.Stat()
	if r.Made || r.Option.Kind == Host {
		return r, nil
	}
	cfg.Dir = filepath.Clean(cfg.Dir) + ".probe" // beside it: the node may make its own just now
	if cfg.Option = r.Option; cfg.Option.Kind == File {
		free, err := freeDisk(cfg.Dir)
		if err == nil && free < r.Option.Bytes {
			err = errs.New(errs.SwapFull, phase, "the disk has no room for the swap file").Advise("free disk space in the data directory, or start the server with a smaller --swap file:SIZE")
		}
		if err != nil {
			return r, err
		}
	}
	cfg.Option.Bytes = Least
	trial, err := New(cfg)
	if err != nil {
		return r, err
	}
	release, err := trial.Take(ctx, 0)
	if err == nil {
		release()
	}
	return r, errors.Join(err, trial.Remove(context.WithoutCancel(ctx)))
}
