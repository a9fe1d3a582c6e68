// Command leaks says what tests left on the machine: 'leaks note FILE' before them,
// 'leaks check FILE DIR' after them, whose temporary files were all below DIR. What
// belongs to nodes that run elsewhere does not count: others may use the machine too.
package main

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"dsec/internal/doctor"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	switch {
	case len(args) == 2 && args[0] == "note":
		now, err := left("")
		if err != nil {
			return err
		}
		return os.WriteFile(args[1], []byte(strings.Join(now, "\n")), 0o600)
	case len(args) == 3 && args[0] == "check":
		return check(args[1], args[2])
	}
	return errors.New("usage: leaks note FILE | leaks check FILE DIR")
}

// settle is how long what ends in the background may take. Other nodes make sandboxes
// meanwhile, of which one look may see a half: a leak is what every look sees.
const settle = 15 * time.Second

func check(file, dir string) error {
	before := map[string]bool{}
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		before[s.Text()] = true
	}
	leaks := map[string]int{} // how many looks saw it
	looks := 0
	for deadline := time.Now().Add(settle); ; time.Sleep(200 * time.Millisecond) {
		now, err := left(dir)
		if err != nil {
			return err
		}
		looks++
		var fresh []string
		for _, x := range now {
			if before[x] {
				continue
			}
			if leaks[x]++; leaks[x] == looks {
				fresh = append(fresh, x)
			}
		}
		if len(fresh) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the tests left something behind:\n%s", strings.Join(fresh, "\n"))
		}
	}
}

// left lists what belongs to no running node, and what belongs to one below dir: those
// of the tests have ended by now, or are leaks themselves.
func left(dir string) (found []string, err error) {
	a, err := doctor.Run(doctor.Node{})
	if err != nil {
		return nil, err
	}
	for _, i := range a.Items {
		if i.Owner == doctor.Leak || dir != "" && strings.HasPrefix(i.Node, dir+"/") {
			found = append(found, i.Kind+" "+i.Name)
		}
	}
	if dir == "" {
		return found, nil
	}
	return found, processes(dir, func(what string) { found = append(found, what) })
}

// processes tells of those that were started with a path below dir.
func processes(dir string, tell func(string)) error {
	all, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, p := range all {
		b, err := os.ReadFile(p)
		if err != nil {
			continue // it has ended
		}
		if line := strings.ReplaceAll(string(b), "\x00", " "); strings.Contains(line, dir+"/") {
			tell("process " + filepath.Base(filepath.Dir(p)) + ": " + line)
		}
	}
	return nil
}
