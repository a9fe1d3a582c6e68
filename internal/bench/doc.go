// Package bench makes load on a running server, as a client, and measures it.
//
// Start at load.go: it calls one operation from several goroutines and counts. The
// benchmarks are create.go, exec.go, session.go, files.go, stream.go, image.go, memory.go, qos.go,
// churn.go, pause.go and job.go;
// create and exec run against any [Target], so that another engine (bench/peers) is
// measured by the same steps. Only successes count in a rate. restart.go has the server killed.
//
// The package must not know how a server is built; what it reads of the machine
// (result.go, memory.go) is the client's own.
package bench
