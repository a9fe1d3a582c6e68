// Package freeze stops all processes of a control group for a moment and lets them go again,
// whatever happens in between. It writes files of the cgroup file system, version 1 (the freezer
// controller) or 2 (cgroup.freeze, also of a version 2 tree beside version 1), and must not know
// what a sandbox is.
//
// PID 1 of a sandbox, the guest, is frozen with the rest. It writes files too, for
// uploads and for output that it spills, so one left running would make the moment no moment; and in
// version 2 a group is frozen as a whole. While it is frozen its connections stay open, unanswered: the
// hold must be shorter than the silence that peers bear (aether: minutes).
//
// A frozen process stands between two system calls or in one that sleeps: what a system call
// writes to a file is there or not begun. Requests that a program left with the kernel (io_uring, aio)
// may still end.
//
// # After kill -9
//
// The kernel keeps a group frozen when the process that froze it dies. So whoever adopts a sandbox
// calls [Group.Thaw] first, unless its own record says that it is to be paused; it costs
// two small reads if the group is not frozen. And nothing stays frozen for longer than Limits.Hold in
// a process that lives but hangs: a timer thaws it, and [Frozen.Thaw] then says that the moment was lost.
// A pause has no such end: it asks for none.
//
// Start reading at freeze.go.
package freeze
