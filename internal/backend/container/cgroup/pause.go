package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// A group's memory goes to swap only while it is paused. With v1 swappiness keeps the kernel from it (a limit
// of the sum of both alone does not), with v2 the limit of swap.
const (
	swappinessV1 = "memory.swappiness"
	kernelUsedV1 = "memory.kmem.usage_in_bytes"
	reclaimV1    = "memory.force_empty"
	reclaimV2    = "memory.reclaim" // kernel 5.19
)

// OpenSwap lets group name's memory go to swap. With v1 its limit is of both together; with v2 it may have as
// much there as in memory, so that pauses that follow each other do not add up.
func (h *Hierarchy) OpenSwap(name string) error {
	if h.v2 {
		limit, err := os.ReadFile(filepath.Join(h.dir("memory"), name, "memory.max"))
		if err != nil {
			return err
		}
		return write(filepath.Join(h.dir("memory"), name, swapLimitV2), strings.TrimSpace(string(limit)))
	}
	return write(filepath.Join(h.dir("memory"), name, swappinessV1), "100")
}

// CloseSwap undoes OpenSwap; what is out stays there until it is needed.
func (h *Hierarchy) CloseSwap(name string) error {
	file := swappinessV1
	if h.v2 {
		file = swapLimitV2
	}
	err := write(filepath.Join(h.dir("memory"), name, file), "0")
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) { // nothing to close
		return nil
	}
	return err
}

// CanSwap fails where a group's memory cannot be counted in swap, which then would have no limit.
func (h *Hierarchy) CanSwap() error {
	if !h.swap {
		return errors.New("the kernel does not count swap for each control group (boot with swapaccount=1)")
	}
	return nil
}

// Reclaim frees what the kernel can of group name's memory. It returns when it finds nothing more, though
// what it is just writing to swap may follow.
func (h *Hierarchy) Reclaim(name string) error {
	path := func(file string) string { return filepath.Join(h.dir("memory"), name, file) }
	var err error
	if h.v2 {
		used, uerr := h.MemoryUsed(name)
		if uerr != nil || used == 0 {
			return uerr
		}
		err = write(path(reclaimV2), itoa(used))
	} else if kernel, kerr := h.number(name, kernelUsedV1); kerr == nil && kernel > 0 {
		// A limit that cannot be kept is refused after one try to get there, where emptying makes sixteen. With
		// something of the kernel's in the group, as every process has, this one is never kept.
		err = write(path(memoryLimitV1), "0")
	} else {
		err = write(path(reclaimV1), "0")
	}
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) || errors.Is(err, unix.EBUSY) || errors.Is(err, fs.ErrNotExist) { // not all of it; no such file before 5.19
		return nil
	}
	return err
}

// MemoryUsed is what group name uses, without swap.
func (h *Hierarchy) MemoryUsed(name string) (int64, error) {
	if h.v2 {
		return h.number(name, "memory.current")
	}
	return h.number(name, "memory.usage_in_bytes")
}

// number reads a file of the memory controller that holds one.
func (h *Hierarchy) number(name, file string) (int64, error) {
	b, err := os.ReadFile(filepath.Join(h.dir("memory"), name, file))
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

// Memory is how group name's memory divides.
type Memory struct {
	Anonymous int64 // what can only go to swap
	Writing   int64 // is on its way to a device
}

// Memory reads that; both versions name these alike.
func (h *Hierarchy) Memory(name string) (m Memory, err error) {
	b, err := os.ReadFile(filepath.Join(h.dir("memory"), name, "memory.stat"))
	if err != nil {
		return m, err
	}
	for line := range strings.Lines(string(b)) {
		key, value, _ := strings.Cut(strings.TrimSuffix(line, "\n"), " ")
		to := map[string]*int64{"inactive_anon": &m.Anonymous, "active_anon": &m.Anonymous, "writeback": &m.Writing, "file_writeback": &m.Writing}[key]
		if to == nil {
			continue
		}
		n, err := strconv.ParseInt(value, 10, 64)
		if err != nil {
			return m, fmt.Errorf("memory.stat of %s: %w", name, err)
		}
		*to += n
	}
	return m, nil
}
