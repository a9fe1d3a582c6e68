package proc

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"strings"
	"syscall"
)

// Of programs, exec reads the head, the ELF program headers, and the same of the
// interpreter that those or a first line of "#!" name, which may have another.
const (
	headBytes       = 4096
	maxHeaders      = 64 << 10 // the kernel refuses more
	maxInterpreters = 6        // a script's, four more as the kernel allows, and ld.so
)

// readHead reads what an exec of path will read, so that this finds it in memory. From fork to
// exec the runtime gives up neither the processor that the thread holds nor the fork lock: while
// the kernel waited there for data of an image that is fetched on demand, or fails to be, no
// goroutine of the guest would run. A read is a system call that others do not wait for.
//
// Only EIO is told: exec knows all else better.
func readHead(path string) error {
	for range maxInterpreters {
		next, err := readOne(path)
		if err == syscall.EIO {
			return err
		}
		if err != nil || next == "" {
			return nil
		}
		path = next
	}
	return nil
}

// readOne reads the head of the program path and returns its interpreter's path.
func readOne(path string) (interpreter string, err error) {
	// No terminal or FIFO may hold it up: what is no file is not read.
	fd, err := syscall.Open(path, syscall.O_RDONLY|syscall.O_CLOEXEC|syscall.O_NONBLOCK|syscall.O_NOCTTY, 0)
	if err != nil {
		return "", err
	}
	defer syscall.Close(fd)
	var st syscall.Stat_t
	if err := syscall.Fstat(fd, &st); err != nil || st.Mode&syscall.S_IFMT != syscall.S_IFREG {
		return "", err
	}
	head := make([]byte, headBytes)
	n, err := readAt(fd, head, 0)
	if err != nil {
		return "", err
	}
	head = head[:n]
	if line, ok := bytes.CutPrefix(head, []byte("#!")); ok {
		line, _, _ = bytes.Cut(line, []byte("\n"))
		if words := strings.Fields(string(line)); len(words) > 0 {
			return words[0], nil
		}
		return "", nil
	}
	var h elf.Header64
	if !bytes.HasPrefix(head, []byte(elf.ELFMAG)) || binary.Read(bytes.NewReader(head), binary.LittleEndian, &h) != nil ||
		int(h.Phentsize) != binary.Size(elf.Prog64{}) || int(h.Phnum)*int(h.Phentsize) > maxHeaders {
		return "", nil
	}
	progs := make([]byte, int(h.Phnum)*int(h.Phentsize))
	if n, err = readAt(fd, progs, int64(h.Phoff)); err != nil {
		return "", err
	}
	for r := bytes.NewReader(progs[:n]); ; {
		var p elf.Prog64
		if binary.Read(r, binary.LittleEndian, &p) != nil {
			return "", nil
		}
		if elf.ProgType(p.Type) != elf.PT_INTERP {
			continue
		}
		name := make([]byte, min(p.Filesz, 4096))
		if n, err = readAt(fd, name, int64(p.Off)); err != nil {
			return "", err
		}
		name, _, _ = bytes.Cut(name[:n], []byte{0})
		return string(name), nil
	}
}

// readAt reads as much of b as the file has.
func readAt(fd int, b []byte, at int64) (n int, err error) {
	for n < len(b) {
		m, err := syscall.Pread(fd, b[n:], at+int64(n))
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return n, err
		case m == 0:
			return n, nil
		default:
			n += m
		}
	}
	return n, nil
}
