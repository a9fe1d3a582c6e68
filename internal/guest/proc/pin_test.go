package proc

import (
	"slices"
	"testing"

	"golang.org/x/sys/unix"
)

func TestPinChooses(t *testing.T) {
	t.Parallel()
	const last = len(unix.CPUSet{})*64 - 1
	for _, c := range []struct {
		has        []int
		from, cpus int
		want       []int
	}{
		{[]int{0, 1}, 0, 1, []int{0}},
		{[]int{0, 1}, 1, 1, []int{1}},
		{[]int{0, 1, 2, 3}, 3, 2, []int{0, 3}},
		{[]int{0, 5, 9}, 6, 2, []int{0, 9}},
		{[]int{2, last}, last, 1, []int{last}},
	} {
		p := &pin{cpus: c.cpus}
		for _, cpu := range c.has {
			p.all.Set(cpu)
		}
		set := p.choose(c.from)
		var got []int
		for cpu := range last + 1 {
			if set.IsSet(cpu) {
				got = append(got, cpu)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%d of %v from %d on: %v, want %v", c.cpus, c.has, c.from, got, c.want)
		}
	}
}

// A process sees the sandbox's processors, and the guest goes on with all.
func TestProcessSeesItsProcessors(t *testing.T) {
	t.Parallel()
	var all unix.CPUSet
	if err := unix.SchedGetaffinity(0, &all); err != nil {
		t.Fatal(err)
	}
	if all.Count() < 2 {
		t.Skip("this machine has one processor")
	}
	tab := newTable(t, func(c *Config) { c.CPUs = 1 })
	for range 20 {
		if _, out, _ := run(t, tab, sh("nproc")); out != "1\n" {
			t.Errorf("nproc says %q", out)
		}
	}
	var now unix.CPUSet
	if err := unix.SchedGetaffinity(0, &now); err != nil || now != all {
		t.Errorf("the guest has %d processors, %v", now.Count(), err)
	}
}
