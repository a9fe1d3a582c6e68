package aether

import (
	"testing"

	"pgregory.net/rapid"
)

// A header changed in passing gets the checksum that encoding the frame anew would give,
// and a damaged payload stays damaged.
func TestPassedChecksumIsTheEncodedOne(t *testing.T) {
	t.Parallel()
	shift := newCRCShift()
	rapid.Check(t, func(rt *rapid.T) {
		n := rapid.OneOf(rapid.IntRange(0, 64), rapid.IntRange(0, MaxPayload), rapid.SampledFrom([]int{MaxPayload, MaxPayload - 1, 1 << 19})).Draw(rt, "n")
		payload := make([]byte, n)
		for i := range payload {
			payload[i] = byte(i * 7)
		}
		var in, want, got rawHeader
		in.encode(typeData, byte(KindStdout), rapid.Uint64().Draw(rt, "from"), rapid.Uint32().Draw(rt, "seq"), payload)
		h, err := decodeHeader(in[:], MaxPayload)
		if err != nil {
			rt.Skip(err)
		}
		to, seq := rapid.Uint64().Draw(rt, "to"), rapid.Uint32().Draw(rt, "seq2")
		want.encode(typeData, h.flags, to, seq, payload)
		got.encodePassed(&h, h.flags, to, seq, shift)
		if got != want {
			rt.Fatalf("%d bytes: %x, want %x", n, got, want)
		}
		if n > 0 {
			payload[n/2] ^= 1
			if checksum(got[:crcOffset], payload) == checksum(want[:crcOffset], make([]byte, n)) && n > 1 {
				rt.Fatal("damage is hidden")
			}
		}
	})
}
