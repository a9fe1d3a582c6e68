// Package robustness breaks things that run: it kills the server at any moment, kills
// guests, starves sandboxes, and counts what is left. Nothing a user was told may be
// lost, and nothing may leak. Each test has a server of its own.
package robustness
