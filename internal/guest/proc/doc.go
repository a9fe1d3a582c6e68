// Package proc starts the sandbox's processes, owns every wait for a child, and keeps
// what the processes write.
//
// A process is finished when its leader exits, never when a pipe ends. What is in the
// pipes at that moment is read before the end is reported; descendants that still hold
// a pipe go on being logged and delay nothing.
//
// The package must not know the protocol. Start at start.go; reaper.go has the one
// owner of waits, log.go the output log with its offsets, cap and spill file.
package proc
