package main

import (
	"encoding/json"
	"strings"
	"testing"

	"dsec/api/v1/errs"
)

// A verb with --json says why it failed in one object on stderr, whatever failed.
func TestFailuresAsJSON(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "busybox")
	gone := c.ok("create", "busybox")
	c.ok("rm", gone)
	c.s.Fail("POST /v1/sandboxes", 1, errs.New(errs.NodeFull, "edge.admit", "no room"))
	for _, x := range []struct {
		code  int
		error errs.Code
		say   string
		args  []string
	}{
		{1, errs.NodeFull, "create sandbox: no room", []string{"create", "busybox"}},
		{125, errs.ImageNotFound, "none", []string{"run", "none", "--", "true"}},
		{125, errs.SandboxGone, gone, []string{"exec", gone, "--", "true"}},
		{127, errs.CommandNotFound, "no-such-command", []string{"exec", id, "--", "no-such-command"}},
		{126, errs.CommandNotExec, "passwd", []string{"exec", id, "--", "/etc/passwd"}},
		{1, errs.SandboxGone, gone, []string{"inspect", gone}},
		{1, errs.SandboxGone, gone, []string{"rm", gone}},
		{1, errs.SandboxGone, gone, []string{"ps", gone}},
		{1, errs.SandboxGone, gone, []string{"logs", gone}},
		{1, errs.ImageNotFound, "none", []string{"image", "inspect", "none"}},
		{1, errs.ImageNotFound, "none", []string{"image", "rm", "none"}},
		{1, errs.LocalFile, "/none", []string{"image", "import", "x", "/none"}},
		{1, errs.TokenNotFound, "none", []string{"token", "rm", "none"}},
		{2, errs.BadRequest, "key=value", []string{"ls", "--label", "x"}},
		{2, errs.BadRequest, "unknown flag: --bogus", []string{"ls", "--bogus"}},
		{2, errs.BadRequest, "ID is missing", []string{"ps"}},
		{2, errs.BadRequest, "is not of the form", []string{"exec", "-e", "=", id, "--", "true"}},
	} {
		r := c.run(append([]string{x.args[0]}, withJSON(x.args)...)...)
		var got failureJSON
		dec := json.NewDecoder(strings.NewReader(r.err))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&got); err != nil || dec.More() || got.Error == nil {
			t.Errorf("%v: %v in %q", x.args, err, r.err)
			continue
		}
		if e := got.Error; r.code != x.code || e.Code != string(x.error) || e.Class == "" || !strings.Contains(e.Message, x.say) || e.Hint == "" {
			t.Errorf("%v: exit code %d, want %d with %s of %q: %+v", x.args, r.code, x.code, x.error, x.say, e)
		}
	}
	if r := c.run("exec", "--json", id, "--", "false"); r.code != 1 || r.err != "" {
		t.Errorf("a command's own failure is reported as ours: %+v", r)
	}
	if r := c.run("exec", "--json", "--timeout", "50ms", id, "--", "sleep", "60"); r.code != 137 || r.err != "" || !strings.Contains(r.out, `"timed_out":true`) {
		t.Errorf("%+v", r)
	}
	if r := c.run("rm", "--json", "--label", "a=none"); r.code != 0 || r.err != "" {
		t.Errorf("%+v", r)
	}
	if r := c.run("exec", id, "--", "sh", "-c", "exit 3", "--json"); r.code != 3 || r.err != "" {
		t.Errorf("the command's --json is taken as ours: %+v", r)
	}
}

// withJSON puts --json behind the verb, which is args' first or first two words.
func withJSON(args []string) []string {
	if args[0] == "image" || args[0] == "token" {
		return append([]string{args[1], "--json"}, args[2:]...)
	}
	return append([]string{"--json"}, args[1:]...)
}

// 125 is dsec's own failure, as docker has it, also when there is no server.
func TestNoServerIsExit125(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"run", "busybox", "--", "true"}, {"exec", "saaaaaabbbbbcccccccccc", "--", "true"}} {
		var out, errOut strings.Builder
		a := &app{stdin: strings.NewReader(""), stdout: &out, stderr: &errOut}
		code := a.main(t.Context(), append([]string{"--url", "unix:///nowhere/api.sock", "--token", "x"}, args...))
		if code != 125 || !strings.Contains(errOut.String(), "server_unreachable") || !strings.Contains(errOut.String(), "dsec up --detach") {
			t.Errorf("%v: exit code %d\n%s", args, code, errOut.String())
		}
	}
}
