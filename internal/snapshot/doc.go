// Package snapshot is pack_diff: it makes a layer of what a sandbox changed ([Pack]), keeps
// account of what each layer was made on ([Chain]), merges neighbouring layers into one
// ([Flatten]), and shows layers on top of each other ([Compose]). Its package freeze stops a sandbox
// for as long as that takes.
//
// What it reads, an upper directory, is hostile: the walk goes by descriptors, one name
// at a time, through a read-only mount that follows no links, bounds what it holds open at any depth,
// and takes no name for the same file twice without looking at the inode. The result is
// deterministic: the same tree gives the same bytes.
//
// A layer is marked as overlayfs marks its own: a removed name is a character device 0:0, a
// directory that hides what is below it has trusted.overlay.opaque=y, and a renamed one says in
// trusted.overlay.redirect where the rest of it is. What else an overlay notes in its upper (origins,
// impure directories, link counts) is about the layers it was made on and left out; a directory with
// whiteouts has an origin that says "unknown", which makes the kernel look for them.
//
// A pack can remember what it saw ([Seen]); the next one of the same upper then makes a layer of what changed
// since, to go on top of the first's.
//
// While the sandbox runs, a pack can read ahead what will likely be the same when it stands still.
//
// Start reading at pack.go, then writer.go and dir.go; seen.go has what is remembered, ahead.go what is read before, and flatten.go resolves
// names as the kernel does.
//
// It must not know of edges, catalogues, stores or cgroup layouts: it is given descriptors.
package snapshot
