package robustness

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
)

// promise is what a user was told about a sandbox, and what must hold after a crash.
type promise struct {
	id      string
	content string // of /state
	pid     uint32 // of the detached counter
	done    bool   // its maker does nothing more with it
}

// ledger keeps the promises. A sandbox whose removal was asked for is no promise any more.
type ledger struct {
	mu   sync.Mutex
	live map[string]promise
}

func (l *ledger) add(p promise) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.live[p.id] = p
}

// take takes any complete promise out, if there are more than keep. Its sandbox's maker
// is done with it.
func (l *ledger) take(keep int) (promise, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.live) <= keep {
		return promise{}, false
	}
	for id, p := range l.live {
		if p.done {
			delete(l.live, id)
			return p, true
		}
	}
	return promise{}, false
}

// counter writes consecutive numbers to its output and the last one to a file.
const counter = `i=0; while :; do i=$((i+1)); echo $i; echo $i > /count; usleep 20000; done`

// load creates, uses and removes sandboxes until ctx ends. Errors are expected only once
// the server is being killed.
func load(ctx context.Context, c *client.Client, l *ledger, name string, dying func() bool) error {
	for n := 0; ctx.Err() == nil; n++ {
		err := turn(ctx, c, l, fmt.Sprintf("%s-%d", name, n), n)
		switch {
		case err == nil:
		case dying():
			return nil
		default:
			return err
		}
	}
	return nil
}

// uses are what is done with a sandbox before its maker is done with it.
var uses = []func(ctx context.Context, sb *client.Sandbox, content string) error{
	func(ctx context.Context, sb *client.Sandbox, content string) error {
		res, err := sb.Run(ctx, "cat", "/state")
		if err == nil && string(res.Stdout) != content {
			err = fmt.Errorf("the state is %q, want %q", res.Stdout, content)
		}
		return err
	},
	func(ctx context.Context, sb *client.Sandbox, _ string) error {
		_, err := sb.Pause(ctx)
		return err
	},
	func(ctx context.Context, sb *client.Sandbox, _ string) error {
		_, err := sb.Resume(ctx)
		return err
	},
}

func turn(ctx context.Context, c *client.Client, l *ledger, content string, n int) error {
	sb, err := c.Create(ctx, client.Spec{Image: bed.Image, Labels: map[string]string{"content": content}})
	if err != nil {
		return err
	}
	// From here on it was reported. What follows is promised only once it was answered too.
	p := promise{id: sb.ID()}
	l.add(p)
	if err := sb.WriteFile(ctx, "/state", []byte(content), 0o644); err != nil {
		return err
	}
	p.content = content
	l.add(p)
	if p.pid, err = sb.StartDetached(ctx, client.Cmd{Path: "sh", Args: []string{"-c", counter}, Tag: "counter"}); err != nil {
		return err
	}
	l.add(p)
	for i := range 2 {
		if err := uses[(n+i)%len(uses)](ctx, sb, content); err != nil {
			return err
		}
	}
	p.done = true
	l.add(p)
	if old, ok := l.take(12); ok {
		return c.Delete(ctx, old.id)
	}
	return nil
}

