package aether

import (
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

const (
	documentPart = 256 << 10
	// maxDocument bounds what is joined: what half a million layers are.
	maxDocument = 256 << 20
)

// SplitDocument cuts a document that may be longer than a message into at least one part.
// The parts share its bytes; their JSON is whole only when it is joined.
func SplitDocument(d *msg.Document) (parts []*msg.Document) {
	rest := d.Json
	for len(rest) > documentPart {
		parts = append(parts, &msg.Document{Json: rest[:documentPart]})
		rest = rest[documentPart:]
	}
	return append(parts, &msg.Document{Json: rest})
}

// JoinDocument adds a part, as it was received, to those before. Errors: body_too_large,
// protocol_error.
func JoinDocument(all *msg.Document, part []byte) error {
	var d msg.Document
	if err := d.ParseWire(part); err != nil {
		return errs.New(errs.ProtocolError, "aether.document", "a part of a document does not parse").Because(err)
	}
	if len(all.Json)+len(d.Json) > maxDocument {
		return errs.New(errs.BodyTooLarge, "aether.document", "a document of more than "+itoa(maxDocument)+" bytes")
	}
	all.Json = append(all.Json, d.Json...)
	return nil
}
