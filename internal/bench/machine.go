package bench

import (
	"bufio"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// MemoryState of a machine, in bytes.
type MemoryState struct {
	Total     int64
	Available int64
	Used      int64            // all that is not available
	By        map[string]int64 // by category
}

// memoryCategories are what memory is used for, as far as the kernel tells; what it can take back at
// once (files, reclaimable slab) mostly is available all the same.
var memoryCategories = []string{"anonymous", "slab, unreclaimable", "slab, reclaimable", "page tables", "kernel stacks", "per processor", "shared memory", "files", "free"}

// Machine is the Peek of the machine that this process runs on.
type Machine struct{ Proc string } // where /proc is

// Memory implements Peek.
func (m Machine) Memory() (MemoryState, error) {
	b, err := os.ReadFile(filepath.Join(m.Proc, "meminfo"))
	if err != nil {
		return MemoryState{}, fmt.Errorf("read memory: %w", err)
	}
	return parseMemory(b)
}

// parseMemory reads /proc/meminfo.
func parseMemory(b []byte) (MemoryState, error) {
	f := map[string]int64{}
	for line := range bytes.Lines(b) {
		name, rest, ok := strings.Cut(string(line), ":")
		if !ok {
			continue
		}
		kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		if err == nil {
			f[name] = kib << 10
		}
	}
	if f["MemTotal"] == 0 || f["MemAvailable"] == 0 {
		return MemoryState{}, fmt.Errorf("read memory: there is no MemTotal or MemAvailable")
	}
	m := MemoryState{Total: f["MemTotal"], Available: f["MemAvailable"], Used: f["MemTotal"] - f["MemAvailable"]}
	m.By = map[string]int64{
		"anonymous": f["AnonPages"], "slab, unreclaimable": f["SUnreclaim"], "slab, reclaimable": f["SReclaimable"],
		"page tables": f["PageTables"] + f["SecPageTables"], "kernel stacks": f["KernelStack"], "per processor": f["Percpu"],
		"shared memory": f["Shmem"], "files": f["Cached"] + f["Buffers"] - f["Shmem"], "free": f["MemFree"],
	}
	return m, nil
}

// GuestMemory is what the guests of some sandboxes have, each on average.
type GuestMemory struct {
	Looked  int   `json:"looked_at"`
	PSS     int64 `json:"pss"`     // resident memory, with its share of what it has with others
	Private int64 `json:"private"` // written by it alone
	Threads int   `json:"threads"` // of all that were looked at
}

// guestName is the kernel's name of a guest's process.
const guestName = "dsec-guest"

// Guests implements Peek.
func (m Machine) Guests(ids []string) (g GuestMemory, err error) {
	entries, err := os.ReadDir(m.Proc)
	if err != nil {
		return g, fmt.Errorf("look for guests: %w", err)
	}
	wanted := map[string]bool{}
	for _, id := range ids {
		wanted[id] = true
	}
	for _, e := range entries {
		if g.Looked == len(ids) {
			break
		}
		dir := filepath.Join(m.Proc, e.Name())
		name, err := os.ReadFile(filepath.Join(dir, "comm"))
		if err != nil || strings.TrimSpace(string(name)) != guestName {
			continue
		}
		groups, err := os.ReadFile(filepath.Join(dir, "cgroup"))
		if err != nil || !slices.ContainsFunc(strings.FieldsFunc(string(groups), func(r rune) bool { return r == '/' || r == '\n' }), func(s string) bool { return wanted[s] }) {
			continue // it ended, or is another's
		}
		maps, err := fields(filepath.Join(dir, "smaps_rollup"))
		if err != nil {
			continue
		}
		status, err := fields(filepath.Join(dir, "status"))
		if err != nil {
			continue
		}
		g.Looked++
		g.PSS += maps["Pss"] << 10
		g.Private += maps["Private_Dirty"] << 10
		g.Threads += int(status["Threads"])
	}
	if g.Looked > 0 {
		g.PSS /= int64(g.Looked)
		g.Private /= int64(g.Looked)
	}
	return g, nil
}

// fields reads the lines "name: number" of a file.
func fields(path string) (map[string]int64, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	out := map[string]int64{}
	sc := bufio.NewScanner(f)
	for sc.Scan() {
		name, rest, ok := strings.Cut(sc.Text(), ":")
		if !ok {
			continue
		}
		if word := strings.Fields(rest); len(word) > 0 {
			if n, err := strconv.ParseInt(word[0], 10, 64); err == nil {
				out[name] = n
			}
		}
	}
	return out, sc.Err()
}
