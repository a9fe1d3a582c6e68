// Package session keeps persistent shells: working directory, variables, functions and
// options of one command are there for the next.
//
// A session is one shell process that reads its script from a pipe. For each command
// the guest writes one line that evaluates the command's text (quoted, so that a syntax
// error in it cannot swallow anything else) and one that reports its status, with a
// number used once, on a descriptor which the command itself does not have. The
// package must not know the protocol. Start at session.go; script.go has the lines.
package session
