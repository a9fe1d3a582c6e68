package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/test/bed"
)

func TestExecKeepsBytesAndStreamsApart(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	in := make([]byte, 200<<10)
	for i := range in {
		in[i] = byte(i*7 + i>>8)
	}
	res, err := sb.Exec(t.Context(), client.Command("tee", "/dev/stderr"), client.Input(in))
	if err != nil || res.Code != 0 || !bytes.Equal(res.Stdout, in) || !bytes.Equal(res.Stderr, in) || res.Truncated {
		t.Errorf("%v, code %d, %d and %d bytes of %d", err, res.Code, len(res.Stdout), len(res.Stderr), len(in))
	}
	res, err = sb.Exec(t.Context(), client.Cmd{Path: "sh", Args: []string{"-c", "echo before; sleep 1000 & sleep 1000"}, Timeout: 50 * time.Millisecond})
	if err != nil || !res.TimedOut || string(res.Stdout) != "before\n" {
		t.Errorf("a timeout: %v, %+v", err, res)
	}
	// All are killed at once; those that are not the leader may take a moment to end.
	bed.Eventually(t, "no process of the group is left", func() error {
		res, err := sb.Run(t.Context(), "pidof", "sleep")
		if err == nil && res.Code == 0 {
			err = fmt.Errorf("left: %s", res.Stdout)
		}
		return err
	})
}

// Each exec's exit code is its own, however many children end at the same moment.
func TestExitCodesAreNeverMixedUp(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() {
			res, err := sb.Run(t.Context(), "sh", "-c", fmt.Sprintf("(exit 99) & (exit 98) & echo %d; exit %d", i, i))
			if err != nil || res.Code != i || string(res.Stdout) != fmt.Sprintf("%d\n", i) {
				t.Errorf("exec %d: %v, %+v", i, err, res)
			}
		})
	}
	wg.Wait()
}

func TestSessionKeepsDirectoryAndEnvironment(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{Env: map[string]string{"FROM": "spec"}})
	s, err := sb.OpenSession(t.Context(), client.SessionOptions{Env: map[string]string{"OWN": "session"}})
	if err != nil {
		t.Fatal(err)
	}
	sh := func(line string) *client.SessionResult {
		t.Helper()
		r, err := s.Sh(t.Context(), line)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	sh("mkdir -p /tmp/d && cd /tmp/d && X=1 && export Y=2 && f() { echo func $1; }")
	if r := sh(`echo $PWD $X $Y $FROM $OWN; f arg; sh -c 'echo $Y'`); string(r.Stdout) != "/tmp/d 1 2 spec session\nfunc arg\n2\n" {
		t.Errorf("state: %q", r.Stdout)
	}
	if r := sh("(exit 7)"); r.Code != 7 || r.Ended {
		t.Errorf("exit code: %+v", r)
	}
	if r := sh("echo out; echo err >&2"); string(r.Stdout) != "out\n" || string(r.Stderr) != "err\n" {
		t.Errorf("streams: %+v", r)
	}
	if r := sh("cat; read x; echo \"[$x]\""); string(r.Stdout) != "[]\n" {
		t.Errorf("stdin of a command: %+v", r)
	}
	// A syntax error and an unclosed quote must not end or confuse the shell.
	if r := sh("echo 'open"); r.Code == 0 || r.Ended {
		t.Errorf("an unclosed quote: %+v", r)
	}
	r, err := s.Exec(t.Context(), client.SessionCommand{Line: "sleep 1000 & sleep 1000", Timeout: 100 * time.Millisecond})
	if err != nil || !r.TimedOut || r.Ended {
		t.Fatalf("timeout: %v, %+v", err, r)
	}
	if r := sh("echo $PWD $X"); string(r.Stdout) != "/tmp/d 1\n" {
		t.Errorf("after a timeout: %+v", r)
	}
	if r := sh("exit 3"); r.Code != 3 || !r.Ended {
		t.Errorf("exit: %+v", r)
	}
	if _, err := s.Sh(t.Context(), "true"); !errors.Is(err, errs.SessionEnded) && !errors.Is(err, errs.SessionNotFound) {
		t.Errorf("a session after its end: %v", err)
	}
}

