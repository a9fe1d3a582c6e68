package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/creack/pty"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

// box makes a sandbox over the command line, removed with the test.
func box(t *testing.T, flags ...string) string {
	t.Helper()
	id := shared.Must(t, append(append([]string{"create"}, flags...), bed.Image)...)
	t.Cleanup(func() { bed.Remove(t, shared.Client(t).Sandbox(id)) })
	return id
}

func TestCreateListInspectRemove(t *testing.T) {
	t.Parallel()
	label := "test=" + t.Name()
	made := bed.Lines[v1.Sandbox](t, shared.Must(t, "create", "--count", "5", "--json", "--label", label, "--label", "n=5", "--memory", "64MiB", bed.Image))
	if len(made) != 5 {
		t.Fatalf("%d sandboxes of 5", len(made))
	}
	var ids []string
	for _, sb := range made {
		if sb.State != v1.StateRunning || sb.Spec.MemoryBytes != 64<<20 || sb.CreateMS <= 0 {
			t.Errorf("created: %+v", sb)
		}
		ids = append(ids, sb.ID)
	}
	slices.Sort(ids)
	if got := strings.Fields(shared.Must(t, "ls", "-q", "--label", label, "--label", "n=5", "--state", "running")); !slices.Equal(got, ids) {
		t.Errorf("ls -q: %v, want %v", got, ids)
	}
	if got := shared.Must(t, "ls", "-q", "--label", label, "--label", "n=6"); got != "" {
		t.Errorf("ls with a label that differs: %s", got)
	}
	if list := bed.JSON[[]v1.Sandbox](t, shared, "ls", "--json", "--label", label); len(list) != 5 {
		t.Errorf("ls --json: %d", len(list))
	}
	text := shared.Must(t, "ls", "--label", label)
	if !strings.HasPrefix(text, "ID ") || strings.Count(text, "\n") != 5 || !strings.Contains(text, "64 MiB") {
		t.Errorf("ls:\n%s", text)
	}
	one := bed.JSON[v1.Sandbox](t, shared, "inspect", "--json", ids[0])
	if one.ID != ids[0] || one.Usage == nil || one.Usage.Processes < 1 || one.Usage.MemoryBytes <= 0 {
		t.Errorf("inspect --json: %+v", one)
	}
	if two := bed.JSON[[]v1.Sandbox](t, shared, "inspect", "--json", ids[0], ids[1]); len(two) != 2 {
		t.Errorf("inspect --json of two: %d", len(two))
	}
	if text := shared.Must(t, "inspect", ids[0]); !strings.Contains(text, ids[0]) || !strings.Contains(text, "running") ||
		!regexp.MustCompile(`(?m)^of that, ms +[a-z]+ \d`).MatchString(text) || !regexp.MustCompile(`(?m)^hostname +`+ids[0]+`$`).MatchString(text) ||
		!regexp.MustCompile(`(?m)^user, directory +root, /$`).MatchString(text) {
		t.Errorf("inspect:\n%s", text)
	}
	if got := shared.Must(t, "rm", ids[0]); got != ids[0] {
		t.Errorf("rm prints %q", got)
	}
	removed := bed.Lines[v1.DeleteResult](t, shared.Must(t, "rm", "--json", "--label", label))
	if len(removed) != 4 {
		t.Errorf("rm --label: %+v", removed)
	}
	for _, r := range removed {
		if r.Error != nil || !slices.Contains(ids[1:], r.ID) {
			t.Errorf("rm --label: %+v", r)
		}
	}
	if left := shared.Must(t, "ls", "-q", "--label", label); left != "" {
		t.Errorf("left: %s", left)
	}
	shared.Fails(t, 1, "sandbox_gone", "inspect", ids[0])
}

