package container

import (
	"encoding/binary"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// verdict runs the profile on one call as the kernel would.
func verdict(t *testing.T, vm *bpf.VM, arch, nr uint32, arg0, arg2 uint64) uint32 {
	t.Helper()
	data := make([]byte, 64) // struct seccomp_data, in the machine's words: this VM reads them in network order
	binary.BigEndian.PutUint32(data[0:], nr)
	binary.BigEndian.PutUint32(data[4:], arch)
	binary.BigEndian.PutUint32(data[16:], uint32(arg0))
	binary.BigEndian.PutUint32(data[20:], uint32(arg0>>32))
	binary.BigEndian.PutUint32(data[32:], uint32(arg2))
	binary.BigEndian.PutUint32(data[36:], uint32(arg2>>32))
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
		if nr > newestCall {
			want = fail(unix.ENOSYS)
		}
		if got := verdict(t, vm, auditArchX86_64, nr, 0, 0); got != want {
			t.Errorf("call %d: %#x, want %#x", nr, got, want)
		}
	}
	for _, c := range []struct {
		what     string
		arch, nr uint32
		arg0     uint64
		arg2     uint64
		want     uint32
	}{
		{"32-bit call", 0x40000003, unix.SYS_READ, 0, 0, unix.SECCOMP_RET_KILL_PROCESS},
		{"x32 call", auditArchX86_64, 0x40000000 | unix.SYS_READ, 0, 0, fail(unix.ENOSYS)},
		{"thread", auditArchX86_64, unix.SYS_CLONE, unix.CLONE_VM | unix.CLONE_THREAD, 0, unix.SECCOMP_RET_ALLOW},
		{"user namespace", auditArchX86_64, unix.SYS_CLONE, unix.CLONE_NEWUSER, 0, fail(unix.EPERM)},
		{"network namespace", auditArchX86_64, unix.SYS_CLONE, unix.CLONE_NEWNET | unix.CLONE_VM, 0, fail(unix.EPERM)},
		{"unix socket", auditArchX86_64, unix.SYS_SOCKET, unix.AF_UNIX, 0, unix.SECCOMP_RET_ALLOW},
		{"vsock", auditArchX86_64, unix.SYS_SOCKET, unix.AF_VSOCK, 0, fail(unix.EAFNOSUPPORT)},
		{"kernel's ciphers", auditArchX86_64, unix.SYS_SOCKET, unix.AF_ALG, 0, fail(unix.EAFNOSUPPORT)},
		{"one's own limits", auditArchX86_64, unix.SYS_PRLIMIT64, 0, 0x7fff00001000, unix.SECCOMP_RET_ALLOW},
		{"a look at PID 1's limits", auditArchX86_64, unix.SYS_PRLIMIT64, 1, 0, unix.SECCOMP_RET_ALLOW},
		{"PID 1's limits", auditArchX86_64, unix.SYS_PRLIMIT64, 1, 0x7fff00001000, fail(unix.EPERM)},
		{"PID 1's limits, from a page at 4 GiB", auditArchX86_64, unix.SYS_PRLIMIT64, 1, 0x100000000, fail(unix.EPERM)},
		{"PID 1's limits, with high bits that the kernel drops", auditArchX86_64, unix.SYS_PRLIMIT64, 0x700000001, 0x1000, fail(unix.EPERM)},
		{"the shared /dev made writable", auditArchX86_64, 467, 0, 0, fail(unix.EPERM)},
	} {
		if got := verdict(t, vm, c.arch, c.nr, c.arg0, c.arg2); got != c.want {
			t.Errorf("%s: %#x, want %#x", c.what, got, c.want)
		}
	}
}
