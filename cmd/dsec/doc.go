// Command dsec is the platform's one binary: the server's roles and the command line
// that drives them.
//
// main.go starts it, root.go holds what all verbs share, and each verb has a file of
// its own. A verb parses flags, calls the client package and prints; it must not know
// how a server works. Exit codes: 0 success, 1 failure, 2 wrong usage; exec and run
// return the command's own code, 125 when the platform failed, 126 and 127 when the
// command could not be executed or was not found, 128+n after signal n.
package main
