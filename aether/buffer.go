package aether

import (
	"math/bits"
	"sync"
)

const (
	minClass = 8  // 256 bytes
	maxClass = 21 // 2 MiB: a whole frame fits
)

// buffer is pooled memory. Its capacity is a power of two unless it was too large to pool.
type buffer struct{ b []byte }

// bufferPools hold buffers by the power of two of their capacity. They are shared by
// all connections, so that an idle connection holds none.
var bufferPools [maxClass + 1]sync.Pool

// getBuffer returns an empty buffer of at least n bytes.
func getBuffer(n int) *buffer {
	class := max(minClass, bits.Len(uint(max(n, 1)-1)))
	if class > maxClass {
		return &buffer{b: make([]byte, 0, n)}
	}
	if v := bufferPools[class].Get(); v != nil {
		return v.(*buffer)
	}
	return &buffer{b: make([]byte, 0, 1<<class)}
}

// put returns the buffer to its pool; nil is allowed. The caller must not use it again.
func (b *buffer) put() {
	if b == nil {
		return
	}
	n := cap(b.b)
	class := bits.Len(uint(n)) - 1
	if n == 0 || class > maxClass || class < minClass || n != 1<<class {
		return
	}
	b.b = b.b[:0]
	bufferPools[class].Put(b)
}

// copyBuffer returns a buffer with a copy of p.
func copyBuffer(p []byte) *buffer {
	b := getBuffer(len(p))
	b.b = append(b.b, p...)
	return b
}

// grow returns a buffer with b's content and room for n more bytes, releasing b if it
// had to be replaced.
func (b *buffer) grow(n int) *buffer {
	if cap(b.b)-len(b.b) >= n {
		return b
	}
	g := getBuffer(len(b.b) + n)
	g.b = append(g.b, b.b...)
	b.put()
	return g
}
