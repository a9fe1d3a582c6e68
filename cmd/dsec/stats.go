package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

// statJSON is what stats --json prints of a sandbox.
type statJSON struct {
	ID        string      `json:"id"`
	Time      time.Time   `json:"time"`
	Cores     *float64    `json:"cpu_cores,omitempty"` // used on average since the reading before
	CPU       int64       `json:"cpu_millis_limit,omitempty"`
	Memory    int64       `json:"memory_bytes_limit,omitempty"`
	PIDs      int64       `json:"pids_limit,omitempty"`
	*v1.Usage             // of one that can be read
	Error     *v1.Problem `json:"error,omitempty"`
}

func (a *app) statsCmd() *cobra.Command {
	var labels []string
	var watch, asJSON bool
	var every time.Duration
	cmd := &cobra.Command{
		Use: "stats [ID...]", Short: "Show what sandboxes use: CPU, memory, processes, disk, bytes sent, image data",
		Long: `Stats shows the use of the named sandboxes, of those with all given labels, or of all that run.
CORES is the CPU used between two readings, --interval apart; --interval 0 reads once and leaves it
out. PEAK is the most memory that a sandbox ever had, SWAP what of it is swapped out, GIB·S its memory
times the seconds that it had it. IO is what its processes read from disks and wrote, SENT what left it; IMAGE READ what it read of its image through the
node's cache, FETCHED what had to be fetched for it. With --watch it goes on until Ctrl-C.

With --json each sandbox is a line of a reading: cpu_seconds (in all), cpu_cores,
memory_bytes, peak_memory_bytes, swap_bytes, memory_gib_seconds, paused_seconds, processes, disk_bytes,
io_read_bytes, io_written_bytes, sent_bytes, image_read_bytes, image_waited_bytes,
image_wait_seconds, image_fetched_bytes, oom_kills, and the limits.`,
		Example: `  dsec stats
  dsec stats --watch --label job=eval7
  dsec stats --json --interval 0 $id | jq .memory_bytes`,
		ValidArgsFunction: a.completeSandboxes(-1),
		RunE: func(cmd *cobra.Command, args []string) error {
			l, err := keyValues("label", labels)
			switch {
			case err != nil:
				return err
			case len(args) > 0 && len(l) > 0:
				return usagef("use only one of ids and --label")
			case watch && every < minInterval:
				return usagef("--interval must be at least %v with --watch", minInterval)
			}
			c, err := a.client()
			if err != nil {
				return err
			}
			s := stats{app: a, c: c, labels: l, asJSON: asJSON}
			if s.ids, err = a.ids(cmd.Context(), c, args); err != nil {
				return err
			}
			return s.run(cmd.Context(), every, watch)
		},
	}
	f := cmd.Flags()
	f.StringArrayVarP(&labels, "label", "l", nil, "only those with this label, KEY=VALUE (repeatable)")
	every = time.Second
	f.Var(newDuration(&every), "interval", "time between two readings")
	f.BoolVar(&watch, "watch", false, "read again and again until Ctrl-C")
	f.BoolVar(&asJSON, jsonFlag, false, "print each sandbox as a line of JSON")
	cmd.RegisterFlagCompletionFunc("label", a.completeLabels())
	return cmd
}

// minInterval keeps a watch from being a load of its own.
const minInterval = 100 * time.Millisecond

// stats reads again and again.
type stats struct {
	*app
	c      *client.Client
	ids    []string // named; none: those with labels, or all
	labels map[string]string
	asJSON bool
}

func (s *stats) run(ctx context.Context, every time.Duration, watch bool) error {
	before := map[string]client.Stat{}
	for n := 0; ; n++ {
		all, err := s.read(ctx)
		if ctx.Err() != nil && watch {
			return nil // Ctrl-C is how it is meant to end
		}
		if err != nil {
			return err
		}
		// The first reading is only what the second is compared with.
		if n > 0 || every == 0 {
			if watch && n > 1 && isTerminal(s.stdout) {
				fmt.Fprint(s.stdout, clearScreen)
			}
			err := s.print(all, before)
			if err != nil || !watch {
				return err
			}
		}
		clear(before)
		for _, st := range all {
			before[st.ID] = st
		}
		select {
		case <-time.After(every):
		case <-ctx.Done():
			if watch {
				return nil
			}
			return context.Cause(ctx)
		}
	}
}

