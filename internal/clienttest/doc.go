// Package clienttest is a small server to test clients against: the management API in
// memory, and guests that run real commands and touch real files below a temporary
// directory, without any isolation. Start at server.go; guest.go and process.go stand
// in for a sandbox's guest.
//
// It can do what a good server should not: [Server.Break] cuts the data plane's
// connections, [Server.Fail] makes the next requests of a path fail.
package clienttest
