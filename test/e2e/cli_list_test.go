package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/creack/pty"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

func TestLsWideAndWatch(t *testing.T) {
	t.Parallel()
	label := "test=" + t.Name()
	watch := shared.Command(t.Context(), "ls", "--watch", "--json", "--label", label)
	out, err := watch.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	defer watch.Process.Kill()
	lists := json.NewDecoder(out)
	await := func(what string, ok func([]v1.Sandbox) bool) {
		t.Helper()
		for {
			var l []v1.Sandbox
			if err := lists.Decode(&l); err != nil {
				t.Fatalf("no list with %s: %v", what, err)
			}
			if ok(l) {
				return
			}
		}
	}
	await("nothing", func(l []v1.Sandbox) bool { return len(l) == 0 })
	id := box(t, "--label", label, "--label", "long="+strings.Repeat("x", 60), "--ttl", "1h", "--cpu", "0.5")
	await("the sandbox", func(l []v1.Sandbox) bool { return len(l) == 1 && l[0].ID == id && l[0].State == v1.StateRunning })

	narrow, wide := shared.Must(t, "ls", "--label", label), shared.Must(t, "ls", "--wide", "--label", label)
	for _, want := range []string{"ID ", " STATE ", " IMAGE ", " AGE ", id, " running ", " " + bed.Image + " ", "…"} {
		if !strings.Contains(narrow, want) {
			t.Errorf("ls lacks %q:\n%s", want, narrow)
		}
	}
	for _, want := range []string{" NODE ", " EXPIRES ", " in ", " 0.5 ", " container ", strings.Repeat("x", 60)} {
		if !strings.Contains(wide, want) || strings.Contains(narrow, want) {
			t.Errorf("%q belongs in ls --wide only:\n%s\n%s", want, wide, narrow)
		}
	}
	shared.Must(t, "rm", id)
	await("nothing again", func(l []v1.Sandbox) bool { return len(l) == 0 })
	watch.Process.Signal(syscall.SIGINT)
	if code := exitCode(watch.Wait()); code != 0 {
		t.Errorf("Ctrl-C ends ls --watch with %d", code)
	}
	// No two columns of a table say the same.
	head, row, _ := strings.Cut(shared.Must(t, "image", "ls"), "\n")
	if strings.Join(strings.Fields(head), " ") != "NAME DIGEST SIZE AGE" || !strings.Contains(row, bed.Image) {
		t.Errorf("image ls:\n%s\n%s", head, row)
	}
	if wide := shared.Must(t, "image", "ls", "--wide"); !strings.Contains(wide, "ON DISK") || !strings.Contains(wide, "FILES") {
		t.Errorf("image ls --wide:\n%s", wide)
	}
}

func TestEventsSince(t *testing.T) {
	t.Parallel()
	label := "test=" + t.Name()
	id := box(t, "--label", label)
	events := bed.Lines[v1.Event](t, shared.Must(t, "events", "--json", "--since", "1h", "--label", label))
	if len(events) == 0 || events[0].Sandbox.ID != id {
		t.Fatalf("%+v", events)
	}
	last := events[len(events)-1].Time
	for since, want := range map[string]int{
		last.Format("2006-01-02T15:04:05.999999999Z07:00"): 1, "2001-02-03": len(events), "2091-02-03 04:05:06": 0,
	} {
		if got := bed.Lines[v1.Event](t, shared.Must(t, "events", "--json", "--since", since, "--label", label)); len(got) != want {
			t.Errorf("since %s: %d events, want %d", since, len(got), want)
		}
	}
	shared.Fails(t, 2, "", "events", "--since", "10")
	shared.Fails(t, 2, "", "events", "--since", "yesterday")
	watch := shared.Command(t.Context(), "events", "--watch", "--label", label)
	out, err := watch.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := watch.Start(); err != nil {
		t.Fatal(err)
	}
	defer watch.Wait()
	defer watch.Process.Kill()
	shared.Must(t, "rm", id)
	for r := bufio.NewScanner(out); ; {
		if !r.Scan() {
			t.Fatal("it ended before the removal")
		}
		if strings.Contains(r.Text(), " removed ") {
			break
		}
	}
}

// rm --all asks, if there is somebody to ask.
func TestRmAllAsks(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	b.Must(t, "create", "--count", "2", bed.Image)
	if r := b.Fails(t, 2, "", "rm", "--all"); !strings.Contains(r.Stderr, "--force") {
		t.Errorf("%+v", r)
	}
	for _, answer := range []string{"n", "y"} {
		f, err := pty.Start(b.Command(t.Context(), "rm", "--all"))
		if err != nil {
			t.Fatal(err)
		}
		term := newScreen(f)
		term.await(t, "remove 2 sandboxes? [y/N]")
		if left := strings.Fields(b.Must(t, "ls", "-q")); len(left) != 2 {
			t.Errorf("before the answer: %v", left)
		}
		fmt.Fprintf(f, "%s\r", answer)
		if answer == "n" {
			term.await(t, "nothing was removed")
		} else {
			bed.Eventually(t, "all are removed", func() error {
				if left := b.Must(t, "ls", "-q"); left != "" {
					return fmt.Errorf("left: %s", left)
				}
				return nil
			})
		}
		f.Close()
	}
}

func TestJSONOfCpKillAttach(t *testing.T) {
	t.Parallel()
	id := box(t)
	file := t.TempDir() + "/f"
	if err := os.WriteFile(file, []byte("12345"), 0o644); err != nil {
		t.Fatal(err)
	}
	type copied struct {
		Sandbox, Source, Destination string
		Bytes                        int
		DurationMS                   float64 `json:"duration_ms"`
	}
	for _, args := range [][]string{{file, id + ":/tmp/f"}, {id + ":/tmp/f", file + ".back"}} {
		got := bed.JSON[copied](t, shared, "cp", "--json", args[0], args[1])
		if got.Sandbox != id || got.Bytes != 5 || got.DurationMS <= 0 || !strings.HasSuffix(args[0], got.Source) || !strings.HasSuffix(args[1], got.Destination) {
			t.Errorf("cp: %+v", got)
		}
	}
	var in copied
	if err := json.Unmarshal([]byte(shared.MustIn(t, "123", "cp", "--json", "-", id+":/tmp/in")), &in); err != nil || in.Bytes != 3 {
		t.Errorf("cp from stdin: %+v, %v", in, err)
	}
	shared.Fails(t, 2, "", "cp", "--json", id+":/tmp/f", "-")
	shared.Must(t, "exec", "-d", "--tag", "job", id, "--", "sh", "-c", "echo out; exec sleep 1000")
	bed.Eventually(t, "it has printed", func() error {
		if out := shared.Must(t, "logs", id, "job"); out != "out" {
			return fmt.Errorf("%q", out)
		}
		return nil
	})
	if k := bed.JSON[struct {
		Sandbox, Process string
		Signal           int
	}](t, shared, "kill", "--json", "-s", "KILL", id, "job"); k.Sandbox != id || k.Process != "job" || k.Signal != 9 {
		t.Errorf("kill: %+v", k)
	}
	r := shared.CLI(t, "attach", "--json", id, "job")
	var x struct {
		ExitCode int `json:"exit_code"`
		Signal   int
		Stdout   string
		PID      int
	}
	if err := json.Unmarshal([]byte(r.Stdout), &x); err != nil || r.Code != 137 || x.ExitCode != 137 || x.Signal != 9 || x.Stdout != "out\n" || x.PID == 0 {
		t.Errorf("attach: %+v of %+v, %v", x, r, err)
	}
}
