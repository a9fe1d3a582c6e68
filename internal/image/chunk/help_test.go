package chunk

import (
	"encoding/binary"
	"math/rand/v2"
)

// randomBlocks are n blocks that compress a little and are as random as can be else.
func randomBlocks(seed uint64, n int) []byte {
	b := make([]byte, n*block)
	rng := rand.New(rand.NewPCG(seed, 7))
	for i := 0; i < len(b); i += 8 {
		binary.LittleEndian.PutUint64(b[i:], rng.Uint64()&0x3f3f3f3f3f3f3f3f)
	}
	return b
}
