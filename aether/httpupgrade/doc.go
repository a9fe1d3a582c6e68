// Package httpupgrade starts an Aether connection on an HTTP port: a GET with
// "Connection: Upgrade, Upgrade: aether/1", answered by 101, after which both sides speak
// frames. It is apart from package aether because the guest must not link net/http.
package httpupgrade
