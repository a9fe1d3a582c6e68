package robustness

import (
	"bufio"
	"strings"
	"testing"

	"dsec/client"
	"dsec/test/bed"
)

// Who follows events over a death of the server hears of what comes after it.
func TestEventsGoOnOverARestart(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	cmd := b.Command(t.Context(), "events", "--follow", "--json")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		cmd.Process.Kill()
		cmd.Wait()
	}()
	lines := bufio.NewScanner(out)
	lines.Buffer(nil, 1<<20)
	hear := func(id string) {
		t.Helper()
		for lines.Scan() {
			if strings.Contains(lines.Text(), id) {
				return
			}
		}
		t.Fatalf("the events ended before %s: %v", id, lines.Err())
	}
	c := b.Client(t)
	hear(b.Sandbox(t, c, client.Spec{Backend: "hollow"}).ID())
	b.Kill(t)
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	hear(b.Sandbox(t, c, client.Spec{Backend: "hollow"}).ID())
}
