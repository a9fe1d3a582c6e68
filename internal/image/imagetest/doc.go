// Package imagetest helps tests of image code: it describes a tree as text lines
// ([Describe]), so that a source and its kernel-mounted layer can be compared, and
// makes random trees ([RandomTree]).
package imagetest
