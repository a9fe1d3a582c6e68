// Package client is DSec's Go SDK: management over REST, and everything that happens
// inside a sandbox over one shared Aether connection.
//
//	c, err := client.FromEnv()
//	sb, err := c.Create(ctx, client.Spec{Image: "debian"})
//	defer sb.Delete(ctx)
//	res, err := sb.Run(ctx, "python3", "-c", "print(6*7)")
//
// A [Client] is safe for any number of goroutines; they share its connections. What there
// is, with examples of each:
//
//   - sandboxes: [Client.Create], [Client.CreateMany], [Client.All], [Client.Resolve],
//     [Client.Get], [Client.Stats], [Sandbox.Delete], [Client.DeleteMany]
//   - while nobody needs them: [Sandbox.Pause], [Client.PauseMany], [Sandbox.Hint]; any
//     operation resumes a sandbox, as do [Sandbox.Resume] and [Client.ResumeMany]; what they
//     use: [Client.Usage]
//   - commands: [Sandbox.Run] and [Sandbox.Exec] for their output at the end,
//     [Sandbox.Start] for streams, stdin, terminals and signals
//   - in the background: [Sandbox.StartDetached], [Sandbox.Attach], [Sandbox.Wait],
//     [Sandbox.Processes], [Sandbox.Kill]
//   - shells that keep their state: [Sandbox.OpenSession], [Session.Sh], [Session.Run]
//   - files: [Sandbox.ReadFile], [Sandbox.WriteFile], [Sandbox.Files] with copies of whole
//     trees both ways ([Files.CopyIn], [Files.CopyOut])
//   - ports: [Sandbox.Ports], [Sandbox.Dial], [Sandbox.Forward]
//   - many operations in one round trip: [Client.Batch]
//   - images: [Client.Import], [Client.ImportPath], [Client.Export], [Client.Images]
//   - what happens: [Client.Events]; who may: [Client.CreateToken]; where: [Client.Nodes]
//
// Start reading at client.go, then sandbox.go for the management calls and handle.go for
// the data plane.
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
