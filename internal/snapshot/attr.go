package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

// IDs is the range of host ids that the owners in an upper are from: in the layer
// they begin at 0. The zero value leaves ids as they are.
type IDs struct{ First, Count uint32 }

// nobody owns in the layer what no id of the range owns.
const nobody = 65534

func (r IDs) toLayer(id uint32) (uint32, bool) {
	if r.Count == 0 {
		return id, true
	}
	if id < r.First || id-r.First >= r.Count {
		return nobody, false
	}
	return id - r.First, true
}

// overlayPrefix is of the xattrs by which an overlay marks what is in its upper.
const overlayPrefix = "trusted.overlay."

// marks are what overlayfs says about an entry.
type marks struct {
	opaque   bool   // nothing of the layers below shows in the directory
	redirect string // where the directory is in the layers below
	metacopy bool   // the file's content is in a layer below
	xwhite   bool   // whiteouts in the directory may be files with an xattr
}

// attrReader reads attributes and turns them into those of a layer.
type attrReader struct {
	ids   IDs
	buf   []byte
	notes map[string]int64
}

func newAttrReader(ids IDs) *attrReader {
	return &attrReader{ids: ids, buf: make([]byte, 64<<10), notes: map[string]int64{}}
}

func (r *attrReader) note(what string) { r.notes[what]++ }

// attr reads those of the file fd, whose stat is st.
func (r *attrReader) attr(fd int, st *unix.Stat_t, opath bool) (layer.Attr, marks, error) {
	a := layer.Attr{Perm: st.Mode & 0o7777, Sec: st.Mtim.Sec, Nsec: uint32(st.Mtim.Nsec)}
	var uok, gok bool
	a.UID, uok = r.ids.toLayer(st.Uid)
	a.GID, gok = r.ids.toLayer(st.Gid)
	if !uok || !gok {
		r.note("owner outside of the sandbox's ids (now nobody)")
	}
	var m marks
	err := r.xattrs(fd, opath, func(name string, value []byte) error {
		return r.xattr(&a, &m, name, value)
	})
	return a, m, err
}

// xattrs calls f with each; the value is good until f returns. An O_PATH descriptor has
// no calls of its own for xattrs, but /proc leads to what it stands for, even a symlink.
func (r *attrReader) xattrs(fd int, opath bool, f func(name string, value []byte) error) error {
	link := ""
	if opath {
		link = "/proc/self/fd/" + strconv.Itoa(fd)
	}
	var n int
	var err error
	if opath {
		n, err = unix.Listxattr(link, r.buf)
	} else {
		n, err = unix.Flistxattr(fd, r.buf)
	}
	if errors.Is(err, unix.ENOTSUP) || err == nil && n == 0 {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list xattrs: %w", err)
	}
	for _, name := range strings.Split(strings.TrimRight(string(r.buf[:n]), "\x00"), "\x00") {
		if dropped(name) {
			continue
		}
		if opath {
			n, err = unix.Getxattr(link, name, r.buf)
		} else {
			n, err = unix.Fgetxattr(fd, name, r.buf)
		}
		if errors.Is(err, unix.ENODATA) { // removed meanwhile
			continue
		}
		if err != nil {
			return fmt.Errorf("read xattr %.100q: %w", name, err)
		}
		if err := f(name, r.buf[:n]); err != nil {
			return err
		}
	}
	return nil
}

// dropped are those that say what an upper is to the layers it was made on: where a file was
// copied from, that a directory has such files, and the like. In a lower layer they
// would be wrong or meaningless.
func dropped(name string) bool {
	switch name {
	case overlayPrefix + "origin", overlayPrefix + "impure", overlayPrefix + "nlink", overlayPrefix + "upper", overlayPrefix + "uuid":
		return true
	}
	return false
}

func (r *attrReader) xattr(a *layer.Attr, m *marks, name string, value []byte) error {
	keep := func(v []byte) {
		a.Xattrs = append(a.Xattrs, layer.Xattr{Name: name, Value: append([]byte(nil), v...)})
	}
	switch {
	case name == overlayPrefix+"opaque":
		m.opaque = string(value) == "y"
		m.xwhite = string(value) == "x"
	case name == overlayPrefix+"redirect":
		m.redirect = string(value)
	case name == overlayPrefix+"metacopy":
		m.metacopy = true
	case name == overlayPrefix+"protattr":
		r.note("immutable and append-only flags")
	case strings.HasPrefix(name, overlayPrefix+"overlay."): // escaped: a program's own
		keep(value)
	case strings.HasPrefix(name, overlayPrefix):
		r.note("unknown mark " + strconv.Quote(name))
	case name == "system.posix_acl_access", name == "system.posix_acl_default":
		v, lost, err := mapACL(value, r.ids)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if lost > 0 {
			r.note("ACL entries for ids outside of the sandbox's")
		}
		keep(v)
	case name == "security.capability":
		v, ok := mapCapability(value, r.ids)
		if !ok {
			r.note("file capabilities of a root outside of the sandbox")
			return nil
		}
		keep(v)
	default:
		keep(value)
	}
	return nil
}

// mapACL turns the ids of a POSIX ACL as the kernel gives it (a version, then tag,
// permissions and id of each entry) into those of a layer. Entries for ids that a layer
// cannot have are left out, and counted.
func mapACL(p []byte, ids IDs) (out []byte, lost int, err error) {
	const version, head, size, user, group = 2, 4, 8, 0x02, 0x08
	if len(p) < head || (len(p)-head)%size != 0 || binary.LittleEndian.Uint32(p) != version {
		return nil, 0, fmt.Errorf("malformed ACL of %d bytes", len(p))
	}
	out = append(out, p[:head]...)
	for e := p[head:]; len(e) > 0; e = e[size:] {
		out = append(out, e[:size]...)
		if tag := binary.LittleEndian.Uint16(e); tag != user && tag != group {
			continue
		}
		id, ok := ids.toLayer(binary.LittleEndian.Uint32(e[4:]))
		if !ok {
			out, lost = out[:len(out)-size], lost+1
			continue
		}
		binary.LittleEndian.PutUint32(out[len(out)-4:], id)
	}
	return out, lost, nil
}

// mapCapability turns file capabilities with the id of the root that they are for (version 3)
// into the same of the layer; those of the layer's own root have no id there (version 2),
// as in any image. Those without an id are for the host's root, which no sandbox has.
func mapCapability(p []byte, ids IDs) ([]byte, bool) {
	const v2, v3, size2, size3, revision = 0x02000000, 0x03000000, 20, 24, 0xff000000
	if ids.Count == 0 {
		return p, true
	}
	if len(p) != size3 || binary.LittleEndian.Uint32(p)&revision != v3 {
		return nil, false
	}
	root, ok := ids.toLayer(binary.LittleEndian.Uint32(p[size2:]))
	if !ok {
		return nil, false
	}
	out := append([]byte(nil), p...)
	if root == 0 {
		binary.LittleEndian.PutUint32(out, binary.LittleEndian.Uint32(p)&^revision|v2)
		return out[:size2], true
	}
	binary.LittleEndian.PutUint32(out[size2:], root)
	return out, true
}

// checkRedirect refuses what the kernel would.
func checkRedirect(to string) error {
	bad := to == "" || strings.IndexByte(to, 0) >= 0
	rest, abs := strings.CutPrefix(to, "/")
	if !abs && strings.Contains(to, "/") {
		bad = true
	}
	for p := range strings.SplitSeq(rest, "/") {
		bad = bad || p == "" || p == "." || p == ".." || len(p) > 255
	}
	if bad {
		return fmt.Errorf("malformed redirect %.300q", to)
	}
	return nil
}
