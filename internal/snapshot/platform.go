package snapshot

import (
	"bytes"
	"strings"

	"golang.org/x/sys/unix"
)

// Platform is what the platform itself puts into every sandbox's upper and will put into
// that of a restored one: left out of the pack as long as the sandbox has not changed it.
// Paths are absolute.
type Platform struct {
	// Files are regular files of root, mode 0644, such as /etc/hostname, with their content.
	Files map[string][]byte
	// Dirs are directories of root, with their modes, that the files needed. One is left
	// out if nothing is left in it.
	Dirs map[string]uint32
	// MountPoints are directories of root, mode 0755, that the guest made to mount on.
	MountPoints []string
}

// platformNode is the part of a Platform below one directory.
type platformNode struct {
	below map[string]*platformNode
	file  *[]byte
	dir   bool
	mode  uint32
	mount bool
}

func (p Platform) tree() *platformNode {
	root := &platformNode{}
	at := func(path string) *platformNode {
		n := root
		for name := range strings.SplitSeq(path, "/") {
			if name == "" {
				continue
			}
			if n.below == nil {
				n.below = map[string]*platformNode{}
			}
			if n.below[name] == nil {
				n.below[name] = &platformNode{}
			}
			n = n.below[name]
		}
		return n
	}
	for path, content := range p.Files {
		at(path).file = &content
	}
	for path, mode := range p.Dirs {
		n := at(path)
		n.dir, n.mode = true, mode&0o7777
	}
	for _, path := range p.MountPoints {
		n := at(path)
		n.dir, n.mode, n.mount = true, 0o755, true
	}
	return root
}

func (n *platformNode) child(name string) *platformNode {
	if n == nil {
		return nil
	}
	return n.below[name]
}

// isDir tells whether a directory with these attributes may be the platform's, if it is
// empty. One that hides what is below it is somebody's doing, unless it was made by a mkdir
// of the guest.
func (n *platformNode) isDir(uid, gid, perm uint32, xattrs int, m marks) bool {
	return n != nil && n.dir && uid == 0 && gid == 0 && perm == n.mode && xattrs == 0 && m.redirect == "" && (n.mount || !m.opaque)
}

// isFile tells whether the open file with these attributes is the platform's, unchanged.
func (n *platformNode) isFile(fd int, st *unix.Stat_t, uid, gid uint32, xattrs int) bool {
	if n == nil || n.file == nil || uid != 0 || gid != 0 || st.Mode&0o7777 != 0o644 || xattrs != 0 || st.Nlink != 1 || st.Size != int64(len(*n.file)) {
		return false
	}
	got := make([]byte, len(*n.file)+1)
	k, err := unix.Pread(fd, got, 0)
	return err == nil && bytes.Equal(got[:k], *n.file)
}
