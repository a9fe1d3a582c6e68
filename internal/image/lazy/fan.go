package lazy

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// Of the kernel's uapi/linux/fanotify.h, and not in golang.org/x/sys.
const (
	fanPreAccess = 0x00100000
	fanInfoRange = 6
	fanMetaSize  = 24
)

// The files of one guarded blob, in the order in which they are held.
const (
	fanGroup = iota // the group with one mark
	fanData         // the data file, opened before the mark
	fanMem          // what was read from the group and is not answered, and pins
	fanFiles
)

// Layout of the shared memory. An event is read from the group straight into a
// slot of it, so there is no moment at which the kernel counts it as read and a
// process that dies takes it along.
const (
	memSlots  = 96
	slotSize  = 64 // one event with its range, or two without
	memPins   = 128
	pinSize   = 16 // thread, 0, chunks [i, j)
	memHeader = 64
	pinsAt    = memHeader + memSlots*slotSize
	memSize   = (pinsAt + memPins*pinSize + 4095) / 4096 * 4096

	memMagic    = 0x315a4c4445534400
	memTracked  = 1 // pins are kept
	memOverflow = 2 // there were more readers than pins
)

// fan guards one blob with a fanotify group of its own: which group an event comes
// from says which blob it is about, whoever reads it.
type fan struct {
	b     *blob
	file  string
	files []*os.File
	group int
	mem   []byte

	slots  chan int
	pinOf  map[uint64]int // guarded by the blob's mutex, like mem's pins
	noPin  []int
	stop   chan struct{}
	tasks  sync.WaitGroup // the reader and its handlers
	closed atomic.Bool
}

// fanEvent is one event of the group.
type fanEvent struct {
	pre      bool
	ranged   bool
	fd       int32
	tid      int32
	off, len int64
}

// parseEvent takes one event off p.
func parseEvent(p []byte) (e fanEvent, rest []byte, err error) {
	le := binary.LittleEndian
	if len(p) < fanMetaSize {
		return e, nil, errors.New("event cut short")
	}
	n, meta := int(le.Uint32(p)), int(le.Uint16(p[6:]))
	if p[4] != unix.FANOTIFY_METADATA_VERSION || n > len(p) || meta < fanMetaSize || meta > n {
		return e, nil, fmt.Errorf("event of %d bytes, version %d, not understood", n, p[4])
	}
	mask := le.Uint64(p[8:])
	e = fanEvent{pre: mask&fanPreAccess != 0, fd: int32(le.Uint32(p[16:])), tid: int32(le.Uint32(p[20:]))}
	for info := p[meta:n]; len(info) >= 4; {
		k := int(le.Uint16(info[2:]))
		if k < 4 || k > len(info) {
			return e, nil, errors.New("event with a bad record")
		}
		if info[0] == fanInfoRange && k >= 24 {
			off, count := le.Uint64(info[8:]), le.Uint64(info[16:])
			if off > 1<<62 || count > 1<<62 {
				return e, nil, errors.New("event with a range out of range")
			}
			e.ranged, e.off, e.len = true, int64(off), int64(count)
		}
		info = info[k:]
	}
	return e, p[n:], nil
}

func initGroup() (int, error) {
	const flags = unix.FAN_CLASS_PRE_CONTENT | unix.FAN_CLOEXEC | unix.FAN_NONBLOCK | unix.FAN_REPORT_TID |
		// A full queue would let readers through.
		unix.FAN_UNLIMITED_QUEUE | unix.FAN_UNLIMITED_MARKS
	init := func() (int, error) {
		return unix.FanotifyInit(flags, unix.O_RDONLY|unix.O_LARGEFILE|unix.O_CLOEXEC)
	}
	g, err := init()
	if err == unix.EMFILE && moreGroups() {
		g, err = init()
	}
	return g, err
}

// moreGroups raises the number of groups that a user may have: 128 by default.
func moreGroups() bool {
	const path = "/proc/sys/fs/fanotify/max_user_groups"
	p, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	n, err := strconv.Atoi(strings.TrimSpace(string(p)))
	if err != nil || n >= 1<<20 {
		return false
	}
	return os.WriteFile(path, []byte(strconv.Itoa(max(2*n, 4096))), 0) == nil
}

