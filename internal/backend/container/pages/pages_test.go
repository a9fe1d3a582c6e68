package pages

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

func TestParse(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]line{
		"00400000-00401000 r-xp 00000000 00:2a 17                         /bin/private\n":       {start: 0x400000, end: 0x401000, file: true},
		"7f0000000000-7f0000001000 rw-p 00000000 00:00 0 \n":                                    {start: 0x7f0000000000, end: 0x7f0000001000},
		"7f0000000000-7f0000001000 rw-p 00000000 00:00 0":                                       {start: 0x7f0000000000, end: 0x7f0000001000},
		"7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                          [stack]\n":    {start: 0x7ffc00000000, end: 0x7ffc00021000},
		"7ffc00000000-7ffc00021000 r--p 00000000 00:00 0                          [vvar]\n":     {start: 0x7ffc00000000, end: 0x7ffc00021000, special: true},
		"ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0                  [vsyscall]\n": {start: 0xffffffffff600000, end: 0xffffffffff601000, special: true},
		"7f0000003000-7f0000004000 rw-s 00000000 00:01 21                 /memfd:x (deleted)\n": {start: 0x7f0000003000, end: 0x7f0000004000, file: true, memory: true},
		"7f0000004000-7f0000005000 rw-s 00000000 00:1b 22                 /dev/shm/x\n":         {start: 0x7f0000004000, end: 0x7f0000005000, file: true, memory: true},
		"7f0000004000-7f0000005000 rw-s 00000000 00:1b 22 [vdso] x\n":                           {start: 0x7f0000004000, end: 0x7f0000005000, file: true}, // a file's name is its owner's choice
	} {
		if got, err := parse([]byte(text)); err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	for _, text := range []string{"", "\n", "00400000 r-xp", "00400000-00401000 r-x", "00400000-00401000  "} {
		if l, err := parse([]byte(text)); err == nil {
			t.Errorf("%q: %+v", text, l)
		}
	}
}

// A path may be as long as its owner likes; the range after it is read all the same.
func TestLongPaths(t *testing.T) {
	t.Parallel()
	const head = "7f0000000000-7f0000001000 r--p 00000000 00:2a 17 /"
	in := bufio.NewReaderSize(strings.NewReader(head+strings.Repeat(`a\012`, 10000)+"\n"+head+"b\n"), 128)
	for range 2 {
		if l, err := next(in); err != nil || l != (line{start: 0x7f0000000000, end: 0x7f0000001000, file: true}) {
			t.Errorf("%+v, %v", l, err)
		}
	}
	if _, err := next(in); err != io.EOF {
		t.Errorf("at the end: %v", err)
	}
}

// sleeper is a process to advise.
func sleeper(t *testing.T) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sleep", "600")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

func TestAdviceToARealProcess(t *testing.T) {
	t.Parallel()
	pid := sleeper(t).Process.Pid
	members := func() ([]int, error) { return []int{pid}, nil }
	for _, s := range []Set{{Members: members}, {Members: members, Only: pid}, {Members: members, Skip: pid}, {Members: members, Behind: true}} {
		if err := Out(t.Context(), s); err != nil {
			t.Errorf("out: %v", err)
		}
		if err := In(t.Context(), s); err != nil {
			t.Errorf("in: %v", err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Out(ctx, Set{Members: members}); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled: %v", err)
	}
}

// A pid that is a member's no more, or was another's all the time, is not touched.
func TestOnlyMembersAreAdvised(t *testing.T) {
	t.Parallel()
	cmd := sleeper(t)
	pid := cmd.Process.Pid
	calls := 0
	a := &adviser{want: func(line) bool { t.Error("its ranges were looked at"); return false }, left: MaxRanges}
	s := Set{Members: func() ([]int, error) {
		if calls++; calls > 1 {
			return nil, nil
		}
		return []int{pid}, nil
	}}
	if err := s.advise(t.Context(), unix.MADV_WILLNEED, a.want); err != nil || calls != 2 {
		t.Errorf("%d calls, %v", calls, err)
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
	s.Members = func() ([]int, error) { return []int{pid}, nil }
	if err := s.advise(t.Context(), unix.MADV_WILLNEED, a.want); err != nil {
		t.Errorf("one that ended: %v", err)
	}
	s.Members = func() ([]int, error) { return nil, os.ErrPermission }
	if err := In(t.Context(), s); !errors.Is(err, os.ErrPermission) {
		t.Errorf("%v", err)
	}
}

// Ranges that the kernel refuses do not keep the others.
func TestRefusedRangesAreLeftOut(t *testing.T) {
	t.Parallel()
	mem, err := unix.Mmap(-1, 0, 4*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Munmap(mem); err != nil {
			t.Error(err)
		}
	}()
	pid := os.Getpid()
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	b, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	a := &adviser{advice: unix.MADV_WILLNEED}
	for l := range strings.Lines(string(b)) { // the kernel's own among them
		parsed, err := parse([]byte(l))
		if err != nil {
			t.Fatal(err)
		}
		a.ranges = append(a.ranges, span{parsed.start, parsed.end - parsed.start})
		if len(a.ranges) == maxSpans {
			break
		}
	}
	a.ranges = append(a.ranges, span{1 << 46, 4096}) // nothing is there
	done := make(chan error, 1)
	go func() { done <- a.flush(t.Context(), fd) }()
	select {
	case err := <-done:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("it does not end")
	}
	if len(a.ranges) != 0 {
		t.Errorf("%d are left", len(a.ranges))
	}
}

func BenchmarkParse(b *testing.B) {
	text := []byte("7f0000004000-7f0000005000 rw-p 00000000 00:00 0 \n")
	b.ReportAllocs()
	for b.Loop() {
		if _, err := parse(text); err != nil {
			b.Fatal(err)
		}
	}
}
