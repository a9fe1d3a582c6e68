package container

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// Guests cannot fill the node's disk with what they say.
func TestGuestLogIsBounded(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "guests.log")
	l, err := openGuestLog(path, 1<<16, time.Hour) // looks when it is told to
	if err != nil {
		t.Fatal(err)
	}
	defer l.close()
	guest, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0) // as a guest that has it from an earlier edge
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close()
	size := func() int64 {
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		return st.Size()
	}
	line := append(bytes.Repeat([]byte("x"), 1023), '\n')
	for range 64 {
		if _, err := guest.Write(line); err != nil {
			t.Fatal(err)
		}
	}
	if err := l.trim(); err != nil || size() != 64<<10 {
		t.Errorf("cut at %d bytes, with room for more; %v", size(), err)
	}
	for range 4096 {
		if _, err := guest.Write(line); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := guest.WriteString("the last words\n"); err != nil {
		t.Fatal(err)
	}
	if err := l.trim(); err != nil || size() != 0 {
		t.Errorf("%d bytes left, %v", size(), err)
	}
	old, err := os.ReadFile(path + ".old")
	if err != nil || len(old) != guestLogKept || !strings.HasSuffix(string(old), "the last words\n") {
		t.Errorf("kept %d bytes, %v", len(old), err)
	}
	if _, err := guest.WriteString("again\n"); err != nil || !strings.HasSuffix(l.tail(), "again") {
		t.Errorf("after the cut: %q, %v", l.tail(), err)
	}
	// By itself, too.
	if _, err := guest.Write(bytes.Repeat(line, 65)); err != nil {
		t.Fatal(err)
	}
	another, err := openGuestLog(path, 1<<16, time.Millisecond)
	if err != nil {
		t.Fatal(err)
	}
	defer another.close()
	for range 2 { // at the start, and later
		for deadline := time.Now().Add(20 * time.Second); size() > 1<<16; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%d bytes, and nobody cuts them", size())
			}
		}
		if _, err := guest.Write(bytes.Repeat(line, 65)); err != nil {
			t.Fatal(err)
		}
	}
}
