package e2e

import (
	"fmt"
	"strings"
	"testing"

	"dsec/test/bed"
)

// A sandbox whose processes are all in use can be had back: by the command that left them,
// though it has ended, and by killing all.
func TestKillRescuesAFullSandbox(t *testing.T) {
	t.Parallel()
	id := shared.Must(t, "create", "--pids", "32", bed.Image)
	defer shared.Must(t, "rm", id)
	shared.Must(t, "exec", id, "--", "sh", "-c", "echo stays > /root/file")
	for _, c := range []struct {
		name, script string
		kill         []string
	}{
		{"session", "sleep 1000 &", []string{"kill", "-s", "KILL", id, "bomb-session"}},
		{"term", "sleep 1000 &", []string{"kill", id, "bomb-term"}},
		{"daemons", "setsid sleep 1000 &", []string{"kill", "--all", id}},
	} {
		r := shared.CLI(t, "exec", "--tag", "bomb-"+c.name, id, "--", "sh", "-c", "i=0; while [ $i -lt 100 ]; do "+c.script+" i=$((i+1)); done")
		if r.Code == 0 || !strings.Contains(r.Stderr, "fork") {
			t.Fatalf("%s: the sandbox is not full: %+v", c.name, r)
		}
		// The one that the script itself freed is not enough for this.
		if r := shared.CLI(t, "exec", id, "--", "sh", "-c", "sleep 1 | sleep 1 | sleep 1"); r.Code == 0 {
			t.Fatalf("%s: the sandbox is not full: %+v", c.name, r)
		}
		shared.Must(t, c.kill...)
		bed.Eventually(t, c.name+": the sandbox is usable again", func() error {
			if r := shared.CLI(t, "exec", id, "--", "cat", "/root/file"); r.Code != 0 || r.Stdout != "stays\n" {
				return fmt.Errorf("%+v", r)
			}
			return nil
		})
		if left := shared.Must(t, "exec", id, "--", "ps", "-o", "comm"); strings.Contains(left, "sleep") {
			t.Errorf("%s: left:\n%s", c.name, left)
		}
	}
	if r := shared.Fails(t, 1, "process_exited", "kill", id, "bomb-session"); !strings.Contains(r.Stderr, "nothing is left of its session") {
		t.Errorf("%+v", r)
	}
	shared.Must(t, "kill", "--all", id) // nothing to kill
	shared.Fails(t, 2, "", "kill", "--all", id, "bomb")
	shared.Fails(t, 2, "", "kill", id)
}