// newFan guards b and has the guard held. Nobody has the file open but b.data.
func newFan(ctx context.Context, b *blob) (*fan, error) {
	g, err := initGroup()
	if err != nil {
		code := errs.InternalError
		if err == unix.EINVAL || err == unix.ENOSYS || err == unix.EPERM {
			code = errs.NotSupported
		}
		return nil, errs.Wrap(code, phase, "make fanotify group", err)
	}
	files := []*os.File{os.NewFile(uintptr(g), "fanotify"), b.data, nil}
	fail := func(action string, err error) (*fan, error) {
		files[fanGroup].Close()
		if files[fanMem] != nil {
			files[fanMem].Close()
		}
		return nil, errs.Wrap(errs.InternalError, phase, action, err)
	}
	m, err := unix.MemfdCreate("dsec-lazy", unix.MFD_CLOEXEC)
	if err != nil {
		return fail("make shared memory", err)
	}
	files[fanMem] = os.NewFile(uintptr(m), "memory")
	if err := unix.Ftruncate(m, memSize); err != nil {
		return fail("make shared memory", err)
	}
	mask := uint64(fanPreAccess)
	flags := uint32(0)
	if b.c.opts.Limit > 0 {
		mask |= unix.FAN_ACCESS
		flags = memTracked
	}
	head := binary.LittleEndian.AppendUint64(nil, memMagic)
	head = binary.LittleEndian.AppendUint32(head, flags)
	if _, err := files[fanMem].WriteAt(head, 0); err != nil {
		return fail("write shared memory", err)
	}
	if err := unix.FanotifyMark(g, unix.FAN_MARK_ADD, mask, unix.AT_FDCWD, b.file()); err != nil {
		return fail("mark blob", err)
	}
	d, err := mapFan(b, files)
	if err != nil {
		return fail("map shared memory", err)
	}
	if h := b.c.opts.Holder; h != nil {
		if err := h.Put(ctx, blobName+b.digest, files); err != nil {
			h.Drop(context.WithoutCancel(ctx), blobName+b.digest)
			unix.Munmap(d.mem)
			return fail("have descriptors held", err)
		}
	}
	return d, nil
}

func mapFan(b *blob, files []*os.File) (*fan, error) {
	mem, err := unix.Mmap(rawFD(files[fanMem]), 0, memSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
	if err != nil {
		return nil, err
	}
	// A fault while the kernel writes an event would refuse the reader.
	unix.Mlock(mem)
	d := &fan{b: b, file: b.file(), files: files, group: rawFD(files[fanGroup]), mem: mem, slots: make(chan int, memSlots), pinOf: map[uint64]int{}, stop: make(chan struct{})}
	return d, nil
}

// rawFD is a file's descriptor, without making it blocking as Fd does.
func rawFD(f *os.File) int {
	fd := -1
	if c, err := f.SyscallConn(); err == nil {
		c.Control(func(p uintptr) { fd = int(p) })
	}
	return fd
}

// adoptFan takes over what guards b from a process that died.
func adoptFan(b *blob, files []*os.File) (*fan, error) {
	if len(files) != fanFiles {
		return nil, badState("descriptors are missing")
	}
	var st unix.Stat_t
	if err := unix.Fstat(rawFD(files[fanMem]), &st); err != nil || st.Size < memSize {
		return nil, badState("shared memory of another size")
	}
	d, err := mapFan(b, files)
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, phase, "map shared memory", err)
	}
	le := binary.LittleEndian
	if le.Uint64(d.mem) != memMagic {
		unix.Munmap(d.mem)
		return nil, badState("shared memory of another kind")
	}
	flags := le.Uint32(d.mem[8:])
	b.mu.Lock()
	defer b.mu.Unlock()
	b.unsure = flags&memTracked == 0 || flags&memOverflow != 0
	for k := range memPins {
		p := d.pin(k)
		tid, i, j := uint64(le.Uint32(p)), int(le.Uint32(p[8:])), int(le.Uint32(p[12:]))
		switch {
		case tid == 0:
			d.noPin = append(d.noPin, k)
		case i > j || j > b.t.n():
			b.unsure = true
			d.noPin = append(d.noPin, k)
		default:
			d.pinOf[tid] = k
			b.pins[tid] = span{i, j}
		}
	}
	return d, nil
}

