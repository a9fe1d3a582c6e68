package client_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/internal/clienttest"
)

func TestPauseResumeHint(t *testing.T) {
	t.Parallel()
	_, c := connect(t)
	sb, err := c.Create(t.Context(), client.Spec{Image: "busybox", QoS: v1.QoSBest, Priority: -5, IdleTTL: 60, OnIdle: v1.OnIdlePause})
	if err != nil {
		t.Fatal(err)
	}
	if s := sb.Info().Spec; s.QoS != v1.QoSBest || s.Priority != -5 || s.IdleTTL != 60 || s.OnIdle != v1.OnIdlePause {
		t.Errorf("spec %+v", s)
	}
	state := func() v1.State {
		info, err := sb.Get(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return info.State
	}
	r, err := sb.Pause(t.Context())
	if err != nil || r.State != v1.StatePaused || !r.Changed || r.FreedBytes != clienttest.Freed || state() != v1.StatePaused {
		t.Errorf("pause: %+v, %v", r, err)
	}
	if r, err = sb.Pause(t.Context()); err != nil || r.Changed {
		t.Errorf("pause again: %+v, %v", r, err)
	}
	if r, err = sb.Resume(t.Context()); err != nil || r.State != v1.StateRunning || !r.Changed || state() != v1.StateRunning {
		t.Errorf("resume: %+v, %v", r, err)
	}
	h, err := sb.Hint(t.Context(), 1500*time.Millisecond)
	if err != nil || h.Action != "keep" || h.HoldCost != 1.5 {
		t.Errorf("hint: %+v, %v", h, err)
	}
	if h, err = sb.Hint(t.Context(), 2*time.Minute); err != nil || h.Action != "pause" || h.Sandbox.State != v1.StatePaused {
		t.Errorf("hint: %+v, %v", h, err)
	}
	if err := sb.Delete(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"pause": second(sb.Pause(t.Context())), "resume": second(sb.Resume(t.Context())), "hint": second(sb.Hint(t.Context(), time.Second)),
	} {
		if !errors.Is(err, errs.SandboxGone) || !strings.Contains(err.Error(), sb.ID()) {
			t.Errorf("%s of a removed one: %v", name, err)
		}
	}
	if _, err := c.Sandbox("../images").Pause(t.Context()); !errors.Is(err, errs.SandboxNotFound) {
		t.Errorf("another path: %v", err)
	}
}

func second[T any](_ T, err error) error { return err }

func TestResumeThatDoesNotFitIsTheCallers(t *testing.T) {
	t.Parallel()
	s, c := connect(t)
	sb, err := c.Create(t.Context(), client.Spec{Image: "busybox"})
	if err != nil {
		t.Fatal(err)
	}
	s.Fail("POST /v1/sandboxes/{id}/resume", 1, errs.New(errs.NodeFull, "edge.admit", "the node is full: memory").With("resource", "memory_bytes"))
	if _, err := sb.Resume(t.Context()); !errors.Is(err, errs.NodeFull) || client.ErrorOf(err).Details["resource"] != "memory_bytes" {
		t.Errorf("%v", err)
	}
	if _, err := sb.Resume(t.Context()); err != nil {
		t.Errorf("again: %v", err)
	}
}

func TestPauseMany(t *testing.T) {
	t.Parallel()
	s, c := connect(t)
	job := map[string]string{"job": "x"}
	for sb, err := range c.CreateMany(t.Context(), client.Spec{Image: "busybox", Labels: job}, 10) {
		if err != nil {
			t.Fatal(sb, err)
		}
	}
	s.Fail("one of turn", 1, errs.New(errs.SwapFull, "backend.pause", "no swap is left"))
	codes := map[string]int{}
	for r, err := range c.PauseMany(t.Context(), v1.PauseRequest{Labels: job}) {
		if err != nil {
			t.Fatal(err)
		}
		if r.Error != nil {
			codes[r.Error.Code]++
		} else {
			codes[string(r.State)]++
		}
	}
	if codes["paused"] != 9 || codes["swap_full"] != 1 {
		t.Errorf("%v", codes)
	}
	if l, err := c.List(t.Context(), client.ListOptions{State: v1.StatePaused}); err != nil || len(l.Items) != 9 {
		t.Errorf("%+v, %v", l, err)
	}
	ids := append(slices.Repeat([]string{"nonsense"}, 10000), s.Sandboxes()...) // two requests
	got, missing := 0, 0
	for r, err := range c.ResumeMany(t.Context(), v1.PauseRequest{IDs: ids}) {
		if err != nil {
			t.Fatal(err)
		}
		if r.Error != nil {
			missing++
		} else {
			got++
		}
	}
	if got != 10 || missing != 10000 {
		t.Errorf("%d resumed, %d failed", got, missing)
	}
	s.Fail("turn breaks off", 1, errs.New(errs.InternalError, "test", ""))
	var last error
	for _, err := range c.PauseMany(t.Context(), v1.PauseRequest{IDs: s.Sandboxes()}) {
		last = err
	}
	if !errors.Is(last, errs.ConnectionLost) {
		t.Errorf("an answer that is short: %v", last)
	}
	for range c.PauseMany(t.Context(), v1.PauseRequest{Labels: job}) {
		break
	}
}

func TestUsage(t *testing.T) {
	t.Parallel()
	_, c := connect(t)
	a, err := c.Create(t.Context(), client.Spec{Image: "busybox", Labels: map[string]string{"n": "a"}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Create(t.Context(), client.Spec{Image: "busybox", Labels: map[string]string{"n": "b"}}); err != nil {
		t.Fatal(err)
	}
	for want, o := range map[int]client.UsageOptions{
		2: {}, 1: {Labels: map[string]string{"n": "a"}}, 0: {IDs: []string{"nonsense"}},
	} {
		l, err := c.Usage(t.Context(), o)
		if err != nil || len(l.Nodes) != 1 || len(l.Nodes[0].Items) != want || len(o.IDs) != len(l.Unknown) {
			t.Errorf("%+v: %+v, %v", o, l, err)
		}
	}
	l, err := c.Usage(t.Context(), client.UsageOptions{IDs: []string{a.ID()}})
	if err != nil || len(l.Nodes[0].Items) != 1 || l.Nodes[0].Items[0].Usage.SwapBytes == 0 {
		t.Errorf("%+v, %v", l, err)
	}
}
