// Package etcd implements store.Store on etcd: an embedded server for one machine
// (embed.go), an external cluster otherwise. Keys are under /dsec/ and listed in keys.go;
// values are the JSON of api/v1. Start at etcd.go.
package etcd
