// Package msg holds the messages of the Aether protocol as plain structs, generated
// from aether/proto by aether/protogen. The encoding is Protocol Buffers (proto3)
// without the protobuf runtime: the guest links this package, and the runtime would
// cost it start-up time and memory in every sandbox.
//
// Unknown fields are skipped; strings are not checked for UTF-8, since paths and
// arguments are bytes; map entries are written in key order, so that one message has
// one encoding. Start reading at wire.go.
//
// Change a message in aether/proto and run 'go generate ./aether/msg'.
package msg

//go:generate go run dsec/aether/protogen -proto ../proto -out .
