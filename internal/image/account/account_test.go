package account_test

import (
	"bufio"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"dsec/internal/image/account"
	"dsec/internal/image/lazy"
)

var _ lazy.Accountant = (*account.Book)(nil)

// inside starts a process in a PID namespace of its own, which has a child in one more, and
// returns their pids as seen from here.
func inside(t *testing.T) (first, nested int) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("needs root")
	}
	cmd := exec.Command("unshare", "--pid", "--fork", "sh", "-c", "echo; read x")
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Pdeathsig: syscall.SIGKILL}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		cmd.Process.Kill() // the first of its namespace: all in it end
		cmd.Wait()
	})
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatal(err)
	}
	first = cmd.Process.Pid
	p, err := os.ReadFile("/proc/" + strconv.Itoa(first) + "/task/" + strconv.Itoa(first) + "/children")
	if err == nil {
		nested, err = strconv.Atoi(strings.TrimSpace(string(p)))
	}
	if err != nil {
		t.Fatal(err)
	}
	return first, nested
}

func TestOwners(t *testing.T) {
	t.Parallel()
	now := time.Unix(1e9, 0)
	b, err := account.New(func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	a1, a2 := inside(t)
	o1, o2 := inside(t)
	if err := b.Open("self", os.Getpid(), lazy.Use{}); err == nil {
		t.Error("all of the machine has an owner")
	}
	check := func(pid int, want string) {
		t.Helper()
		for range 2 { // read, and remembered
			if got := b.Owner(pid); got != want {
				t.Errorf("%d is %q's, not %q's", pid, got, want)
			}
		}
	}
	for _, pid := range []int{0, -1, 1 << 30, os.Getpid(), a1, a2} {
		check(pid, "")
	}
	// A new account is seen at once.
	before := lazy.Use{Reads: 1, Read: 10, Waited: 5, Wait: time.Second, Fetched: 7}
	if err := b.Open("ann", a1, before); err != nil {
		t.Fatal(err)
	}
	if err := b.Open("ben", o1, lazy.Use{}); err != nil {
		t.Fatal(err)
	}
	check(a1, "ann")
	check(a2, "ann")
	check(o1, "ben")
	check(o2, "ben")
	check(os.Getpid(), "")

	b.Count("ann", "", lazy.Use{Reads: 1, Read: 3, Waited: 2, Wait: time.Second, Fetched: 4})
	b.Count("ben", "", lazy.Use{Fetched: 8})
	b.Count("", "", lazy.Use{Fetched: 16})
	if u := b.Of("ann"); u != (lazy.Use{Reads: 2, Read: 13, Waited: 7, Wait: 2 * time.Second, Fetched: 11}) {
		t.Errorf("ann %+v", u)
	}
	if m := b.Most(10); len(m) != 2 || m[0].Owner != "ann" || m[0].Fetched != 11 || m[1].Owner != "ben" || len(b.Most(1)) != 1 {
		t.Errorf("most: %+v", m)
	}
	// Totals leave out what was before, and keep what was.
	b.Close("ben")
	check(o1, "")
	b.Count("ben", "", lazy.Use{Fetched: 32})
	owned, others := b.Totals()
	if owned != (lazy.Use{Reads: 1, Read: 3, Waited: 2, Wait: time.Second, Fetched: 12}) || others != (lazy.Use{Fetched: 48}) || b.Of("ben") != (lazy.Use{}) {
		t.Errorf("owned %+v, others %+v", owned, others)
	}
	// A namespace that has a new owner is not taken from that by the end of the old one.
	if err := b.Open("cid", a1, lazy.Use{}); err != nil {
		t.Fatal(err)
	}
	b.Close("ann")
	check(a2, "cid")
}

// A thread's number is another thread's one day.
func TestOwnersAreForgotten(t *testing.T) {
	t.Parallel()
	now := time.Unix(1e9, 0)
	b, err := account.New(func() time.Time { return now })
	if err != nil {
		t.Fatal(err)
	}
	pid, _ := inside(t)
	if err := b.Open("ann", pid, lazy.Use{}); err != nil {
		t.Fatal(err)
	}
	if got := b.Owner(pid); got != "ann" {
		t.Fatal(got)
	}
	p, err := os.FindProcess(pid)
	if err == nil {
		err = p.Kill()
	}
	if err != nil {
		t.Fatal(err)
	}
	var status syscall.WaitStatus
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if n, _ := syscall.Wait4(pid, &status, 0, nil); n == pid {
			break
		}
		if time.Now().After(end) {
			t.Fatal("it does not end")
		}
	}
	now = now.Add(time.Second)
	if got := b.Owner(pid); got != "" {
		t.Errorf("a thread that is no more is %q's", got)
	}
}
