// Package lazy is a node's cache of data blobs that fill when they are read: the
// kernel mounts a layer's EROFS over a sparse file, and whoever reads what is not
// there yet waits until it has been fetched, verified and written.
//
// [Open] a [Cache], get a [Blob] for each layer, give [Blob.Path] to the mount, close
// the handle after the mount. The package must not know where bytes come from (a
// [Filler]), what a layer, image or sandbox is, or who holds descriptors (a [Holder]).
//
// Who reads, and what was fetched for them, an [Accountant] is told: a question of the
// kernel says which thread is stopped, and read-ahead, the kernel's and ours, is done in
// the name of whose read it follows.
//
// Start reading at cache.go; blob.go has a blob's chunks and who may read them,
// flight.go fetching, ahead.go read-ahead, trace.go traces, evict.go eviction,
// state.go what is kept on disk; fan.go and fuse.go stop readers, probe.go says which
// of the two works here.
//
// # Two modes
//
// With fanotify pre-content events (Linux 6.14) the kernel reads the file itself and
// asks before each read; a complete blob loses its mark and is a plain file. With FUSE
// the kernel asks us for the bytes; a blob that is complete when it is opened is given
// out as the plain file, which is why FUSE passthrough, decided at open as well, would
// add nothing but a level of stacking. The FUSE protocol is spoken here, not by a
// library: the one there is begins with a message that a process which takes a
// connection over never gets.
//
// # No reader sees zeros
//
// A hole reads as zeros, so a reader may pass only if its bytes are there until it has
// copied them. Four things could break that.
//
// The process dies. When the last descriptor of a fanotify group closes, the kernel
// lets all readers pass. The Holder's processes keep the group open, so readers wait
// for the next process. It must also answer events that the dead one had read. The
// kernel finds an event by its group and the number that its descriptor had in the
// reading process, and takes the answer from any process with the group. So each blob
// has a group of its own, which says what an event is about, and events are read from
// it straight into memory that the Holder keeps as well: the kernel copies an event
// before it counts it as read, and a process cannot be killed in between. A slot is
// emptied after its answer and before the descriptor's number can be used again. The
// next process answers all that is in the slots before it reads from the group, whose
// new events could have the same numbers. With FUSE the kernel is told to send
// unanswered requests again (6.9), and if all holders die readers get an error.
//
// The queue is full: unlimited, it cannot be (a full one lets readers pass). Events
// that the kernel cannot hand over (no memory, no descriptors) it refuses itself.
//
// The fetch fails: the reader is refused with EIO (ENOSPC), after the deadline, or a tenth
// of it if nothing came of the same bytes a moment ago: the kernel and programs ask several
// times. A chunk counts as filled only after all of its bytes were put in order and written.
//
// Eviction punches out what a reader that was let through is about to copy. Between
// the answer and the copy lies a time that no waiting can bound. But the kernel tells
// when the copy is over: FAN_ACCESS events come after it, from the same thread and in
// one queue with the questions. So before an answer is written the thread is entered as
// holding the chunks (in the shared memory, for the next process), under the lock under
// which it is seen that all of them are filled; and chunks go from filled to evicting
// under that lock only if no thread holds them. A hold ends when
//   - an ACCESS event of the thread is read. It cannot be an earlier read's: that one's
//     event lies before the question in the queue, so it was read before the answer; and
//   - when the thread asks again, or is no more: it is not in the old read any longer.
//
// A thread that neither finishes, asks nor ends keeps its chunks, whatever time passes.
// Readers that cannot be told (out of sight of this process's PID namespace, or more
// than there is room for) make a blob unevictable until it is unmounted. Reads that ask
// meanwhile wait, and then fetch again. This depends on the file being read by read
// calls, as EROFS does without its directio option, and mapped by nobody: the directory
// is root's alone.
//
// Whole blobs are removed only while a write lease on their file is held: the kernel
// grants it if nobody else, a mount above all, has the file open, and makes whoever opens
// it wait. The same lease says whether a blob whose handles are closed is still mounted;
// if so it is served on. A file opened before its mark was set would never ask, so a
// blob is only given out marked, and one that is incomplete, unmarked and open is
// refused (its guard was lost).
//
// # What survives
//
// See state.go: what a process knew survives its death, and what was synced survives the
// machine's. The claim of a chunk is withdrawn, durably, before its bytes are punched out.
package lazy
