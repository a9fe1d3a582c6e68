package doctor

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// threads of a process; none of one that ended.
func threads(pid string) int {
	tasks, _ := os.ReadDir("/proc/" + pid + "/task")
	return len(tasks)
}

// kindsOf counts what a process has open, by kind.
func kindsOf(pid string) map[string]int {
	kinds := map[string]int{}
	for _, what := range descriptors(pid) {
		kinds[kindOf(what)]++
	}
	return kinds
}

// kindOf is the kind of what a descriptor's link names.
func kindOf(what string) string {
	switch {
	case strings.HasPrefix(what, "/"):
		return "fd file"
	case strings.HasPrefix(what, "socket:"):
		return "fd socket"
	case strings.HasPrefix(what, "pipe:"):
		return "fd pipe"
	case strings.HasPrefix(what, "pidfd:"), what == "anon_inode:[pidfd]":
		return "fd pidfd"
	case what == "anon_inode:[eventfd]":
		return "fd eventfd"
	case what == "anon_inode:[eventpoll]":
		return "fd epoll"
	case strings.HasPrefix(what, "anon_inode:bpf"), what == "anon_inode:[bpf-link]":
		return "fd bpf"
	}
	return "fd other"
}

// swapName is what a node calls its swap file.
const swapName = "dsec.swap"

// swaps lists nodes' swap files that the kernel uses.
func swaps(add func(kind, name, sandbox, where string)) error {
	b, err := os.ReadFile("/proc/swaps")
	if errors.Is(err, fs.ErrNotExist) { // a kernel without swap
		return nil
	}
	if err != nil {
		return err
	}
	for _, file := range swapFiles(string(b)) {
		add("swap", file, "", file)
	}
	return nil
}

// swapFiles are the nodes' among those of /proc/swaps.
func swapFiles(list string) (found []string) {
	for line := range strings.Lines(list) {
		// The kernel writes a blank in a name as an octal number, and says if the file is deleted.
		name, _, _ := strings.Cut(line, " ")
		name = strings.TrimSuffix(strings.TrimSpace(name), `\040(deleted)`)
		if filepath.Base(name) == swapName {
			found = append(found, strings.ReplaceAll(name, `\040`, " "))
		}
	}
	return found
}

// devices lists network devices of the host that bear the name of a node. Sandboxes have
// only loopbacks, in namespaces of their own.
func devices(add func(kind, name, sandbox, where string)) error {
	entries, err := os.ReadDir("/sys/class/net")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "dsec") {
			add("device", e.Name(), "", e.Name())
		}
	}
	return nil
}
