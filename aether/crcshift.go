package aether

import "hash/crc32"

// crcShift knows what appending zeros does to a CRC-32: for each power of two, the matrix
// over GF(2) of that many zero bytes. A relay changes a frame's header and so its
// checksum by the difference, moved past the payload.
type crcShift [20][32]uint32 // up to 1 MiB, the largest payload

func newCRCShift() *crcShift {
	var m crcShift
	// One zero byte: the register's low byte selects a table entry.
	for bit := range 32 {
		c := uint32(1) << bit
		m[0][bit] = crc32.IEEETable[byte(c)] ^ c>>8
	}
	for k := 1; k < len(m); k++ { // squared: twice as many
		for bit := range 32 {
			m[k][bit] = times(&m[k-1], m[k-1][bit])
		}
	}
	return &m
}

func times(m *[32]uint32, v uint32) (out uint32) {
	for i := 0; v != 0; i, v = i+1, v>>1 {
		if v&1 != 0 {
			out ^= m[i]
		}
	}
	return out
}

// zeros moves the difference of two checksums past n bytes that are the same in both.
func (m *crcShift) zeros(diff, n uint32) uint32 {
	for k := 0; n != 0; k, n = k+1, n>>1 {
		if n&1 != 0 {
			if k == len(m) { // exactly 1 MiB
				return times(&m[k-1], times(&m[k-1], diff))
			}
			diff = times(&m[k], diff)
		}
	}
	return diff
}
