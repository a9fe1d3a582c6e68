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

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// The files of the FUSE file system as they are held.
const (
	fuseDev   = iota // the connection
	fuseMount        // the detached mount: no path shows it
	fuseFiles
)

// fuseServer serves one file per blob. It speaks the protocol itself since the
// library that could (go-fuse) begins with the kernel's INIT message, which a
// process that takes a connection over never gets.
type fuseServer struct {
	c     *Cache
	dev   *os.File
	mount *os.File
	fd    int
	seq   atomic.Uint64 // of pins
	bufs  sync.Pool     // of *[]byte
	tasks sync.WaitGroup
	ended atomic.Bool
}

// fuseBlob is the device of one blob in FUSE mode.
type fuseBlob struct {
	s    *fuseServer
	b    *blob
	node uint64

	mu    sync.Mutex
	opens int
	old   bool // opened before this process took over
}

// connectFUSE makes a FUSE file system and its detached mount. The kernel's first
// message, INIT, is on its way when it returns.
func connectFUSE() (dev, mount *os.File, err error) {
	fd, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	m, err := func() (int, error) {
		fs, err := unix.Fsopen("fuse", unix.FSOPEN_CLOEXEC)
		if err != nil {
			return -1, err
		}
		defer unix.Close(fs)
		for _, kv := range [][2]string{{"source", "dsec-lazy"}, {"fd", strconv.Itoa(fd)}, {"rootmode", "40000"}, {"user_id", "0"}, {"group_id", "0"}, {"max_read", strconv.Itoa(fuseMaxRead)}} {
			if err := unix.FsconfigSetString(fs, kv[0], kv[1]); err != nil {
				return -1, fmt.Errorf("%s: %w", kv[0], err)
			}
		}
		if err := unix.FsconfigSetFlag(fs, "allow_other"); err != nil {
			return -1, err
		}
		if err := unix.FsconfigCreate(fs); err != nil {
			return -1, err
		}
		return unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_RDONLY|unix.MOUNT_ATTR_NODEV|unix.MOUNT_ATTR_NOSUID)
	}()
	if err != nil {
		unix.Close(fd)
		return nil, nil, err
	}
	// Only now: polled before it is connected, the runtime would take it for broken.
	return os.NewFile(uintptr(fd), "/dev/fuse"), os.NewFile(uintptr(m), "fuse mount"), nil
}

// startFUSE makes the cache's file system and has it held.
func (c *Cache) startFUSE(ctx context.Context) (*fuseServer, error) {
	dev, mount, err := connectFUSE()
	if err != nil {
		return nil, errs.Wrap(errs.NotSupported, phase, "make FUSE file system", err)
	}
	s := &fuseServer{c: c, dev: dev, mount: mount, fd: rawFD(dev)}
	if c.opts.Holder != nil {
		if err := c.opts.Holder.Put(ctx, fuseName, []*os.File{dev, mount}); err != nil {
			dev.Close()
			mount.Close()
			return nil, errs.Wrap(errs.InternalError, phase, "have descriptors held", err)
		}
	}
	s.start()
	return s, nil
}

// adoptFUSE takes the connection over from a process that died: the kernel is told
// to send again what that one did not answer.
func (c *Cache) adoptFUSE(files []*os.File) (*fuseServer, error) {
	if len(files) != fuseFiles {
		return nil, badState("descriptors are missing")
	}
	s := &fuseServer{c: c, dev: files[fuseDev], mount: files[fuseMount], fd: rawFD(files[fuseDev])}
	for _, b := range c.blobs {
		if _, err := os.Stat(b.dir + "/" + openFile); err != nil || b.dev != nil {
			continue
		}
		f, err := os.OpenFile(b.file(), os.O_RDWR, 0)
		if err != nil {
			return nil, diskError("open blob", err)
		}
		d := s.add(b)
		d.old = true
		b.data, b.dev = f, d
	}
	// The kernel sends nothing new before INIT is answered, and what the other
	// process had read comes again.
	if _, err := unix.Write(s.fd, fuseNotifyResend()); err != nil {
		c.log.Error("unanswered requests are not sent again", "error", err)
	}
	s.start()
	return s, nil
}