// The heart of it: the server is killed at random moments of a busy life, and everything
// that it ever said is still true afterwards.
func TestKilledServerKeepsItsPromises(t *testing.T) {
	t.Parallel()
	random := bed.Random(t)
	b := bed.New(t, bed.Options{})
	l := &ledger{live: map[string]promise{}}
	for round := range 8 {
		ctx, cancel := context.WithCancel(t.Context())
		killed := make(chan struct{})
		dying := func() bool {
			select {
			case <-killed:
				return true
			case <-time.After(bed.Patience): // the client saw the end before we did
				return false
			}
		}
		var wg sync.WaitGroup
		for i := range 8 {
			c := b.Client(t)
			wg.Go(func() {
				if err := load(ctx, c, l, fmt.Sprintf("r%d-c%d", round, i), dying); err != nil {
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		time.Sleep(time.Duration(random.Int64N(int64(700 * time.Millisecond)))) // the random moment
		b.Kill(t)
		close(killed)
		cancel()
		wg.Wait()
		for id, p := range l.live { // nobody is at work on any now
			p.done = true
			l.live[id] = p
		}
		if err := b.Up(t.Context()); err != nil {
			t.Fatalf("round %d: %v", round, err)
		}
		audit(t, b, l, round, random)
		if t.Failed() {
			t.Fatalf("in round %d", round)
		}
	}
}

// audit compares what is there with what was promised.
func audit(t *testing.T, b *bed.Bed, l *ledger, round int, random *rand.Rand) {
	t.Helper()
	c := b.Client(t)
	defer c.Close()
	ctx := t.Context()
	var wg sync.WaitGroup
	for _, p := range l.live {
		wg.Go(func() { kept(t, c, p) })
	}
	wg.Wait()
	// Those that nobody was told of may be there whole, or not at all.
	for sb, err := range c.All(ctx, client.ListOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		if _, promised := l.live[sb.ID]; promised {
			continue
		}
		res, err := c.Sandbox(sb.ID).Run(ctx, "true")
		if err != nil && !errors.Is(err, client.ErrGone) || err == nil && res.Code != 0 {
			t.Errorf("a sandbox that nobody was told of is half-made: %s is %s: %v", sb.ID, sb.State, err)
		}
		if err := c.Delete(ctx, sb.ID); err != nil && !errors.Is(err, client.ErrGone) {
			t.Errorf("remove %s: %v", sb.ID, err)
		}
	}
	bed.Eventually(t, "the audit is clean", func() error { // the kernel may still take something down
		if r := b.CLI(t, "doctor", "--audit", "--data", b.Data); r.Code != 0 && strings.Contains(r.Stdout+r.Stderr, b.Data) {
			return fmt.Errorf("audit: %s%s", r.Stdout, r.Stderr)
		}
		return nil
	})
	// Each sandbox is one directory and one group of each kind, and nothing else is there.
	bed.Eventually(t, "the kernel holds what the promises need", func() error {
		held, err := b.Held()
		if err == nil && held["directory"] != len(l.live) {
			err = fmt.Errorf("%v for %d sandboxes", held, len(l.live))
		}
		return err
	})
	// A few of the promises end here, so that all kinds of sandboxes meet each crash.
	for range random.IntN(4) {
		if p, ok := l.take(4); ok {
			if err := c.Delete(ctx, p.id); err != nil {
				t.Errorf("remove %s: %v", p.id, err)
			}
		}
	}
}

// kept checks one promise.
func kept(t *testing.T, c *client.Client, p promise) {
	sb, ctx := c.Sandbox(p.id), t.Context()
	if p.content == "" {
		if res, err := sb.Run(ctx, "true"); err != nil || res.Code != 0 {
			t.Errorf("sandbox %s: %v", p.id, err)
		}
		return
	}
	if data, err := sb.ReadFile(ctx, "/state"); err != nil || string(data) != p.content {
		t.Errorf("sandbox %s: state %q, want %q: %v", p.id, data, p.content, err)
		return
	}
	if p.pid == 0 {
		return
	}
	// It keeps counting.
	read := func() (n int, err error) {
		res, err := sb.Run(ctx, "cat", "/count")
		if err == nil {
			_, err = fmt.Sscan(string(res.Stdout), &n) // fails while the file is being replaced
		}
		return n, err
	}
	first := 0
	bed.Eventually(t, "the process of "+p.id+" counts on", func() error {
		n, err := read()
		switch {
		case err != nil:
			return err
		case first == 0:
			first = n
			return errors.New("first look")
		case n <= first:
			return fmt.Errorf("still %d", n)
		}
		return nil
	})
	// Its output from offset 0 on has every number once.
	var out bytes.Buffer
	proc, err := sb.Attach(ctx, client.Selector{PID: p.pid}, client.IO{Stdout: &out, OnGap: func(bool, uint64, uint64) { t.Errorf("%s: a gap", p.id) }}, client.AttachOptions{NoFollow: true})
	if err != nil {
		t.Errorf("attach to %s: %v", p.id, err)
		return
	}
	if _, err := proc.Wait(); err != nil {
		t.Errorf("attach to %s: %v", p.id, err)
	}
	if err := consecutive(out.String()); err != nil {
		t.Errorf("%s: its output: %v", p.id, err)
		return
	}
	if lines := strings.Count(out.String(), "\n"); lines < first {
		t.Errorf("%s: %d lines of output, it had counted to %d", p.id, lines, first)
	}
}

// A client's process goes on over the death of the server, without a byte lost.
func TestProcessStreamsSurviveAKilledServer(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	sb := b.Sandbox(t, c, client.Spec{})
	var out lockedBuffer
	p, err := sb.Start(t.Context(), client.Command("sh", "-c", `i=0; while [ ! -e /stop ]; do i=$((i+1)); echo $i; usleep 2000; done; echo end; exit 6`), client.IO{Stdout: &out})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		before := out.Len()
		bed.Eventually(t, "output comes", func() error {
			if out.Len() <= before {
				return fmt.Errorf("still %d bytes", before)
			}
			return nil
		})
		b.Kill(t)
		if err := b.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.Client(t).Sandbox(sb.ID()).WriteFile(t.Context(), "/stop", nil, 0); err != nil {
		t.Fatal(err)
	}
	exit, err := p.Wait()
	if err != nil || exit.Code != 6 {
		t.Errorf("%+v, %v", exit, err)
	}
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	for i, line := range lines[:len(lines)-1] {
		if line != fmt.Sprint(i+1) {
			t.Fatalf("line %d is %q", i+1, line)
		}
	}
	if last := lines[len(lines)-1]; last != "end" {
		t.Errorf("the last line is %q", last)
	}
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) Len() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Len()
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestIdempotencyKeyHoldsOverACrash(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	spec := client.Spec{Image: bed.Image}
	first, err := b.Client(t).Create(t.Context(), spec, client.IdempotencyKey("k"))
	if err != nil {
		t.Fatal(err)
	}
	b.Kill(t)
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	again, err := b.Client(t).Create(t.Context(), spec, client.IdempotencyKey("k"))
	if err != nil || again.ID() != first.ID() {
		t.Errorf("%v, %v; want %s", again, err, first.ID())
	}
}

// A sandbox whose removal was answered is gone, not unknown, also for a server that was
// killed at once and started again.
func TestRemovedIsGoneAfterAKill(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	var ids []string
	for range 3 {
		sb, err := c.Create(t.Context(), client.Spec{Image: bed.Image})
		if err != nil {
			t.Fatal(err)
		}
		ids = append(ids, sb.ID())
		if err := sb.Delete(t.Context()); err != nil {
			t.Fatal(err)
		}
		b.Kill(t)
		if err := b.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
		c = b.Client(t)
		for _, id := range ids {
			if _, err := c.Get(t.Context(), id); !errors.Is(err, errs.SandboxGone) {
				t.Errorf("get: %v", err)
			}
			if _, err := c.Sandbox(id).Run(t.Context(), "true"); !errors.Is(err, errs.SandboxGone) {
				t.Errorf("exec: %v", err)
			}
			if err := c.Delete(t.Context(), id); !errors.Is(err, errs.SandboxGone) {
				t.Errorf("remove: %v", err)
			}
		}
	}
}

// 'dsec down' removes sandboxes too, and their ids say so to the next server.
func TestRemovedByDownIsGone(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	sb, err := b.Client(t).Create(t.Context(), client.Spec{Image: bed.Image})
	if err != nil {
		t.Fatal(err)
	}
	b.Must(t, "down", "--data", b.Data)
	<-b.Exited()
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := b.Client(t).Get(t.Context(), sb.ID()); !errors.Is(err, errs.SandboxGone) {
		t.Errorf("get: %v", err)
	}
}

// A data directory that somebody removed from under a killed server leaves processes,
// groups and mounts behind; 'dsec down' still finds them.
func TestDownFindsWhatARemovedDirectoryLeft(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	for range 2 {
		if _, err := b.Client(t).Create(t.Context(), client.Spec{Image: bed.Image}); err != nil {
			t.Fatal(err)
		}
	}
	b.Kill(t)
	_ = os.RemoveAll(b.Data) // not all of it goes where something is mounted below
	if held, err := b.Held(); err != nil || held["process"] != 2 || held["cgroup"] == 0 {
		t.Fatalf("held before: %v, %v", held, err)
	}
	b.Must(t, "down", "--data", b.Data)
	if held, err := b.Held(); err != nil || len(held) != 0 {
		t.Errorf("left: %v, %v", held, err)
	}
	b.Fails(t, 1, "node_not_found", "down", "--data", b.Dir)
}

// After the machine has restarted, the sandboxes of before are lost, and are said to be.
func TestSandboxesOfBeforeARebootAreLost(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	sb := b.Client(t)
	old, err := sb.Create(t.Context(), client.Spec{Image: bed.Image})
	if err != nil {
		t.Fatal(err)
	}
	held, err := b.Held()
	if err != nil {
		t.Fatal(err)
	}
	b.Kill(t)
	b.PretendReboot(t)
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := b.Client(t)
	_, err = c.Get(t.Context(), old.ID())
	if e := client.ErrorOf(err); e == nil || e.Code != errs.SandboxLost || !e.Infra {
		t.Errorf("get: %v", err)
	}
	if _, err := c.Sandbox(old.ID()).Run(t.Context(), "true"); !errors.Is(err, errs.SandboxLost) {
		t.Errorf("exec: %v", err)
	}
	if err := c.Delete(t.Context(), old.ID()); !errors.Is(err, errs.SandboxLost) {
		t.Errorf("remove: %v", err)
	}
	now, err := b.Held()
	if err != nil || now["directory"] != 0 || now["process"] != 0 {
		t.Errorf("left of before: %v, %v; had %v", now, err, held)
	}
	fresh := b.Sandbox(t, c, client.Spec{})
	if res, err := fresh.Run(t.Context(), "true"); err != nil || res.Code != 0 {
		t.Errorf("a new sandbox: %v", err)
	}
}

func TestDownKeepThenUpAdopts(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	l := &ledger{live: map[string]promise{}}
	for i := range 5 {
		if err := turn(t.Context(), c, l, fmt.Sprint(i), i); err != nil {
			t.Fatal(err)
		}
	}
	b.Must(t, "down", "--keep", "--data", b.Data)
	<-b.Exited()
	b.Fails(t, 1, "server_unreachable", "ls")
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	fresh := b.Client(t)
	for _, p := range l.live {
		kept(t, fresh, p)
	}
	if n := len(strings.Fields(b.Must(t, "ls", "-q"))); n != 5 {
		t.Errorf("%d sandboxes of 5", n)
	}
	b.Must(t, "rm", "--all", "--force")
}

func TestUpTwiceOnOneDataDirectory(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	sb := b.Sandbox(t, b.Client(t), client.Spec{})
	for _, args := range [][]string{
		{"up", "--data", b.Data, "--listen", "unix:" + b.Dir + "/second.sock"},
		{"up", "--detach", "--data", b.Data, "--listen", "unix:" + b.Dir + "/second.sock"},
	} {
		path := filepath.Join(t.TempDir(), "context.json")
		b.Must(t, append(args[:len(args)-2:len(args)-2], "--context", path)...)
		b.Must(t, "ls", "--context", path)
		r := b.Fails(t, 1, "node_running", append(args, "--context", path)...)
		if !strings.Contains(r.Stderr, "unix://"+b.Sock) {
			t.Errorf("it does not say where the node answers: %s", r.Stderr)
		}
		b.Must(t, "ls", "--context", path) // the file was written for the one that runs
	}
	b.Fails(t, 1, "address_in_use", "up", "--data", t.TempDir(), "--listen", "unix:"+b.Sock)
	if res, err := sb.Run(t.Context(), "true"); err != nil || res.Code != 0 {
		t.Errorf("the first server afterwards: %v", err)
	}
	b.Must(t, "ls")
}
