// Package objecttest has the conformance suite of [object.Store] ([Run]), a real S3
// server for tests ([S3]), and stores that count ([Counting]) and fail ([Faulty]).
package objecttest
