package layer

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"sort"
	"strings"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

const (
	readPhase = "image.layer.read"
	pageBits  = 14
	pageCount = 256 // pages of metadata kept: 4 MiB
	dirMax    = 1 << 30
)

// Reader reads a layer back from its blobs: what [Builder] wrote, nothing else
// that EROFS can express. Damage is image_corrupt, saying where; a Reader never
// reads outside the blobs, nor endlessly, whatever they hold. It is not safe for
// concurrent use.
type Reader struct {
	meta     io.ReaderAt
	metaSize int64
	data     io.ReaderAt
	dataSize int64
	root     uint64
	pages    [pageCount]page
}

type page struct {
	at int64 // its number + 1
	p  []byte
}

// Entry is one file of a layer, of any type, without its names.
type Entry struct {
	ID           uint64 // names with the same ID are names of the same file
	Mode         uint32 // type and permissions
	Attr         Attr
	Size         int64 // of a regular file
	Nlink        uint32
	Target       string // of a symlink
	Major, Minor uint32 // of a device

	layout uint16
	field  uint32 // block, chunk format or device, by type and layout
	size   int64
	tail   int64 // where what follows the inode and xattrs begins
}

// Type returns the S_IF bits.
func (e *Entry) Type() uint32 { return e.Mode & unix.S_IFMT }

// Name is one name in a directory.
type Name struct {
	Name string
	ID   uint64
}

// NewReader reads the layer with the given blobs; data may be nil if dataSize is 0.
func NewReader(meta io.ReaderAt, metaSize int64, data io.ReaderAt, dataSize int64) (*Reader, error) {
	r := &Reader{meta: meta, metaSize: metaSize, data: data, dataSize: dataSize}
	if metaSize < 2*blockSize {
		return nil, r.bad("metadata of %d bytes", metaSize)
	}
	block, err := r.at(0, blockSize)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	sb := append([]byte(nil), block[sbOffset:]...)
	sum := le.Uint32(sb[4:])
	le.PutUint32(sb[4:], 0)
	inc := le.Uint32(sb[80:])
	switch {
	case le.Uint32(sb) != magic:
		return nil, r.bad("no layer: wrong magic number")
	case ^crc32.Checksum(sb, crc32.MakeTable(crc32.Castagnoli)) != sum:
		return nil, r.bad("the superblock's checksum is wrong")
	case sb[12] != blockBits || le.Uint32(sb[40:]) != 1 || inc&^(incChunked|incDevices) != 0:
		return nil, r.bad("not a layer of this kind")
	case int64(le.Uint32(sb[36:]))<<blockBits > metaSize:
		return nil, r.bad("metadata of %d bytes instead of %d", metaSize, int64(le.Uint32(sb[36:]))<<blockBits)
	}
	var want int64
	if inc&incDevices != 0 {
		want = int64(le.Uint32(sb[sbSize+64:])) << blockBits
	}
	if want != dataSize {
		return nil, r.bad("data of %d bytes instead of %d", dataSize, want)
	}
	r.root = uint64(le.Uint16(sb[14:]))
	return r, nil
}

func (r *Reader) bad(format string, args ...any) error {
	return errs.New(errs.ImageCorrupt, readPhase, fmt.Sprintf(format, args...))
}

// at returns n bytes of the metadata; they are valid until the next call.
func (r *Reader) at(off int64, n int) ([]byte, error) {
	if off < 0 || n < 0 || off > r.metaSize-int64(n) {
		return nil, r.bad("%d bytes at %d are outside the metadata", n, off)
	}
	num := off >> pageBits
	if (off+int64(n)-1)>>pageBits != num || n == 0 {
		p := make([]byte, n)
		return p, r.read(p, off)
	}
	pg := &r.pages[num%pageCount]
	if pg.at != num+1 {
		if pg.p == nil {
			pg.p = make([]byte, 1<<pageBits)
		}
		pg.at = 0
		p := pg.p[:min(1<<pageBits, r.metaSize-num<<pageBits)]
		if err := r.read(p, num<<pageBits); err != nil {
			return nil, err
		}
		pg.at = num + 1
	}
	in := off & (1<<pageBits - 1)
	return pg.p[in : in+int64(n)], nil
}

