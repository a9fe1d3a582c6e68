package bench

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
)

// Names of the files of a density report.
const (
	densityText = "density.md"
	densityData = "density.json"
	densityPlot = "density.svg"
)

// Report writes the run to dir: for people, for programs, and as a plot.
func (d *Density) Report(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	data, err := json.MarshalIndent(d, "", "  ")
	if err != nil {
		return err
	}
	var text strings.Builder
	d.markdown(&text)
	return errors.Join(
		os.WriteFile(filepath.Join(dir, densityText), []byte(text.String()), 0o644),
		os.WriteFile(filepath.Join(dir, densityData), append(data, '\n'), 0o644),
		os.WriteFile(filepath.Join(dir, densityPlot), []byte(d.plot()), 0o644),
	)
}

func mib(n int64) string   { return fmt.Sprintf("%.1f", float64(n)/(1<<20)) }
func kib(n float64) string { return fmt.Sprintf("%.1f", n/1024) }

// ratio of the last tenth's rate to the first's, 0 if there were too few.
func (d *Density) ratio() float64 {
	if d.First == 0 {
		return 0
	}
	return d.Last / d.First
}

// facts are the figures that matter most, as pairs.
func (d *Density) facts() [][2]string {
	facts := [][2]string{
		{"sandboxes live at once", fmt.Sprintf("%d of %d asked for, of %s", d.Live, d.Asked, strings.Join(d.Images, ", "))},
		{"memory in use, whole machine", mib(d.UsedBytes) + " MiB"},
		{"memory of one sandbox", kib(float64(d.Each)) + " KiB"},
		{"its guest", fmt.Sprintf("%s KiB private, %s KiB with its share of what it has with others (%d looked at, %d threads)", kib(float64(d.Guests.Private)), kib(float64(d.Guests.PSS)), d.Guests.Looked, d.Guests.Threads)},
		{"the server, for each", kib(d.perSandbox(d.Server.Before, d.Server.With)) + " KiB"},
		{"creates", fmt.Sprintf("%s/s, %d at once; p50 %s, p99 %s ms", short(d.Create.RatePerS), d.Parallel, short(d.Create.Latency.P50), short(d.Create.Latency.P99))},
		{"the last tenth against the first", fmt.Sprintf("%s/s against %s/s: %s", short(d.Last), short(d.First), short(d.ratio()))},
		{"exec in random ones", fmt.Sprintf("p50 %s, p90 %s, p99 %s, max %s ms (%d, %d at once)", short(d.Exec.Latency.P50), short(d.Exec.Latency.P90), short(d.Exec.Latency.P99), short(d.Exec.Latency.Max), d.Exec.N, d.Exec.Parallel)},
		{"stop of all, one request", fmt.Sprintf("%s/s, %s s", short(d.Remove.RatePerS), short(d.Remove.Seconds))},
		{"memory in use afterwards", mib(d.After) + " MiB"},
		{"errors", fmt.Sprint(d.Create.Errors + d.Exec.Errors + d.Remove.Errors)},
		{"audit", d.Audit},
	}
	if d.Stopped != "" {
		facts = append(facts, [2]string{"no more were made", d.Stopped})
	}
	return facts
}

func (d *Density) perSandbox(before, with int64) float64 {
	if d.Live == 0 {
		return 0
	}
	return float64(with-before) / float64(d.Live)
}

// Table prints the run for people.
func (d *Density) Table(w io.Writer) error {
	tw := tabwriter.NewWriter(w, 0, 4, 2, ' ', 0)
	for _, f := range d.facts() {
		fmt.Fprintf(tw, "%s\t%s\n", f[0], f[1])
	}
	fmt.Fprintln(tw)
	fmt.Fprintln(tw, "MEMORY\tBEFORE MiB\tWITH MiB\tKiB EACH")
	for _, c := range d.Memory {
		fmt.Fprintf(tw, "%s\t%s\t%s\t%s\n", c.Name, mib(c.Before), mib(c.With), kib(d.perSandbox(c.Before, c.With)))
	}
	fmt.Fprintln(tw)
	fmt.Fprintln(tw, "LIVE\tUSED MiB\tKiB EACH\tCREATES/S\tP50 ms\tP99 ms")
	for _, p := range d.Points {
		fmt.Fprintf(tw, "%d\t%s\t%s\t%s\t%s\t%s\n", p.Count, mib(p.UsedBytes), kib(float64(p.Each)), short(p.Rate), short(p.Latency.P50), short(p.Latency.P99))
	}
	for _, r := range []Result{d.Create, d.Exec, d.Remove} {
		for _, e := range r.ErrorSamples {
			fmt.Fprintf(tw, "%s: error: %s\n", r.Name, e)
		}
		for _, n := range r.Notes {
			fmt.Fprintf(tw, "%s: %s\n", r.Name, n)
		}
	}
	return tw.Flush()
}

func (d *Density) markdown(w *strings.Builder) {
	h := d.Host
	fmt.Fprintf(w, "# Density\n\nWritten by `dsec bench density --report`. Machine: %s, %d cores, %.1f GiB, Linux %s.\nEach sandbox has a guest and namespaces of its own, network included.\n\n", h.CPU, h.Cores, float64(h.Memory)/(1<<30), h.Kernel)
	row := func(cells ...string) { fmt.Fprintf(w, "| %s |\n", strings.Join(cells, " | ")) }
	head := func(cells ...string) {
		row(cells...)
		row(strings.Split(strings.Repeat("---,", len(cells)-1)+"---", ",")...)
	}
	head("what", "measured")
	for _, f := range d.facts() {
		row(f[0], f[1])
	}
	fmt.Fprintf(w, "\n![Memory and create latency against the number of live sandboxes](%s)\n\n## Memory by category\n\n", densityPlot)
	head("category", "before, MiB", "with all, MiB", "each, KiB")
	for _, c := range d.Memory {
		row(c.Name, mib(c.Before), mib(c.With), kib(d.perSandbox(c.Before, c.With)))
	}
	fmt.Fprintf(w, "\n\"In use\" is what the kernel does not call available: files and reclaimable slab are mostly available.\n\n## Against the count\n\n")
	head("live", "in use, MiB", "each, KiB", "creates/s", "p50, ms", "p90, ms", "p99, ms", "max, ms")
	for _, p := range d.Points {
		row(fmt.Sprint(p.Count), mib(p.UsedBytes), kib(float64(p.Each)), short(p.Rate), short(p.Latency.P50), short(p.Latency.P90), short(p.Latency.P99), short(p.Latency.Max))
	}
	fmt.Fprintf(w, "\n## Commands in random sandboxes\n\n")
	head("up to, ms", "commands")
	for _, b := range d.Histogram {
		end := "longer"
		if b.UpTo > 0 {
			end = short(b.UpTo)
		}
		row(end, fmt.Sprint(b.Count))
	}
}
