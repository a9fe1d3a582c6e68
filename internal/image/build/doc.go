// Package build makes root file systems from recipes: a YAML file that names what
// to start from (Debian packages, busybox, nothing), steps, and how programs run in
// the image. The result is a tar, so that a client can build and a server import.
//
// Build runs as root beside the platform, not on its hot path, so it may use the
// machine's tools: mmdebstrap, busybox, mount, chroot. Commands of a recipe run in
// a mount and PID namespace of their own that dies with them; nothing stays
// mounted. A recipe is trusted as its author is: it is not a sandbox.
//
// Steps can as well be done by others, in a sandbox: steps.go says what each needs and by which
// keys results can be used again. Then nothing of a recipe's own runs here.
//
// Start reading at recipe.go, then build.go. It must not know of stores or layers.
package build
