package container

import (
	"encoding/binary"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// verdict runs the profile on one call as the kernel would.
func verdict(t *testing.T, vm *bpf.VM, arch, nr uint32, args ...uint64) uint32 {
	t.Helper()
	data := make([]byte, 64) // struct seccomp_data, in the machine's words: this VM reads them in network order
	binary.BigEndian.PutUint32(data[0:], nr)
	binary.BigEndian.PutUint32(data[4:], arch)
	for i, arg := range args {
		binary.BigEndian.PutUint32(data[16+8*i:], uint32(arg))
		binary.BigEndian.PutUint32(data[20+8*i:], uint32(arg>>32))
	}
	v, err := vm.Run(data)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(v)
}

func TestSeccompProfile(t *testing.T) {
	raw, err := seccompProgram()
	if err != nil {
		t.Fatal(err)
	}
	var prog []bpf.RawInstruction
	for i := 0; i < len(raw); i += unix.SizeofSockFilter {
		prog = append(prog, bpf.RawInstruction{Op: binary.LittleEndian.Uint16(raw[i:]), Jt: raw[i+2], Jf: raw[i+3], K: binary.LittleEndian.Uint32(raw[i+4:])})
	}
	instructions, ok := bpf.Disassemble(prog)
	if !ok {
		t.Fatal("not all of the profile is known")
	}
	vm, err := bpf.NewVM(instructions)
	if err != nil {
		t.Fatal(err)
	}
	fail := func(e unix.Errno) uint32 { return unix.SECCOMP_RET_ERRNO | uint32(e) }
	for nr := uint32(0); nr < newestCall+1000; nr++ {
		want := uint32(unix.SECCOMP_RET_ALLOW)
		if e, ok := denied[nr]; ok {
			want = fail(e)
		}
		switch {
		case nr > newestCall:
			want = fail(unix.ENOSYS)
		case nr == unix.SYS_SOCKET || nr == unix.SYS_SOCKETPAIR: // of no family
			want = fail(unix.EAFNOSUPPORT)
		}
		if got := verdict(t, vm, auditArchX86_64, nr); got != want {
			t.Errorf("call %d: %#x, want %#x", nr, got, want)
		}
	}
	for _, c := range []struct {
		what     string
		arch, nr uint32
		args     []uint64
		want     uint32
	}{
		{"32-bit call", 0x40000003, unix.SYS_READ, nil, unix.SECCOMP_RET_KILL_PROCESS},
		{"x32 call", auditArchX86_64, 0x40000000 | unix.SYS_READ, nil, fail(unix.ENOSYS)},
		{"thread", auditArchX86_64, unix.SYS_CLONE, []uint64{unix.CLONE_VM | unix.CLONE_THREAD}, unix.SECCOMP_RET_ALLOW},
		{"user namespace", auditArchX86_64, unix.SYS_CLONE, []uint64{unix.CLONE_NEWUSER}, fail(unix.EPERM)},
		{"network namespace", auditArchX86_64, unix.SYS_CLONE, []uint64{unix.CLONE_NEWNET | unix.CLONE_VM}, fail(unix.EPERM)},
		{"unix socket", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_UNIX}, unix.SECCOMP_RET_ALLOW},
		{"internet socket", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_INET6, unix.SOCK_STREAM | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK}, unix.SECCOMP_RET_ALLOW},
		{"netlink", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_NETLINK}, unix.SECCOMP_RET_ALLOW},
		{"UDP", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_DGRAM, unix.IPPROTO_UDP}, unix.SECCOMP_RET_ALLOW},
		{"ping", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_RAW | unix.SOCK_CLOEXEC, unix.IPPROTO_ICMP}, unix.SECCOMP_RET_ALLOW},
		{"a raw protocol", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_RAW, unix.IPPROTO_SCTP}, unix.SECCOMP_RET_ALLOW},
		{"SCTP", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_STREAM, unix.IPPROTO_SCTP}, fail(unix.EPROTONOSUPPORT)},
		{"L2TP", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_INET6, unix.SOCK_DGRAM, unix.IPPROTO_L2TP}, fail(unix.EPROTONOSUPPORT)},
		{"DCCP", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_INET, unix.SOCK_DCCP | unix.SOCK_CLOEXEC, 0}, fail(unix.ESOCKTNOSUPPORT)},
		{"of kernel modules' netlink", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_XFRM}, fail(unix.EPROTONOSUPPORT)},
		{"netlink of users among themselves", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_NETLINK, unix.SOCK_RAW, unix.NETLINK_USERSOCK}, fail(unix.EPROTONOSUPPORT)},
		{"netlink of devices", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_NETLINK, unix.SOCK_DGRAM, unix.NETLINK_KOBJECT_UEVENT}, unix.SECCOMP_RET_ALLOW},
		{"TLS by the kernel", auditArchX86_64, unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_TCP, unix.TCP_ULP}, fail(unix.ENOENT)},
		{"TCP without delay", auditArchX86_64, unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_TCP, unix.TCP_NODELAY}, unix.SECCOMP_RET_ALLOW},
		{"a TCP option with the number of a filter", auditArchX86_64, unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_TCP, unix.SO_ATTACH_FILTER}, unix.SECCOMP_RET_ALLOW},
		{"another line discipline", auditArchX86_64, unix.SYS_IOCTL, []uint64{0, unix.TIOCSETD}, fail(unix.EPERM)},
		{"a terminal's size", auditArchX86_64, unix.SYS_IOCTL, []uint64{0, unix.TIOCGWINSZ}, unix.SECCOMP_RET_ALLOW},
		{"memory", auditArchX86_64, unix.SYS_MMAP, []uint64{0, 1 << 21, 3, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS}, unix.SECCOMP_RET_ALLOW},
		{"huge pages", auditArchX86_64, unix.SYS_MMAP, []uint64{0, 1 << 21, 3, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_HUGETLB}, fail(unix.ENOMEM)},
		{"a file of huge pages", auditArchX86_64, unix.SYS_MEMFD_CREATE, []uint64{0, unix.MFD_CLOEXEC | unix.MFD_HUGETLB}, fail(unix.ENOMEM)},
		{"huge pages to share", auditArchX86_64, unix.SYS_SHMGET, []uint64{0, 1 << 21, shmHugeTLB}, fail(unix.ENOMEM)},
		{"a sync of the whole machine", auditArchX86_64, unix.SYS_SYNC, nil, unix.SECCOMP_RET_ERRNO},
		{"pair of sockets", auditArchX86_64, unix.SYS_SOCKETPAIR, []uint64{unix.AF_UNIX}, unix.SECCOMP_RET_ALLOW},
		{"pair of another kind", auditArchX86_64, unix.SYS_SOCKETPAIR, []uint64{unix.AF_TIPC}, fail(unix.EAFNOSUPPORT)},
		{"packets of the network", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_PACKET}, fail(unix.EAFNOSUPPORT)},
		{"packets, mapped", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_XDP}, fail(unix.EAFNOSUPPORT)},
		{"a family to come", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_MAX}, fail(unix.EAFNOSUPPORT)},
		{"vsock", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_VSOCK}, fail(unix.EAFNOSUPPORT)},
		{"kernel's ciphers", auditArchX86_64, unix.SYS_SOCKET, []uint64{unix.AF_ALG}, fail(unix.EAFNOSUPPORT)},
		{"one's own limits", auditArchX86_64, unix.SYS_PRLIMIT64, []uint64{0, 0, 0x7fff00001000}, unix.SECCOMP_RET_ALLOW},
		{"a look at PID 1's limits", auditArchX86_64, unix.SYS_PRLIMIT64, []uint64{1}, unix.SECCOMP_RET_ALLOW},
		{"PID 1's limits", auditArchX86_64, unix.SYS_PRLIMIT64, []uint64{1, 0, 0x7fff00001000}, fail(unix.EPERM)},
		{"PID 1's limits, from a page at 4 GiB", auditArchX86_64, unix.SYS_PRLIMIT64, []uint64{1, 0, 0x100000000}, fail(unix.EPERM)},
		{"PID 1's limits, with high bits that the kernel drops", auditArchX86_64, unix.SYS_PRLIMIT64, []uint64{0x700000001, 0, 0x1000}, fail(unix.EPERM)},
		{"a filter on a socket", auditArchX86_64, unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_SOCKET, unix.SO_ATTACH_FILTER}, fail(unix.EPERM)},
		{"a BPF program on a socket", auditArchX86_64, unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_SOCKET, unix.SO_ATTACH_BPF}, fail(unix.EPERM)},
		{"a filter on sockets that share a port", auditArchX86_64, unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_CBPF}, fail(unix.EPERM)},
		{"a BPF program on sockets that share a port", auditArchX86_64, unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_SOCKET, unix.SO_ATTACH_REUSEPORT_EBPF}, fail(unix.EPERM)},
		{"a filter, with high bits that the kernel drops", auditArchX86_64, unix.SYS_SETSOCKOPT, []uint64{3, 1<<32 | unix.SOL_SOCKET, 1<<32 | unix.SO_ATTACH_FILTER}, fail(unix.EPERM)},
		{"an option of IP with the number of a filter", auditArchX86_64, unix.SYS_SETSOCKOPT, []uint64{3, unix.IPPROTO_IP, unix.SO_ATTACH_FILTER}, unix.SECCOMP_RET_ALLOW},
		{"a port that is used again", auditArchX86_64, unix.SYS_SETSOCKOPT, []uint64{3, unix.SOL_SOCKET, unix.SO_REUSEADDR}, unix.SECCOMP_RET_ALLOW},
		{"a filter of its own", auditArchX86_64, unix.SYS_SECCOMP, []uint64{unix.SECCOMP_SET_MODE_FILTER}, fail(unix.EINVAL)},
		{"which verdicts filters have", auditArchX86_64, unix.SYS_SECCOMP, []uint64{unix.SECCOMP_GET_ACTION_AVAIL}, unix.SECCOMP_RET_ALLOW},
		{"a filter of its own by prctl", auditArchX86_64, unix.SYS_PRCTL, []uint64{unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER}, fail(unix.EINVAL)},
		{"read, write and exit only", auditArchX86_64, unix.SYS_PRCTL, []uint64{unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_STRICT}, unix.SECCOMP_RET_ALLOW},
		{"a thread's name", auditArchX86_64, unix.SYS_PRCTL, []uint64{unix.PR_SET_NAME, unix.SECCOMP_MODE_FILTER}, unix.SECCOMP_RET_ALLOW},
		{"the shared /dev made writable", auditArchX86_64, 467, nil, fail(unix.EPERM)},
	} {
		if got := verdict(t, vm, c.arch, c.nr, c.args...); got != c.want {
			t.Errorf("%s: %#x, want %#x", c.what, got, c.want)
		}
	}
}
