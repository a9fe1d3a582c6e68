package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	"dsec/test/bed"
)

// How detached processes ended, and what they printed, is there after many others ran, and
// one that prints much does not take it away.
func TestDetachedProcessesAreKept(t *testing.T) {
	t.Parallel()
	id := shared.Must(t, "create", bed.Image)
	defer shared.Must(t, "rm", id)
	shared.Must(t, "exec", "--detach", "--tag", "job", id, "--", "sh", "-c", "echo result; exit 7")
	pid := shared.Must(t, "exec", "--detach", id, "--", "sh", "-c", "echo other; exit 8")
	shared.Must(t, "exec", id, "--", "sh", "-c", "echo first")
	for range 3 {
		shared.Must(t, "exec", id, "--", "seq", "1", "300000")
	}
	shared.Must(t, "exec", "--detach", "--tag", "big", id, "--", "seq", "1", "300000")
	for i := range 70 {
		if got := shared.Must(t, "exec", id, "--", "echo", fmt.Sprint(i)); got != fmt.Sprint(i) {
			t.Fatalf("%q", got)
		}
	}
	if r := shared.CLI(t, "attach", id, "job"); r.Code != 7 || r.Stdout != "result\n" {
		t.Errorf("%+v", r)
	}
	if r := shared.CLI(t, "attach", id, pid); r.Code != 8 || r.Stdout != "other\n" {
		t.Errorf("%+v", r)
	}
	all := bed.JSON[[]psRow](t, shared, "ps", "--json", id)
	if len(all) != 77 {
		t.Errorf("%d processes are known", len(all))
	}
	if logs := shared.Must(t, "logs", id); !strings.Contains(logs, " | first\n") || !strings.Contains(logs, "job | result\n") {
		t.Errorf("%d bytes of logs without the first ones", len(logs))
	}
	big := shared.CLI(t, "logs", id, "big")
	if big.Code != 0 || !strings.HasSuffix(big.Stdout, "\n300000\n") || !strings.Contains(big.Stderr, "bytes of stdout from offset 0 are no longer kept") {
		t.Errorf("exit code %d, %d bytes, %s", big.Code, len(big.Stdout), big.Stderr)
	}
	shared.Fails(t, 1, "process_not_found", "logs", id, "nosuch")
	shared.Fails(t, 125, "process_not_found", "attach", id, "nosuch")
}

// A sandbox that is gone tells when and why, also after the server was killed.
func TestGoneSaysWhenAndWhy(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	want := map[string]string{}
	asked := b.Must(t, "create", bed.Image)
	b.Must(t, "rm", asked)
	want[asked] = "request"
	want[b.Must(t, "create", "--ttl", "200ms", bed.Image)] = "ttl"
	check := func() {
		t.Helper()
		for id, reason := range want {
			bed.Eventually(t, id+" is gone", func() error {
				r := b.CLI(t, "inspect", "--json", id)
				var got struct {
					Error struct {
						Status  int
						Code    string
						Message string
						Details map[string]string
					}
				}
				if r.Code != 1 || json.Unmarshal([]byte(r.Stderr), &got) != nil {
					return fmt.Errorf("%+v", r)
				}
				if e := got.Error; e.Status != 410 || e.Code != "sandbox_gone" || e.Details["end_reason"] != reason || e.Details["removed_at"] == "" || !strings.Contains(e.Message, "was removed at 20") {
					return fmt.Errorf("%+v", e)
				}
				return nil
			})
		}
		if r := b.CLI(t, "exec", asked, "--", "true"); r.Code != 125 || !strings.Contains(r.Stderr, "somebody asked for it") {
			t.Errorf("exec: %+v", r)
		}
	}
	check()
	b.Kill(t)
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	check()
}
