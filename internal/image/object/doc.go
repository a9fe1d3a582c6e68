// Package object is a flat space of immutable objects, the only thing that
// DSec asks of what keeps its images: a directory ([OpenDir]: a local disk, NFS or
// another network file system) or an S3 bucket ([OpenS3]).
//
// [Store] (object.go) is the contract; package objecttest has the conformance
// suite that every implementation passes, and a faulty and a counting store for
// tests. [Throttle] puts a rate and a latency before a store.
//
// Errors are of api/v1/errs: object_not_found, store_unavailable (retryable: the
// store does not answer, is too busy, or broke off), store_denied, disk_full,
// bad_request (a key or range that no store takes), deadline_exceeded and
// request_canceled (the caller's own context).
//
// It must not know of chunks, layers or images. Start reading at object.go.
package object
