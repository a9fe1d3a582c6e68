package port

import (
	"bufio"
	"encoding/binary"
	"io"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"

	"dsec/api/v1/errs"
)

// Listening is a TCP port on which something in the sandbox listens.
type Listening struct {
	Port    uint16
	Address string
}

// List returns the listening TCP sockets of the sandbox, by port.
func List() ([]Listening, error) {
	var out []Listening
	var failed error
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		f, err := os.Open(name)
		if err != nil {
			if !os.IsNotExist(err) || name == "/proc/net/tcp" {
				failed = err // without IPv6 there is no second file
			}
			continue
		}
		l, err := parse(f)
		f.Close()
		if err != nil {
			failed = err
		}
		out = append(out, l...)
	}
	if failed != nil && len(out) == 0 {
		return nil, errs.Wrap(errs.NotSupported, phase, "read the sandbox's socket table", failed)
	}
	slices.SortFunc(out, func(a, b Listening) int {
		if a.Port != b.Port {
			return int(a.Port) - int(b.Port)
		}
		return strings.Compare(a.Address, b.Address)
	})
	return slices.Compact(out), nil
}

const stateListen = "0A"

// parse reads the kernel's table; lines it cannot read are not sockets that listen.
func parse(r io.Reader) ([]Listening, error) {
	var out []Listening
	s := bufio.NewScanner(r)
	for s.Scan() {
		f := strings.Fields(s.Text())
		if len(f) < 4 || f[3] != stateListen {
			continue
		}
		host, port, ok := strings.Cut(f[1], ":")
		n, err := strconv.ParseUint(port, 16, 16)
		addr, err2 := address(host)
		if !ok || err != nil || err2 != nil || n == 0 {
			continue
		}
		out = append(out, Listening{uint16(n), addr})
	}
	return out, s.Err()
}

// address renders an address that the kernel prints as 32-bit words in its own byte order.
func address(s string) (string, error) {
	if len(s) != 8 && len(s) != 32 {
		return "", strconv.ErrSyntax
	}
	var b []byte
	for ; s != ""; s = s[8:] {
		word, err := strconv.ParseUint(s[:8], 16, 32)
		if err != nil {
			return "", err
		}
		b = binary.NativeEndian.AppendUint32(b, uint32(word))
	}
	a, _ := netip.AddrFromSlice(b)
	return a.Unmap().String(), nil
}
