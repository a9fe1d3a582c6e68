package proc

import "runtime"

// spareThread has the runtime start one thread more than it needs, which it then keeps. It
// wants another when a system call, such as a fork on a busy machine, takes long; at the
// sandbox's limit of processes there is none to be had, and the runtime ends the program.
func spareThread() {
	n := runtime.GOMAXPROCS(0)
	runtime.GOMAXPROCS(n + 1) // starts a thread for the new processor
	runtime.GOMAXPROCS(n)
}
