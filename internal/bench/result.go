package bench

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// Result of one benchmark.
type Result struct {
	Name     string  `json:"name"`
	Target   string  `json:"target"` // dsec, or a peer
	N        int     `json:"n"`
	OK       int     `json:"ok"`
	Errors   int     `json:"errors"`
	Parallel int     `json:"parallel"`
	Seconds  float64 `json:"seconds"`
	RatePerS float64 `json:"rate_per_s"` // successes only
	Latency  Latency `json:"latency_ms"` // of successes
	// ClientCPUSeconds is what this process used: near Seconds × cores, it measured itself.
	ClientCPUSeconds float64            `json:"client_cpu_seconds"`
	ErrorSamples     []string           `json:"error_samples,omitempty"`
	Extra            map[string]float64 `json:"extra,omitempty"`
	Notes            []string           `json:"notes,omitempty"`
	Samples          []ServerSample     `json:"samples,omitempty"` // of the server, on the way
	Host             Host               `json:"host"`

	first error // of those counted
}

// Latency in milliseconds.
type Latency struct {
	P50 float64 `json:"p50"`
	P90 float64 `json:"p90"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// Host is the machine that the client ran on.
type Host struct {
	CPU    string `json:"cpu"`
	Cores  int    `json:"cores"`
	Memory int64  `json:"memory"`
	Kernel string `json:"kernel"`
}

// ReadHost describes this machine.
func ReadHost() Host {
	h := Host{Cores: runtime.NumCPU()}
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		h.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	var si unix.Sysinfo_t
	if unix.Sysinfo(&si) == nil {
		h.Memory = int64(si.Totalram) * int64(si.Unit)
	}
	if f, err := os.Open("/proc/cpuinfo"); err == nil {
		defer f.Close()
		for sc := bufio.NewScanner(f); sc.Scan(); {
			if k, v, ok := strings.Cut(sc.Text(), ":"); ok && strings.TrimSpace(k) == "model name" {
				h.CPU = strings.TrimSpace(v)
				break
			}
		}
	}
	return h
}

// latencies summarises by nearest rank.
func latencies(all []time.Duration) Latency {
	if len(all) == 0 {
		return Latency{}
	}
	slices.Sort(all)
	at := func(p float64) float64 {
		i := int(math.Ceil(p*float64(len(all)))) - 1
		return ms(all[max(0, min(i, len(all)-1))])
	}
	return Latency{P50: at(0.50), P90: at(0.90), P99: at(0.99), Max: ms(all[len(all)-1])}
}

func ms(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 }

// cpuSeconds is what this process has used so far.
func cpuSeconds() float64 {
	var ru unix.Rusage
	if unix.Getrusage(unix.RUSAGE_SELF, &ru) != nil {
		return 0
	}
	return float64(ru.Utime.Nano()+ru.Stime.Nano()) / 1e9
}

// Table prints results for people.
func Table(w io.Writer, results []Result) error {
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(tw, "name\ttarget\tn\tok\terrors\tparallel\tseconds\trate/s\tp50 ms\tp90 ms\tp99 ms\tmax ms\tclient cpu s\t")
	for _, r := range results {
		fmt.Fprintf(tw, "%s\t%s\t%d\t%d\t%d\t%d\t%.2f\t%s\t%s\t%s\t%s\t%s\t%.2f\t\n", r.Name, r.Target, r.N, r.OK, r.Errors, r.Parallel, r.Seconds,
			short(r.RatePerS), short(r.Latency.P50), short(r.Latency.P90), short(r.Latency.P99), short(r.Latency.Max), r.ClientCPUSeconds)
	}
	if err := tw.Flush(); err != nil {
		return err
	}
	for _, r := range results {
		keys := make([]string, 0, len(r.Extra))
		for k := range r.Extra {
			keys = append(keys, k)
		}
		slices.Sort(keys)
		for _, k := range keys {
			fmt.Fprintf(w, "%s (%s): %s = %s\n", r.Name, r.Target, k, short(r.Extra[k]))
		}
		for _, n := range r.Notes {
			fmt.Fprintf(w, "%s (%s): %s\n", r.Name, r.Target, n)
		}
		for _, e := range r.ErrorSamples {
			fmt.Fprintf(w, "%s (%s): error: %s\n", r.Name, r.Target, e)
		}
	}
	if len(results) > 0 {
		h := results[0].Host
		_, err := fmt.Fprintf(w, "host: %s, %d cores, %.1f GiB, Linux %s\n", h.CPU, h.Cores, float64(h.Memory)/(1<<30), h.Kernel)
		return err
	}
	return nil
}

// short prints three significant digits, and whole numbers whole.
func short(f float64) string {
	switch {
	case f == math.Trunc(f) || math.Abs(f) >= 1000:
		return strconv.FormatFloat(f, 'f', 0, 64)
	case math.Abs(f) >= 100:
		return strconv.FormatFloat(f, 'f', 1, 64)
	case math.Abs(f) >= 1:
		return strconv.FormatFloat(f, 'f', 2, 64)
	}
	return strconv.FormatFloat(f, 'f', 3, 64)
}
