// Package serve answers a sandbox's Aether methods from the guest's parts: it turns
// messages into their plain types and back, and holds no logic of its own.
//
// Raw bytes of files, archives and ports travel as DATA of kind input in both directions,
// those of processes under the kind of their stream. Start at guest.go, which lists the
// methods.
package serve
