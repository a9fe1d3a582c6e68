// Package registry pulls images from any OCI registry into a layer.Builder and
// pushes images of ours to one.
//
// Layers are downloaded a few at a time into a spool file of bounded size while
// they are converted in order; each is checked against its digest as it passes.
// A connection that breaks is taken up where it broke. Nothing that a registry
// says is trusted: sizes, digests, media types, redirects and token servers are
// checked, and credentials go to no one but the registry and its token server, in
// plain text only where that was asked for.
//
// Every failure is typed (registry_denied, registry_not_found, registry_busy,
// registry_unavailable, image_corrupt, image_unsupported, disk_full,
// deadline_exceeded, bad_request) and its Phase says where it happened:
// image.registry.resolve, .download, .convert or .push.
//
// Start reading at [Pull] (pull.go) and [Push] (push.go); session.go logs in,
// transport.go retries and watches for silence, download.go resumes. It must not
// know of the store or of names in the catalogue: its caller has the builder.
package registry
