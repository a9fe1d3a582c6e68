package user

import (
	"runtime"
	"syscall"
	"unsafe"

	"dsec/api/v1/errs"
)

// Do runs f with the file-system permissions of u: files that f opens or makes are
// checked against, and owned by, u. The rest of the guest is not affected, since the
// kernel keeps these ids for each thread; f must therefore not hand its work to another
// goroutine. The result is f's error.
func (u *User) Do(f func() error) error {
	if u.Root() || syscall.Geteuid() != 0 {
		return f()
	}
	runtime.LockOSThread()
	before, err := groups()
	if err == nil {
		err = u.become()
	}
	if err != nil {
		runtime.UnlockOSThread()
		return errs.Wrap(errs.PermissionDenied, "guest.user", "act as user "+u.Name, err)
	}
	defer func() {
		// A thread whose identity cannot be put back is never used again: it stays
		// locked and ends with its goroutine.
		if setFS(0, 0) && setGroups(before) == nil {
			runtime.UnlockOSThread()
		}
	}()
	return f()
}

// become switches the calling thread.
func (u *User) become() error {
	if err := setGroups(u.Groups); err != nil {
		return err
	}
	if !setFS(u.UID, u.GID) {
		setFS(0, 0)
		return syscall.EPERM
	}
	return nil
}

// setFS sets both ids; the group first, while the thread may still do so.
func setFS(uid, gid uint32) bool {
	const none = ^uint32(0) // an invalid id changes nothing and returns the current one
	syscall.RawSyscall(syscall.SYS_SETFSGID, uintptr(gid), 0, 0)
	syscall.RawSyscall(syscall.SYS_SETFSUID, uintptr(uid), 0, 0)
	u, _, _ := syscall.RawSyscall(syscall.SYS_SETFSUID, uintptr(none), 0, 0)
	g, _, _ := syscall.RawSyscall(syscall.SYS_SETFSGID, uintptr(none), 0, 0)
	return uint32(u) == uid && uint32(g) == gid
}

func groups() ([]uint32, error) {
	var buf [256]uint32
	n, _, e := syscall.RawSyscall(syscall.SYS_GETGROUPS, uintptr(len(buf)), uintptr(unsafe.Pointer(&buf[0])), 0)
	if e != 0 {
		return nil, e
	}
	return append([]uint32(nil), buf[:n]...), nil
}

// setGroups changes the calling thread only, unlike syscall.Setgroups.
func setGroups(g []uint32) error {
	var p unsafe.Pointer
	if len(g) > 0 {
		p = unsafe.Pointer(&g[0])
	}
	_, _, e := syscall.RawSyscall(syscall.SYS_SETGROUPS, uintptr(len(g)), uintptr(p), 0)
	if e != 0 {
		return e
	}
	return nil
}
