package proc

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

// pin lets children run on as many processors as the sandbox has, so that they see so many: nproc and most
// runtimes ask the scheduler. Which ones is chosen at each start, beginning with that on which the kernel
// has just put us, as the one with most room. The guest itself runs wherever there is room.
type pin struct {
	cpus int // 0: all
	all  unix.CPUSet
}

func newPin(cpus int) *pin {
	p := &pin{cpus: cpus}
	if cpus > 0 && (unix.SchedGetaffinity(0, &p.all) != nil || p.all.Count() <= cpus) {
		p.cpus = 0
	}
	return p
}

// fork calls f, which forks. One goroutine may call it at a time. If the runtime puts it on another thread
// meanwhile, the child runs everywhere, which does no harm.
func (p *pin) fork(f func() (int, error)) (int, error) {
	if p.cpus == 0 {
		return f()
	}
	set := p.choose(current())
	thread := unix.Gettid()
	if unix.SchedSetaffinity(thread, &set) != nil {
		return f()
	}
	defer func() { _ = unix.SchedSetaffinity(thread, &p.all) }() // it is our own thread
	return f()
}

// choose returns so many processors, from one on and around.
func (p *pin) choose(from int) (set unix.CPUSet) {
	const most = len(unix.CPUSet{}) * 64
	for i := 0; i < most && set.Count() < p.cpus; i++ {
		if cpu := (from + i) % most; p.all.IsSet(cpu) {
			set.Set(cpu)
		}
	}
	return set
}

// current is the processor that the calling thread runs on.
func current() int {
	var cpu uint32
	unix.RawSyscall(unix.SYS_GETCPU, uintptr(unsafe.Pointer(&cpu)), 0, 0)
	return int(cpu)
}
