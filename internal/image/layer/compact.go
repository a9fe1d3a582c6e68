package layer

import (
	"crypto/sha256"
	"sort"

	"golang.org/x/sys/unix"
)

// blocks returns how many blocks of the data blob a file of size bytes uses.
func (e *extent) blocks(size int64) int64 {
	all := (size + blockSize - 1) >> blockBits
	switch {
	case e.start == nullBlock:
		return 0
	case e.chunks == nil:
		return all
	}
	unit := int64(1) << (e.unitBits - blockBits)
	var n int64
	for i, c := range e.chunks {
		if c != nullBlock {
			n += min(unit, all-int64(i)*unit)
		}
	}
	return n
}

func (e *extent) shift(delta uint32) {
	e.start -= delta
	for i := range e.chunks {
		if e.chunks[i] != nullBlock {
			e.chunks[i] -= delta
		}
	}
}

// compact closes the gaps that replaced and removed files left in the data blob,
// moving what is alive towards its start, and hashes it anew.
func (b *Builder) compact(inodes []*inode) error {
	var live []*inode
	var blocks int64
	for _, ino := range inodes {
		if ino.mode&unix.S_IFMT == unix.S_IFREG && ino.small == nil && ino.size > 0 && ino.extent.start != nullBlock {
			live = append(live, ino)
			blocks += ino.extent.blocks(ino.size)
		}
	}
	d := b.data
	if blocks<<blockBits == d.off {
		return nil
	}
	sort.Slice(live, func(i, j int) bool { return live[i].extent.start < live[j].extent.start })
	d.sum = sha256.New()
	buf := d.buf[:cap(d.buf)]
	var to int64
	for _, ino := range live {
		from, n := int64(ino.extent.start)<<blockBits, ino.extent.blocks(ino.size)<<blockBits
		ino.extent.shift(uint32((from - to) >> blockBits))
		for n > 0 {
			p := buf[:min(n, int64(len(buf)))]
			if _, err := d.w.ReadAt(p, from); err != nil {
				return DiskError("read data blob back", err)
			}
			d.sum.Write(p)
			if from != to {
				if _, err := d.w.WriteAt(p, to); err != nil {
					return DiskError("close gaps of data blob", err)
				}
			}
			from, to, n = from+int64(len(p)), to+int64(len(p)), n-int64(len(p))
		}
	}
	d.off = to
	return DiskError("cut data blob", d.w.Truncate(to))
}