func TestExecOptions(t *testing.T) {
	t.Parallel()
	id := box(t)
	if got := shared.MustIn(t, "from stdin", "exec", "-i", "-w", "/tmp", "-u", "1000", "-e", "X=y", id, "--", "sh", "-c", "pwd; id -u; echo $X; cat"); got != "/tmp\n1000\ny\nfrom stdin" {
		t.Errorf("exec: %q", got)
	}
	if got := shared.MustIn(t, "unseen", "exec", id, "--", "cat"); got != "" {
		t.Errorf("exec without -i read %q", got)
	}
	for code, args := range map[int][]string{
		0: {"true"}, 3: {"sh", "-c", "exit 3"}, 126: {"/etc/passwd"}, 127: {"nosuch"}, 143: {"sh", "-c", "kill $$"},
	} {
		if r := shared.CLI(t, append([]string{"exec", id, "--"}, args...)...); r.Code != code {
			t.Errorf("exec %v: exit code %d, want %d (%s)", args, r.Code, code, r.Stderr)
		}
	}
	r := shared.CLI(t, "exec", "--timeout", "50ms", id, "--", "sh", "-c", "sleep 1000 & echo out; wait")
	if r.Code != 137 || r.Stdout != "out\n" {
		t.Errorf("exec past its timeout: %+v", r)
	}
	r = shared.CLI(t, "exec", "--idle-timeout", "100ms", id, "--", "sh", "-c", "echo out; sleep 1000")
	if r.Code != 137 || r.Stdout != "out\n" || !strings.Contains(r.Stderr, "--idle-timeout") {
		t.Errorf("exec past its idle timeout: %+v", r)
	}
	if n := shared.Must(t, "exec", id, "--", "sh", "-c", "pidof sleep || true"); n != "" {
		t.Errorf("timeouts left processes: %s", n)
	}
}

func TestExecJSON(t *testing.T) {
	t.Parallel()
	type outcome struct {
		Sandbox        string `json:"sandbox"`
		ExitCode       int    `json:"exit_code"`
		Signal         int    `json:"signal"`
		Stdout, Stderr *string
		StdoutBase64   []byte  `json:"stdout_base64"`
		StdoutBytes    int     `json:"stdout_bytes"`
		Truncated      bool    `json:"truncated"`
		DurationMS     float64 `json:"duration_ms"`
	}
	id := box(t)
	for _, args := range [][]string{{"exec", "--json", id}, {"run", "--json", bed.Image}} {
		for script, want := range map[string]outcome{
			"echo out; echo err >&2; exit 3": {ExitCode: 3, StdoutBytes: 4},
			"kill -9 $$":                     {ExitCode: 137, Signal: 9},
			"head -c 40000000 /dev/zero":     {StdoutBytes: 40000000, Truncated: true},
		} {
			r := shared.CLI(t, append(args, "--", "sh", "-c", script)...)
			all := bed.Lines[outcome](t, r.Stdout)
			if len(all) != 1 || r.Code != want.ExitCode {
				t.Fatalf("%v %q: exit code %d, %d objects, %s", args, script, r.Code, len(all), r.Stderr)
			}
			got := all[0]
			if got.ExitCode != want.ExitCode || got.Signal != want.Signal || got.StdoutBytes != want.StdoutBytes || got.Truncated != want.Truncated ||
				got.DurationMS <= 0 || got.Sandbox == "" || got.Stdout == nil || got.Stderr == nil {
				t.Errorf("%v %q: %+v", args, script, got)
			}
			if want.ExitCode == 3 && (*got.Stdout != "out\n" || *got.Stderr != "err\n") {
				t.Errorf("%v: %q, %q", args, *got.Stdout, *got.Stderr)
			}
		}
	}
	r := shared.CLI(t, "exec", "--json", id, "--", "printf", `\377`)
	if all := bed.Lines[outcome](t, r.Stdout); len(all) != 1 || all[0].Stdout != nil || string(all[0].StdoutBase64) != "\xff" {
		t.Errorf("bytes that are no text: %+v", r)
	}
}

// exec returns when the command does, even if a child of it holds the output open.
func TestExecEndsThoughADescendantKeepsStdout(t *testing.T) {
	t.Parallel()
	id := box(t)
	if got := shared.Must(t, "exec", id, "--", "sh", "-c", "sleep 1000 & echo parent"); got != "parent" {
		t.Errorf("got %q", got)
	}
}

type process struct {
	PID         uint32 `json:"pid"`
	Tag         string `json:"tag"`
	Running     bool   `json:"running"`
	ExitCode    *int   `json:"exit_code"`
	StdoutBytes int    `json:"stdout_bytes"`
}

