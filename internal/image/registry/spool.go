package registry

import (
	"context"
	"io"
	"os"
	"sync"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"

	"golang.org/x/sys/unix"
)

const slotSize = 256 << 10

// spool is a file of a bounded number of slots. Downloads fill slots and the one
// reader, who takes the streams in order, gives them back. The stream being read
// always finds a slot, whatever the ones after it have taken.
type spool struct {
	f    *os.File
	max  int
	mu   sync.Mutex
	wake *sync.Cond
	free []int
	used int // slots ever used
	out  int // slots in use
	head int // the stream being read
	peak int
}

func newSpool(dir string, size int64) (*spool, error) {
	f, err := os.CreateTemp(dir, "spool-*")
	if err != nil {
		return nil, layer.DiskError("make spool file", err)
	}
	if err := unix.Unlink(f.Name()); err != nil {
		f.Close()
		return nil, errs.Wrap(errs.InternalError, phasePrefix+PhaseDownload, "unlink spool file", err)
	}
	s := &spool{f: f, max: int(max(4, size/slotSize))}
	s.wake = sync.NewCond(&s.mu)
	return s, nil
}

func (s *spool) close() { s.f.Close() }

// take waits for a free slot for the given stream.
func (s *spool) take(ctx context.Context, stream int) (int, error) {
	stop := context.AfterFunc(ctx, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.wake.Broadcast()
	})
	defer stop()
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		limit := s.max
		if stream > s.head {
			limit -= 2 // kept for the stream being read
		}
		if s.out < limit {
			break
		}
		s.wake.Wait()
	}
	s.out++
	s.peak = max(s.peak, s.out)
	if n := len(s.free); n > 0 {
		slot := s.free[n-1]
		s.free = s.free[:n-1]
		return slot, nil
	}
	s.used++
	return s.used - 1, nil
}

func (s *spool) give(slot int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.free = append(s.free, slot)
	s.out--
	s.wake.Broadcast()
}

// read makes stream the one being read.
func (s *spool) read(stream int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.head = stream
	s.wake.Broadcast()
}

// stream is one layer on its way through the spool.
type stream struct {
	spool *spool
	num   int
	size  int64
	read  func(n int64) // told of bytes read

	mu    sync.Mutex
	wake  *sync.Cond
	slots []slot // written, not yet read
	done  bool
	err   error

	pos  int // in the first slot
	left int64
}

type slot struct{ num, n int }

func newStream(sp *spool, num int, size int64, read func(int64)) *stream {
	st := &stream{spool: sp, num: num, size: size, left: size, read: read}
	st.wake = sync.NewCond(&st.mu)
	return st
}

// write puts at most a slot's bytes behind the others.
func (st *stream) write(ctx context.Context, p []byte) error {
	num, err := st.spool.take(ctx, st.num)
	if err != nil {
		return err
	}
	if _, err := st.spool.f.WriteAt(p, int64(num)*slotSize); err != nil {
		st.spool.give(num)
		return layer.DiskError("write spool file", err)
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	st.slots = append(st.slots, slot{num, len(p)})
	st.wake.Broadcast()
	return nil
}

// finish says that nothing more comes, and why.
func (st *stream) finish(err error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.done, st.err = true, err
	st.wake.Broadcast()
}

func (st *stream) failure() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.err
}

func (st *stream) Read(p []byte) (int, error) {
	st.mu.Lock()
	for len(st.slots) == 0 && !st.done {
		st.wake.Wait()
	}
	if len(st.slots) == 0 {
		defer st.mu.Unlock()
		if st.err != nil {
			return 0, st.err
		}
		return 0, io.EOF
	}
	first := st.slots[0]
	st.mu.Unlock()
	n, err := st.spool.f.ReadAt(p[:min(len(p), first.n-st.pos)], int64(first.num)*slotSize+int64(st.pos))
	if err != nil && n == 0 {
		return 0, layer.DiskError("read spool file", err)
	}
	st.pos += n
	if st.pos == first.n {
		st.mu.Lock()
		st.slots = st.slots[1:]
		st.mu.Unlock()
		st.spool.give(first.num)
		st.pos = 0
	}
	st.read(int64(n))
	return n, nil
}

// Close gives back what was not read; a reader that stops early has to.
func (st *stream) Close() error {
	st.mu.Lock()
	defer st.mu.Unlock()
	for _, s := range st.slots {
		st.spool.give(s.num)
	}
	st.slots = nil
	return nil
}
