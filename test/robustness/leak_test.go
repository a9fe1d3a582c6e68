package robustness

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"dsec/client"
	"dsec/internal/keeper"
	"dsec/test/bed"
)

// What 600 sandboxes took is given back, to the last descriptor.
func TestCreateAndRemoveLeakNothing(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	watch := b.Client(t)
	churn := func(n int) {
		t.Helper()
		var wg sync.WaitGroup
		next := make(chan int)
		for range 16 {
			c := b.Client(t)
			wg.Go(func() {
				defer c.Close()
				for i := range next {
					sb, err := c.Create(t.Context(), client.Spec{Image: bed.Image})
					if err != nil {
						t.Errorf("create %d: %v", i, err)
						continue
					}
					// As a stream, whose end comes in a message of its own: the exit code
					// must be in it however busy the machine is.
					var out bytes.Buffer
					var exit client.Exit
					script := fmt.Sprintf("echo %d > /f; cat /f; sleep 1000 & exit %d", i, i%250+1)
					p, err := sb.Start(t.Context(), client.Command("sh", "-c", script), client.IO{Stdout: &out})
					if err == nil {
						exit, err = p.Wait()
					}
					if err != nil || exit.Code != i%250+1 || out.String() != fmt.Sprintf("%d\n", i) {
						t.Errorf("start %d: %+v, %q, %v", i, exit, out.String(), err)
					}
					if err := sb.Delete(t.Context()); err != nil {
						t.Errorf("remove %d: %v", i, err)
					}
				}
			})
		}
		for i := range n {
			next <- i
		}
		close(next)
		wg.Wait()
	}
	churn(50) // what is made once, and kept, is made here
	watch.Close()
	count := func() map[string]int {
		t.Helper()
		held, err := b.Held()
		if err != nil {
			t.Fatal(err)
		}
		m := bed.Metrics(t, watch)
		held["goroutines"], held["descriptors"] = int(m["go_goroutines"]), int(m["process_open_fds"])
		held["sandboxes"], held["streams"] = int(m["dsec_sandboxes"]), int(m["dsec_edge_streams"])
		held["children"] = children(t, b.PID())
		return held
	}
	var before map[string]int
	bed.Eventually(t, "the server is at rest", func() error {
		last := before
		if before = count(); last == nil || before["goroutines"] > last["goroutines"] || before["sandboxes"] > 0 || before["children"] > 0 {
			return fmt.Errorf("%v", before)
		}
		return nil
	})
	for range 3 {
		churn(200)
		bed.Eventually(t, "all is as before", func() error {
			now := count()
			for kind, n := range now {
				slack := 0
				switch kind {
				case "goroutines", "descriptors": // of HTTP connections that come and go
					slack = 6
				}
				if n > before[kind]+slack {
					return fmt.Errorf("%s: %d, before %d; all: %v, before: %v", kind, n, before[kind], now, before)
				}
			}
			return nil
		})
	}
}

// children counts the server's child processes, zombies included.
func children(t *testing.T, pid int) int {
	t.Helper()
	tasks, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, task := range tasks {
		list, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task.Name()))
		if err != nil { // the thread has ended
			continue
		}
		for child := range strings.FieldsSeq(string(list)) {
			if keeper.DirOf(child) == "" { // of which there are two
				n++
			}
		}
	}
	return n
}

func TestManyCommandLinesAtOnce(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	before, err := b.Held()
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for n := range 3 {
				want := fmt.Sprintf("%d %d\n", i, n)
				r := b.Run(t.Context(), strings.NewReader(want), "run", bed.Image, "--", "sh", "-c", fmt.Sprintf("cat; exit %d", i))
				if r.Code != i || r.Stdout != want {
					t.Errorf("%d: %+v", i, r)
				}
			}
		})
	}
	wg.Wait()
	same(t, b, before)
}
