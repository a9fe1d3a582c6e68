package e2e

import (
	"encoding/json"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/test/bed"
)

// A script reads from the exit code whose failure it was, and with --json from stderr what.
func TestFailuresForScripts(t *testing.T) {
	t.Parallel()
	id, gone := box(t), shared.Must(t, "create", bed.Image)
	shared.Must(t, "rm", gone)
	away := "--url=unix://" + shared.Dir + "/none.sock"
	for _, x := range []struct {
		code  int
		error string
		infra bool
		args  []string
	}{
		{125, "server_unreachable", true, []string{"exec", "--json", away, id, "--", "true"}},
		{125, "server_unreachable", true, []string{"run", "--json", away, bed.Image, "--", "true"}},
		{125, "sandbox_gone", false, []string{"exec", "--json", gone, "--", "true"}},
		{125, "image_not_found", false, []string{"run", "--json", "none", "--", "true"}},
		{125, "cwd_not_found", false, []string{"exec", "--json", "-w", "/none", id, "--", "true"}},
		{125, "user_not_found", false, []string{"exec", "--json", "-u", "nosuch", id, "--", "true"}},
		{127, "command_not_found", false, []string{"exec", "--json", id, "--", "nosuch"}},
		{126, "command_not_executable", false, []string{"run", "--json", bed.Image, "--", "/etc/passwd"}},
		{1, "server_unreachable", true, []string{"ls", "--json", away}},
		{1, "sandbox_not_found", false, []string{"inspect", "--json", strings.Repeat("z", 8)}},
		{1, "path_not_found", false, []string{"cp", "--json", id + ":/none", t.TempDir()}},
		{1, "image_not_found", false, []string{"create", "--json", "none"}},
		{2, "bad_request", false, []string{"create", "--json", "--memory", "lots", bed.Image}},
	} {
		r := shared.CLI(t, x.args...)
		var got struct{ Error *v1.Problem }
		dec := json.NewDecoder(strings.NewReader(r.Stderr))
		if err := dec.Decode(&got); err != nil || dec.More() || got.Error == nil {
			t.Errorf("%v: stderr is not one object (%v): %q", x.args, err, r.Stderr)
			continue
		}
		if e := got.Error; r.Code != x.code || e.Code != x.error || e.Infra != x.infra || e.Message == "" || e.Hint == "" || e.Class == "" || e.Phase == "" {
			t.Errorf("%v: exit code %d, want %d; %+v", x.args, r.Code, x.code, e)
		}
	}
	if r := shared.CLI(t, "exec", "--json", id, "--", "sh", "-c", "exit 125"); r.Code != 125 || r.Stderr != "" {
		t.Errorf("the command's own 125: %+v", r)
	}
	// A beginning of an id does.
	if out := shared.Must(t, "exec", id[12:], "--", "echo", "short"); out != "short" {
		t.Errorf("%q", out)
	}
}
