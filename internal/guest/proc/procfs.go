package proc

import (
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// member is a process as /proc/PID/stat shows it.
type member struct {
	pid, ppid, session int
	start              uint64 // clock ticks since boot
	zombie             bool
}

// sessionMembers lists the processes of a session. Without /proc it is empty.
func sessionMembers(session int) []member {
	all := processes()
	out := all[:0]
	for _, m := range all {
		if m.session == session {
			out = append(out, m)
		}
	}
	return out
}

// processes lists every process that /proc shows.
func processes() []member {
	fd, err := syscall.Open("/proc", syscall.O_RDONLY|syscall.O_DIRECTORY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	defer syscall.Close(fd)
	var out []member
	buf := make([]byte, 8192)
	for {
		n, err := unix.Getdents(fd, buf)
		if err != nil || n <= 0 {
			return out
		}
		_, _, names := syscall.ParseDirent(buf[:n], -1, nil)
		for _, name := range names {
			pid, err := strconv.Atoi(name)
			if err != nil {
				continue
			}
			if m, ok := stat(pid); ok {
				out = append(out, m)
			}
		}
	}
}

func stat(pid int) (member, bool) {
	fd, err := syscall.Open("/proc/"+strconv.Itoa(pid)+"/stat", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return member{}, false
	}
	var buf [512]byte
	n, err := syscall.Read(fd, buf[:])
	syscall.Close(fd)
	if err != nil || n <= 0 {
		return member{}, false
	}
	s := string(buf[:n])
	// The name may hold anything, parentheses too.
	i := strings.LastIndexByte(s, ')')
	if i < 0 {
		return member{}, false
	}
	f := strings.Fields(s[i+1:])
	if len(f) < 20 {
		return member{}, false
	}
	m := member{pid: pid}
	m.zombie = f[0] == "Z"
	m.ppid, _ = strconv.Atoi(f[1])
	m.session, _ = strconv.Atoi(f[3])
	m.start, _ = strconv.ParseUint(f[19], 10, 64)
	return m, true
}

func sessionOf(pid int) int {
	sid, err := unix.Getsid(pid)
	if err != nil {
		return -1
	}
	return sid
}

// Ticks is the clock that member.start counts.
func Ticks() uint64 {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts)
	const hz = 100 // USER_HZ: part of the kernel's interface on this architecture
	return uint64(ts.Sec)*hz + uint64(ts.Nsec)/(1e9/hz)
}

// KillSince kills the members of a session that started at or after ticks, except its leader.
func (p *Process) KillSince(ticks uint64) {
	for _, m := range sessionMembers(p.Pid) {
		if m.pid != p.Pid && m.start >= ticks && sessionOf(m.pid) == p.Pid {
			syscall.Kill(m.pid, syscall.SIGKILL)
		}
	}
}
