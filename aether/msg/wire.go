package msg

import (
	"encoding/binary"
	"errors"
)

// Message is what every type of this package implements (by pointer).
type Message interface {
	// AppendWire appends the protobuf encoding to b; a nil message appends nothing.
	AppendWire(b []byte) []byte
	// ParseWire resets the message and decodes b into it, copying what it keeps.
	ParseWire(b []byte) error
}

// Wire types of the protobuf encoding.
const (
	wireVarint  = 0
	wireFixed64 = 1
	wireBytes   = 2
	wireFixed32 = 5
)

// maxElements bounds one repeated or map field, so that a payload of two-byte
// elements cannot be blown up into hundreds of times its size.
const maxElements = 1 << 16

// Errors of ParseWire.
var (
	ErrTruncated = errors.New("protobuf: message is truncated")
	ErrVarint    = errors.New("protobuf: varint is longer than 64 bits")
	ErrField     = errors.New("protobuf: field number is out of range")
	ErrWireType  = errors.New("protobuf: field has the wrong wire type")
	ErrTooMany   = errors.New("protobuf: field has too many elements")
)

func appendTag(b []byte, num, wire uint64) []byte { return binary.AppendUvarint(b, num<<3|wire) }

func appendUint(b []byte, num, v uint64) []byte {
	if v == 0 {
		return b
	}
	return binary.AppendUvarint(appendTag(b, num, wireVarint), v)
}

func appendBool(b []byte, num uint64, v bool) []byte {
	if !v {
		return b
	}
	return append(appendTag(b, num, wireVarint), 1)
}

// appendElement writes a string or bytes value even when it is empty.
func appendElement[T string | []byte](b []byte, num uint64, v T) []byte {
	b = binary.AppendUvarint(appendTag(b, num, wireBytes), uint64(len(v)))
	return append(b, v...)
}

func appendBytes[T string | []byte](b []byte, num uint64, v T) []byte {
	if len(v) == 0 {
		return b
	}
	return appendElement(b, num, v)
}

// appendMessage encodes m in place and then makes room for its length, which is one
// byte for most messages.
func appendMessage(b []byte, num uint64, m Message) []byte {
	b = append(appendTag(b, num, wireBytes), 0)
	start := len(b)
	b = m.AppendWire(b)
	return fixLength(b, start)
}

// fixLength writes the length of b[start:] before start, where one byte was reserved.
func fixLength(b []byte, start int) []byte {
	n := len(b) - start
	if n < 0x80 {
		b[start-1] = byte(n)
		return b
	}
	var l [binary.MaxVarintLen64]byte
	ln := binary.PutUvarint(l[:], uint64(n))
	b = append(b, l[:ln-1]...)
	copy(b[start+ln-1:], b[start:start+n])
	copy(b[start-1:], l[:ln])
	return b
}

// appendEntry writes key and value even when empty, as other implementations do.
func appendEntry(b []byte, num uint64, k, v string) []byte {
	b = append(appendTag(b, num, wireBytes), 0)
	start := len(b)
	b = appendElement(b, 1, k)
	b = appendElement(b, 2, v)
	return fixLength(b, start)
}

// reader walks the fields of one message. The first error ends the walk.
type reader struct {
	b    []byte
	num  uint64
	wire uint64
	err  error
}

func (r *reader) fail(err error) {
	if r.err == nil {
		r.err = err
	}
	r.b = nil
}

func (r *reader) uvarint() uint64 {
	v, n := binary.Uvarint(r.b)
	switch {
	case n > 0:
		r.b = r.b[n:]
		return v
	case n == 0:
		r.fail(ErrTruncated)
	default:
		r.fail(ErrVarint)
	}
	return 0
}

// next reads a tag; false at the end of the message or after an error.
func (r *reader) next() bool {
	if len(r.b) == 0 || r.err != nil {
		return false
	}
	tag := r.uvarint()
	if r.err != nil {
		return false
	}
	r.num, r.wire = tag>>3, tag&7
	if r.num == 0 || r.num > 1<<29-1 {
		r.fail(ErrField)
		return false
	}
	return true
}

func (r *reader) uint() uint64 {
	if r.wire != wireVarint {
		r.fail(ErrWireType)
		return 0
	}
	return r.uvarint()
}

// raw returns a length-delimited value as part of the input.
func (r *reader) raw() []byte {
	if r.wire != wireBytes {
		r.fail(ErrWireType)
		return nil
	}
	n := r.uvarint()
	if n > uint64(len(r.b)) {
		r.fail(ErrTruncated)
		return nil
	}
	v := r.b[:n]
	r.b = r.b[n:]
	return v
}

// string does not insist on UTF-8: paths and arguments are bytes.
func (r *reader) string() string { return string(r.raw()) }

func (r *reader) bytes() []byte {
	v := r.raw()
	if len(v) == 0 {
		return nil
	}
	return append([]byte(nil), v...)
}

// room says whether a field of n elements may take one more.
func (r *reader) room(n int) bool {
	if n >= maxElements {
		r.fail(ErrTooMany)
		return false
	}
	return true
}

func (r *reader) message(merge func([]byte) error) {
	if v := r.raw(); r.err == nil {
		if err := merge(v); err != nil {
			r.fail(err)
		}
	}
}

func (r *reader) entry() (k, v string) {
	e := reader{b: r.raw()}
	for e.next() {
		switch e.num {
		case 1:
			k = e.string()
		case 2:
			v = e.string()
		default:
			e.skip()
		}
	}
	if e.err != nil {
		r.fail(e.err)
	}
	return k, v
}

// skip passes over an unknown field. Groups, which proto3 does not have, are errors.
func (r *reader) skip() {
	switch r.wire {
	case wireVarint:
		r.uvarint()
	case wireBytes:
		r.raw()
	case wireFixed32:
		r.drop(4)
	case wireFixed64:
		r.drop(8)
	default:
		r.fail(ErrWireType)
	}
}

func (r *reader) drop(n int) {
	if len(r.b) < n {
		r.fail(ErrTruncated)
		return
	}
	r.b = r.b[n:]
}