func TestDetachPsAttachLogsKill(t *testing.T) {
	t.Parallel()
	id := box(t)
	// The second half of the output comes once a file exists.
	script := `i=0; while [ $i -lt 1000 ]; do echo "line $i"; i=$((i+1)); done; while [ ! -e /tmp/go ]; do usleep 2000; done; echo err >&2; echo end; exit 5`
	var started struct {
		PID uint32 `json:"pid"`
		Tag string `json:"tag"`
	}
	if err := json.Unmarshal([]byte(shared.Must(t, "exec", "--detach", "--tag", "job", "--json", id, "--", "sh", "-c", script)), &started); err != nil {
		t.Fatal(err)
	}
	ps := bed.JSON[[]process](t, shared, "ps", "--json", id)
	if len(ps) != 1 || ps[0].PID != started.PID || ps[0].Tag != "job" || !ps[0].Running {
		t.Errorf("ps: %+v", ps)
	}
	if text := shared.Must(t, "ps", id); !strings.Contains(text, "job") || !strings.Contains(text, "running") {
		t.Errorf("ps:\n%s", text)
	}
	var whole strings.Builder
	for i := range 1000 {
		fmt.Fprintf(&whole, "line %d\n", i)
	}
	attach := shared.Command(t.Context(), "attach", "--no-stdin", id, "job")
	out, err := attach.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := attach.Start(); err != nil {
		t.Fatal(err)
	}
	head := make([]byte, whole.Len())
	if _, err := io.ReadFull(out, head); err != nil || string(head) != whole.String() {
		t.Fatalf("attach: %v, %d bytes", err, len(head))
	}
	if got := shared.Must(t, "logs", id, "job"); got+"\n" != whole.String() {
		t.Errorf("logs: %d bytes, want %d", len(got)+1, whole.Len())
	}
	shared.MustIn(t, "", "cp", "-", id+":/tmp/go")
	tail, err := io.ReadAll(out)
	if code := exitCode(attach.Wait()); err != nil || code != 5 || string(tail) != "end\n" {
		t.Errorf("attach ended with %d, %v, %q; want 5 and end", code, err, tail)
	}
	whole.WriteString("end\n")
	const from = 777
	r := shared.CLI(t, "attach", "--from", fmt.Sprint(from), id, fmt.Sprint(started.PID))
	if r.Code != 5 || r.Stdout != whole.String()[from:] || !strings.Contains(r.Stderr, "err\n") {
		t.Errorf("attach from %d: exit code %d, %d bytes of %d, stderr %q", from, r.Code, len(r.Stdout), whole.Len()-from, r.Stderr)
	}
	if r := shared.CLI(t, "attach", "--from", "999999", id, "job"); r.Code != 5 || r.Stdout != "" || !strings.Contains(r.Stderr, "past the end of the output") {
		t.Errorf("attach from past the end: %+v", r)
	}
	type line struct {
		PID               uint32
		Tag, Stream, Text string
	}
	if l := bed.Lines[line](t, shared.Must(t, "logs", "--json", id)); len(l) != 1002 || !slices.Contains(l, line{started.PID, "job", "stderr", "err\n"}) ||
		!slices.Contains(l, line{started.PID, "job", "stdout", "line 999\n"}) {
		t.Errorf("logs --json: %d lines, %+v", len(l), l[max(0, len(l)-3):])
	}
	if all := shared.Must(t, "logs", id); strings.Count(all, "job | line ") != 1000 {
		t.Errorf("logs of all processes: %d lines", strings.Count(all, "job | "))
	}
	if ps := bed.JSON[[]process](t, shared, "ps", "--json", id); len(ps) != 1 || ps[0].Running || ps[0].ExitCode == nil || *ps[0].ExitCode != 5 {
		t.Errorf("ps after the end: %+v", ps)
	}

	shared.Must(t, "exec", "-d", "--tag", "victim", id, "--", "sh", "-c", "sleep 1000 & sleep 1000; echo never")
	shared.Must(t, "kill", id, "victim")
	if r := shared.CLI(t, "attach", id, "victim"); r.Code != 143 || r.Stdout != "" {
		t.Errorf("attach to a killed process: %+v", r)
	}
	shared.Fails(t, 1, "process_not_found", "kill", id, "nosuch")
	shared.Fails(t, 125, "process_not_found", "attach", id, "999999")
	shared.Fails(t, 2, "", "kill", "-s", "NOSUCH", id, "victim")
	shared.Fails(t, 127, "command_not_found", "exec", "--detach", id, "--", "nosuch")
	if r := shared.CLI(t, "exec", id, "--", "ls -l /"); r.Code != 127 || !strings.Contains(r.Stderr, "sh -c") {
		t.Errorf("a whole line as a program: %s", r.Stderr)
	}
}

