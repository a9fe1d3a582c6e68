// Package user finds users and groups in the sandbox's own /etc/passwd and /etc/group
// and lets a piece of code act on the file system with a user's permissions.
//
// The files belong to the sandbox and may hold anything: they are read without
// blocking, up to a size limit, and a line that does not parse is skipped. The package
// must not know what is done with a user. Start at lookup.go.
package user
