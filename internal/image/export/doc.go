// Package export writes stored layers as what other tools read: the tar stream of
// an OCI layer ([Tar]), the compressed layers, configuration and manifest of an
// image ([Pack], [Packed.Manifest]), and an archive of an OCI layout that is also
// a docker-archive ([Archive]).
//
// Output is deterministic: it depends on the layers and options alone.
//
// Start reading at tar.go (the walk), then image.go. It must not know where layers
// are stored (it reads them through layer.Reader) nor of registries.
package export
