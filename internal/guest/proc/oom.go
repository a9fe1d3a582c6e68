package proc

import (
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// oom makes the kernel prefer the sandbox's processes to the guest when memory runs out.
// A child has the score that its parent had at the fork: the guest takes the higher one
// just for that. Raising the child's after its exec would leave what it forks at once with
// the guest's.
type oom struct {
	fd          int // of our own oom_score_adj; -1: scores are left alone
	raised, own []byte
}

// openOOM prepares for children with a score. Called before any other process is there.
func openOOM(score int) oom {
	o := oom{fd: -1}
	if score == 0 {
		return o
	}
	const path = "/proc/self/oom_score_adj"
	fd, err := syscall.Open(path, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
	if err == syscall.EACCES {
		// The files of an undumpable process are not its own. As PID 1 we are alone in
		// sight of our /proc so far; whatever is opened now stays open.
		if unix.Prctl(unix.PR_SET_DUMPABLE, 1, 0, 0, 0) == nil {
			fd, err = syscall.Open(path, syscall.O_RDWR|syscall.O_CLOEXEC, 0)
			if unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0) != nil {
				panic("the guest cannot be made undumpable again")
			}
		}
	}
	if err != nil {
		return o
	}
	var buf [16]byte
	n, err := syscall.Read(fd, buf[:])
	own := strings.TrimSpace(string(buf[:max(n, 0)]))
	if is, aerr := strconv.Atoi(own); err != nil || aerr != nil || is >= score {
		syscall.Close(fd)
		return o
	}
	o.fd, o.raised, o.own = fd, strconv.AppendInt(nil, int64(score), 10), []byte(own)
	return o
}

// fork calls f, which forks; one at a time. Meanwhile the guest's score is as high as its
// children's, which are still taken first for what they use.
func (o *oom) fork(f func() (int, error)) (int, error) {
	if o.fd < 0 {
		return f()
	}
	syscall.Write(o.fd, o.raised)
	defer syscall.Write(o.fd, o.own) // not below what we were started with, so this needs no capability
	return f()
}
