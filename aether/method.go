package aether

import "strings"

// guestGroups are the groups of methods that a sandbox's guest serves: "process" is that
// of "process.exec". Relays pass on these and no others: what an edge serves for the
// control plane must never get a group of the same name.
var guestGroups = [...]string{"process", "session", "file", "port", "guest"}

// GuestGroup returns the group of a method that the guest of the stream's target serves,
// or "" for any other method. MethodBatch has none: what a batch is follows from its
// operations.
func GuestGroup(method string) string {
	for _, g := range guestGroups {
		if rest, ok := strings.CutPrefix(method, g); ok && len(rest) > 1 && rest[0] == '.' {
			return g
		}
	}
	return ""
}
