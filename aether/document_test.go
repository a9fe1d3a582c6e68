package aether

import (
	"bytes"
	"testing"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

func TestDocumentsInParts(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 1, documentPart, documentPart + 1, 5*documentPart - 1} {
		want := bytes.Repeat([]byte("abcdefg"), n/7+1)[:n]
		var all msg.Document
		for _, p := range SplitDocument(&msg.Document{Json: want}) {
			b := p.AppendWire(nil)
			if len(b) > MaxPayload {
				t.Fatalf("a part of %d bytes", len(b))
			}
			if err := JoinDocument(&all, b); err != nil {
				t.Fatal(err)
			}
		}
		if !bytes.Equal(all.Json, want) {
			t.Errorf("%d bytes became %d others", n, len(all.Json))
		}
	}
	if err := JoinDocument(&msg.Document{}, []byte{0xff}); errs.Of(err).Code != errs.ProtocolError {
		t.Errorf("got %v", err)
	}
	full := &msg.Document{Json: make([]byte, maxDocument)}
	if err := JoinDocument(full, (&msg.Document{Json: []byte("x")}).AppendWire(nil)); errs.Of(err).Code != errs.BodyTooLarge {
		t.Errorf("got %v", err)
	}
}