func (s *stats) read(ctx context.Context) ([]client.Stat, error) {
	ids := s.ids
	if len(ids) == 0 {
		for sb, err := range s.c.All(ctx, client.ListOptions{Labels: s.labels, State: v1.StateRunning}) {
			if err != nil {
				return nil, err
			}
			ids = append(ids, sb.ID)
		}
	}
	all := s.c.Stats(ctx, ids...)
	if len(s.ids) > 0 {
		return all, nil
	}
	kept := all[:0]
	for _, st := range all { // one that has gone since the list was not asked for
		if st.Err == nil || !alreadyGone(st.Err) {
			kept = append(kept, st)
		}
	}
	return kept, nil
}

// print shows a reading; one that failed is the error, after all others.
func (s *stats) print(all []client.Stat, before map[string]client.Stat) error {
	var failed []error
	var rows [][]string
	for _, st := range all {
		j := statJSON{ID: st.ID, Time: st.At.UTC(), Error: v1.ProblemOf(st.Err)}
		if st.Err != nil {
			failed = append(failed, st.Err)
		} else if j.Usage = st.Sandbox.Usage; j.Usage != nil {
			spec := st.Sandbox.Spec
			j.CPU, j.Memory, j.PIDs, j.Cores = spec.CPUMillis, spec.MemoryBytes, spec.PIDs, cores(st, before[st.ID])
		}
		if s.asJSON {
			if err := s.jsonLine(j); err != nil {
				return err
			}
		} else if j.Usage != nil {
			rows = append(rows, statRow(j, st.Sandbox))
		}
	}
	if !s.asJSON {
		if err := table(s.stdout, []string{"ID", "IMAGE", "CORES", "CPU TIME", "MEMORY", "PEAK", "SWAP", "GIB·S", "PROCESSES", "DISK", "IO", "SENT", "IMAGE READ", "FETCHED", "OOM KILLS"}, rows); err != nil {
			return err
		}
	}
	if len(failed) > 1 {
		return fmt.Errorf("%d of %d cannot be read; the first: %w", len(failed), len(all), failed[0])
	}
	return errors.Join(failed...)
}

func statRow(j statJSON, sb *v1.Sandbox) []string {
	used := "-"
	if j.Cores != nil {
		used = fmt.Sprintf("%.2f", *j.Cores)
	}
	return []string{
		j.ID, orDash(sb.Spec.Image), fmt.Sprintf("%s/%g", used, float64(j.CPU)/1000), fmt.Sprintf("%.2f s", j.CPUSeconds),
		size(j.MemoryBytes) + "/" + size(j.Memory), size(j.PeakMemoryBytes), size(j.SwapBytes), fmt.Sprintf("%.1f", j.MemoryGiBSeconds),
		fmt.Sprintf("%d/%d", j.Processes, j.PIDs), size(j.DiskBytes), size(j.IOReadBytes) + "/" + size(j.IOWrittenBytes), size(j.SentBytes),
		size(j.ImageReadBytes), size(j.ImageFetchedBytes), fmt.Sprint(j.OOMKills),
	}
}

// cores is the CPU used between two readings of a sandbox; nil without an earlier one.
func cores(now, before client.Stat) *float64 {
	if before.Sandbox == nil || before.Sandbox.Usage == nil || !now.At.After(before.At) {
		return nil
	}
	used := (now.Sandbox.Usage.CPUSeconds - before.Sandbox.Usage.CPUSeconds) / now.At.Sub(before.At).Seconds()
	used = max(used, 0)
	return &used
}
