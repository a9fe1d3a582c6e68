package cgroup

import (
	"os"
	"strconv"
	"strings"
)

// Member returns the name of the group below the parent group (as of [NameOf]) that a thread is
// in, wherever the hierarchies are mounted.
func Member(pid int, parent string) (name string, ok bool) {
	data, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cgroup")
	if err != nil {
		return "", false // it has ended
	}
	return member(string(data), parent)
}

// member reads the lines of a cgroup file: hierarchy, controllers and path.
func member(lines, parent string) (name string, ok bool) {
	for line := range strings.Lines(lines) {
		path := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(path) < 3 {
			continue
		}
		if _, rest, found := strings.Cut(path[2]+"/", "/"+parent+"/"); found {
			if name, _, _ = strings.Cut(rest, "/"); name != "" {
				return name, true
			}
		}
	}
	return "", false
}