func (s *fuseServer) start() {
	s.tasks.Add(1)
	go func() {
		defer s.tasks.Done()
		s.loop()
	}()
}

// stop ends serving, end closes the connection: readers wait while it is held.
func (s *fuseServer) stop() {
	s.ended.Store(true)
	s.dev.SetReadDeadline(time.Unix(1, 0))
	s.tasks.Wait()
}

func (s *fuseServer) end() error {
	var err error
	if h := s.c.opts.Holder; h != nil {
		busy := false
		for _, b := range s.c.blobs {
			if d, ok := b.dev.(*fuseBlob); ok && d.mounted() {
				busy = true
			}
		}
		if !busy {
			err = h.Drop(context.WithoutCancel(s.c.ctx), fuseName)
		}
	}
	return errors.Join(err, s.mount.Close(), s.dev.Close())
}

// openFile is there while a blob's FUSE file is open.
const openFile = "open"

func (s *fuseServer) add(b *blob) *fuseBlob {
	return &fuseBlob{s: s, b: b, node: nodeID(b.digest)}
}

// nodeID derives a file's number from its digest, so that every process knows it.
func nodeID(digest string) uint64 {
	n, _ := strconv.ParseUint(digest[:16], 16, 64)
	return n | 1<<63 // not the root's
}

func (d *fuseBlob) path() string {
	return fmt.Sprintf("/proc/%d/fd/%d/%s", os.Getpid(), rawFD(d.s.mount), d.b.digest)
}

func (d *fuseBlob) mounted() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.old || d.opens > 0
}

func (d *fuseBlob) pinned(uint64, span) {}
func (d *fuseBlob) unpinned(uint64)     {}
func (d *fuseBlob) close(bool)          {}

func (d *fuseBlob) opened(n int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if n > 0 && d.opens == 0 && !d.old {
		f, err := os.Create(d.b.dir + "/" + openFile)
		if err != nil {
			return err
		}
		f.Close()
	}
	if d.opens += n; d.opens < 0 { // of one that was open before
		d.opens, d.old = 0, false
	}
	if d.opens == 0 && !d.old {
		os.Remove(d.b.dir + "/" + openFile)
		d.s.c.wake()
	}
	return nil
}

func (s *fuseServer) byNode(node uint64) *fuseBlob {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	for _, b := range s.c.blobs {
		if nodeID(b.digest) == node {
			return b.fuse()
		}
	}
	return nil
}

func (s *fuseServer) byName(name string) *fuseBlob {
	s.c.mu.Lock()
	defer s.c.mu.Unlock()
	if b := s.c.blobs[name]; b != nil {
		return b.fuse()
	}
	return nil
}

func (b *blob) fuse() *fuseBlob {
	b.mu.Lock()
	defer b.mu.Unlock()
	d, _ := b.dev.(*fuseBlob)
	return d
}

// loop reads requests. Reads of blobs are answered beside it.
func (s *fuseServer) loop() {
	raw, err := s.dev.SyscallConn()
	if err != nil {
		return
	}
	buf := make([]byte, fuseMinBuffer)
	for {
		var n int
		var rerr error
		err := raw.Read(func(fd uintptr) bool {
			if s.ended.Load() {
				rerr = os.ErrClosed
				return true
			}
			n, rerr = unix.Read(int(fd), buf)
			return rerr != unix.EAGAIN
		})
		switch {
		case err != nil || rerr == os.ErrClosed:
			if !s.ended.Load() {
				s.c.log.Error("FUSE connection not readable", "error", err)
			}
			return
		case rerr == unix.EINTR || rerr == unix.ENOENT: // interrupted before it was read
			continue
		case rerr == unix.ENODEV:
			s.c.log.Info("FUSE file system unmounted")
			return
		case rerr != nil:
			s.c.log.Error("FUSE request not read", "error", rerr)
			return
		}
		r, err := parseFuse(buf[:n])
		if err != nil {
			s.c.log.Error("FUSE request not understood", "error", err)
			continue
		}
		if r.op == opRead {
			s.tasks.Add(1)
			go func() {
				defer s.tasks.Done()
				s.read(r)
			}()
			continue
		}
		s.answer(r)
	}
}