func TestShellOnATerminal(t *testing.T) {
	t.Parallel()
	id := box(t)
	cmd := shared.Command(t.Context(), "shell", "--cwd", "/tmp", "-e", "GREETING=hi", id)
	f, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 20, Cols: 60})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	term := newScreen(f)
	fmt.Fprint(f, "echo $GREETING-$(pwd); stty size\r")
	term.await(t, "hi-/tmp")
	term.await(t, "20 60")
	if err := pty.Setsize(f, &pty.Winsize{Rows: 41, Cols: 99}); err != nil {
		t.Fatal(err)
	}
	// The new size travels beside the input: asked until it has come.
	fmt.Fprint(f, "until [ \"$(stty size)\" = '41 99' ]; do usleep 5000; done; echo re''sized\r")
	term.await(t, "resized")
	fmt.Fprint(f, "echo sle''eping; sleep 1000\r") // printed when the terminal makes signals again
	term.await(t, "sleeping")
	fmt.Fprint(f, "\x03")
	fmt.Fprint(f, "echo inter''rupted\r")
	term.await(t, "interrupted")
	fmt.Fprint(f, "exit 9\r")
	if code := exitCode(cmd.Wait()); code != 9 {
		t.Errorf("exit code %d, want 9; screen:\n%s", code, term)
	}
	shared.Fails(t, 2, "", "shell", id) // stdin is no terminal here
}

func TestEvents(t *testing.T) {
	t.Parallel()
	label := "test=" + t.Name()
	follow := shared.Command(t.Context(), "events", "--follow", "--json", "--label", label)
	out, err := follow.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := follow.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		follow.Process.Kill()
		follow.Wait()
	}()
	id := box(t, "--label", label)
	shared.Must(t, "rm", id)
	var types []string
	var last uint64
	for dec := json.NewDecoder(out); ; {
		var e v1.Event
		if err := dec.Decode(&e); err != nil {
			t.Fatalf("after %v: %v", types, err)
		}
		if e.Revision <= last || e.Sandbox == nil || e.Sandbox.ID != id {
			t.Errorf("event %+v after revision %d", e, last)
		}
		last = e.Revision
		types = append(types, string(e.Type)+":"+string(e.Sandbox.State))
		if e.Type == v1.EventRemoved {
			break
		}
	}
	if !slices.Contains(types, "state:running") {
		t.Errorf("events: %v", types)
	}
	past := bed.Lines[v1.Event](t, shared.Must(t, "events", "--json", "--label", label))
	if len(past) != len(types) {
		t.Errorf("%d events followed, %d kept", len(types), len(past))
	}
	text := shared.Must(t, "events", "--label", label)
	if strings.Count(text, "\n") != len(types) || !strings.HasPrefix(text, "REVISION ") || !strings.Contains(text, id) {
		t.Errorf("events:\n%s", text)
	}
}

// Events say why a sandbox went.
func TestEventsSayWhy(t *testing.T) {
	t.Parallel()
	for reason, args := range map[string][]string{"request": nil, "ttl": {"--ttl", "300ms"}} {
		label := "test=" + t.Name() + "-" + reason
		id := box(t, append([]string{"--label", label}, args...)...)
		if reason == "request" {
			shared.Must(t, "rm", id)
		}
		bed.Eventually(t, "the events say why "+id+" went", func() error {
			events := bed.Lines[v1.Event](t, shared.Must(t, "events", "--json", "--label", label))
			last := events[len(events)-1]
			if last.Type != v1.EventRemoved || string(last.Sandbox.EndReason) != reason {
				return fmt.Errorf("last event: %+v %+v", last, last.Sandbox)
			}
			return nil
		})
		text := shared.Must(t, "events", "--label", label)
		if last := text[strings.LastIndexByte(text, '\n')+1:]; !strings.Contains(last, "removed") || !strings.HasSuffix(last, " "+reason) {
			t.Errorf("events:\n%s", text)
		}
	}
}

