package aether

import (
	"io"
	"net"
	"sync/atomic"
)

const (
	minReadBuffer = 4 << 10
	maxReadBuffer = 256 << 10

	passLength = 4 << 10 // from which passing a checksum on beats computing it anew
)

// frameReader cuts a byte stream into frames. Its buffer doubles while reads fill it and
// shrinks when they do not: an idle connection holds minReadBuffer.
type frameReader struct {
	conn       net.Conn
	buf        *buffer
	r, w       int // unread part of buf
	last       int // size of the last read
	large      *buffer
	maxPayload int
	heard      atomic.Bool // set by every read; the keep-alive clears it
	beforeWait func()      // called before a read that may block

	// relayed tells of frames that are passed on, whose payload is not looked at. May be nil.
	relayed func(stream uint64) bool
}

// next returns the next frame; the payload is valid until the next call.
func (r *frameReader) next() (h header, payload []byte, err error) {
	r.large.put()
	r.large = nil
	for r.w-r.r < HeaderSize {
		if err := r.fill(HeaderSize); err != nil {
			return h, nil, err
		}
	}
	head := r.buf.b[r.r : r.r+HeaderSize]
	if h, err = decodeHeader(head, r.maxPayload); err != nil {
		return h, nil, err
	}
	total := HeaderSize + int(h.length)
	if total > maxReadBuffer {
		payload, err = r.readLarge(total)
		if err != nil {
			return h, nil, err
		}
		head, payload = payload[:HeaderSize], payload[HeaderSize:]
	} else {
		for r.w-r.r < total {
			if err := r.fill(total); err != nil {
				return h, nil, midFrame(err)
			}
		}
		head = r.buf.b[r.r : r.r+HeaderSize]
		payload = r.buf.b[r.r+HeaderSize : r.r+total]
		r.r += total
	}
	if h.length >= passLength && (h.typ == typeData || h.typ == typeMessage) && r.relayed != nil && r.relayed(h.stream) {
		h.unverified = true
		return h, payload, nil
	}
	if sum := checksum(head[:crcOffset], payload); sum != h.crc {
		return h, nil, broken("%s on stream %d: checksum %#08x, want %#08x", h.typ, h.stream, h.crc, sum)
	}
	return h, payload, nil
}

// readLarge reads a frame that the read buffer should not grow for.
func (r *frameReader) readLarge(total int) ([]byte, error) {
	r.large = getBuffer(total)
	b := r.large.b[:total]
	n := copy(b, r.buf.b[r.r:r.w])
	r.r, r.w = 0, 0
	for n < total {
		r.beforeWait()
		m, err := r.conn.Read(b[n:])
		r.heard.Store(true)
		n += m
		if err != nil && n < total {
			return nil, midFrame(err)
		}
	}
	return b, nil
}

// fill reads once, making room so that need bytes fit behind r.r.
func (r *frameReader) fill(need int) error {
	r.resize(need)
	r.beforeWait()
	n, err := r.conn.Read(r.buf.b[r.w:cap(r.buf.b)])
	r.heard.Store(true)
	r.last = n
	r.w += n
	r.buf.b = r.buf.b[:r.w]
	if n > 0 {
		return nil
	}
	if err == nil {
		return io.ErrNoProgress
	}
	if r.w > r.r {
		return midFrame(err)
	}
	return err
}

func (r *frameReader) resize(need int) {
	if r.buf == nil {
		r.buf = getBuffer(minReadBuffer)
	}
	size, rest := cap(r.buf.b), r.w-r.r
	want := size
	switch {
	case r.last > 0 && r.w == size && size < maxReadBuffer:
		want = size * 2
	case rest == 0 && size > minReadBuffer && r.last < size/8:
		want = max(minReadBuffer, size/4)
	}
	want = max(want, need)
	switch {
	case want != size:
		b := getBuffer(want)
		b.b = append(b.b, r.buf.b[r.r:r.w]...)
		r.buf.put()
		r.buf = b
	case r.r == 0:
		return
	default:
		r.buf.b = r.buf.b[:copy(r.buf.b[:size], r.buf.b[r.r:r.w])]
	}
	r.r, r.w = 0, rest
}

func (r *frameReader) release() {
	r.large.put()
	r.buf.put()
	r.large, r.buf, r.r, r.w = nil, nil, 0, 0
}

func midFrame(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
