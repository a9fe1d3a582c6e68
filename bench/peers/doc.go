// Package peers measures other engines by the steps of internal/bench, so that a ratio
// compares like with like. docker.go speaks to Docker's engine over its socket, with
// no more than net/http: an SDK's own cost would be measured too.
package peers
