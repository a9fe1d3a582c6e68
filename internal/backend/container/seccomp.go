package container

import (
	"encoding/binary"
	"fmt"
	"math"
	"slices"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// newestCall is the highest system call number that this profile was written for
// (kernel 6.18: listns 470). Later ones read as absent, which programs handle.
const newestCall = 470

const (
	auditArchX86_64 = 0xc000003e
	clone3          = unix.SYS_CLONE3
	openTreeAttr    = 467 // kernel 6.15
	listNS          = 470 // kernel 6.18
	socketType      = 0xf // of the type's argument, which has flags too (kernel: SOCK_TYPE_MASK)
	shmHugeTLB      = 0o4000
	newNamespaces   = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC |
		unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET
)

// denied is what sandboxed processes may not call: what reaches parts of the kernel
// that are not confined by namespaces, or that programs of this kind of sandbox do not
// need and exploits of the kernel do. docs/security.md says more.
var denied = map[uint32]unix.Errno{
	// mounts and namespaces
	unix.SYS_MOUNT: unix.EPERM, unix.SYS_UMOUNT2: unix.EPERM, unix.SYS_PIVOT_ROOT: unix.EPERM, unix.SYS_MOVE_MOUNT: unix.EPERM,
	unix.SYS_OPEN_TREE: unix.EPERM, unix.SYS_FSOPEN: unix.EPERM, unix.SYS_FSMOUNT: unix.EPERM, unix.SYS_FSCONFIG: unix.EPERM,
	unix.SYS_FSPICK: unix.EPERM, unix.SYS_MOUNT_SETATTR: unix.EPERM, unix.SYS_SETNS: unix.EPERM, unix.SYS_UNSHARE: unix.EPERM,
	openTreeAttr: unix.EPERM, listNS: unix.ENOSYS,
	unix.SYS_OPEN_BY_HANDLE_AT: unix.EPERM, unix.SYS_QUOTACTL: unix.EPERM, unix.SYS_QUOTACTL_FD: unix.EPERM, unix.SYS_FANOTIFY_INIT: unix.EPERM,
	// its flags lie in memory, where a filter cannot look; C libraries fall back to clone
	clone3: unix.ENOSYS,
	// the machine
	unix.SYS_REBOOT: unix.EPERM, unix.SYS_KEXEC_LOAD: unix.EPERM, unix.SYS_KEXEC_FILE_LOAD: unix.EPERM, unix.SYS_INIT_MODULE: unix.EPERM,
	unix.SYS_FINIT_MODULE: unix.EPERM, unix.SYS_DELETE_MODULE: unix.EPERM, unix.SYS_SWAPON: unix.EPERM, unix.SYS_SWAPOFF: unix.EPERM,
	unix.SYS_ACCT: unix.EPERM, unix.SYS_SETTIMEOFDAY: unix.EPERM, unix.SYS_CLOCK_SETTIME: unix.EPERM, unix.SYS_SYSLOG: unix.EPERM,
	unix.SYS_IOPL: unix.EPERM, unix.SYS_IOPERM: unix.EPERM, unix.SYS_VHANGUP: unix.EPERM,
	// not namespaced, or a history of holes
	unix.SYS_ADD_KEY: unix.EPERM, unix.SYS_REQUEST_KEY: unix.EPERM, unix.SYS_KEYCTL: unix.EPERM, unix.SYS_BPF: unix.EPERM,
	unix.SYS_PERF_EVENT_OPEN: unix.EPERM, unix.SYS_USERFAULTFD: unix.EPERM, unix.SYS_MOVE_PAGES: unix.EPERM, unix.SYS_MIGRATE_PAGES: unix.EPERM,
	unix.SYS_IO_URING_SETUP: unix.ENOSYS, unix.SYS_IO_URING_ENTER: unix.ENOSYS, unix.SYS_IO_URING_REGISTER: unix.ENOSYS,
	// its rings count against one number of the whole machine (fs.aio-max-nr); without any, the calls on them find none
	unix.SYS_IO_SETUP: unix.ENOSYS,
	// What the kernel would write is that of the whole machine. A sandbox's files need not outlive a
	// crash (see mount.Overlay), so there is nothing to do for it: it succeeds.
	unix.SYS_SYNC: 0,
	// gone from the kernel or never needed
	unix.SYS_MODIFY_LDT: unix.ENOSYS,
	unix.SYS_USELIB:     unix.ENOSYS, unix.SYS_SYSFS: unix.ENOSYS, unix.SYS_USTAT: unix.ENOSYS, unix.SYS_LOOKUP_DCOOKIE: unix.ENOSYS,
	unix.SYS_NFSSERVCTL: unix.ENOSYS, unix.SYS__SYSCTL: unix.ENOSYS,
}

// filterOptions of setsockopt(2) hang a BPF program on a socket. A sandbox may have none: the
// kernel frees each from a queue of work of the whole machine, where ten thousand that go
// at once wait for each other for ever (kernel 6.18: bpf_prog_free).
var filterOptions = []uint32{unix.SO_ATTACH_FILTER, unix.SO_ATTACH_BPF, unix.SO_ATTACH_REUSEPORT_CBPF, unix.SO_ATTACH_REUSEPORT_EBPF}

// Sockets that there are, by family, type and protocol. Of other families, AF_PACKET and AF_XDP have rings in
// memory that no limit counts, AF_VSOCK reaches the host whatever the network namespace, and the rest is old code
// that nobody here needs. Of other protocols likewise; besides, for one that it does not have the kernel
// starts a program outside of all limits, to look for a module.
var (
	// for streams and datagrams of AF_INET and AF_INET6; raw sockets have any
	inetProtocols    = []uint32{0, unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6, unix.IPPROTO_MPTCP}
	netlinkProtocols = []uint32{unix.NETLINK_ROUTE, unix.NETLINK_SOCK_DIAG, unix.NETLINK_AUDIT, unix.NETLINK_KOBJECT_UEVENT, unix.NETLINK_GENERIC}
)

// seccompProgram compiles the profile to struct sock_filter[].
func seccompProgram() ([]byte, error) {
	fail := func(e unix.Errno) bpf.Instruction { return bpf.RetConstant{Val: unix.SECCOMP_RET_ERRNO | uint32(e)} }
	allow := bpf.RetConstant{Val: unix.SECCOMP_RET_ALLOW}
	// Offsets into struct seccomp_data, little-endian.
	const nr, arch, arg0, arg1, arg2, arg3 = 0, 4, 16, 24, 32, 40
	// The machine's pool of huge pages counts for nobody; to a sandbox it is empty.
	hugePages := func(flags uint32, bit uint32) []bpf.Instruction {
		return []bpf.Instruction{bpf.LoadAbsolute{Off: flags, Size: 4}, bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: bit, SkipTrue: 1}, allow, fail(unix.ENOMEM)}
	}
	prog := []bpf.Instruction{
		bpf.LoadAbsolute{Off: arch, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: auditArchX86_64, SkipTrue: 1},
		bpf.RetConstant{Val: unix.SECCOMP_RET_KILL_PROCESS}, // 32-bit calls have other numbers
		bpf.LoadAbsolute{Off: nr, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpLessOrEqual, Val: newestCall, SkipTrue: 1},
		fail(unix.ENOSYS), // also the x32 numbers
	}
	// What becomes of each number, as runs of numbers with one verdict.
	special := map[uint32][]bpf.Instruction{
		unix.SYS_CLONE: {
			bpf.LoadAbsolute{Off: arg0, Size: 4}, bpf.JumpIf{Cond: bpf.JumpBitsSet, Val: newNamespaces, SkipTrue: 1}, allow, fail(unix.EPERM),
		},
		// One may look at another's limits but set only one's own: PID 1 has the same owner.
		unix.SYS_PRLIMIT64: {
			bpf.LoadAbsolute{Off: arg0, Size: 4}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: 0, SkipTrue: 4},
			bpf.LoadAbsolute{Off: arg2, Size: 4}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 0, SkipTrue: 3},
			bpf.LoadAbsolute{Off: arg2 + 4, Size: 4}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: 0, SkipTrue: 1},
			allow, fail(unix.EPERM),
		},
		// Filters of one's own are BPF programs too (see filterOptions). The errors are those of a kernel
		// without them, which the programs that sandbox themselves go on with.
		unix.SYS_SECCOMP: {
			bpf.LoadAbsolute{Off: arg0, Size: 4}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.SECCOMP_SET_MODE_FILTER, SkipTrue: 1}, allow, fail(unix.EINVAL),
		},
		unix.SYS_PRCTL: {
			bpf.LoadAbsolute{Off: arg0, Size: 4}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.PR_SET_SECCOMP, SkipTrue: 2},
			bpf.LoadAbsolute{Off: arg1, Size: 4}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.SECCOMP_MODE_FILTER, SkipTrue: 1},
			allow, fail(unix.EINVAL),
		},
		// Line disciplines other than that of terminals are drivers, which the kernel looks for as modules.
		unix.SYS_IOCTL: {
			bpf.LoadAbsolute{Off: arg1, Size: 4}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.TIOCSETD, SkipTrue: 1}, allow, fail(unix.EPERM),
		},
		unix.SYS_MMAP:         hugePages(arg3, unix.MAP_HUGETLB),
		unix.SYS_MEMFD_CREATE: hugePages(arg1, unix.MFD_HUGETLB),
		unix.SYS_SHMGET:       hugePages(arg2, shmHugeTLB),
	}
	option := []bpf.Instruction{
		bpf.LoadAbsolute{Off: arg1, Size: 4}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SOL_TCP, SkipTrue: 3},
		bpf.LoadAbsolute{Off: arg2, Size: 4}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.TCP_ULP, SkipTrue: 1}, fail(unix.ENOENT), // as without any
		bpf.LoadAbsolute{Off: arg1, Size: 4}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.SOL_SOCKET, SkipTrue: 1}, allow,
		bpf.LoadAbsolute{Off: arg2, Size: 4},
	}
	for _, o := range filterOptions {
		option = append(option, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: o, SkipTrue: 1}, fail(unix.EPERM))
	}
	special[unix.SYS_SETSOCKOPT] = append(option, allow)
	// What is in the accumulator is one of them, or it fails.
	oneOf := func(values []uint32, e unix.Errno) (out []bpf.Instruction) {
		for _, v := range values {
			out = append(out, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: v, SkipTrue: 1}, allow)
		}
		return append(out, fail(e))
	}
	inet := slices.Concat([]bpf.Instruction{
		bpf.LoadAbsolute{Off: arg1, Size: 4}, bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: socketType},
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.SOCK_RAW, SkipTrue: 1}, allow,
		bpf.JumpIf{Cond: bpf.JumpLessThan, Val: unix.SOCK_RAW, SkipTrue: 1}, fail(unix.ESOCKTNOSUPPORT),
		bpf.LoadAbsolute{Off: arg2, Size: 4},
	}, oneOf(inetProtocols, unix.EPROTONOSUPPORT))
	netlink := append([]bpf.Instruction{bpf.LoadAbsolute{Off: arg2, Size: 4}}, oneOf(netlinkProtocols, unix.EPROTONOSUPPORT)...)
	socket := slices.Concat([]bpf.Instruction{
		bpf.LoadAbsolute{Off: arg0, Size: 4}, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.AF_UNIX, SkipTrue: 1}, allow,
		bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: unix.AF_NETLINK, SkipTrue: uint8(len(netlink))},
	}, netlink, []bpf.Instruction{
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_INET, SkipTrue: 2}, bpf.JumpIf{Cond: bpf.JumpEqual, Val: unix.AF_INET6, SkipTrue: 1}, fail(unix.EAFNOSUPPORT),
	}, inet)
	special[unix.SYS_SOCKET], special[unix.SYS_SOCKETPAIR] = socket, socket
	var runs []run
	for n := uint32(0); n <= newestCall; n++ {
		verdict := special[n]
		if e, ok := denied[n]; ok {
			verdict = []bpf.Instruction{fail(e)}
		} else if verdict == nil {
			verdict = []bpf.Instruction{allow}
		}
		if len(runs) == 0 || !slices.Equal(runs[len(runs)-1].verdict, verdict) {
			runs = append(runs, run{n, verdict})
		}
	}
	prog = append(prog, search(runs)...)
	raw, err := bpf.Assemble(prog)
	if err != nil {
		return nil, fmt.Errorf("assemble seccomp profile: %w", err)
	}
	out := make([]byte, 0, len(raw)*unix.SizeofSockFilter)
	for _, i := range raw {
		out = binary.LittleEndian.AppendUint16(out, i.Op)
		out = append(out, i.Jt, i.Jf)
		out = binary.LittleEndian.AppendUint32(out, i.K)
	}
	return out, nil
}

// run is a run of system call numbers, up to the next one's first.
type run struct {
	first   uint32
	verdict []bpf.Instruction
}

// search finds the run of the number in the accumulator by halving. The kernel tries a new
// filter on every number there is, once for each sandbox.
func search(runs []run) []bpf.Instruction {
	if len(runs) == 1 {
		return runs[0].verdict
	}
	half := len(runs) / 2
	low, high := search(runs[:half]), search(runs[half:])
	out := []bpf.Instruction{bpf.JumpIf{Cond: bpf.JumpGreaterOrEqual, Val: runs[half].first, SkipTrue: uint8(len(low))}}
	if len(low) > math.MaxUint8 { // a conditional jump goes no further
		out = []bpf.Instruction{bpf.JumpIf{Cond: bpf.JumpLessThan, Val: runs[half].first, SkipTrue: 1}, bpf.Jump{Skip: uint32(len(low))}}
	}
	return append(append(out, low...), high...)
}