func TestImageVerbs(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	writeTree(t, dir)
	img := bed.JSON[v1.Image](t, shared, "image", "import", "--json", "e2e/tree:1", dir)
	if img.Name != "e2e/tree:1" || img.Files == 0 || !strings.HasPrefix(img.Digest, "sha256:") {
		t.Errorf("imported: %+v", img)
	}
	if got := bed.JSON[v1.Image](t, shared, "image", "inspect", "--json", "e2e/tree:1"); got.Digest != img.Digest {
		t.Errorf("inspect: %+v", got)
	}
	if names := strings.Fields(shared.Must(t, "image", "ls", "-q")); !slices.Contains(names, "e2e/tree:1") || !slices.Contains(names, bed.Image) {
		t.Errorf("ls -q: %v", names)
	}
	if list := bed.JSON[[]v1.Image](t, shared, "image", "ls", "--json"); len(list) < 2 {
		t.Errorf("ls --json: %d images", len(list))
	}
	if text := shared.Must(t, "image", "inspect", "e2e/tree:1"); !strings.Contains(text, img.Digest) {
		t.Errorf("inspect:\n%s", text)
	}
	id := shared.Must(t, "create", "e2e/tree:1")
	shared.Fails(t, 1, "image_in_use", "image", "rm", "e2e/tree:1")
	shared.Must(t, "rm", id)
	if out := shared.Must(t, "image", "rm", "--json", "e2e/tree:1"); out != `{"name":"e2e/tree:1"}` {
		t.Errorf("image rm --json: %s", out)
	}
	shared.Fails(t, 1, "image_not_found", "image", "inspect", "e2e/tree:1")
	shared.Fails(t, 1, "image_not_found", "image", "rm", "e2e/tree:1")
}

func TestTokenAndNodeVerbs(t *testing.T) {
	t.Parallel()
	tok := bed.JSON[v1.Token](t, shared, "token", "create", "--json", "--right", "read", "--ttl", "1h", "reader")
	if tok.Secret == "" || tok.ExpiresAt == nil || len(tok.Rights) != 1 {
		t.Errorf("token: %+v", tok)
	}
	if list := bed.JSON[[]v1.Token](t, shared, "token", "ls", "--json"); !slices.ContainsFunc(list, func(x v1.Token) bool { return x.ID == tok.ID && x.Secret == "" }) {
		t.Errorf("token ls: %+v", list)
	}
	shared.Must(t, "ls", "--token", tok.Secret)
	shared.Fails(t, 1, "missing_right", "create", "--token", tok.Secret, bed.Image)
	shared.Must(t, "token", "rm", tok.ID)
	shared.Fails(t, 1, "bad_token", "ls", "--token", tok.Secret)
	shared.Fails(t, 1, "token_not_found", "token", "rm", tok.ID)
	if nodes := bed.JSON[[]v1.Node](t, shared, "node", "ls", "--json"); len(nodes) != 1 || !nodes[0].Ready || !slices.Contains(nodes[0].Backends, v1.BackendContainer) {
		t.Errorf("node ls: %+v", nodes)
	}
}

type backendInfo struct {
	Name, Detail string
	Usable       bool
}

func TestVersionCompletionDoctorBench(t *testing.T) {
	t.Parallel()
	v := bed.JSON[map[string]string](t, shared, "version", "--json")
	if v["client"] == "" || v["server"] != v["client"] || !strings.HasPrefix(v["go"], "go1.") {
		t.Errorf("version: %v", v)
	}
	id := box(t)
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		if out := shared.Must(t, "completion", shell); len(out) < 1000 {
			t.Errorf("completion %s: %q", shell, out)
		}
	}
	if out := shared.Must(t, "__complete", "exec", "s"); !strings.Contains(out, id) {
		t.Errorf("completion of ids lacks %s:\n%s", id, out)
	}
	if out := shared.Must(t, "__complete", "run", ""); !strings.Contains(out, bed.Image) {
		t.Errorf("completion of images:\n%s", out)
	}
	doctor := bed.JSON[struct {
		OK       bool
		Checks   []struct{ Name, Status, Detail string }
		Backends []backendInfo
	}](t, shared, "doctor", "--json", "--data", shared.Data)
	usable := map[string]bool{}
	for _, b := range doctor.Backends {
		usable[b.Name] = b.Usable
		if b.Detail == "" {
			t.Errorf("doctor says nothing of the backend %s", b.Name)
		}
	}
	if want := map[string]bool{"container": true, "hollow": true, "microvm": false, "fullvm": false, "fncall": false}; !maps.Equal(usable, want) {
		t.Errorf("backends: %v", usable)
	}
	if !doctor.OK || len(doctor.Checks) < 5 {
		t.Errorf("doctor: %+v", doctor)
	}
	var results []struct {
		Name     string
		N, OK    int
		Errors   int
		RateperS float64 `json:"rate_per_s"`
	}
	if err := json.Unmarshal([]byte(shared.Must(t, "bench", "exec", "--image", bed.Image, "--count", "20", "--parallel", "4", "--json")), &results); err != nil {
		t.Fatal(err)
	}
	if len(results) != 1 || results[0].OK != 20 || results[0].Errors != 0 || results[0].RateperS <= 0 {
		t.Errorf("bench: %+v", results)
	}
}