func (r *Reader) read(p []byte, off int64) error {
	n, err := r.meta.ReadAt(p, off)
	if n == len(p) {
		return nil
	}
	return blobError("metadata", err)
}

func blobError(what string, err error) error {
	if err == nil || errors.Is(err, io.EOF) {
		return errs.New(errs.ImageCorrupt, readPhase, "the "+what+" is cut off")
	}
	return errs.Wrap(errs.ImageCorrupt, readPhase, "read "+what, err)
}

// Root returns the layer's root directory.
func (r *Reader) Root() (*Entry, error) {
	e, err := r.Entry(r.root)
	if err == nil && e.Type() != unix.S_IFDIR {
		err = r.bad("the root is not a directory")
	}
	return e, err
}

// Entry returns the file with the given ID.
func (r *Reader) Entry(id uint64) (*Entry, error) {
	if id > uint64(r.metaSize)/slotSize {
		return nil, r.bad("inode %d is outside the metadata", id)
	}
	off := blockSize + int64(id)*slotSize
	h, err := r.at(off, inodeSize)
	if err != nil {
		return nil, err
	}
	le := binary.LittleEndian
	format := le.Uint16(h)
	e := &Entry{
		ID: id, Mode: uint32(le.Uint16(h[4:])), Nlink: le.Uint32(h[44:]),
		Attr:   Attr{UID: le.Uint32(h[24:]), GID: le.Uint32(h[28:]), Sec: int64(le.Uint64(h[32:])), Nsec: le.Uint32(h[40:])},
		layout: format &^ formatExtended, field: le.Uint32(h[16:]), size: int64(le.Uint64(h[8:])),
	}
	e.Attr.Perm = e.Mode & permBits
	xattrs := 0
	if n := int(le.Uint16(h[2:])); n > 0 {
		xattrs = xattrHeader + 4*(n-1)
	}
	e.tail = off + inodeSize + int64(xattrs)
	switch {
	case format&formatExtended == 0 || e.layout != layoutPlain && e.layout != layoutInline && e.layout != layoutChunk:
		return nil, r.bad("inode %d has the unknown format %#x", id, format)
	case e.size < 0 || e.Attr.Nsec >= 1e9:
		return nil, r.bad("inode %d has numbers out of range", id)
	case e.layout == layoutChunk && e.Type() != unix.S_IFREG:
		return nil, r.bad("inode %d has chunks and is no regular file", id)
	}
	if xattrs > 0 {
		if e.Attr.Xattrs, err = r.xattrs(id, off+inodeSize, xattrs); err != nil {
			return nil, err
		}
	}
	return e, r.typed(e)
}

// typed fills in what entries of e's type have.
func (r *Reader) typed(e *Entry) error {
	switch e.Type() {
	case unix.S_IFREG:
		e.Size = e.size
		if e.layout != layoutChunk && e.size > r.metaSize {
			return r.bad("inode %d has %d bytes in the metadata", e.ID, e.size)
		}
	case unix.S_IFDIR:
		if e.size > min(r.metaSize, dirMax) {
			return r.bad("directory %d has %d bytes", e.ID, e.size)
		}
	case unix.S_IFLNK:
		if e.size == 0 || e.size > targetMax {
			return r.bad("symlink %d has %d bytes", e.ID, e.size)
		}
		p, err := r.small(e)
		if err != nil {
			return err
		}
		if e.Target = string(p); strings.IndexByte(e.Target, 0) >= 0 {
			return r.bad("symlink %d has a target with a NUL byte", e.ID)
		}
	case unix.S_IFCHR, unix.S_IFBLK:
		e.Major, e.Minor = e.field>>8&0xfff, e.field&0xff|e.field>>12&^0xff
	case unix.S_IFIFO, unix.S_IFSOCK:
	default:
		return r.bad("inode %d has the unknown type %#o", e.ID, e.Type())
	}
	return nil
}

