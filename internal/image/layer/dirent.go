package layer

import (
	"encoding/binary"
	"sort"

	"golang.org/x/sys/unix"
)

// Directories are sorted lists cut into blocks; each block has its records
// first, then their names. "." and ".." are sorted in like any other name.

type dirent struct {
	name string
	node *node
}

// entriesOf lists d with "." and "..", sorted; names are d's sorted children.
func entriesOf(d *node, names []*node) []dirent {
	up := d.parent
	if up == nil {
		up = d
	}
	list := make([]dirent, 0, len(names)+2)
	for _, c := range names {
		list = append(list, dirent{c.name, c})
	}
	for _, x := range []dirent{{".", d}, {"..", up}} {
		at := sort.Search(len(list), func(i int) bool { return list[i].name > x.name })
		list = append(list, dirent{})
		copy(list[at+1:], list[at:])
		list[at] = x
	}
	return list
}

// cutBlock returns how many entries of list fit one block and the bytes they take.
func cutBlock(list []dirent) (n, size int) {
	for n < len(list) {
		more := direntSize + len(list[n].name)
		if size+more > blockSize {
			break
		}
		size += more
		n++
	}
	return n, size
}

// dirSize is the length of the directory with these entries.
func dirSize(list []dirent) int64 {
	var total int64
	for len(list) > 0 {
		n, size := cutBlock(list)
		if list = list[n:]; len(list) > 0 {
			size = blockSize
		}
		total += int64(size)
	}
	return total
}

func (e *encoder) dirents(d *node) []byte {
	list := entriesOf(d, e.names[d])
	out := make([]byte, 0, d.ino.place.dirSize)
	for len(list) > 0 {
		n, size := cutBlock(list)
		off := n * direntSize
		for _, x := range list[:n] {
			ino := x.node.ino
			out = binary.LittleEndian.AppendUint64(out, uint64(ino.place.off/slotSize))
			out = binary.LittleEndian.AppendUint16(out, uint16(off))
			out = append(out, fileType(ino.mode), 0)
			off += len(x.name)
		}
		for _, x := range list[:n] {
			out = append(out, x.name...)
		}
		if list = list[n:]; len(list) > 0 {
			out = append(out, make([]byte, blockSize-size)...)
		}
	}
	return out
}

func fileType(mode uint32) byte {
	switch mode & unix.S_IFMT {
	case unix.S_IFREG:
		return 1
	case unix.S_IFDIR:
		return 2
	case unix.S_IFCHR:
		return 3
	case unix.S_IFBLK:
		return 4
	case unix.S_IFIFO:
		return 5
	case unix.S_IFSOCK:
		return 6
	default:
		return 7 // symlink
	}
}