func (s *fuseServer) reply(r fuseRequest, e unix.Errno, body []byte) {
	head := fuseHeader(r.unique, e, len(body))
	n, err := unix.Writev(s.fd, [][]byte{head, body})
	// ENOENT: the reader was killed meanwhile.
	if err != nil && err != unix.ENOENT || err == nil && n != len(head)+len(body) {
		s.c.log.Error("FUSE request not answered", "op", r.op, "error", err)
	}
}

func (s *fuseServer) answer(r fuseRequest) {
	switch r.op {
	case opInit:
		s.reply(r, 0, fuseInitReply(r))
	case opForget, opBatchForget, opInterrupt:
	case opLookup:
		if d := s.byName(r.name); r.node == fuseRoot && d != nil {
			s.reply(r, 0, fuseEntry(d.node, d.b.t.size()))
		} else {
			s.reply(r, unix.ENOENT, nil)
		}
	case opGetattr:
		if r.node == fuseRoot {
			s.reply(r, 0, fuseAttrReply(fuseRoot, 0))
		} else if d := s.byNode(r.node); d != nil {
			s.reply(r, 0, fuseAttrReply(d.node, d.b.t.size()))
		} else {
			s.reply(r, unix.ENOENT, nil)
		}
	case opOpen:
		d := s.byNode(r.node)
		if d == nil || d.opened(1) != nil {
			s.reply(r, unix.EIO, nil)
			return
		}
		s.reply(r, 0, fuseOpenReply(1))
	case opRelease:
		if d := s.byNode(r.node); d != nil {
			d.opened(-1)
		}
		s.reply(r, 0, nil)
	case opFlush, opDestroy, opAccess:
		s.reply(r, 0, nil)
	default:
		s.reply(r, unix.ENOSYS, nil)
	}
}

// read answers one read: pinned until the bytes have been handed over.
func (s *fuseServer) read(r fuseRequest) {
	d := s.byNode(r.node)
	if d == nil {
		s.reply(r, unix.EIO, nil)
		return
	}
	n := min(int64(r.size), d.b.t.size()-r.off, fuseMaxRead)
	if n <= 0 {
		s.reply(r, 0, nil)
		return
	}
	key := s.seq.Add(1) | 1<<32
	err := d.b.readFor(key, int(r.pid), r.off, n)
	if errors.Is(err, errs.ShuttingDown) {
		return // the kernel sends it again to the next process
	}
	if err != nil {
		s.reply(r, errno(err), nil)
		return
	}
	buf, _ := s.bufs.Get().(*[]byte)
	if buf == nil || int64(len(*buf)) < n {
		p := make([]byte, n)
		buf = &p
	}
	defer s.bufs.Put(buf)
	p := (*buf)[:n]
	_, err = d.b.data.ReadAt(p, r.off)
	d.b.unpin(key)
	if err != nil {
		s.reply(r, unix.EIO, nil)
		return
	}
	s.reply(r, 0, p)
}

// The part of the FUSE protocol (uapi/linux/fuse.h) that is spoken.
const (
	opLookup      = 1
	opForget      = 2
	opGetattr     = 3
	opOpen        = 14
	opRead        = 15
	opRelease     = 18
	opFlush       = 25
	opInit        = 26
	opAccess      = 34
	opInterrupt   = 36
	opDestroy     = 38
	opBatchForget = 42

	fuseRoot       = 1
	fuseInHeader   = 40
	fuseMinBuffer  = 8192
	fuseMaxRead    = 1 << 20
	fuseMinor      = 40 // the first with resend
	fuseResendCode = 7
	fuseAsyncRead  = 1 << 0
	fuseMaxPages   = 1 << 22
	fuseInitExt    = 1 << 30
	fuseHasResend  = 1 << (39 - 32) // in the second word
	fuseDirectIO   = 1 << 0
)

// fuseRequest is one request.
type fuseRequest struct {
	op     uint32
	unique uint64
	node   uint64
	pid    uint32
	name   string // lookup
	off    int64  // read
	size   uint32
	ahead  uint32 // init: read-ahead
	flags  uint32
	flags2 uint32
	minor  uint32
}

