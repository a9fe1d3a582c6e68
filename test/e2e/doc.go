// Package e2e drives the real program on the real kernel: each verb of the command line,
// the Go SDK, and input that must be refused. cli_*_test.go is the first, sdk_*_test.go
// the second, bad_*_test.go the third. All tests of the package share one server
// (main_test.go), except those that need it to be special.
package e2e
