// Package control wires the control plane's parts into one process: store, IAM, watcher,
// placement, apiserver. Each has its own package and contract; this one owns their start
// and stop only, and must not know what any of them does. Start at control.go.
package control
