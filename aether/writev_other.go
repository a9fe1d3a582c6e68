//go:build !linux

package aether

import "syscall"

// writev writes p alone; the caller goes on with the rest.
func writev(fd int, p, _ []byte) (int, error) { return syscall.Write(fd, p) }
