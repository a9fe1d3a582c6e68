package container

import (
	"os"
	"testing"
	"time"
)

func TestParseIO(t *testing.T) {
	t.Parallel()
	r, w := parseIO([]byte("rchar: 1\nwchar: 2\nsyscr: 3\nsyscw: 4\nread_bytes: 4096\nwrite_bytes: 8192\ncancelled_write_bytes: 1024\n"))
	if r != 4096 || w != 7168 {
		t.Errorf("%d read, %d written", r, w)
	}
}

// What was counted once stays, also when the process is gone.
func TestDiskIONeverShrinks(t *testing.T) {
	t.Parallel()
	d := diskIO{read: 1 << 60, written: 1 << 61}
	if r, w := d.ofProcesses([]int{os.Getpid()}); r != 1<<60 || w != 1<<61 {
		t.Errorf("%d, %d", r, w)
	}
}

// What processes wrote and read counts when they have ended, too, and what a child of a child did.
func TestDiskIOOfEndedProcesses(t *testing.T) {
	t.Parallel()
	b := newBox(t, nil)
	const script = "(dd if=/dev/zero of=/root/file bs=1M count=8; sync) 2>/dev/null; echo 8"
	if out, code := b.sh(script); out != "8" || code != 0 {
		t.Fatal(out)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) { // the guest has yet to wait for them
		u, err := b.Usage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if u.IOWrittenBytes >= 8<<20 && u.IOWrittenBytes < 64<<20 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes written", u.IOWrittenBytes)
		}
	}
	// Past the page cache, so that the disk is read.
	if out, code := b.sh("dd if=/root/file of=/dev/null iflag=direct bs=1M 2>&1 && echo ok"); code != 0 {
		t.Fatal(out)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		u, err := b.Usage(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if u.IOReadBytes >= 8<<20 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes read", u.IOReadBytes)
		}
	}
}
