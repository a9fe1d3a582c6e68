// Package aether is DSec's data-plane protocol: many operations multiplexed over one
// byte stream. docs/aether.md is the specification.
//
// The package owns frames, the handshake, streams with credit, cancel, deadlines,
// keep-alive, batches and relays, on both ends. The messages carried are in aether/msg
// (generated from aether/proto by aether/protogen); the start over HTTP is in
// aether/httpupgrade. It must not know what a method does, and must stay small enough
// for the guest: no reflection-based encoding, no net/http, no work at start-up.
//
// A client end comes from [NewClient]: [Conn.Call] for one request and response,
// [Conn.Open] for a [Stream] of data and messages, [Conn.Batch] for many operations at
// once. A server end is a [Server] with a [Handler] per method; [Unary] makes one of a
// plain function. A server whose configuration has a Route passes streams on to other
// servers.
//
// Start reading at frame.go, then conn.go (one connection), stream.go (one operation; send.go, recv.go),
// writer.go (how frames of many goroutines become few writes) and relay.go. Locks are
// taken in the order Stream.mu (of a relayed pair the server's half first), Conn.openMu,
// Stream.sendMu, Conn.mu, writer.mu. The reader of a connection waits neither for another
// connection nor for an application.
package aether