func parseFuse(p []byte) (fuseRequest, error) {
	le := binary.LittleEndian
	if len(p) < fuseInHeader || int(le.Uint32(p)) != len(p) {
		return fuseRequest{}, fmt.Errorf("%d bytes", len(p))
	}
	r := fuseRequest{op: le.Uint32(p[4:]), unique: le.Uint64(p[8:]), node: le.Uint64(p[16:]), pid: le.Uint32(p[32:])}
	body := p[fuseInHeader:]
	short := fmt.Errorf("operation %d with %d bytes", r.op, len(body))
	switch r.op {
	case opLookup:
		name, _, ok := strings.Cut(string(body), "\x00")
		if !ok {
			return r, short
		}
		r.name = name
	case opRead:
		if len(body) < 40 {
			return r, short
		}
		off := le.Uint64(body[8:])
		if off > 1<<62 {
			return r, fmt.Errorf("read at %d", off)
		}
		r.off, r.size = int64(off), le.Uint32(body[16:])
	case opInit:
		if len(body) < 16 {
			return r, short
		}
		r.minor, r.ahead, r.flags = le.Uint32(body[4:]), le.Uint32(body[8:]), le.Uint32(body[12:])
		if len(body) >= 20 {
			r.flags2 = le.Uint32(body[16:])
		}
	}
	return r, nil
}

func fuseHeader(unique uint64, e unix.Errno, n int) []byte {
	le := binary.LittleEndian
	p := le.AppendUint32(make([]byte, 0, 16), uint32(16+n))
	p = le.AppendUint32(p, uint32(-int32(e)))
	return le.AppendUint64(p, unique)
}

// fuseNotifyResend asks for the requests that were read and not answered.
func fuseNotifyResend() []byte {
	le := binary.LittleEndian
	p := le.AppendUint32(make([]byte, 0, 16), 16)
	p = le.AppendUint32(p, fuseResendCode)
	return le.AppendUint64(p, 0)
}

func fuseInitReply(r fuseRequest) []byte {
	le := binary.LittleEndian
	p := make([]byte, 64)
	le.PutUint32(p[0:], 7)
	le.PutUint32(p[4:], min(r.minor, fuseMinor))
	le.PutUint32(p[8:], max(r.ahead, fuseMaxRead))
	le.PutUint32(p[12:], r.flags&(fuseAsyncRead|fuseMaxPages|fuseInitExt))
	le.PutUint16(p[16:], 256)  // requests in the background
	le.PutUint16(p[18:], 192)  // then it slows down
	le.PutUint32(p[20:], 4096) // nobody writes
	le.PutUint32(p[24:], 1)
	le.PutUint16(p[28:], fuseMaxRead/4096)
	le.PutUint32(p[32:], r.flags2&fuseHasResend)
	return p
}

// fuseAttr is the attributes of the root or a blob.
func fuseAttr(node uint64, size int64) []byte {
	le := binary.LittleEndian
	p := make([]byte, 88)
	le.PutUint64(p[0:], node)
	le.PutUint64(p[8:], uint64(size))
	le.PutUint64(p[16:], uint64(size+511)/512)
	mode, links := uint32(unix.S_IFREG|0o400), uint32(1)
	if node == fuseRoot {
		mode, links = unix.S_IFDIR|0o500, 2
	}
	le.PutUint32(p[60:], mode)
	le.PutUint32(p[64:], links)
	le.PutUint32(p[80:], 4096)
	return p
}

const fuseValid = 3600 // seconds; blobs never change

func fuseAttrReply(node uint64, size int64) []byte {
	p := binary.LittleEndian.AppendUint64(make([]byte, 0, 104), fuseValid)
	return append(append(p, make([]byte, 8)...), fuseAttr(node, size)...)
}

func fuseEntry(node uint64, size int64) []byte {
	le := binary.LittleEndian
	p := make([]byte, 40, 128)
	le.PutUint64(p[0:], node)
	le.PutUint64(p[16:], 0) // names are looked up each time: blobs come and go
	le.PutUint64(p[24:], fuseValid)
	return append(p, fuseAttr(node, size)...)
}

func fuseOpenReply(handle uint64) []byte {
	p := make([]byte, 16)
	binary.LittleEndian.PutUint64(p, handle)
	binary.LittleEndian.PutUint32(p[8:], fuseDirectIO) // EROFS caches already
	return p
}
