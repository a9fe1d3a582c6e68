package chunk

import (
	"bytes"

	"github.com/cespare/xxhash/v2"
)

const (
	block     = 4 << 10
	minBlocks = 8  // 32 KiB
	maxBlocks = 64 // 256 KiB
	maxChunk  = maxBlocks * block

	// A run of zeros at least this long is a hole; a shorter one is content, as it
	// costs next to nothing compressed.
	holeBlocks = 8
)

// A block is a chunk's last if its hash has these bits zero. A block whose end is
// zeros is probably a file's last one, and is so more often: chunks that begin where
// files do are found again when the files beside them change.
const (
	cutMask  = 1<<5 - 1
	tailMask = 1<<1 - 1
	tail     = 16 // bytes of zeros that make an end
)

var zeroBlock [block]byte

// cutter finds where the chunks of a blob end. Where it does depends on nothing but
// blocks since the last boundary: on each block's own content, and on min and max.
type cutter struct {
	blocks int // in the chunk under way
}

// ends takes the next block, which is not part of a hole, and says whether the chunk
// ends with it.
func (c *cutter) ends(b []byte) bool {
	c.blocks++
	if c.blocks < minBlocks {
		return false
	}
	if c.blocks >= maxBlocks || isCut(b) {
		c.blocks = 0
		return true
	}
	return false
}

// reset says that the chunk ended for another reason: a hole or the blob's end.
func (c *cutter) reset() { c.blocks = 0 }

func isCut(b []byte) bool {
	mask := uint64(cutMask)
	if len(b) >= tail && bytes.Equal(b[len(b)-tail:], zeroBlock[:tail]) {
		mask = tailMask
	}
	// The low bits of a hash of mere zeros must not decide for every sparse file at once.
	return xxhash.Sum64(b)&mask == 0
}

func isZero(b []byte) bool { return bytes.Equal(b, zeroBlock[:len(b)]) }
