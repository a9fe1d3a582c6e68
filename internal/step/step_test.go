package step

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"
)

func TestRunUndoesInReverse(t *testing.T) {
	t.Parallel()
	var log []string
	boom := errors.New("boom")
	mk := func(name string, err error) Step {
		return Step{name,
			func(context.Context) error { log = append(log, "+"+name); return err },
			func(ctx context.Context) error {
				if ctx.Err() != nil {
					t.Error("undo got a dead context")
				}
				log = append(log, "-"+name)
				return nil
			}}
	}
	ctx, cancel := context.WithCancel(t.Context())
	var timed []string
	err := Run(ctx, []Step{mk("a", nil), {Name: "cancel", Do: func(context.Context) error { cancel(); return nil }}, mk("c", boom), mk("d", nil)},
		func(name string, _ time.Duration) { timed = append(timed, name) })
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("a cancelled operation went on: %v", err)
	}
	if want := []string{"+a", "-c", "-a"}; !slices.Equal(log, want) {
		t.Fatalf("got %v, want %v", log, want)
	}
	log = nil
	if err := Run(t.Context(), []Step{mk("a", nil), mk("b", boom), mk("c", nil)}, nil); !errors.Is(err, boom) {
		t.Fatalf("got %v", err)
	}
	if want := []string{"+a", "+b", "-b", "-a"}; !slices.Equal(log, want) {
		t.Fatalf("got %v, want %v", log, want)
	}
	if !slices.Equal(timed, []string{"a", "cancel", "c"}) {
		t.Fatalf("timed %v", timed)
	}
}

func TestUndoErrorsAreReported(t *testing.T) {
	t.Parallel()
	boom, stuck := errors.New("boom"), errors.New("stuck")
	err := Run(t.Context(), []Step{
		{"a", func(context.Context) error { return nil }, func(context.Context) error { return stuck }},
		{"b", func(context.Context) error { return boom }, nil},
	}, nil)
	if !errors.Is(err, boom) || !errors.Is(err, stuck) {
		t.Fatalf("got %v", err)
	}
}
