// Package bed runs the real dsec binary for tests: a server of its own in a temporary
// directory, the command line and the SDK pointed at it, and a look at what the kernel
// and the disk hold of it.
//
// A bed knows the program only from outside, as a user and the kernel see it; it must
// not import internal packages. It needs root. Start reading at bed.go; server.go starts
// and ends the server, cli.go runs commands, leftovers.go is the audit. $DSEC_BIN names another
// program than the one that is built: one built with -race looks for races in the server.
package bed
