package pressure

import (
	"bufio"
	"os"
	"strconv"
	"strings"
	"time"
)

// Level is how short of memory a node is. Each includes what those below do.
type Level int

// Levels.
const (
	None      Level = iota
	Admission       // no more sandboxes
	Pause           // sandboxes of class be are paused
	Evict           // sandboxes are removed
)

// String is the name in the API: empty for None.
func (l Level) String() string { return [...]string{"", "admission", "pause", "evict"}[l] }

// Reading is of the node's memory at one time.
type Reading struct {
	FreeBytes int64   // that can be had without swapping
	Stall     float64 // percent of the last ten seconds in which nothing ran for want of memory; 0 if not known
}

// Limits say when a level begins: with less free than this. A limit of 0 is never met.
type Limits struct {
	Admission, Pause, Evict int64
}

// LimitsFor are those of a node that keeps so much free.
func LimitsFor(reserve int64) Limits {
	return Limits{Admission: reserve, Pause: reserve / 4 * 3, Evict: reserve / 2}
}

const (
	// stallMost lifts the level by one, of a node that has little free anyway: processes that thrash at
	// their own sandbox's limit stall too, and are no reason to touch others.
	stallMost = 20
	// A level ends when a quarter more is free than where it began, and that for as long as hold.
	hold = 5 * time.Second
)

func (l Limits) at(level Level) int64 { return [...]int64{0, l.Admission, l.Pause, l.Evict}[level] }

// demand is the level that begins with a reading, if the limits are so many percent of what they are.
func (l Limits) demand(r Reading, percent int64) Level {
	level := None
	for up := Admission; up <= Evict; up++ {
		if r.FreeBytes*100 < l.at(up)*percent {
			level = up
		}
	}
	if level > None && r.Stall > stallMost {
		level = min(level+1, Evict)
	}
	return level
}

// Stall reads how much of the last ten seconds nothing ran for want of memory, from a file like
// /proc/pressure/memory. It is 0 where the kernel does not say.
func Stall(path string) float64 {
	f, err := os.Open(path)
	if err != nil {
		return 0
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), "full avg10="); ok {
			number, _, _ := strings.Cut(rest, " ")
			stall, err := strconv.ParseFloat(number, 64)
			if err == nil {
				return stall
			}
		}
	}
	return 0
}
