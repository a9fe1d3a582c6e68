package aether

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"

	"dsec/api/v1/errs"
)

// Sizes and constants of the frame layout.
const (
	Magic      = 0xAE7E  // first two bytes of every frame
	Version    = 1       // of the frame layout and of the protocol
	HeaderSize = 25      // bytes before the payload
	MaxPayload = 1 << 20 // bytes of payload in one frame

	crcOffset = 21 // the checksum covers what is before it, then the payload

	// maxHandshake bounds the payload of a peer that has not proved anything yet.
	maxHandshake = 64 << 10
)

type frameType uint8

// Frame types.
const (
	typeHello   frameType = 1
	typeWelcome frameType = 2
	typeOpen    frameType = 3
	typeData    frameType = 4
	typeMessage frameType = 5
	typeEnd     frameType = 6
	typeCredit  frameType = 7
	typeCancel  frameType = 8
	typePing    frameType = 9
	typePong    frameType = 10
	typeGoAway  frameType = 11
)

var typeNames = [...]string{"", "HELLO", "WELCOME", "OPEN", "DATA", "MESSAGE", "END", "CREDIT", "CANCEL", "PING", "PONG", "GOAWAY"}

func (t frameType) String() string {
	if int(t) < len(typeNames) && t != 0 {
		return typeNames[t]
	}
	return fmt.Sprintf("frame type %d", uint8(t))
}

// Flags.
const (
	flagKind = 0x0f // kind of a DATA frame
	flagFin  = 0x80 // last frame of the sender on this stream
)

// Kind says what a DATA frame carries.
type Kind uint8

// Kinds.
const (
	KindInput  Kind = 0
	KindStdout Kind = 1
	KindStderr Kind = 2
	KindPTY    Kind = 3
)

// header is the fixed part of a frame.
type header struct {
	typ    frameType
	flags  uint8
	stream uint64
	seq    uint32
	length uint32
	crc    uint32

	unverified bool // on its way through a relay: the receiver at the end checks it
}

// rawHeader is an encoded header.
type rawHeader [HeaderSize]byte

// encode fills b with the header of a frame that carries payload.
func (b *rawHeader) encode(typ frameType, flags uint8, stream uint64, seq uint32, payload []byte) {
	b.put(typ, flags, stream, seq, uint32(len(payload)))
	binary.BigEndian.PutUint32(b[crcOffset:], checksum(b[:crcOffset], payload))
}

// put fills all but the checksum.
func (b *rawHeader) put(typ frameType, flags uint8, stream uint64, seq, length uint32) {
	binary.BigEndian.PutUint16(b[0:], Magic)
	b[2] = Version
	b[3] = byte(typ)
	b[4] = flags
	binary.BigEndian.PutUint64(b[5:], stream)
	binary.BigEndian.PutUint32(b[13:], seq)
	binary.BigEndian.PutUint32(b[17:], length)
}

// encodePassed is encode for a frame that is passed on as it came, with another stream and
// sequence: the checksum is changed by what that changes, without reading the payload.
func (b *rawHeader) encodePassed(h *header, flags uint8, stream uint64, seq uint32, shift *crcShift) {
	var old rawHeader
	old.put(h.typ, h.flags, h.stream, h.seq, h.length)
	b.put(h.typ, flags, stream, seq, h.length)
	diff := crc32.ChecksumIEEE(old[:crcOffset]) ^ crc32.ChecksumIEEE(b[:crcOffset])
	binary.BigEndian.PutUint32(b[crcOffset:], h.crc^shift.zeros(diff, h.length))
}

func checksum(head, payload []byte) uint32 {
	return crc32.Update(crc32.ChecksumIEEE(head), crc32.IEEETable, payload)
}

// decodeHeader reads a header and checks all that can be checked without the payload.
func decodeHeader(b []byte, maxPayload int) (header, error) {
	_ = b[HeaderSize-1]
	if m := binary.BigEndian.Uint16(b); m != Magic {
		return header{}, broken("bad magic %#04x", m)
	}
	if b[2] != Version {
		return header{}, broken("frame version %d, this side has %d", b[2], Version)
	}
	h := header{
		typ:    frameType(b[3]),
		flags:  b[4],
		stream: binary.BigEndian.Uint64(b[5:]),
		seq:    binary.BigEndian.Uint32(b[13:]),
		length: binary.BigEndian.Uint32(b[17:]),
		crc:    binary.BigEndian.Uint32(b[crcOffset:]),
	}
	if uint64(h.length) > uint64(maxPayload) {
		return header{}, broken("%s payload of %d bytes, the limit is %d", h.typ, h.length, maxPayload)
	}
	return h, h.check()
}

// check verifies what the type demands of the other fields.
func (h *header) check() error {
	flags, conn, length := uint8(0), false, -1
	switch h.typ {
	case typeHello, typeWelcome, typeGoAway:
		conn = true
	case typePing, typePong:
		conn, length = true, 8
	case typeOpen, typeMessage:
		flags = flagFin
	case typeData:
		flags = flagFin | flagKind
		if h.length == 0 && h.flags&flagFin == 0 {
			return broken("DATA without payload or FIN on stream %d", h.stream)
		}
	case typeEnd:
		flags = flagFin
		if h.flags&flagFin == 0 {
			return broken("END without FIN on stream %d", h.stream)
		}
	case typeCredit:
		length = 4
	case typeCancel:
		length = 0
	default:
		return broken("unknown %s", h.typ)
	}
	switch {
	case h.flags&^flags != 0:
		return broken("%s with flags %#02x", h.typ, h.flags)
	case length >= 0 && int(h.length) != length:
		return broken("%s with %d bytes, want %d", h.typ, h.length, length)
	case conn && (h.stream != 0 || h.seq != 0):
		return broken("%s with stream %d, sequence %d, want 0, 0", h.typ, h.stream, h.seq)
	case !conn && h.stream == 0:
		return broken("%s without a stream", h.typ)
	}
	return nil
}

// cost is what a frame takes from the credit of its stream. The header counts, so that
// many small frames cannot hold more memory than few large ones. A bare FIN is free:
// a sender without credit can still say that it is done.
func (h *header) cost() int {
	if h.length == 0 && h.typ == typeData {
		return 0
	}
	return int(h.length) + HeaderSize
}

// broken makes the error that closes a connection whose peer broke the protocol.
func broken(format string, args ...any) *errs.Error {
	return errs.New(errs.ProtocolError, "aether", fmt.Sprintf(format, args...))
}
