package backendtest

import (
	"context"
	"errors"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// pauseTests are for backends whose instances are backend.Pauser; others pass them.
var pauseTests = map[string]func(*testing.T, Subject){
	"PauseStandsStill": pauseStandsStill, "PauseAndResumeAreIdempotent": pauseTwice, "DeletePaused": deletePaused,
	"AdoptPaused": adoptPaused, "AdoptOfPausedThatShallRun": adoptPausedToRun, "AdoptOfRunningThatIsPaused": adoptRunningAsPaused,
	"PauseCanceled": pauseCanceled, "DeletePausedWithoutMemory": deletePausedWithoutMemory, "PauseInTurns": pauseInTurns,
}

// pauser returns the instance's way to pause, if its backend has one.
func pauser(t *testing.T, i backend.Instance) backend.Pauser {
	t.Helper()
	p, ok := i.(backend.Pauser)
	if !ok {
		t.Skip("this backend does not pause")
	}
	return p
}

func mustPause(t *testing.T, i backend.Instance) {
	t.Helper()
	got, err := pauser(t, i).Pause(t.Context())
	if err != nil {
		t.Fatalf("pause: %v", err)
	}
	if got.FreedBytes < 0 || got.SwapBytes < 0 {
		t.Errorf("pause: %+v", got)
	}
}

func mustResume(t *testing.T, i backend.Instance) {
	t.Helper()
	if err := pauser(t, i).Resume(t.Context(), time.Second); err != nil {
		t.Fatalf("resume: %v", err)
	}
}

// caller is a connection to the guest that stays.
type caller struct {
	t *testing.T
	c *aether.Conn
}

func newCaller(t *testing.T, i backend.Instance) *caller {
	t.Helper()
	conn, err := i.DialGuest(t.Context())
	if err != nil {
		t.Fatalf("dial guest: %v", err)
	}
	c, err := aether.NewClient(t.Context(), conn, aether.ClientConfig{})
	if err != nil {
		t.Fatalf("handshake with guest: %v", err)
	}
	t.Cleanup(func() { c.Close() })
	return &caller{t, c}
}

// call asks the guest for something in the background.
func (c *caller) call(ctx context.Context) <-chan error {
	done := make(chan error, 1)
	go func() {
		var info msg.GuestInfo
		done <- c.c.Call(ctx, "", "guest.info", &msg.Empty{}, &info)
	}()
	return done
}

// quiet is how long an answer does not come from what stands still.
const quiet = 50 * time.Millisecond

func (c *caller) standsStill() <-chan error {
	c.t.Helper()
	asked := c.call(c.t.Context())
	select {
	case err := <-asked:
		c.t.Fatalf("a paused sandbox answers: %v", err)
	case <-time.After(quiet):
	}
	return asked
}

func (c *caller) answered(asked <-chan error) {
	c.t.Helper()
	select {
	case err := <-asked:
		if err != nil {
			c.t.Fatalf("the answer after the resume: %v", err)
		}
	case <-time.After(20 * time.Second):
		c.t.Fatal("no answer after the resume")
	}
}

// What was asked of a paused sandbox is answered when it runs again, over the connection that was there.
func pauseStandsStill(t *testing.T, s Subject) {
	i := mustCreate(t, open(t, s), s.Spec(id(400)))
	c := newCaller(t, i)
	for range 3 {
		mustPause(t, i)
		asked := c.standsStill()
		if _, err := i.Usage(t.Context()); err != nil {
			t.Errorf("usage while paused: %v", err)
		}
		select {
		case <-i.Done():
			t.Fatal("a paused sandbox has ended")
		default:
		}
		mustResume(t, i)
		c.answered(asked)
		answers(t, i)
	}
}

func pauseTwice(t *testing.T, s Subject) {
	i := mustCreate(t, open(t, s), s.Spec(id(401)))
	p := pauser(t, i)
	c := newCaller(t, i)
	mustResume(t, i) // of what runs
	c.answered(c.call(t.Context()))
	mustPause(t, i)
	mustPause(t, i)
	if got, err := p.Pause(t.Context()); err != nil || got.FreedBytes != 0 {
		t.Errorf("pausing what is paused: %+v, %v", got, err)
	}
	asked := c.standsStill()
	mustResume(t, i)
	mustResume(t, i)
	c.answered(asked)
}

func deletePaused(t *testing.T, s Subject) {
	b := open(t, s)
	i := mustCreate(t, b, s.Spec(id(402)))
	mustPause(t, i)
	mustDelete(t, b, id(402))
	select {
	case <-i.Done():
	case <-time.After(10 * time.Second):
		t.Error("Done is not closed after the delete")
	}
	mustBeEmpty(t, b)
}

func deletePausedWithoutMemory(t *testing.T, s Subject) {
	first := open(t, s)
	i := mustCreate(t, first, s.Spec(id(403)))
	mustPause(t, i)
	second := open(t, s)
	mustDelete(t, second, id(403))
	mustBeEmpty(t, second)
}

func adoptPaused(t *testing.T, s Subject) {
	first := open(t, s)
	spec := s.Spec(id(404))
	before := mustCreate(t, first, spec)
	mustPause(t, before)
	second := open(t, s)
	spec.Paused = true
	i, err := second.Adopt(t.Context(), spec, before.Handle())
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	mustPause(t, i) // it is
	conn, err := i.DialGuest(t.Context())
	if err != nil {
		t.Fatalf("dial the guest of a paused sandbox: %v", err)
	}
	greeted := make(chan error, 1)
	go func() {
		c, err := aether.NewClient(t.Context(), conn, aether.ClientConfig{})
		if err == nil {
			c.Close()
		}
		greeted <- err
	}()
	select {
	case err := <-greeted:
		t.Fatalf("an adopted, paused sandbox answers: %v", err)
	case <-time.After(quiet):
	}
	mustResume(t, i)
	select {
	case err := <-greeted:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("no answer after the resume")
	}
	answers(t, i)
	mustDelete(t, second, spec.ID)
	mustBeEmpty(t, second)
}

func adoptPausedToRun(t *testing.T, s Subject) {
	first := open(t, s)
	spec := s.Spec(id(405))
	before := mustCreate(t, first, spec)
	mustPause(t, before)
	second := open(t, s)
	i, err := second.Adopt(t.Context(), spec, before.Handle())
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	answers(t, i)
	mustResume(t, i)
	mustPause(t, i)
	mustResume(t, i)
	answers(t, i)
	mustDelete(t, second, spec.ID)
	mustBeEmpty(t, second)
}

// An edge that dies while it resumes a sandbox leaves one that runs, of which its record says that it is paused.
func adoptRunningAsPaused(t *testing.T, s Subject) {
	first := open(t, s)
	spec := s.Spec(id(406))
	before := mustCreate(t, first, spec)
	pauser(t, before)
	second := open(t, s)
	spec.Paused = true
	i, err := second.Adopt(t.Context(), spec, before.Handle())
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	mustPause(t, i)
	mustResume(t, i)
	answers(t, i)
	mustDelete(t, second, spec.ID)
	mustBeEmpty(t, second)
}

// A pause that is cut short anywhere leaves a sandbox that runs.
func pauseCanceled(t *testing.T, s Subject) {
	i := mustCreate(t, open(t, s), s.Spec(id(407)))
	p := pauser(t, i)
	c := newCaller(t, i)
	mustPause(t, i) // what is made at the first is there
	mustResume(t, i)
	for after := time.Duration(0); after < 8*time.Millisecond; after += 400 * time.Microsecond {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		_, err := p.Pause(ctx)
		cancel()
		switch {
		case err == nil:
			mustResume(t, i)
		case !errors.Is(err, errs.RequestCanceled) && !errors.Is(err, errs.DeadlineExceeded):
			t.Errorf("canceled after %v: %v", after, err)
		}
		c.answered(c.call(t.Context()))
	}
}

// However fast they follow each other, the last one holds.
func pauseInTurns(t *testing.T, s Subject) {
	i := mustCreate(t, open(t, s), s.Spec(id(408)))
	c := newCaller(t, i)
	for range 20 {
		mustPause(t, i)
		mustResume(t, i)
	}
	c.answered(c.call(t.Context()))
	mustPause(t, i)
	asked := c.standsStill()
	mustResume(t, i)
	c.answered(asked)
}
