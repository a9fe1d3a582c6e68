// Package backendtest is the conformance suite of backend.Backend. Each implementation
// runs it, the hollow one included, so that the hollow one can stand for the others.
package backendtest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
)

// Subject is one implementation under test.
type Subject struct {
	// Open returns a backend over the same state each time it is called, as an edge
	// that restarts does.
	Open func(t *testing.T) backend.Backend
	// Spec returns a spec that works, for an id.
	Spec func(id string) backend.Spec
	// Broken returns specs that Create must refuse, by what is wrong with them.
	Broken map[string]func(id string) backend.Spec
}

const created = 1 // the generation of all creates here

func id(n int) string { return v1.SandboxID("conform", 1, uint64(n)) }

// Run runs the suite on what subject makes.
func Run(t *testing.T, subject func(t *testing.T) Subject) {
	tests := map[string]func(*testing.T, Subject){
		"CreateAnswersAndDeleteLeavesNothing": createDelete, "CreateIsIdempotent": createTwice, "DeleteIsIdempotent": deleteTwice,
		"CanceledCreateLeavesNothing": canceled, "BrokenSpecLeavesNothing": broken, "Adopt": adopt, "AdoptRefusesStrangers": adoptStranger,
		"Parallel": parallel, "DeleteWithoutMemory": deleteWithoutMemory,
	}
	for name, test := range pauseTests {
		tests[name] = test
	}
	for name, test := range tests {
		t.Run(name, func(t *testing.T) { test(t, subject(t)) })
	}
}

func open(t *testing.T, s Subject) backend.Backend {
	t.Helper()
	b := s.Open(t)
	t.Cleanup(func() {
		if err := b.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
	})
	if err := b.Check(t.Context()); err != nil {
		t.Fatalf("the backend does not work here: %v", err)
	}
	return b
}

func mustCreate(t *testing.T, b backend.Backend, spec backend.Spec) backend.Instance {
	t.Helper()
	i, err := b.Create(t.Context(), spec, nil)
	if err != nil {
		t.Fatalf("create: %v", err)
	}
	t.Cleanup(func() { mustDelete(t, b, spec.ID) })
	return i
}

func mustDelete(t *testing.T, b backend.Backend, id string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 20*time.Second)
	defer cancel()
	if err := b.Delete(ctx, id); err != nil {
		t.Errorf("delete %s: %v", id, err)
	}
}

func mustBeEmpty(t *testing.T, b backend.Backend) {
	t.Helper()
	ids, err := b.List(t.Context())
	if err != nil || len(ids) != 0 {
		t.Errorf("left behind: %v, %v", ids, err)
	}
	res, err := b.Audit(t.Context())
	if err != nil {
		t.Errorf("audit: %v", err)
	}
	for _, r := range res {
		if r.Sandbox != "" {
			t.Errorf("left behind: %+v", r)
		}
	}
}

// answers talks to the guest.
func answers(t *testing.T, i backend.Instance) {
	t.Helper()
	conn, err := i.DialGuest(t.Context())
	if err != nil {
		t.Fatalf("dial guest: %v", err)
	}
	c, err := aether.NewClient(t.Context(), conn, aether.ClientConfig{})
	if err != nil {
		t.Fatalf("handshake with guest: %v", err)
	}
	defer c.Close()
	var info msg.GuestInfo
	if err := c.Call(t.Context(), "", "guest.info", &msg.Empty{}, &info); err != nil || info.Version == "" {
		t.Fatalf("guest.info: %+v, %v", info, err)
	}
}

func createDelete(t *testing.T, s Subject) {
	b := open(t, s)
	steps := 0
	i, err := b.Create(t.Context(), s.Spec(id(1)), func(string, time.Duration) { steps++ })
	if err != nil {
		t.Fatal(err)
	}
	if i.ID() != id(1) {
		t.Errorf("id %s", i.ID())
	}
	answers(t, i)
	answers(t, i) // a second connection too
	if _, err := i.Usage(t.Context()); err != nil {
		t.Errorf("usage: %v", err)
	}
	if ids, err := b.List(t.Context()); err != nil || !slices.Equal(ids, []string{id(1)}) {
		t.Errorf("list: %v, %v", ids, err)
	}
	if res, err := b.Audit(t.Context()); err != nil || len(res) == 0 {
		t.Errorf("a running sandbox is not in the audit: %v, %v", res, err)
	}
	select {
	case <-i.Done():
		t.Error("it ended by itself")
	default:
	}
	mustDelete(t, b, id(1))
	select {
	case <-i.Done():
	case <-time.After(10 * time.Second):
		t.Error("Done is not closed after the delete")
	}
	mustBeEmpty(t, b)
}

