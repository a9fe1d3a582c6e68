// Package capability makes and checks signed, short-lived tokens that let an edge judge
// a data-plane call without asking anybody: HMAC-SHA256 over a subject, the sandbox it is
// good for, rights and an expiry.
//
// It must not know where the key comes from (internal/control/store keeps it). Start at
// capability.go.
package capability