func (r *Reader) xattrs(id uint64, off int64, size int) ([]Xattr, error) {
	p, err := r.at(off, size)
	if err != nil {
		return nil, err
	}
	if p[4] != 0 {
		return nil, r.bad("inode %d has shared xattrs", id)
	}
	var list []Xattr
	for p = p[xattrHeader:]; len(p) >= 4; {
		name, index, value := int(p[0]), p[1], int(binary.LittleEndian.Uint16(p[2:]))
		used := (4 + name + value + 3) &^ 3
		prefix, ok := xattrPrefix(index, name)
		if !ok || used > len(p) {
			return nil, r.bad("inode %d has damaged xattrs", id)
		}
		list = append(list, Xattr{
			Name:  prefix + string(p[4:4+name]),
			Value: append([]byte{}, p[4+name:4+name+value]...),
		})
		p = p[used:]
	}
	if len(p) > 0 {
		return nil, r.bad("inode %d has damaged xattrs", id)
	}
	return list, nil
}

// small returns content that the metadata holds.
func (r *Reader) small(e *Entry) ([]byte, error) {
	tail := int64(0)
	if e.layout == layoutInline {
		tail = e.size & (blockSize - 1)
	}
	if e.layout == layoutChunk || e.size > r.metaSize {
		return nil, r.bad("inode %d has no content of %d bytes in the metadata", e.ID, e.size)
	}
	out := make([]byte, 0, e.size)
	for _, part := range []struct{ off, n int64 }{{int64(e.field) << blockBits, e.size - tail}, {e.tail, tail}} {
		if part.n == 0 {
			continue
		}
		p, err := r.at(part.off, int(part.n))
		if err != nil {
			return nil, err
		}
		out = append(out, p...)
	}
	return out, nil
}

// List returns the names in the directory, sorted, without "." and "..".
func (r *Reader) List(dir *Entry) ([]Name, error) {
	if dir.Type() != unix.S_IFDIR {
		return nil, r.bad("inode %d is not a directory", dir.ID)
	}
	all, err := r.small(dir)
	if err != nil {
		return nil, err
	}
	var names []Name
	for len(all) > 0 {
		block := all[:min(blockSize, len(all))]
		all = all[len(block):]
		if names, err = r.appendNames(names, dir.ID, block); err != nil {
			return nil, err
		}
	}
	if !sort.SliceIsSorted(names, func(i, j int) bool { return names[i].Name < names[j].Name }) {
		return nil, r.bad("directory %d is not sorted", dir.ID)
	}
	for i := 1; i < len(names); i++ {
		if names[i].Name == names[i-1].Name {
			return nil, r.bad("directory %d has the name %s twice", dir.ID, quote(names[i].Name))
		}
	}
	return names, nil
}

func (r *Reader) appendNames(names []Name, dir uint64, block []byte) ([]Name, error) {
	le := binary.LittleEndian
	if len(block) < direntSize {
		return nil, r.bad("directory %d is cut off", dir)
	}
	first := int(le.Uint16(block[8:]))
	if first%direntSize != 0 || first == 0 || first > len(block) {
		return nil, r.bad("directory %d is damaged", dir)
	}
	for i := 0; i < first; i += direntSize {
		from, to := int(le.Uint16(block[i+8:])), len(block)
		last := i+direntSize == first
		if !last {
			to = int(le.Uint16(block[i+direntSize+8:]))
		}
		if from < first || to > len(block) || from >= to {
			return nil, r.bad("directory %d is damaged", dir)
		}
		name := string(block[from:to])
		if last { // padding follows the last name of a block
			for len(name) > 0 && name[len(name)-1] == 0 {
				name = name[:len(name)-1]
			}
		}
		if name == "." || name == ".." {
			continue
		}
		if parts, err := split(name); err != nil || len(parts) != 1 || parts[0] != name {
			return nil, r.bad("directory %d has the name %s", dir, quote(name))
		}
		names = append(names, Name{Name: name, ID: le.Uint64(block[i:])})
	}
	return names, nil
}