func (d *fan) slot(k int) []byte { return d.mem[memHeader+k*slotSize:][:slotSize:slotSize] }
func (d *fan) pin(k int) []byte  { return d.mem[pinsAt+k*pinSize:][:pinSize:pinSize] }

// start answers what was left unanswered, then reads the group.
func (d *fan) start() {
	if len(d.pinOf) == 0 && d.noPin == nil {
		for k := range memPins {
			d.noPin = append(d.noPin, k)
		}
	}
	d.tasks.Add(1)
	go func() {
		defer d.tasks.Done()
		if d.recover() {
			d.loop()
		}
	}()
}

// recover answers the events that the process before this one had read. The
// kernel finds an event by the number that its descriptor had there, so no new ones
// are read before all are answered: theirs could have the same numbers.
func (d *fan) recover() bool {
	var old sync.WaitGroup
	for k := range memSlots {
		events := d.events(k)
		for _, e := range events {
			if !e.pre {
				d.b.unpin(uint64(e.tid))
				continue
			}
			old.Add(1)
			go func() {
				defer old.Done()
				d.handle(k, e, false)
			}()
		}
		if len(events) == 0 || !events[len(events)-1].pre {
			clear(d.slot(k))
		}
	}
	old.Wait()
	if d.b.c.ctx.Err() != nil || d.closed.Load() {
		return false
	}
	for k := range memSlots {
		d.slots <- k
	}
	return true
}

// events parses what a slot holds.
func (d *fan) events(k int) (out []fanEvent) {
	for p := d.slot(k); len(p) >= fanMetaSize && binary.LittleEndian.Uint32(p) != 0; {
		e, rest, err := parseEvent(p)
		if err != nil {
			d.b.c.log.Error("fanotify event not understood", "blob", d.b.digest, "error", err)
			break
		}
		out, p = append(out, e), rest
	}
	return out
}

// loop reads the group. Events are looked at in the order in which the kernel made
// them: pins depend on it.
func (d *fan) loop() {
	raw, err := d.files[fanGroup].SyscallConn()
	if err != nil {
		d.b.c.log.Error("fanotify group not readable", "blob", d.b.digest, "error", err)
		return
	}
	for {
		var k int
		select {
		case k = <-d.slots:
		case <-d.stop:
			return
		case <-d.b.c.ctx.Done():
			return
		}
		var rerr error
		err := raw.Read(func(fd uintptr) bool {
			if d.closed.Load() || d.b.c.ctx.Err() != nil {
				rerr = os.ErrClosed
				return true
			}
			for {
				_, rerr = unix.Read(int(fd), d.slot(k))
				if rerr != unix.EINTR {
					return rerr != unix.EAGAIN
				}
			}
		})
		switch {
		case err != nil || rerr == os.ErrClosed:
			if !d.closed.Load() {
				d.b.c.log.Error("fanotify group not readable", "blob", d.b.digest, "error", err)
			}
			return
		case rerr != nil:
			// The kernel has refused the reader (no descriptors, for one).
			d.b.c.log.Error("fanotify event not read", "blob", d.b.digest, "error", rerr)
			clear(d.slot(k))
			d.slots <- k
			continue
		}
		d.take(k)
	}
}

// take looks at the events of slot k and gives it back.
func (d *fan) take(k int) {
	for _, e := range d.events(k) {
		d.b.unpin(uint64(e.tid)) // its last read is over
		if !e.pre {
			if e.fd >= 0 {
				unix.Close(int(e.fd))
			}
			continue
		}
		if d.b.present(e.off, e.len) {
			if !d.handle(k, e, true) {
				return
			}
		} else {
			d.tasks.Add(1)
			go func() {
				defer d.tasks.Done()
				if d.handle(k, e, true) {
					d.slots <- k
				}
			}()
			return // it is the only one
		}
	}
	clear(d.slot(k))
	d.slots <- k
}

