// Package pressure decides what a node does when it is short of memory: first it takes no more sandboxes, then
// it pauses those of class be, and then it evicts.
//
// It owns the levels and the order of who is paused and evicted; it knows no edge, which gives it readings
// and does what it says. Start at policy.go.
package pressure
