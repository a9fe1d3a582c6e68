package layer

import (
	"encoding/binary"
	"fmt"
	"strings"
)

const (
	xattrHeader = 12
	xattrAreaMx = xattrHeader + 4*(1<<16-2)
	valueMax    = 1<<16 - 1
)

// xattrIndex splits a name into the format's prefix number and the rest. The
// format has no number for other name spaces, and Linux no use for them.
func xattrIndex(name string) (index byte, rest string, ok bool) {
	switch name {
	case "system.posix_acl_access":
		return 2, "", true
	case "system.posix_acl_default":
		return 3, "", true
	}
	for _, p := range []struct {
		prefix string
		index  byte
	}{{"user.", 1}, {"trusted.", 4}, {"security.", 6}} {
		if rest, ok := strings.CutPrefix(name, p.prefix); ok && rest != "" {
			return p.index, rest, true
		}
	}
	return 0, "", false
}

// xattrClass names the name space of an xattr that is left out.
func xattrClass(name string) string {
	ns, _, _ := strings.Cut(name, ".")
	if len(ns) > 32 {
		ns = ns[:32]
	}
	return ns + ".*"
}

// xattrSize returns the bytes that the xattrs take after their inode.
func xattrSize(xs []Xattr) (int, error) {
	if len(xs) == 0 {
		return 0, nil
	}
	size := xattrHeader
	for _, x := range xs {
		_, rest, _ := xattrIndex(x.Name)
		if len(x.Name) > nameMax || strings.IndexByte(x.Name, 0) >= 0 {
			return 0, fmt.Errorf("bad xattr name %s", quote(x.Name))
		}
		if len(x.Value) > valueMax {
			return 0, fmt.Errorf("%s has %d bytes (limit %d)", quote(x.Name), len(x.Value), valueMax)
		}
		size += (4 + len(rest) + len(x.Value) + 3) &^ 3
		if size > xattrAreaMx {
			return 0, fmt.Errorf("more than %d bytes in all", xattrAreaMx)
		}
	}
	return size, nil
}

func appendXattrs(b []byte, xs []Xattr) []byte {
	if len(xs) == 0 {
		return b
	}
	b = append(b, 0xff, 0xff, 0xff, 0xff) // name filter: not used
	b = append(b, make([]byte, xattrHeader-4)...)
	for _, x := range xs {
		index, rest, _ := xattrIndex(x.Name)
		b = append(b, byte(len(rest)), index)
		b = binary.LittleEndian.AppendUint16(b, uint16(len(x.Value)))
		b = append(b, rest...)
		b = append(b, x.Value...)
		b = append(b, make([]byte, -(len(rest)+len(x.Value))&3)...)
	}
	return b
}

// xattrPrefix is the opposite of xattrIndex: what precedes a name of the given length.
func xattrPrefix(index byte, rest int) (string, bool) {
	switch {
	case index == 2 && rest == 0:
		return "system.posix_acl_access", true
	case index == 3 && rest == 0:
		return "system.posix_acl_default", true
	case rest == 0:
		return "", false
	case index == 1:
		return "user.", true
	case index == 4:
		return "trusted.", true
	case index == 6:
		return "security.", true
	}
	return "", false
}
