package main

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	v1 "dsec/api/v1"
	"dsec/client"
)

// topSorts are what top can sort by, the first one unless told otherwise.
var topSorts = []string{"cpu", "memory", "swap", "io"}

// minTop is the shortest interval: nodes read all their sandboxes no more often.
const minTop = time.Second

func (a *app) topCmd() *cobra.Command {
	t := top{app: a}
	every := 2 * time.Second
	var labels []string
	var once bool
	cmd := &cobra.Command{
		Use: "top", Short: "Watch what sandboxes and nodes use: CPU, memory, swap, io",
		Long: `Top shows what nodes and their sandboxes use, again every --interval, until q or Ctrl-C: a line for each
node, and a row for each sandbox, those first that use most of what --sort names. However many sandboxes
and watchers there are, a node reads them once; no paused sandbox wakes.

CPU% is of one core, IO/S what was read from and written to disks, both since the reading before. A node's
cpu counts whatever runs on its machine; its memory is what is not free. JOB is the label job. On a terminal
as many rows are shown as fit; elsewhere, or with --json, all, unless -n says how many.

With --once it reads twice, --interval apart, shows one table, and ends. With --json each refresh is an
object on a line: time, nodes, sandboxes with usage, cpu_cores and io_bytes_per_second, and how many were
left out.`,
		Example: `  dsec top
  dsec top --sort memory --label job=train7
  dsec top --once -n 5
  dsec top --json --once | jq '.sandboxes[] | select(.usage.swap_bytes > 0) | .id'`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			t.json = a.asJSON
			switch {
			case !slices.Contains(topSorts, t.sort):
				return usagef("--sort %q: it is one of %s", t.sort, strings.Join(topSorts, ", "))
			case t.rows < 0:
				return usagef("-n %d: it must not be negative", t.rows)
			case every < minTop:
				return usagef("--interval must be at least %v", minTop)
			}
			if t.options.Labels, err = keyValues("label", labels); err != nil {
				return err
			}
			if t.c, err = a.client(); err != nil {
				return err
			}
			if once {
				return t.once(cmd.Context(), every)
			}
			return t.run(cmd.Context(), every)
		},
	}
	f := cmd.Flags()
	f.Var(newDuration(&every), "interval", "time between two readings")
	f.StringVar(&t.sort, "sort", topSorts[0], "what those shown first use most of: "+strings.Join(topSorts, ", "))
	f.StringArrayVarP(&labels, "label", "l", nil, "only those with this label, KEY=VALUE (repeatable)")
	f.IntVarP(&t.rows, "rows", "n", 0, "how many sandboxes to show; 0: as many as there is room for")
	f.BoolVar(&once, "once", false, "show one table and end")
	f.Bool(jsonFlag, false, "print each refresh as a line of JSON")
	cmd.RegisterFlagCompletionFunc("label", a.completeLabels())
	cmd.RegisterFlagCompletionFunc("sort", cobra.FixedCompletions(topSorts, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// top reads again and again.
type top struct {
	*app
	c       *client.Client
	options client.UsageOptions
	sort    string
	rows    int // 0: as many as fit
	json    bool

	nodes map[string]v1.NodeUsage // the reading before, by node
	rates map[string]rate         // of sandboxes, and by "node " and its id of nodes, between the two last readings
}

// rate is what was used between two readings.
type rate struct {
	cores float64
	io    float64 // bytes a second
	known bool
}

// topNode is a node in top --json.
type topNode struct {
	v1.Node
	Cores  *float64    `json:"cpu_cores,omitempty"` // of the machine, in use on average since the reading before
	CPU    int64       `json:"cpu_millis"`
	Memory int64       `json:"memory_bytes"`
	Error  *v1.Problem `json:"error,omitempty"`
}

// topRow is a sandbox in top --json.
type topRow struct {
	v1.SandboxUsage
	Cores *float64 `json:"cpu_cores,omitempty"`
	IO    *float64 `json:"io_bytes_per_second,omitempty"`
}

// topReading is a refresh.
type topReading struct {
	Time      time.Time `json:"time"`
	Nodes     []topNode `json:"nodes"`
	Sandboxes []topRow  `json:"sandboxes"`
	LeftOut   int       `json:"left_out"`
}

// read asks for what is used, and compares it with the reading before.
func (t *top) read(ctx context.Context) (topReading, error) {
	l, err := t.c.Usage(ctx, t.options)
	if err != nil {
		return topReading{}, err
	}
	r := topReading{Time: time.Now().UTC(), Nodes: []topNode{}, Sandboxes: []topRow{}}
	rates, nodes := map[string]rate{}, map[string]v1.NodeUsage{}
	for _, n := range l.Nodes {
		before, seen := t.nodes[n.Node.ID]
		was := map[string]*v1.Usage{}
		for _, it := range before.Items {
			was[it.ID] = it.Usage
		}
		took := n.At.Sub(before.At).Seconds()
		fresh := seen && before.Error == nil && n.Error == nil && took > 0
		between := func(key string, cores, io float64, known bool) rate {
			switch {
			case !known:
				return rate{}
			case fresh:
				rates[key] = rate{max(cores, 0) / took, max(io, 0) / took, true}
			case seen && took == 0: // the node has not read again yet
				rates[key] = t.rates[key]
			}
			return rates[key]
		}
		nr := between("node "+n.Node.ID, n.CPUSeconds-before.CPUSeconds, 0, n.CPUSeconds > 0)
		r.Nodes = append(r.Nodes, topNode{Node: n.Node, Cores: nr.used(), CPU: n.CPUMillis, Memory: n.MemoryBytes, Error: n.Error})
		for _, it := range n.Items {
			row := topRow{SandboxUsage: it}
			if u, b := it.Usage, was[it.ID]; u != nil {
				known := b != nil
				if !known {
					b = &v1.Usage{}
				}
				sr := between(it.ID, u.CPUSeconds-b.CPUSeconds, float64(u.IOReadBytes+u.IOWrittenBytes-b.IOReadBytes-b.IOWrittenBytes), known)
				row.Cores, row.IO = sr.used(), sr.moved()
			}
			r.Sandboxes = append(r.Sandboxes, row)
		}
		nodes[n.Node.ID] = n
	}
	t.nodes, t.rates = nodes, rates
	slices.SortFunc(r.Sandboxes, func(a, b topRow) int {
		return cmp.Or(cmp.Compare(t.weight(b), t.weight(a)), strings.Compare(a.ID, b.ID))
	})
	return r, nil
}

func (r rate) used() *float64 {
	if !r.known {
		return nil
	}
	return &r.cores
}

func (r rate) moved() *float64 {
	if !r.known {
		return nil
	}
	return &r.io
}

// weight is what rows are sorted by.
func (t *top) weight(r topRow) float64 {
	known := func(f *float64) float64 {
		if f == nil {
			return 0
		}
		return *f
	}
	switch {
	case r.Usage == nil:
		return -1
	case t.sort == "memory":
		return float64(r.Usage.MemoryBytes)
	case t.sort == "swap":
		return float64(r.Usage.SwapBytes)
	case t.sort == "io":
		return known(r.IO)
	}
	return known(r.Cores)
}

// limit leaves out what there is no room for.
func (r *topReading) limit(rows int) {
	if rows < len(r.Sandboxes) {
		r.LeftOut = len(r.Sandboxes) - rows
		r.Sandboxes = r.Sandboxes[:rows]
	}
}

// failed is the first node that cannot be read.
func (r *topReading) failed() error {
	for _, n := range r.Nodes {
		if n.Error != nil {
			return fmt.Errorf("node %s: %w", n.ID, n.Error.Err())
		}
	}
	return nil
}

func (t *top) once(ctx context.Context, every time.Duration) error {
	if _, err := t.read(ctx); err != nil {
		return err
	}
	select {
	case <-time.After(every):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	r, err := t.read(ctx)
	if err != nil {
		return err
	}
	if err := t.print(r); err != nil {
		return err
	}
	return r.failed()
}

// print shows a reading where lines follow each other.
func (t *top) print(r topReading) error {
	if t.rows > 0 {
		r.limit(t.rows)
	}
	if t.json {
		return t.jsonLine(r)
	}
	return r.write(t.stdout)
}

// write shows the nodes, and a table of the sandboxes.
func (r *topReading) write(w io.Writer) error {
	for _, n := range r.Nodes {
		if _, err := fmt.Fprintln(w, printable(n.line())); err != nil {
			return err
		}
	}
	rows := make([][]string, len(r.Sandboxes))
	for i, s := range r.Sandboxes {
		rows[i] = s.cells()
	}
	if err := table(w, []string{"ID", "STATE", "CPU%", "MEMORY", "SWAP", "IO/S", "PROCESSES", "JOB", "QOS"}, rows); err != nil {
		return err
	}
	if r.LeftOut > 0 {
		_, err := fmt.Fprintf(w, "and %d more\n", r.LeftOut)
		return err
	}
	return nil
}

func (n *topNode) line() string {
	if n.Error != nil {
		return fmt.Sprintf("node %s: %s", n.ID, n.Error.Message)
	}
	cpu := "-"
	if n.Cores != nil && n.CPU > 0 {
		cpu = fmt.Sprintf("%.0f%%", *n.Cores*100_000/float64(n.CPU))
	}
	return fmt.Sprintf("node %s: cpu %s of %s, memory %s/%s, swap %s, pressure %s, %s, %d paused", n.ID, cpu, count(int(n.CPU/1000), "core"),
		size(max(n.Memory-n.FreeMemory, 0)), size(n.Memory), swapOf(n.Swap), cmp.Or(n.Pressure, "none"), count(int(n.Sandboxes), "sandbox"), n.Paused)
}

func (r *topRow) cells() []string {
	row := []string{r.ID, orDash(string(r.State)), "-", "-", "-", "-", "-", orDash(r.Labels["job"]), orDash(string(r.QoS))}
	if u := r.Usage; u != nil {
		row[3], row[4], row[6] = size(u.MemoryBytes), size(u.SwapBytes), fmt.Sprint(u.Processes)
	}
	if r.Cores != nil {
		row[2] = fmt.Sprintf("%.1f", *r.Cores*100)
	}
	if r.IO != nil {
		row[5] = size(int64(*r.IO))
	}
	return row
}

// Sequences of terminals.
const (
	altScreen  = "\x1b[?1049h\x1b[?25l" // a screen of its own, without cursor
	mainScreen = "\x1b[?25h\x1b[?1049l"
	toTop      = "\x1b[H"
	restOfLine = "\x1b[K"
	allBelow   = "\x1b[J"
)

// run shows readings until ctx ends, or somebody presses q on the terminal.
func (t *top) run(ctx context.Context, every time.Duration) error {
	r, err := t.read(ctx)
	if err != nil {
		return err
	}
	out, ok := t.stdout.(*os.File)
	screen := ok && isTerminal(out) && !t.json
	show := func() error { return t.print(r) }
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	winch := make(chan os.Signal, 1)
	if screen {
		signal.Notify(winch, syscall.SIGWINCH)
		defer signal.Stop(winch)
		defer t.keys(stop)()
		fmt.Fprint(out, altScreen)
		defer fmt.Fprint(out, mainScreen)
		show = func() error { return t.draw(out, r, err) }
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	for n := 0; ; n++ {
		// Where lines stay, the first reading is only what the second is compared with.
		if screen || n > 0 {
			if err := show(); err != nil {
				return err
			}
		}
		select {
		case <-winch:
			continue
		case <-tick.C:
		case <-ctx.Done():
			return nil // that is how it is meant to end
		}
		var next topReading
		next, err = t.read(ctx)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			r = next
		case !screen:
			return err
		} // on a screen the last reading stays, with the error, until the server is back
	}
}

// keys calls quit at q and Ctrl-C, which a raw terminal does not turn into a signal. The
// returned function gives the terminal back.
func (t *top) keys(quit func()) (restore func()) {
	_, restore, err := t.raw()
	if err != nil {
		return func() {} // without a keyboard
	}
	go func() {
		b := make([]byte, 64)
		for {
			n, err := t.stdin.Read(b)
			if err != nil {
				return
			}
			if bytes.ContainsAny(b[:n], "qQ\x03") {
				quit()
				return
			}
		}
	}()
	return restore
}

// draw fills the terminal with a reading, or what of it fits, and with why there is no newer one.
func (t *top) draw(out *os.File, r topReading, failed error) error {
	dim, err := terminalSize(int(out.Fd()))
	if err != nil {
		dim = noTerminal
	}
	last := "q quits"
	if failed != nil {
		last = brief(failed)
	}
	room := max(int(dim.Rows)-len(r.Nodes)-3, 0) // a head, what is left out, the last line
	if t.rows > 0 {
		room = min(room, t.rows)
	}
	r.limit(room)
	var text bytes.Buffer
	if err := r.write(&text); err != nil {
		return err
	}
	text.WriteString(printable(last))
	lines := strings.Split(text.String(), "\n")
	lines = lines[max(len(lines)-int(dim.Rows), 0):]
	var screen strings.Builder
	screen.WriteString(toTop)
	for i, l := range lines {
		if i > 0 {
			screen.WriteString("\r\n")
		}
		screen.WriteString(fit(l, int(dim.Cols)) + restOfLine)
	}
	screen.WriteString(allBelow)
	_, err = io.WriteString(out, screen.String())
	return err
}

// fit cuts a line to a number of columns.
func fit(s string, columns int) string {
	r := []rune(s)
	return string(r[:min(len(r), columns)])
}
