// Package swap owns where the memory of a node's paused sandboxes goes: the machine's swap as it is, or a
// file or a zram device of the node's own, made when something is paused for the first time.
//
// What it makes lies in one directory, or is noted there, so that the next process of the node finds it
// again, and whoever removes the node does too. It touches no device that it has not made. The kernel
// chooses the device of each page: with several at once, pages of one node lie on another's too, and
// what is free is a matter of the machine.
//
// It must not know what a sandbox is. Start reading at swap.go; file.go and zram.go are the devices.
package swap
