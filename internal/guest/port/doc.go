// Package port connects to what listens inside the sandbox and lists it.
//
// It uses plain sockets instead of package net, whose resolver the guest does not need
// and would have to carry. Start at dial.go.
package port
