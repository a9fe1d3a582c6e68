package layer

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash/crc32"
	"io"
	"math/bits"
	"sort"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
)

// On-disk constants of EROFS (little-endian throughout).
const (
	sbOffset   = 1024
	sbSize     = 128
	devSlot    = 128
	magic      = 0xE0F5E1E2
	compatSum  = 0x1
	compatTime = 0x2
	incChunked = 0x4
	incDevices = 0x8

	inodeSize  = 64 // the extended form: 32-bit ids, 64-bit times and sizes
	slotSize   = 32 // inode numbers count these
	direntSize = 12
	indexSize  = 8

	formatExtended = 1
	layoutPlain    = 0 << 1
	layoutInline   = 2 << 1
	layoutChunk    = 4 << 1
	chunkIndexes   = 0x20

	dataDevice = 1 // the data blob's number in chunk addresses

	// A tail longer than this gets a block of its own: beside its inode it
	// might leave as much unused.
	tailMax = blockSize / 2
)

// place is where the encoder puts an inode.
type place struct {
	done    bool
	layout  uint16
	xattrs  int   // bytes
	tail    int   // bytes after the inode and xattrs
	off     int64 // from the start of the inode area
	block   uint32
	nlink   uint32
	dir     *node // a directory's node
	dirSize int64
}

// Result describes a finished layer.
type Result struct {
	MetaDigest, DataDigest string // hex SHA-256; DataDigest is empty without a data blob
	MetaSize, DataSize     int64
	Files                  int64 // entries, the root not counted
	Bytes                  int64 // logical bytes of regular files, hard links once
}

type encoder struct {
	inodes []*inode // in order of offset
	names  map[*node][]*node
	next   int64 // end of the inode area so far
	plain  []*inode
	res    Result
	chunks bool
}

// Finish writes the metadata blob. The builder cannot be used afterwards.
func (b *Builder) Finish(meta io.Writer) (Result, error) {
	if err := b.data.flush(); err != nil {
		return Result{}, err
	}
	enc := &encoder{names: map[*node][]*node{}}
	enc.plan(b.root)
	if err := b.compact(enc.inodes); err != nil {
		return Result{}, err
	}
	if enc.res.DataSize = b.data.off; enc.res.DataSize > 0 {
		enc.res.DataDigest = hex.EncodeToString(b.data.sum.Sum(nil))
	}
	sum := sha256.New()
	w := bufio.NewWriterSize(io.MultiWriter(meta, sum), bufSize)
	if err := enc.write(w); err != nil {
		return Result{}, err
	}
	if err := w.Flush(); err != nil {
		return Result{}, DiskError("write metadata blob", err)
	}
	enc.res.MetaDigest = hex.EncodeToString(sum.Sum(nil))
	return enc.res, nil
}

func (e *encoder) plan(root *node) {
	e.planInode(root)
	root.ino.place.nlink = 2
	for queue := []*node{root}; len(queue) > 0; {
		dir := queue[len(queue)-1]
		queue = queue[:len(queue)-1]
		names := e.names[dir]
		for _, c := range names {
			e.res.Files++
			e.planInode(c)
			c.ino.place.nlink++
			if c.children != nil {
				c.ino.place.nlink++   // its own "."
				dir.ino.place.nlink++ // its ".."
			}
		}
		for i := len(names) - 1; i >= 0; i-- {
			if names[i].children != nil {
				queue = append(queue, names[i])
			}
		}
	}
	// Some readers look for xattrs behind an inode that has none, also the last.
	first := uint32(1 + (e.next+xattrHeader+blockSize-1)/blockSize)
	for _, ino := range e.plain {
		ino.place.block = first
		first += uint32((e.sizeOf(ino) + blockSize - 1) / blockSize)
	}
	e.res.MetaSize = int64(first) << blockBits
}

// planInode gives c's inode its place, at its first name.
func (e *encoder) planInode(c *node) {
	ino := c.ino
	p := &ino.place
	if p.done {
		return
	}
	p.done = true
	p.xattrs, _ = xattrSize(ino.xattrs)
	switch ino.mode & unix.S_IFMT {
	case unix.S_IFDIR:
		names := make([]*node, 0, len(c.children))
		for _, n := range c.children {
			names = append(names, n)
		}
		sort.Slice(names, func(i, j int) bool { return names[i].name < names[j].name })
		e.names[c] = names
		p.dir, p.dirSize = c, dirSize(entriesOf(c, names))
		e.planTail(ino, p.dirSize)
	case unix.S_IFLNK:
		e.planTail(ino, ino.size)
	case unix.S_IFREG:
		e.res.Bytes += ino.size
		switch {
		case ino.size == 0:
			p.layout = layoutPlain
		case ino.small != nil:
			e.planTail(ino, ino.size)
		default:
			p.layout = layoutChunk
			p.tail = -(inodeSize+p.xattrs)&(indexSize-1) + indexSize*max(1, len(ino.extent.chunks))
			e.chunks = true
		}
	}
	p.off = e.next
	if p.layout == layoutInline && p.tail > 0 {
		// The kernel wants an inlined tail inside one block.
		for start := p.off + inodeSize + int64(p.xattrs); start>>blockBits != (start+int64(p.tail)-1)>>blockBits; start += slotSize {
			p.off += slotSize
		}
	}
	e.next = (p.off + inodeSize + int64(p.xattrs+p.tail) + slotSize - 1) &^ (slotSize - 1)
	e.inodes = append(e.inodes, ino)
}

// planTail chooses between content beside the inode and blocks of its own.
func (e *encoder) planTail(ino *inode, size int64) {
	p := &ino.place
	rest := size & (blockSize - 1)
	if rest > 0 && rest <= tailMax {
		p.layout, p.tail = layoutInline, int(rest)
	}
	if size > int64(p.tail) {
		e.plain = append(e.plain, ino)
	}
}