func TestLargeFileUpAndDown(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	const size = 64 << 20
	up, down := sha256.New(), sha256.New()
	src := io.TeeReader(io.LimitReader(&pattern{}, size), up)
	if err := sb.Files().WriteFrom(t.Context(), "/tmp/big", src, client.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("%x", up.Sum(nil))
	res, err := sb.Run(t.Context(), "sha256sum", "/tmp/big")
	if err != nil || !strings.HasPrefix(string(res.Stdout), want) {
		t.Errorf("inside: %s, want %s (%v)", res.Stdout, want, err)
	}
	r, err := sb.Files().Open(t.Context(), "/tmp/big", 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	n, err := io.Copy(down, r)
	if got := fmt.Sprintf("%x", down.Sum(nil)); err != nil || n != size || got != want {
		t.Errorf("down: %d bytes, %s, %v; want %s", n, got, err, want)
	}
	// A range from the middle is what is there.
	part, err := sb.Files().Open(t.Context(), "/tmp/big", size/2+3, 5)
	if err != nil {
		t.Fatal(err)
	}
	defer part.Close()
	got, err := io.ReadAll(part)
	if want := []byte{patternAt(size/2 + 3), patternAt(size/2 + 4), patternAt(size/2 + 5), patternAt(size/2 + 6), patternAt(size/2 + 7)}; err != nil || !bytes.Equal(got, want) {
		t.Errorf("range: %v, %v; want %v", got, err, want)
	}
}

// pattern is an endless reader of bytes that tell their offset.
type pattern struct{ off int64 }

func patternAt(off int64) byte { return byte(off ^ off>>8 ^ off>>16 ^ off>>24) }

func (p *pattern) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = patternAt(p.off)
		p.off++
	}
	return len(b), nil
}

func TestFileOperations(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	f, ctx := sb.Files(), t.Context()
	check := func(what string, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	check("mkdir", f.MkdirAll(ctx, "/w/a/b", 0o750))
	check("write", f.WriteFile(ctx, "/w/a/f", []byte("one"), client.WriteOptions{Mode: 0o600}))
	check("append", f.WriteFile(ctx, "/w/a/f", []byte("two"), client.WriteOptions{Append: true}))
	check("range", f.WriteFile(ctx, "/w/a/f", []byte("X"), client.WriteOptions{Keep: true, Offset: 1}))
	check("atomic", f.WriteFile(ctx, "/w/a/g", []byte("g"), client.WriteOptions{Atomic: true}))
	if data, err := f.ReadFile(ctx, "/w/a/f"); err != nil || string(data) != "oXetwo" {
		t.Errorf("read: %q, %v", data, err)
	}
	check("chown", f.Chown(ctx, "/w", "12:34", true)) // takes set-uid bits away, so it comes first
	check("chmod", f.Chmod(ctx, "/w/a/f", 0o711|fs.ModeSetuid, false))
	if e, err := f.Stat(ctx, "/w/a/f"); err != nil || e.Uid != 12 || e.Gid != 34 || e.Mode&0o7777 != 0o4711 || e.Size != 6 {
		t.Errorf("stat: %+v, %v", e, err)
	}
	check("move", f.Move(ctx, "/w/a/f", "/w/a/b/h"))
	list, more, err := f.List(ctx, "/w", 3, 0)
	var names []string
	for _, e := range list {
		names = append(names, e.Path)
	}
	if err != nil || more || strings.Join(names, " ") != "/w/a /w/a/b /w/a/b/h /w/a/g" {
		t.Errorf("list: %v, %t, %v", names, more, err)
	}
	if err := f.Remove(ctx, "/w/a"); err == nil {
		t.Error("a directory that is not empty was removed")
	}
	check("remove", f.RemoveAll(ctx, "/w"))
	check("remove again", f.RemoveAll(ctx, "/w"))
	if _, err := f.Stat(ctx, "/w"); !errors.Is(err, errs.PathNotFound) {
		t.Errorf("stat of what was removed: %v", err)
	}
}

func TestWatchReportsChanges(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	if err := sb.Files().MkdirAll(t.Context(), "/w", 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), bed.Patience)
	defer cancel()
	changed := make(chan struct{})
	change := func() {
		defer close(changed)
		if res, err := sb.Run(ctx, "sh", "-c", "mkdir /w/new && echo x > /w/new/file && mv /w/new/file /w/moved && rm /w/moved"); err != nil || res.Code != 0 {
			t.Errorf("change: %v, %+v", err, res)
		}
	}
	seen := map[string]bool{}
	for e, err := range sb.Files().Watch(ctx, "/w", true, func() { go change() }) {
		if err != nil {
			t.Fatal(err)
		}
		seen[fmt.Sprintf("%d %s", e.Type, strings.TrimPrefix(e.Name, "/w/"))] = true
		if e.Type == msg.EventTypeRemove && strings.HasSuffix(e.Name, "moved") {
			break
		}
	}
	<-changed
	if err := ctx.Err(); err != nil {
		t.Fatalf("%v; seen: %v", err, seen)
	}
	if !seen[fmt.Sprintf("%d new", msg.EventTypeCreate)] || !seen[fmt.Sprintf("%d moved", msg.EventTypeRemove)] {
		t.Errorf("seen: %v", seen)
	}
}

