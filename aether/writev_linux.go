package aether

import (
	"syscall"
	"unsafe"
)

// writev writes both parts with one call.
func writev(fd int, p, q []byte) (int, error) {
	if len(q) == 0 {
		return syscall.Write(fd, p)
	}
	var iov [2]syscall.Iovec
	iov[0].Base, iov[1].Base = unsafe.SliceData(p), unsafe.SliceData(q)
	iov[0].SetLen(len(p))
	iov[1].SetLen(len(q))
	n, _, errno := syscall.Syscall(syscall.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 2)
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
