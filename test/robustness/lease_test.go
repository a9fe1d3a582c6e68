package robustness

import (
	"bufio"
	"bytes"
	"io"
	"strings"
	"testing"
	"time"

	"dsec/test/bed"
)

// A server that was away for longer than a run's lease does not take its sandbox: leases
// begin anew with the server, and the run attaches again.
func TestRunOutlivesAServerRestart(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	const lease = time.Second
	cmd := b.Command(t.Context(), "run", "--lease", lease.String(), bed.Image, "--", "sh", "-c", "echo started; while [ ! -e /tmp/go ]; do usleep 5000; done; echo end")
	var said bytes.Buffer
	cmd.Stderr = &said
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("run said: %s", said.String())
		}
	})
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(out)
	if line, err := r.ReadString('\n'); line != "started\n" {
		t.Fatal(line, err)
	}
	id := b.Must(t, "ls", "-q")
	b.Kill(t)
	time.Sleep(2 * lease) // what is tested is that time passes
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	time.Sleep(2 * lease) // the new lease was renewed, too
	// The program may see the file and end, and the sandbox go, before the copy has its answer.
	if r := b.Run(t.Context(), strings.NewReader(""), "cp", "-", id+":/tmp/go"); r.Code != 0 && !strings.Contains(r.Stderr, "sandbox_gone") {
		t.Errorf("cp: %s", r.Stderr)
	}
	rest, err := io.ReadAll(r)
	if werr := cmd.Wait(); err != nil || werr != nil || string(rest) != "end\n" {
		t.Errorf("run ended with %v, %q, %v", werr, rest, err)
	}
	if left := b.Must(t, "ls", "-q"); left != "" {
		t.Errorf("left: %s", left)
	}
}