// present says whether a range is there, as a guess.
func (b *blob) present(off, n int64) bool {
	i, j := b.t.chunks(off, n)
	b.mu.Lock()
	defer b.mu.Unlock()
	for k := i; k < j; k++ {
		if b.chunk[k] != filled {
			return false
		}
	}
	return true
}

// handle answers one event and empties its slot, or leaves both for the next
// process and returns false. Own says that the event's descriptor is this process's.
func (d *fan) handle(k int, e fanEvent, own bool) bool {
	if e.fd < 0 {
		clear(d.slot(k))
		return true // the kernel has answered it
	}
	if !e.ranged {
		e.off, e.len = 0, d.b.t.size()
	}
	err := d.b.readFor(uint64(e.tid), int(e.tid), e.off, e.len)
	if errors.Is(err, errs.ShuttingDown) {
		return false
	}
	r := unix.FanotifyResponse{Fd: e.fd, Response: unix.FAN_ALLOW}
	if err != nil {
		r.Response = unix.FAN_DENY | uint32(errno(err))<<24
	}
	_, werr := unix.Write(d.group, (*[unsafe.Sizeof(r)]byte)(unsafe.Pointer(&r))[:])
	if werr != nil && (own || werr != unix.ENOENT) {
		d.b.c.log.Error("fanotify event not answered", "blob", d.b.digest, "error", werr)
	}
	// In this order: the number is not used again before the slot is empty.
	clear(d.slot(k))
	if own {
		unix.Close(int(e.fd))
	}
	return true
}

// errno is what the reader's kernel is told.
func errno(err error) unix.Errno {
	if isDiskFull(err) {
		return unix.ENOSPC
	}
	return unix.EIO
}

func (d *fan) path() string  { return d.file }
func (d *fan) mounted() bool { return false } // the lease says it

func (d *fan) pinned(key uint64, s span) {
	le := binary.LittleEndian
	k, ok := d.pinOf[key]
	if !ok && key != 0 {
		if len(d.noPin) == 0 {
			for x := range d.b.pins {
				if x != key && threadGone(x) {
					delete(d.b.pins, x)
					d.unpinned(x)
				}
			}
		}
		if n := len(d.noPin); n > 0 {
			k, ok = d.noPin[n-1], true
			d.noPin = d.noPin[:n-1]
			d.pinOf[key] = k
		}
	}
	if !ok {
		d.b.unsure = true
		le.PutUint32(d.mem[8:], le.Uint32(d.mem[8:])|memOverflow)
		return
	}
	p := d.pin(k)
	le.PutUint32(p[8:], uint32(s.i))
	le.PutUint32(p[12:], uint32(s.j))
	le.PutUint32(p, uint32(key))
}

func (d *fan) unpinned(key uint64) {
	if k, ok := d.pinOf[key]; ok {
		clear(d.pin(k))
		delete(d.pinOf, key)
		d.noPin = append(d.noPin, k)
	}
}

func (d *fan) close(forget bool) {
	if d.closed.Swap(true) {
		return
	}
	b := d.b
	if forget {
		// Nothing is missing, or nobody can read: no event needs an answer any more.
		unix.FanotifyMark(d.group, unix.FAN_MARK_REMOVE, fanPreAccess|unix.FAN_ACCESS, unix.AT_FDCWD, d.file)
	}
	close(d.stop)
	// The poller would close the descriptor's number under the handlers.
	d.files[fanGroup].SetReadDeadline(time.Unix(1, 0))
	d.tasks.Wait()
	if h := b.c.opts.Holder; h != nil && forget {
		if err := h.Drop(context.WithoutCancel(b.c.ctx), blobName+b.digest); err != nil {
			b.c.log.Error("descriptors are held on", "blob", b.digest, "error", err)
		}
	}
	unix.Munmap(d.mem)
	d.files[fanGroup].Close()
	d.files[fanMem].Close()
}
