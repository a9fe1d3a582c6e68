// Package keeper holds file descriptors beyond the death of the process that needs
// them. When the last descriptor of a fanotify group closes, the kernel lets every
// reader it held up go on, over bytes that are not there; so besides the edge there
// are two keepers, processes that do nothing but hold. All of them have to die before
// one has been restarted for a descriptor to be lost.
//
// An edge calls [Start] and has descriptors held with [Client.Put]; the next edge
// finds them with List and Take. Each keeper watches the others by pidfd, starts one
// that ended and gives it copies of all it holds; the edge does the same. Keepers have
// a session of their own, ignore signals that can be ignored, are the last that the
// kernel would kill for memory, and are reached by a socket that only the same user and
// root may use. They end when told ([Client.Stop]), or when they hold nothing and no
// edge has been there for a while. If they hold something and no edge comes,
// Hooks.Abandoned can see to those that wait.
//
// The binary runs itself: the program calls [Main] for the verb in Config.Verb. A
// service manager that ends every process of a service must be told not to
// (systemd: KillMode=process), else it takes the keepers along.
//
// Start reading at main.go, the keeper's side; client.go is the edge's, wire.go the
// protocol. The package must not know what it holds.
package keeper
