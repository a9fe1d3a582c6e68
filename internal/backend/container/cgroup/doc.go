// Package cgroup limits and measures a sandbox with control groups, version 1 or 2,
// whichever the host has. It writes files of the cgroup file system and nothing else;
// it must not know what a sandbox is. Start reading at cgroup.go.
package cgroup
