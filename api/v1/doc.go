// Package v1 holds the wire types of DSec's management API: what REST carries as JSON
// and what an edge keeps in a sandbox's record. No logic beyond defaults, validation
// and id parsing.
//
// Start at sandbox.go. Errors are in api/v1/errs; the data plane's messages are in
// aether/msg.
package v1
