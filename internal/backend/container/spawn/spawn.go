package spawn

import (
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// op is one system call of the child: number and five arguments.
type op struct{ nr, a0, a1, a2, a3, a4 uintptr }

// failure is written by the child when a call fails; it shares our memory.
type failure struct {
	step  uintptr // 1 + index of the op
	errno uintptr // negative
}

// cloneArgs is struct clone_args of clone3(2).
type cloneArgs struct {
	flags, pidfd  uint64
	_, _          uint64 // child_tid, parent_tid
	exitSignal    uint64
	_, _, _, _, _ uint64 // stack, stack_size, tls, set_tid, set_tid_size
	cgroup        uint64
}

func cloneProgram(args *cloneArgs, size uintptr, prog *op, n uintptr, failure *failure) (pid uintptr)

// Program is what the child does between clone and the end of its life as a copy of
// us: system calls in order, the last of which is an exec. The first that fails ends
// the child.
type Program struct {
	ops      []op
	names    []string
	keep     []any // what the ops point to
	ownFiles bool
}

func (p *Program) add(name string, nr uintptr, args ...uintptr) {
	var a [5]uintptr
	copy(a[:], args)
	p.ops = append(p.ops, op{nr, a[0], a[1], a[2], a[3], a[4]})
	p.names = append(p.names, name)
}

// OwnFiles, called first, gives the child a descriptor table of its own with only those
// descriptors of ours that are below a number. Copying thousands, and closing them
// at the exec, would cost more than all the rest of a clone.
func (p *Program) OwnFiles(below int) {
	p.ownFiles = true
	p.add("own descriptors", unix.SYS_CLOSE_RANGE, uintptr(below), math.MaxUint32, unix.CLOSE_RANGE_UNSHARE)
}

// CloseExcept closes all descriptors but keep. The child has a copy of each of ours until
// its exec: while it waits, it would hold on to our locks and to both ends of our pipes,
// and not notice our death.
func (p *Program) CloseExcept(keep ...int) {
	slices.Sort(keep)
	from := 0
	for _, fd := range keep {
		if fd > from {
			p.add("close descriptors", unix.SYS_CLOSE_RANGE, uintptr(from), uintptr(fd-1))
		}
		from = max(from, fd+1)
	}
	p.add("close descriptors", unix.SYS_CLOSE_RANGE, uintptr(from), math.MaxUint32)
}

// AwaitByte blocks the child until a byte (or the end of file, which counts as one) can be read from fd.
func (p *Program) AwaitByte(fd int) {
	buf := new([8]byte)
	p.keep = append(p.keep, buf)
	p.add("wait for the parent", unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(buf)), 1)
}

// Write writes data to fd.
func (p *Program) Write(what string, fd int, data []byte) {
	p.keep = append(p.keep, data)
	p.add(what, unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(data))), uintptr(len(data)))
}

// BecomeRoot takes uid and gid 0 of the child's user namespace, with no further groups.
func (p *Program) BecomeRoot() {
	p.add("drop groups", unix.SYS_SETGROUPS, 0, 0)
	p.add("set gid", unix.SYS_SETRESGID, 0, 0, 0)
	p.add("set uid", unix.SYS_SETRESUID, 0, 0, 0)
}