func createTwice(t *testing.T, s Subject) {
	b := open(t, s)
	one := mustCreate(t, b, s.Spec(id(2)))
	two, err := b.Create(t.Context(), s.Spec(id(2)), nil)
	if err != nil || string(one.Handle()) != string(two.Handle()) {
		t.Errorf("second create made another: %s, %s, %v", one.Handle(), two.Handle(), err)
	}
	answers(t, two)
}

func deleteTwice(t *testing.T, s Subject) {
	b := open(t, s)
	mustCreate(t, b, s.Spec(id(3)))
	mustDelete(t, b, id(3))
	mustDelete(t, b, id(3))
	mustDelete(t, b, id(99)) // never existed
	mustBeEmpty(t, b)
}

func canceled(t *testing.T, s Subject) {
	b := open(t, s)
	// Ever later, so that each part of the create is cut once.
	for n, after := 0, time.Duration(0); n < 25; n, after = n+1, after+400*time.Microsecond {
		ctx, cancel := context.WithTimeout(t.Context(), after)
		i, err := b.Create(ctx, s.Spec(id(100+n)), nil)
		cancel()
		if err == nil {
			answers(t, i)
			mustDelete(t, b, id(100+n))
		}
	}
	mustBeEmpty(t, b)
}

func broken(t *testing.T, s Subject) {
	b := open(t, s)
	n := 200
	for what, spec := range s.Broken {
		n++
		if _, err := b.Create(t.Context(), spec(id(n)), nil); err == nil {
			t.Errorf("%s: no error", what)
			mustDelete(t, b, id(n))
		} else if errs.Of(err).Message == "" {
			t.Errorf("%s: no message in %v", what, err)
		}
	}
	mustBeEmpty(t, b)
}

func adopt(t *testing.T, s Subject) {
	first := open(t, s)
	spec := s.Spec(id(4))
	before, err := first.Create(t.Context(), spec, nil)
	if err != nil {
		t.Fatal(err)
	}
	handle := before.Handle()
	second := open(t, s)
	after, err := second.Adopt(t.Context(), spec, handle)
	if err != nil {
		t.Fatalf("adopt: %v", err)
	}
	answers(t, after)
	mustDelete(t, second, spec.ID)
	select {
	case <-after.Done():
	case <-time.After(10 * time.Second):
		t.Error("the end of an adopted sandbox is not noticed")
	}
	mustBeEmpty(t, second)
	if _, err := second.Adopt(t.Context(), spec, handle); !errors.Is(err, errs.SandboxLost) {
		t.Errorf("adopting what is gone: %v", err)
	}
}

func adoptStranger(t *testing.T, s Subject) {
	b := open(t, s)
	i := mustCreate(t, b, s.Spec(id(5)))
	other := open(t, s)
	for what, adopt := range map[string]func() (backend.Instance, error){
		"garbage": func() (backend.Instance, error) { return other.Adopt(t.Context(), s.Spec(id(5)), []byte("?")) },
		"another generation": func() (backend.Instance, error) {
			spec := s.Spec(id(5))
			spec.Generation = created + 1
			return other.Adopt(t.Context(), spec, i.Handle())
		},
	} {
		if _, err := adopt(); !errors.Is(err, errs.SandboxLost) {
			t.Errorf("%s: %v", what, err)
		}
	}
	answers(t, i)
}

func parallel(t *testing.T, s Subject) {
	b := open(t, s)
	var wg sync.WaitGroup
	for n := range 16 {
		wg.Go(func() {
			for round := range 3 {
				spec := s.Spec(id(300 + n))
				i, err := b.Create(t.Context(), spec, nil)
				if err != nil {
					t.Errorf("create %d, round %d: %v", n, round, err)
					return
				}
				answers(t, i)
				mustDelete(t, b, spec.ID)
			}
		})
	}
	wg.Wait()
	mustBeEmpty(t, b)
}

// deleteWithoutMemory removes with a backend that never heard of the sandbox.
func deleteWithoutMemory(t *testing.T, s Subject) {
	first := open(t, s)
	if _, err := first.Create(t.Context(), s.Spec(id(6)), nil); err != nil {
		t.Fatal(err)
	}
	second := open(t, s)
	ids, err := second.List(t.Context())
	if err != nil || fmt.Sprint(ids) != fmt.Sprint([]string{id(6)}) {
		t.Errorf("list: %v, %v", ids, err)
	}
	mustDelete(t, second, id(6))
	mustBeEmpty(t, second)
}
