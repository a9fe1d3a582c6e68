// Package client is DSec's Go SDK: management over REST, and everything that happens
// inside a sandbox over one shared Aether connection.
//
//	c, err := client.FromEnv()
//	sb, err := c.Create(ctx, client.Spec{Image: "debian"})
//	defer sb.Delete(ctx)
//	res, err := sb.Run(ctx, "python3", "-c", "print(6*7)")
//
// A [Client] is safe for any number of goroutines; they share its connections. Start
// reading at client.go, then sandbox.go for the management calls and handle.go for the
// data plane ([Sandbox.Exec], [Sandbox.Start], [Sandbox.OpenSession], [Sandbox.ReadFile]).
//
// A sandbox stays when the program that made it dies, unless it was made with Spec.Lease,
// which [Sandbox.KeepAlive], in a goroutine of its own, renews.
//
// Every error that the platform reports carries a code of the table in api/v1/errs:
// errors.Is(err, client.ErrNotFound) matches a class, errors.Is(err, errs.NodeFull) a
// code, and [ErrorOf] returns all of it. A command that ends with a non-zero exit code
// is a result, not an error.
//
// The package must not know how the server is built: it imports api/v1 and aether only.
package client
