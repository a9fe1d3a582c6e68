package robustness

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/client"
	"dsec/test/bed"
)

// A server may be replaced by another version, whether it was killed or told to end: what runs and what is paused
// goes on, as do clients' streams, and limits of time are as they were.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	next, err := bed.BuildVersion(t.Context(), t.TempDir(), "next")
	if err != nil {
		t.Fatal(err)
	}
	for how, end := range map[string]func(*testing.T, *bed.Bed){
		"killed": func(t *testing.T, b *bed.Bed) { b.Kill(t) },
		"told to end": func(t *testing.T, b *bed.Bed) {
			b.Must(t, "down", "--keep", "--data", b.Data)
			<-b.Exited()
		},
	} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			const limit = 2 * time.Second
			b := bed.New(t, bed.Options{})
			c := b.Client(t)
			running := b.Sandbox(t, c, client.Spec{MaxTTL: 3600, Lease: 1800})
			paused := b.Sandbox(t, c, client.Spec{IdleTTL: 7200, OnIdle: v1.OnIdlePause})
			var out, counted lockedBuffer
			script := `i=0; while [ ! -e /stop ]; do i=$((i+1)); echo $i; usleep 2000; done; exit 6`
			p, err := running.Start(t.Context(), client.Command("sh", "-c", script), client.IO{Stdout: &out})
			if err != nil {
				t.Fatal(err)
			}
			// Nobody is attached to this one: who comes back to a stream wakes its sandbox.
			pid, err := paused.StartDetached(t.Context(), client.Command("sh", "-c", script))
			if err != nil {
				t.Fatal(err)
			}
			begun := time.Now()
			limited, err := running.Start(t.Context(), client.Cmd{Path: "sleep", Args: []string{"1000"}, Timeout: limit}, client.IO{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := paused.Pause(t.Context()); err != nil {
				t.Fatal(err)
			}
			before := [2]*client.Sandbox{running, paused}
			var was [2]*v1.Sandbox
			for i, sb := range before {
				if was[i], err = c.Get(t.Context(), sb.ID()); err != nil {
					t.Fatal(err)
				}
			}

			end(t, b)
			b.Bin = next
			if err := b.Up(t.Context()); err != nil {
				t.Fatal(err)
			}
			fresh := b.Client(t)
			if h, err := fresh.Health(t.Context()); err != nil || !h.OK || h.Version != "next" {
				t.Errorf("%+v, %v", h, err)
			}
			for i, sb := range before {
				v, err := fresh.Get(t.Context(), sb.ID())
				if err != nil || v.State != was[i].State || (v.ExpiresAt == nil) != (was[i].ExpiresAt == nil) || v.ExpiresAt != nil && !v.ExpiresAt.Equal(*was[i].ExpiresAt) ||
					v.Spec.IdleTTL != was[i].Spec.IdleTTL || v.Spec.MemoryBytes != was[i].Spec.MemoryBytes {
					t.Errorf("after: %+v, %v; before: %+v", v, err, was[i])
				}
			}
			exit, err := limited.Wait()
			if d := time.Since(begun); err != nil || !exit.TimedOut || d < limit {
				t.Errorf("a limit of %v: %+v, %v after %v", limit, exit, err, d)
			}
			for _, sb := range before { // the first request to the paused one resumes it
				if err := fresh.Sandbox(sb.ID()).WriteFile(t.Context(), "/stop", nil, 0); err != nil {
					t.Fatal(err)
				}
			}
			q, err := fresh.Sandbox(paused.ID()).Attach(t.Context(), client.Selector{PID: pid}, client.IO{Stdout: &counted}, client.AttachOptions{})
			if err != nil {
				t.Fatal(err)
			}
			for what, p := range map[string]*client.Process{"the one that ran": p, "the one that was paused": q} {
				if exit, err := p.Wait(); err != nil || exit.Code != 6 {
					t.Errorf("%s: %+v, %v", what, exit, err)
				}
			}
			for _, o := range []*lockedBuffer{&out, &counted} {
				if err := consecutive(o.String()); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// consecutive says whether text is lines of the numbers from 1 on.
func consecutive(text string) error {
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	for i, line := range lines {
		if line != fmt.Sprint(i+1) {
			return fmt.Errorf("line %d is %q", i+1, line)
		}
	}
	return nil
}

// A client that waits for a server that does not come back says so, with the code of why, and not before its time is over.
func TestStreamGivesUpOnAServerThatStaysAway(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	const patience = time.Second
	c, err := client.New(client.Options{URL: "unix://" + b.Sock, Token: b.Token(t), ReattachFor: patience})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	sb := b.Sandbox(t, c, client.Spec{})
	var out bytes.Buffer
	p, err := sb.Start(t.Context(), client.Command("sleep", "1000"), client.IO{Stdout: &out})
	if err != nil {
		t.Fatal(err)
	}
	killed := time.Now()
	b.Kill(t)
	_, err = p.Wait()
	if d := time.Since(killed); !errors.Is(err, client.ErrUnavailable) || d < patience {
		t.Errorf("%v after %v", err, d)
	}
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	// The process goes on: nothing was run again, and nothing ended.
	all, err := b.Client(t).Sandbox(sb.ID()).Processes(t.Context())
	if err != nil || len(all) != 1 || !all[0].Running {
		t.Errorf("%v, %v", all, err)
	}
}