// LoopbackUp brings up the loopback of the child's network namespace. fd is the lowest number
// that is free then; the socket keeps it until something else is put there.
func (p *Program) LoopbackUp(fd int) error {
	ifr, err := unix.NewIfreq("lo")
	if err != nil {
		return err
	}
	ifr.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	p.keep = append(p.keep, ifr)
	p.add("socket for the loopback", unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	p.add("bring up the loopback", unix.SYS_IOCTL, uintptr(fd), unix.SIOCSIFFLAGS, uintptr(unsafe.Pointer(ifr)))
	return nil
}

// DropCapability takes a capability from the child and all that come of it, for good.
func (p *Program) DropCapability(c uintptr) {
	p.add("drop a capability", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, c)
}

// Limit sets a resource limit, soft and hard.
func (p *Program) Limit(resource int, n uint64) {
	l := &unix.Rlimit{Cur: n, Max: n}
	p.keep = append(p.keep, l)
	p.add("set a resource limit", unix.SYS_PRLIMIT64, 0, uintptr(resource), uintptr(unsafe.Pointer(l)), 0)
}

// TimerSlack says by how much the kernel may delay the child's timers.
func (p *Program) TimerSlack(d time.Duration) {
	p.add("set timer slack", unix.SYS_PRCTL, unix.PR_SET_TIMERSLACK, uintptr(d.Nanoseconds()))
}

// Setsid starts a session.
func (p *Program) Setsid() { p.add("setsid", unix.SYS_SETSID) }

// Dup makes fd available as number to, inherited over exec. from and to differ.
func (p *Program) Dup(from, to int) { p.add("dup", unix.SYS_DUP3, uintptr(from), uintptr(to), 0) }

// Keep makes fd itself inherited over exec.
func (p *Program) Keep(fd int) {
	p.add("keep descriptor", unix.SYS_FCNTL, uintptr(fd), unix.F_SETFD, 0)
}

// Exec ends the program with the binary open as fd.
func (p *Program) Exec(fd int, argv, env []string) error {
	empty, err := syscall.BytePtrFromString("")
	if err != nil {
		return err
	}
	a, err := syscall.SlicePtrFromStrings(argv)
	if err != nil {
		return err
	}
	e, err := syscall.SlicePtrFromStrings(env)
	if err != nil {
		return err
	}
	p.keep = append(p.keep, empty, a, e)
	p.add("exec", unix.SYS_EXECVEAT, uintptr(fd), uintptr(unsafe.Pointer(empty)),
		uintptr(unsafe.Pointer(unsafe.SliceData(a))), uintptr(unsafe.Pointer(unsafe.SliceData(e))), unix.AT_EMPTY_PATH)
	return nil
}

// Child is a started process.
type Child struct {
	PID     int
	PIDFD   int // owned by the caller; non-blocking, close-on-exec
	pidfd   int32
	program *Program
	failure *failure
}

// Start clones a child with the given CLONE_NEW* flags, into the cgroup v2 directory
// open as cgroup (or -1: where we are), and lets it run p. It returns at once; the
// caller learns of the exec from the program that was started and must call Release
// after that, or after the child's death.
func Start(flags uint64, cgroup int, p *Program) (*Child, error) {
	c := &Child{program: p, failure: &failure{}}
	args := &cloneArgs{
		// Cleared signal handlers: ours must never run in the child, which shares our memory.
		flags:      flags | unix.CLONE_VM | unix.CLONE_CLEAR_SIGHAND | unix.CLONE_PIDFD,
		pidfd:      uint64(uintptr(unsafe.Pointer(&c.pidfd))),
		exitSignal: uint64(syscall.SIGCHLD),
	}
	if p.ownFiles { // shared until the child's first call
		args.flags |= unix.CLONE_FILES
	}
	if cgroup >= 0 {
		args.flags |= unix.CLONE_INTO_CGROUP
		args.cgroup = uint64(cgroup)
	}
	// No syscall.ForkLock: it guards descriptors that get FD_CLOEXEC after their open,
	// and everything in this program opens with O_CLOEXEC. Holding it would let only one
	// clone run at a time.
	pid := cloneProgram(args, unsafe.Sizeof(*args), unsafe.SliceData(p.ops), uintptr(len(p.ops)), c.failure)
	runtime.KeepAlive(args)
	if errno := -int(pid); errno > 0 && errno < 4096 {
		return nil, fmt.Errorf("clone: %w", syscall.Errno(errno))
	}
	c.PID, c.PIDFD = int(pid), int(c.pidfd)
	if err := unix.SetNonblock(c.PIDFD, true); err != nil { // so that the runtime's poller takes it
		return nil, fmt.Errorf("pidfd: %w", err)
	}
	return c, nil
}

// Err says which call of the program failed, or nil if none did so far. Meaningful
// once the child has ended.
func (c *Child) Err() error {
	step := atomic.LoadUintptr(&c.failure.step)
	if step == 0 {
		return nil
	}
	name := "program ran past its end"
	if int(step) <= len(c.program.names) {
		name = c.program.names[step-1]
	}
	return fmt.Errorf("%s: %w", name, syscall.Errno(-atomic.LoadUintptr(&c.failure.errno)))
}

// Release lets go of the memory that the child used. Only after its exec or its death.
func (c *Child) Release() { runtime.KeepAlive(c.program); c.program = &Program{names: c.program.names} }
