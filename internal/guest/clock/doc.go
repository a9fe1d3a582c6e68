// Package clock measures time that a sandbox ran: what passes while it is paused does not
// count against the limits of its commands.
//
// Nothing in a paused sandbox runs, its guest neither, and afterwards the kernel's clocks
// say that all of that time has passed. The edge tells the guest for how long it stood
// still, by a message that is in its socket before it runs again; but a timer that was due
// meanwhile goes off at the same moment. So one that goes off noticeably late waits a
// little for that message.
//
// How exact it is: a limit is put off by what the edge says, which is off by the
// milliseconds that a pause and a resume take. If no message comes (the sandbox only had
// no processor, or was stopped by somebody else than its edge) a late timer is later by
// [Patience], once. The wall clock needs nothing here: a container has its node's.
//
// The package must not know the protocol or what is timed.
package clock
