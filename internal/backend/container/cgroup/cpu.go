package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// The weight of all groups together against what else runs on the machine, where each thread outside of
// any group counts as a group with 1024 shares (v1) or a weight of 100 (v2). On a processor
// that sandboxes keep busy, one thread of the node gets a third, and they get two.
const (
	sharesPerCPU = 2048
	weightPerCPU = 200
	maxWeight    = 10000 // the kernel's
)

// Groups of the idle class have a parent of their own in the hierarchy of the cpu controller, beside that of all
// others, and it is that parent which is idle: the kernel compares two threads at the level where their groups
// have the same parent, so a group that is idle below the common one would share its weight, and
// take two thirds of a processor from the node's own threads. Among each other they are as usual.
const (
	IdleSuffix = "-be"      // of that parent's name
	idleFile   = "cpu.idle" // kernel 5.15, both versions
)

// Of a kernel without the idle class: the least weight there is.
const (
	leastShares = 2
	leastWeight = 1
)

// What the idle class has while one of its groups is in a hurry: a fifth of a processor that sandboxes
// keep busy; and what that group has of it, the most there is.
const (
	hurriedShares = 512
	hurriedWeight = 50
	mostShares    = 1 << 18
	usualShares   = 1024
	usualWeight   = 100
)

// hurries counts the groups of the idle class that are in a hurry.
type hurries struct {
	mu sync.Mutex
	n  int
}

// idleParent is where groups of the idle class are, in the hierarchy of the cpu controller.
func (h *Hierarchy) idleParent() string { return h.dir("cpu") + IdleSuffix }

// group is the directory of group name in a controller's hierarchy, whichever class it has.
func (h *Hierarchy) group(controller, name string) string {
	dir := h.dir(controller)
	if dir == h.dir("cpu") {
		idle := filepath.Join(h.idleParent(), name)
		if _, err := os.Lstat(idle); err == nil {
			return idle
		}
	}
	return filepath.Join(dir, name)
}

// Idle tells whether group name is of the idle class.
func (h *Hierarchy) Idle(name string) bool {
	return filepath.Dir(h.group("cpu", name)) == h.idleParent()
}

// Hurry lets group name of the idle class run though others keep every processor busy, until calm, which may be
// called once: it must end, stand still or begin, and without that would need seconds. It is the parent
// that is lifted out of the idle class, and within it the group has nearly all; that needs two writes, where
// moving each process to another group would take milliseconds for each. What fails makes it slow, no more.
func (h *Hierarchy) Hurry(name string) (calm func()) {
	file, parent, most, usual := "cpu.shares", int64(hurriedShares), int64(mostShares), int64(usualShares)
	if h.v2 {
		file, parent, most, usual = "cpu.weight", hurriedWeight, maxWeight, usualWeight
	}
	own := filepath.Join(h.idleParent(), name, file)
	h.hurries.mu.Lock()
	defer h.hurries.mu.Unlock()
	if h.hurries.n++; h.hurries.n == 1 {
		_ = write(filepath.Join(h.idleParent(), idleFile), "0")
		_ = write(filepath.Join(h.idleParent(), file), itoa(parent))
	}
	_ = write(own, itoa(most))
	return func() {
		h.hurries.mu.Lock()
		defer h.hurries.mu.Unlock()
		_ = write(own, itoa(usual)) // fails if it has ended
		if h.hurries.n--; h.hurries.n == 0 {
			_ = h.makeIdle() // else the next one that is in a hurry tries again
		}
	}
}

// makeIdle puts the parent of groups of the idle class into it.
func (h *Hierarchy) makeIdle() error {
	err := write(filepath.Join(h.idleParent(), idleFile), "1")
	switch {
	case !errors.Is(err, unix.ENOENT):
		return err
	case h.v2:
		return write(filepath.Join(h.idleParent(), "cpu.weight"), itoa(leastWeight))
	}
	return write(filepath.Join(h.idleParent(), "cpu.shares"), itoa(leastShares))
}

// prepareCPU sets what all groups have of the processors together.
func (h *Hierarchy) prepareCPU() error {
	idle := h.idleParent()
	if err := mkdir(idle); err != nil {
		return err
	}
	cpus := int64(runtime.NumCPU())
	file, all := "cpu.shares", int64(sharesPerCPU*cpus)
	if h.v2 {
		if err := enableV2(idle); err != nil {
			return err
		}
		file, all = "cpu.weight", min(weightPerCPU*cpus, maxWeight)
	}
	if err := write(filepath.Join(h.dir("cpu"), file), itoa(all)); err != nil {
		return err
	}
	left, err := os.ReadDir(idle) // of an earlier process, which may have died while some were in a hurry
	if err != nil {
		return err
	}
	for _, e := range left {
		if e.IsDir() {
			h.Hurry(e.Name())()
		}
	}
	return h.makeIdle()
}

// IdleClass tells whether the kernel has the idle class for groups; without it they have the least weight.
func (h *Hierarchy) IdleClass() bool {
	_, err := os.Stat(filepath.Join(h.idleParent(), idleFile))
	return !errors.Is(err, fs.ErrNotExist)
}