func TestDialReachesAServerInside(t *testing.T) {
	t.Parallel()
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	if _, err := sb.Dial(t.Context(), "", 8000); !errors.Is(err, errs.PortClosed) {
		t.Errorf("dial where nothing listens: %v", err)
	}
	if _, err := sb.StartDetached(t.Context(), client.Command("nc", "-ll", "-p", "8000", "-e", "cat")); err != nil {
		t.Fatal(err)
	}
	bed.Eventually(t, "the server inside listens", func() error {
		ports, err := sb.Ports(t.Context())
		if err == nil && len(ports) == 0 {
			err = errors.New("no port")
		}
		return err
	})
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			conn, err := sb.Dial(t.Context(), "", 8000)
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			want := bytes.Repeat([]byte{byte(i)}, 1<<20)
			go func() {
				conn.Write(want) // a failure shows in what comes back
				conn.(interface{ CloseWrite() error }).CloseWrite()
			}()
			got, err := io.ReadAll(conn)
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("echo: %d bytes of %d, %v", len(got), len(want), err)
			}
		})
	}
	wg.Wait()
}

func TestBatchOverSandboxes(t *testing.T) {
	t.Parallel()
	c := shared.Client(t)
	a, b := shared.Sandbox(t, c, client.Spec{}), shared.Sandbox(t, c, client.Spec{})
	batch := c.Batch(1, false)
	w := batch.WriteFile(a, "/tmp/f", []byte("in a"), client.WriteOptions{})
	r := batch.ReadFile(a, "/tmp/f")
	x := batch.Exec(b, client.Command("sh", "-c", "cat /tmp/f; exit 2"))
	bad := batch.Stat(b, "/tmp/f")
	none := batch.Exec(c.Sandbox(neverExisted(a.ID())), client.Command("true"))
	if err := batch.Do(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Get(); err != nil {
		t.Error(err)
	}
	if data, err := r.Get(); err != nil || string(data) != "in a" {
		t.Errorf("read: %q, %v", data, err)
	}
	if res, err := x.Get(); err != nil || res.Code != 2 {
		t.Errorf("exec: %+v, %v", res, err)
	}
	if _, err := bad.Get(); !errors.Is(err, errs.PathNotFound) {
		t.Errorf("stat: %v", err)
	}
	if _, err := none.Get(); !errors.Is(err, errs.SandboxNotFound) {
		t.Errorf("exec in no sandbox: %v", err)
	}
}

// neverExisted is an id of the same node and epoch as id that no sandbox had.
func neverExisted(id string) string {
	last := "a"
	if strings.HasSuffix(id, last) {
		last = "b"
	}
	return id[:len(id)-1] + last
}

func TestDetachedProcessSurvivesItsClient(t *testing.T) {
	t.Parallel()
	first, err := client.New(client.Options{URL: "unix://" + shared.Sock, Token: shared.Token(t)})
	if err != nil {
		t.Fatal(err)
	}
	sb := shared.Sandbox(t, shared.Client(t), client.Spec{})
	const lines = 20000
	script := fmt.Sprintf("i=0; while [ $i -lt %d ]; do echo line $i; i=$((i+1)); done; read x < /tmp/fifo; echo $x", lines)
	if res, err := sb.Run(t.Context(), "mkfifo", "/tmp/fifo"); err != nil || res.Code != 0 {
		t.Fatal(err, res)
	}
	pid, err := first.Sandbox(sb.ID()).StartDetached(t.Context(), client.Cmd{Path: "sh", Args: []string{"-c", script}, Tag: "bg"})
	if err != nil {
		t.Fatal(err)
	}
	first.Close()

	var want strings.Builder
	for i := range lines {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	want.WriteString("done\n")
	// Clients of their own attach from different offsets and get the same bytes.
	offsets := []uint64{0, 1, 4096, 100000, uint64(want.Len()) - 5}
	got := make([]bytes.Buffer, len(offsets))
	var procs []*client.Process
	for i, off := range offsets {
		p, err := shared.Client(t).Sandbox(sb.ID()).Attach(t.Context(), client.Selector{Tag: "bg"}, client.IO{Stdout: &got[i]}, client.AttachOptions{StdoutFrom: off})
		if err != nil {
			t.Fatal(err)
		}
		procs = append(procs, p)
	}
	if res, err := sb.Run(t.Context(), "sh", "-c", "echo done > /tmp/fifo"); err != nil || res.Code != 0 {
		t.Fatal(err, res)
	}
	for i, p := range procs {
		if exit, err := p.Wait(); err != nil || exit.Code != 0 {
			t.Errorf("attach from %d: %+v, %v", offsets[i], exit, err)
		}
		if got[i].String() != want.String()[offsets[i]:] {
			t.Errorf("attach from %d: %d bytes, want %d", offsets[i], got[i].Len(), want.Len()-int(offsets[i]))
		}
	}
	if ps, err := sb.Processes(t.Context()); err != nil || !slices.ContainsFunc(ps, func(p *client.ProcessInfo) bool { return p.Pid == pid && p.Tag == "bg" && !p.Running }) {
		t.Errorf("processes: %v, %v", ps, err)
	}
}

func TestIdempotencyKeyUnderConcurrency(t *testing.T) {
	t.Parallel()
	c := shared.Client(t)
	label := map[string]string{"test": t.Name()}
	spec := client.Spec{Image: bed.Image, Labels: label}
	ids := make([]string, 30)
	var wg sync.WaitGroup
	for i := range ids {
		wg.Go(func() {
			sb, err := c.Create(t.Context(), spec, client.IdempotencyKey(t.Name()))
			if err != nil {
				t.Error(err)
				return
			}
			ids[i] = sb.ID()
			if res, err := sb.Run(t.Context(), "true"); err != nil || res.Code != 0 {
				t.Errorf("exec: %v", err)
			}
		})
	}
	wg.Wait()
	for _, id := range ids {
		if id != ids[0] {
			t.Errorf("ids differ: %s, %s", id, ids[0])
		}
	}
	if l, err := c.List(t.Context(), client.ListOptions{Labels: label}); err != nil || len(l.Items) != 1 {
		t.Errorf("%d sandboxes, %v", len(l.Items), err)
	}
	other := spec
	other.MemoryBytes = 64 << 20
	if _, err := c.Create(t.Context(), other, client.IdempotencyKey(t.Name())); !errors.Is(err, errs.IdempotencyReuse) {
		t.Errorf("the key with another spec: %v", err)
	}
	if err := c.Delete(t.Context(), ids[0]); err != nil {
		t.Error(err)
	}
}

func TestEventsFromARevisionMissNothing(t *testing.T) {
	t.Parallel()
	c := shared.Client(t)
	label := map[string]string{"test": t.Name()}
	list, err := c.List(t.Context(), client.ListOptions{Labels: label})
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int{} // id → 1 running, 2 removed
	for sb, err := range c.CreateMany(t.Context(), client.Spec{Image: bed.Image, Labels: label}, 10) {
		if err != nil {
			t.Fatal(err)
		}
		want[sb.ID()] = 2
	}
	for id, err := range c.DeleteMany(t.Context(), v1.DeleteRequest{Labels: label}) {
		if err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), bed.Patience)
	defer cancel()
	got, last := map[string]int{}, list.Revision
	for e, err := range c.Events(ctx, client.EventOptions{From: list.Revision, Follow: true, Labels: label}) {
		if err != nil {
			t.Fatal(err)
		}
		if e.Revision <= last {
			t.Errorf("revision %d after %d", e.Revision, last)
		}
		last = e.Revision
		switch {
		case e.Type == v1.EventRemoved && got[e.Sandbox.ID] == 1:
			got[e.Sandbox.ID] = 2
		case e.Type == v1.EventState && e.Sandbox.State == v1.StateRunning && got[e.Sandbox.ID] == 0:
			got[e.Sandbox.ID] = 1
		}
		done := len(got) == len(want)
		for id := range want {
			done = done && got[id] == 2
		}
		if done {
			return
		}
	}
	t.Errorf("the events ended: %v", got)
}

func TestMaxTTLRemovesTheSandbox(t *testing.T) {
	t.Parallel()
	c := shared.Client(t)
	sb := shared.Sandbox(t, c, client.Spec{MaxTTL: 0.2})
	bed.Eventually(t, "it is gone", func() error {
		if _, err := sb.Get(t.Context()); !errors.Is(err, errs.SandboxGone) {
			return fmt.Errorf("get: %w", err)
		}
		return nil
	})
}
