// Package step runs a lifecycle operation as a list of named, idempotent steps with
// undo. An operation that takes kernel resources is such a list and nothing else, so
// that it reads top to bottom, is timed step by step, and leaves nothing behind when
// it fails half-way. A crash in the middle is handled by whoever owns the resource
// names: it deletes by name, with the same functions that the undos call.
package step

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// undoTime bounds the undo of a failed operation; it does not count against the caller's deadline.
const undoTime = 15 * time.Second

// Step is one part of an operation.
type Step struct {
	Name string
	// Do makes the step's change, or finds it made.
	Do func(ctx context.Context) error
	// Undo removes whatever Do made, also after a Do that failed half-way. May be nil.
	Undo func(ctx context.Context) error
}

// Report is told of each finished step.
type Report func(name string, took time.Duration)

// Run does the steps in order. When one fails, it and those before it are undone in
// reverse, and the error says which step failed; errors of undoing are joined.
func Run(ctx context.Context, steps []Step, report Report) error {
	for i, s := range steps {
		start := time.Now()
		err := ctx.Err()
		if err == nil {
			err = s.Do(ctx)
		}
		if report != nil {
			report(s.Name, time.Since(start))
		}
		if err != nil {
			return errors.Join(fmt.Errorf("%s: %w", s.Name, err), undo(ctx, steps[:i+1]))
		}
	}
	return nil
}

func undo(ctx context.Context, steps []Step) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	var all []error
	for i := len(steps) - 1; i >= 0; i-- {
		if steps[i].Undo == nil {
			continue
		}
		if err := steps[i].Undo(ctx); err != nil {
			all = append(all, fmt.Errorf("undo %s: %w", steps[i].Name, err))
		}
	}
	return errors.Join(all...)
}
