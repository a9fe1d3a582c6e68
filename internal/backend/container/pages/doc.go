// Package pages moves the memory of processes that somebody else owns out to swap and back, range by
// range, by process_madvise(2).
//
// Their address spaces are hostile: what it reads of them is bounded in number and in memory, and a range that
// cannot be moved (locked, a device's) is left alone. Pages that several processes share are not
// moved by the kernel either: who wants these out as well has a control group reclaimed afterwards.
package pages
