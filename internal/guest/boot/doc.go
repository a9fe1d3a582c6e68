// Package boot is what the guest does before it serves: as PID 1 it must survive what
// the sandbox's programs send it, and hand nothing of its own to them. Start at
// protect.go.
package boot
