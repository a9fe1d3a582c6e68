package proc

import "syscall"

// Memory is the memory limit of the sandbox.
type Memory struct {
	Limit  int64 // bytes; 0: none
	Events int   // descriptor of the control group's file with a line "oom_kill N"; 0: none
}

// Kills returns how many of the sandbox's processes the limit has killed so far.
func (m Memory) Kills() int64 {
	if m.Events <= 0 {
		return 0
	}
	var buf [256]byte
	n, err := syscall.Pread(m.Events, buf[:], 0)
	if err != nil {
		return 0
	}
	return oomKills(buf[:n])
}

// oomKills finds the count in what version 1 calls memory.oom_control and version 2
// memory.events.
func oomKills(b []byte) (n int64) {
	const key = "oom_kill "
	for len(b) > 0 {
		line := b
		for i, c := range b {
			if c == '\n' {
				line = b[:i]
				break
			}
		}
		b = b[min(len(line)+1, len(b)):]
		if len(line) < len(key) || string(line[:len(key)]) != key {
			continue
		}
		for _, c := range line[len(key):] {
			if c < '0' || c > '9' {
				break
			}
			n = n*10 + int64(c-'0')
		}
	}
	return n
}

// Memory returns the sandbox's limit.
func (t *Table) Memory() Memory { return t.cfg.Memory }

// OOM is what the memory limit did while something ran.
type OOM struct {
	Killed bool  // it ended as by SIGKILL, and that was the limit's
	Kills  int64 // processes of the sandbox that the limit killed meanwhile
	Limit  int64 // with Kills: bytes
}

// Since says what the limit did since Kills was before, to what ended with code. A shell
// whose last command was killed ends with the same code as if it had been itself.
func (m Memory) Since(before int64, code int, killedByUs bool) (o OOM) {
	if o.Kills = max(0, m.Kills()-before); o.Kills > 0 {
		o.Limit = m.Limit
		o.Killed = code == 128+int(syscall.SIGKILL) && !killedByUs
	}
	return o
}
