package bench

import (
	"context"
	"fmt"
	"time"

	"dsec/client"
)

// touchDir is where, below touchBase, a sandbox that touched memory keeps the sums of it.
const (
	touchBase = "/tmp"
	touchDir  = "bench-touch"
)

// touchScript has a process hold $1 bytes of memory that do not compress, of which it kept the sum: tail holds
// back that much until its input ends, which is when somebody opens the gate.
const touchScript = `mkdir -p "$2" && cd "$2" && rm -f * && mkfifo copy gate || exit 1
sha256sum <copy >before &
(head -c "$1" /dev/urandom | tee copy; : >ready; cat gate) | tail -c "$1" | sha256sum >after
: >ended`

const (
	touchedScript = `cd "$1" && while [ ! -e ready ]; do sleep 0.05; done`
	intactScript  = `cd "$1" && : >gate && while [ ! -e ended ]; do sleep 0.05; done; cmp before after`
)

// touch returns when a process of the sandbox holds so many bytes of memory.
func touch(ctx context.Context, sb *client.Sandbox, size int64) error {
	if _, err := sb.StartDetached(ctx, shell(touchScript, fmt.Sprint(size), touchDir)); err != nil {
		return err
	}
	return script(ctx, sb, "touch memory", `mkdir -p "$1"; `+touchedScript)
}

// intact ends that process and fails unless it held what it had been given.
func intact(ctx context.Context, sb *client.Sandbox) error {
	return script(ctx, sb, "memory after a pause is not what it was before", intactScript)
}

func shell(script string, args ...string) client.Cmd {
	return client.Cmd{Path: "sh", Args: append([]string{"-c", script, "sh"}, args...), Dir: touchBase}
}

func script(ctx context.Context, sb *client.Sandbox, what, text string) error {
	r, err := sb.Exec(ctx, shell(text, touchDir))
	if err == nil && r.Code != 0 {
		err = fmt.Errorf("%s: exit code %d: %s", what, r.Code, r.Stderr)
	}
	return err
}

// memoryOf is what sandboxes have of memory together, by their node's count.
func memoryOf(ctx context.Context, c *client.Client, boxes []Box) (sum int64, err error) {
	ids := make([]string, len(boxes))
	for i, b := range boxes {
		ids[i] = b.(dsecBox).sb.ID()
	}
	for _, s := range c.Stats(ctx, ids...) {
		if s.Err != nil {
			return 0, s.Err
		}
		if s.Sandbox.Usage == nil {
			return 0, fmt.Errorf("the server does not tell what %s uses", s.ID)
		}
		sum += s.Sandbox.Usage.MemoryBytes
	}
	return sum, nil
}

// room is the memory limit of a sandbox that touches size bytes.
func room(limit, size int64) int64 { return max(limit, size+size/4+(64<<20)) }

// percent is how much of before is gone.
func percent(before, after int64) float64 {
	if before <= 0 {
		return 0
	}
	return 100 * float64(before-after) / float64(before)
}

// sum is in seconds.
func sum(all []time.Duration) (s float64) {
	for _, d := range all {
		s += d.Seconds()
	}
	return s
}
