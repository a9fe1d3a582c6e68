package container

import (
	"fmt"
	"testing"

	"golang.org/x/sys/unix"

	"dsec/internal/backend"
)

func TestVisibleFiles(t *testing.T) {
	t.Parallel()
	const machine = "processor\t: 0\nflags\t\t: a\n\nprocessor\t: 1\nflags\t\t: b\n\nprocessor\t: 2\nflags\t\t: c\n\n"
	if got := string(cpuInfo([]byte(machine), 2)); got != "processor\t: 0\nflags\t\t: a\n\nprocessor\t: 1\nflags\t\t: b\n\n" {
		t.Errorf("cpuinfo: %q", got)
	}
	for n, want := range map[int]string{1: "0\n", 2: "0-1\n", 64: "0-63\n"} {
		if got := string(cpuList(n)); got != want {
			t.Errorf("%d processors: %q", n, got)
		}
	}
	const info = "MemTotal:       24684032 kB\nMemFree:         1000000 kB\nMemAvailable:    2000000 kB\nCached:          7031000 kB\nSwapTotal:       4000000 kB\nHugePages_Total:       5\nHugepagesize:       2048 kB\nodd\n"
	const want = "MemTotal:         524288 kB\nMemFree:          524288 kB\nMemAvailable:     524288 kB\nCached:                0 kB\nSwapTotal:             0 kB\nHugePages_Total:       0\nHugepagesize:       2048 kB\n"
	if got := string(memInfo([]byte(info), 512<<20)); got != want {
		t.Errorf("meminfo:\n%swant\n%s", got, want)
	}
	v := &visible{machine: 4}
	for millis, want := range map[int64]int{0: 0, 1: 1, 1000: 1, 1001: 2, 3000: 3, 3500: 0, 4000: 0, 9000: 0} {
		if got := v.cpus(millis); got != want {
			t.Errorf("%d thousandths of a processor: %d, want %d", millis, got, want)
		}
	}
}

// However many different limits there were, the files of later ones can be made, and those in use stay.
func TestVisibleFilesAreBounded(t *testing.T) {
	v, err := newVisible()
	if err != nil {
		t.Skip(err) // it takes root
	}
	defer v.close()
	first, err := v.views(1, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer closeViews(first)
	for n := range int64(3 * visibleMost) {
		all, err := v.views(0, (n+2)<<20)
		if err != nil {
			t.Fatal(err)
		}
		closeViews(all)
	}
	if len(v.made) > visibleMost {
		t.Errorf("%d files are kept", len(v.made))
	}
	for _, f := range first {
		var st unix.Stat_t
		if err := unix.Fstat(f.fd, &st); err != nil || st.Size == 0 {
			t.Errorf("%s: %d bytes, %v", f.path, st.Size, err)
		}
	}
}

// Programs that size themselves by the machine see the sandbox's limits, and cannot change what they see.
func TestLimitsAreVisible(t *testing.T) {
	t.Parallel()
	b := newBox(t, func(s *backend.Spec) { s.Sandbox.CPUMillis, s.Sandbox.MemoryBytes = 1000, 512<<20 })
	for script, want := range map[string]string{
		"nproc": "1", "grep -c ^processor /proc/cpuinfo": "1", "cat /sys/devices/system/cpu/online": "0",
		"grep -E '^Mem(Total|Available)' /proc/meminfo | tr -s ' '": "MemTotal: 524288 kB\nMemAvailable: 524288 kB",
	} {
		if got, _ := b.sh(script); got != want {
			t.Errorf("%s: %q, want %q", script, got, want)
		}
	}
	for _, path := range []string{"/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu/online"} {
		for _, attack := range []string{"echo x > %s", "chmod 666 %s", "chown 0 %s", "rm %s", "umount %s", "mount -o remount,rw,bind %s", "mv %s /tmp"} {
			if out, code := b.sh(fmt.Sprintf(attack, path)); code == 0 {
				t.Errorf("%s: %q", fmt.Sprintf(attack, path), out)
			}
		}
	}
}