// sizeOf returns the bytes of an inode's content that lie in blocks of the metadata blob.
func (e *encoder) sizeOf(ino *inode) int64 {
	size := ino.size
	if ino.place.dir != nil {
		size = ino.place.dirSize
	}
	return size - int64(ino.place.tail)
}

func (e *encoder) write(w io.Writer) error {
	put := func(action string, p []byte) error {
		_, err := w.Write(p)
		return DiskError(action, err)
	}
	if err := put("write superblock", e.superblock()); err != nil {
		return err
	}
	var off int64
	var buf []byte
	for _, ino := range e.inodes {
		buf = append(buf[:0], make([]byte, ino.place.off-off)...)
		buf = e.appendInode(buf, ino)
		if err := put("write inodes", buf); err != nil {
			return err
		}
		off += int64(len(buf))
	}
	if off != e.next { // blocks would not be where they were planned
		return errs.New(errs.InternalError, "image.encode", fmt.Sprintf("inodes end at %d and were planned to end at %d", off, e.next))
	}
	zero := make([]byte, 2*blockSize)
	off += xattrHeader
	if err := put("write inodes", zero[:xattrHeader+-off&(blockSize-1)]); err != nil {
		return err
	}
	for _, ino := range e.plain {
		body := e.content(ino)[:e.sizeOf(ino)]
		if err := put("write directories", body); err != nil {
			return err
		}
		if err := put("write directories", zero[:-len(body)&(blockSize-1)]); err != nil {
			return err
		}
	}
	return nil
}

func (e *encoder) superblock() []byte {
	le := binary.LittleEndian
	block := make([]byte, blockSize)
	sb := block[sbOffset:]
	le.PutUint32(sb[0:], magic)
	le.PutUint32(sb[8:], compatSum|compatTime)
	sb[12] = blockBits
	le.PutUint16(sb[14:], 0) // root's inode number: the first slot
	le.PutUint64(sb[16:], uint64(len(e.inodes)))
	le.PutUint32(sb[36:], uint32(e.res.MetaSize>>blockBits))
	le.PutUint32(sb[40:], 1) // inodes begin at block 1
	var inc uint32
	if e.chunks {
		inc |= incChunked
	}
	if e.res.DataSize > 0 {
		inc |= incDevices
		le.PutUint16(sb[86:], 1)
		le.PutUint16(sb[88:], (sbOffset+sbSize)/devSlot)
		slot := sb[sbSize:]
		copy(slot[:64], e.res.DataDigest) // the tag names the blob that belongs here
		le.PutUint32(slot[64:], uint32(e.res.DataSize>>blockBits))
		raw, _ := hex.DecodeString(e.res.DataDigest[:32])
		copy(sb[48:64], raw) // the volume's UUID
	}
	le.PutUint32(sb[80:], inc)
	le.PutUint32(sb[4:], ^crc32.Checksum(sb, crc32.MakeTable(crc32.Castagnoli)))
	return block
}

func (e *encoder) appendInode(b []byte, ino *inode) []byte {
	le := binary.LittleEndian
	p := &ino.place
	h := make([]byte, inodeSize)
	le.PutUint16(h[0:], formatExtended|p.layout)
	if p.xattrs > 0 {
		le.PutUint16(h[2:], uint16((p.xattrs-xattrHeader)/4+1))
	}
	le.PutUint16(h[4:], uint16(ino.mode))
	size := ino.size
	if p.dir != nil {
		size = p.dirSize
	}
	le.PutUint64(h[8:], uint64(size))
	unitBits := uint8(0)
	switch {
	case p.layout == layoutChunk:
		unitBits = ino.extent.unitBits
		if ino.extent.chunks == nil { // one chunk that is large enough
			unitBits = max(blockBits, uint8(bits.Len64(uint64(ino.size-1))))
		}
		le.PutUint32(h[16:], uint32(unitBits-blockBits)|chunkIndexes)
	case e.sizeOf(ino) > 0:
		le.PutUint32(h[16:], p.block)
	case ino.rdev != 0:
		le.PutUint32(h[16:], ino.rdev)
	}
	le.PutUint32(h[20:], uint32(p.off/slotSize))
	le.PutUint32(h[24:], ino.uid)
	le.PutUint32(h[28:], ino.gid)
	le.PutUint64(h[32:], uint64(ino.sec))
	le.PutUint32(h[40:], ino.nsec)
	le.PutUint32(h[44:], p.nlink)
	b = append(b, h...)
	b = appendXattrs(b, ino.xattrs)
	if p.layout == layoutChunk {
		b = append(b, make([]byte, -(inodeSize+p.xattrs)&(indexSize-1))...)
		chunks := ino.extent.chunks
		if chunks == nil {
			chunks = []uint32{ino.extent.start}
		}
		for _, c := range chunks {
			b = appendChunk(b, c)
		}
	} else if p.tail > 0 {
		b = append(b, e.content(ino)[e.sizeOf(ino):]...)
	}
	return append(b, make([]byte, -(inodeSize+p.xattrs+p.tail)&(slotSize-1))...)
}

func appendChunk(b []byte, block uint32) []byte {
	var hi, dev uint16 = 0, dataDevice
	if block == nullBlock {
		hi, dev = ^uint16(0), 0
	}
	b = binary.LittleEndian.AppendUint16(b, hi)
	b = binary.LittleEndian.AppendUint16(b, dev)
	return binary.LittleEndian.AppendUint32(b, block)
}

// content returns what the metadata blob holds of an inode's content.
func (e *encoder) content(ino *inode) []byte {
	if d := ino.place.dir; d != nil {
		return e.dirents(d)
	}
	return ino.small
}
