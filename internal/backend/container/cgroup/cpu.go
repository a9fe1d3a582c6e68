package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"

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

// prepareCPU sets what all groups have of the processors together.
func (h *Hierarchy) prepareCPU() error {
	idle := h.idleParent()
	if err := mkdir(idle); err != nil {
		return err
	}
	cpus := int64(runtime.NumCPU())
	file, all, least := "cpu.shares", int64(sharesPerCPU*cpus), int64(leastShares)
	if h.v2 {
		if err := enableV2(idle); err != nil {
			return err
		}
		file, all, least = "cpu.weight", min(weightPerCPU*cpus, maxWeight), leastWeight
	}
	if err := write(filepath.Join(h.dir("cpu"), file), itoa(all)); err != nil {
		return err
	}
	err := write(filepath.Join(idle, idleFile), "1")
	if errors.Is(err, unix.ENOENT) {
		err = write(filepath.Join(idle, file), itoa(least))
	}
	return err
}

// IdleClass tells whether the kernel has the idle class for groups; without it they have the least weight.
func (h *Hierarchy) IdleClass() bool {
	_, err := os.Stat(filepath.Join(h.idleParent(), idleFile))
	return !errors.Is(err, fs.ErrNotExist)
}