// Content returns a reader of e's content; it is a [Sparse].
func (r *Reader) Content(e *Entry) (*Content, error) {
	if e.Type() != unix.S_IFREG {
		return nil, r.bad("inode %d is not a regular file", e.ID)
	}
	c := &Content{r: r, size: e.size, unit: max(e.size, 1)}
	if e.size == 0 {
		return c, nil
	}
	if e.layout != layoutChunk {
		var err error
		c.small, err = r.small(e)
		return c, err
	}
	bits := e.field&0x1f + blockBits
	if e.field&^0x1f != chunkIndexes {
		return nil, r.bad("inode %d has the unknown chunk format %#x", e.ID, e.field)
	}
	c.unit = int64(1) << bits
	c.table = (e.tail + indexSize - 1) &^ (indexSize - 1)
	if n := (e.size-1)>>bits + 1; n > r.metaSize/indexSize {
		return nil, r.bad("inode %d has %d chunks", e.ID, n)
	}
	return c, nil
}

// Content is the content of one file of a layer.
type Content struct {
	r     *Reader
	size  int64
	pos   int64
	small []byte // all of it, if the metadata holds it

	unit  int64 // bytes that one address is for
	table int64 // of addresses, in the metadata

	chunk int64 // the unit that addr is of, + 1
	addr  uint32

	runFrom, runTo int64 // units that are all holes, or all not
	runHole        bool
}

// locate returns the address of the unit at pos.
func (c *Content) locate(pos int64) (uint32, error) {
	num := pos / c.unit
	if c.chunk == num+1 {
		return c.addr, nil
	}
	p, err := c.r.at(c.table+num*indexSize, indexSize)
	if err != nil {
		return 0, err
	}
	le := binary.LittleEndian
	hi, dev, addr := le.Uint16(p), le.Uint16(p[2:]), le.Uint32(p[4:])
	n := min(c.unit, c.size-num*c.unit)
	if addr != nullBlock && (hi != 0 || dev != dataDevice || int64(addr)<<blockBits > c.r.dataSize-n) {
		return 0, c.r.bad("an address outside the data: %d:%d:%d", dev, hi, addr)
	}
	c.chunk, c.addr = num+1, addr
	return addr, nil
}

// Hole returns how many bytes from here on are a hole.
func (c *Content) Hole() (int64, error) { return c.run(true) }

// Data returns how many bytes from here on are not a hole.
func (c *Content) Data() (int64, error) { return c.run(false) }

func (c *Content) run(hole bool) (int64, error) {
	if c.small != nil {
		if hole {
			return 0, nil
		}
		return c.size - c.pos, nil
	}
	if c.pos < c.runFrom || c.pos >= c.runTo {
		c.runFrom, c.runTo = c.pos, c.pos
		for c.runTo < c.size {
			addr, err := c.locate(c.runTo)
			if err != nil {
				return 0, err
			}
			if c.runTo == c.pos {
				c.runHole = addr == nullBlock
			} else if c.runHole != (addr == nullBlock) {
				break
			}
			c.runTo = min(c.size, c.runTo-c.runTo%c.unit+c.unit)
		}
	}
	if c.runHole != hole {
		return 0, nil
	}
	return c.runTo - c.pos, nil
}

// Skip moves n bytes on.
func (c *Content) Skip(n int64) error {
	if n < 0 || n > c.size-c.pos {
		return c.r.bad("skip beyond the end")
	}
	c.pos += n
	return nil
}

func (c *Content) Read(p []byte) (int, error) {
	if c.pos >= c.size {
		return 0, io.EOF
	}
	if c.small != nil {
		n := copy(p, c.small[c.pos:])
		c.pos += int64(n)
		return n, nil
	}
	in := c.pos % c.unit
	p = p[:min(int64(len(p)), c.unit-in, c.size-c.pos)]
	addr, err := c.locate(c.pos)
	if err != nil {
		return 0, err
	}
	if addr == nullBlock {
		clear(p)
	} else if n, err := c.r.data.ReadAt(p, int64(addr)<<blockBits+in); n < len(p) {
		return 0, blobError("data", err)
	}
	c.pos += int64(len(p))
	return len(p), nil
}
