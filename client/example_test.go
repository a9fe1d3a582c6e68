package client_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	v1 "dsec/api/v1"
	"dsec/client"
	"dsec/internal/clienttest"
)

// exampleServer stands for 'dsec up'; a real program calls client.FromEnv alone.
func exampleServer() (*client.Client, func()) {
	s, stop := clienttest.Standalone()
	c, err := client.New(client.Options{URL: s.URL, Token: clienttest.Token})
	if err != nil {
		log.Fatal(err)
	}
	return c, func() { c.Close(); stop() }
}

func Example() {
	c, stop := exampleServer() // c, err := client.FromEnv()
	defer stop()
	ctx := context.Background()
	sb, err := c.Create(ctx, client.Spec{Image: "busybox", MemoryBytes: 256 << 20})
	if err != nil {
		log.Fatal(err)
	}
	defer sb.Delete(ctx)
	res, err := sb.Run(ctx, "sh", "-c", "echo $((6*7))")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d: %s", res.Code, res.Stdout)
	// Output: 0: 42
}

func ExampleClient_CreateMany() {
	c, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	n := 0
	for sb, err := range c.CreateMany(ctx, client.Spec{Image: "busybox"}, 20) {
		if errors.Is(err, client.ErrCapacity) {
			fmt.Println("full; try again after", client.ErrorOf(err).RetryAfter)
			continue
		}
		if err != nil {
			log.Fatal(err)
		}
		defer sb.Delete(ctx)
		n++
	}
	fmt.Println(n, "sandboxes")
	// Output: 20 sandboxes
}

// A job that is preempted leaves its memory to others, by one request.
func ExampleClient_PauseMany() {
	c, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	job := map[string]string{"job": "train-7"}
	for _, err := range c.CreateMany(ctx, client.Spec{Image: "busybox", Labels: job}, 20) {
		if err != nil {
			log.Fatal(err)
		}
	}
	paused, freed := 0, int64(0)
	for r, err := range c.PauseMany(ctx, v1.PauseRequest{Labels: job}) {
		switch {
		case err != nil: // the request's
			log.Fatal(err)
		case r.Error != nil: // a sandbox's
			log.Print(r.ID, ": ", r.Error)
		default:
			paused++
			freed += r.FreedBytes
		}
	}
	fmt.Println(paused, "paused,", freed>>20, "MiB freed")
	// Output: 20 paused, 1280 MiB freed
}

// While the model thinks, its sandbox need not hold memory.
func ExampleSandbox_Hint() {
	c, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	sb, err := c.Create(ctx, client.Spec{Image: "busybox"})
	if err != nil {
		log.Fatal(err)
	}
	h, err := sb.Hint(ctx, 5*time.Minute) // when the next tool call is expected
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(h.Action)
	res, err := sb.Run(ctx, "echo", "resumed by this") // sooner than expected: it works all the same
	if err != nil {
		log.Fatal(err)
	}
	fmt.Print(string(res.Stdout))
	// Output:
	// pause
	// resumed by this
}

func ExampleSandbox_Start() {
	c, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	sb, err := c.Create(ctx, client.Spec{Image: "busybox"})
	if err != nil {
		log.Fatal(err)
	}
	p, err := sb.Start(ctx, client.Command("sh", "-c", "for i in 1 2 3; do echo step $i; done"), client.IO{Stdout: os.Stdout})
	if err != nil {
		log.Fatal(err)
	}
	exit, err := p.Wait()
	fmt.Println(exit.Code, err)
	// Output:
	// step 1
	// step 2
	// step 3
	// 0 <nil>
}

func ExampleSession_Sh() {
	c, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	sb, err := c.Create(ctx, client.Spec{Image: "busybox"})
	if err != nil {
		log.Fatal(err)
	}
	shell, err := sb.OpenSession(ctx, client.SessionOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer shell.Close(ctx)
	res, err := shell.Sh(ctx, "echo persistent")
	fmt.Printf("%s%v", res.Stdout, err)
	// Output:
	// persistent
	// <nil>
}

func ExampleSandbox_WriteFile() {
	c, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	sb, err := c.Create(ctx, client.Spec{Image: "busybox"})
	if err != nil {
		log.Fatal(err)
	}
	if err := sb.WriteFile(ctx, "/tmp/notes", []byte("hello"), 0o644); err != nil {
		log.Fatal(err)
	}
	b, err := sb.ReadFile(ctx, "/tmp/notes")
	fmt.Println(string(b), err)
	_, err = sb.ReadFile(ctx, "/tmp/other")
	fmt.Println(errors.Is(err, client.ErrNotFound))
	// Output:
	// hello <nil>
	// true
}

func ExampleClient_Batch() {
	c, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	sb, err := c.Create(ctx, client.Spec{Image: "busybox"})
	if err != nil {
		log.Fatal(err)
	}
	b := c.Batch(1, true) // in order, until one fails
	b.WriteFile(sb, "/tmp/a", []byte("from a batch"), client.WriteOptions{})
	read := b.ReadFile(sb, "/tmp/a")
	if err := b.Do(ctx); err != nil {
		log.Fatal(err)
	}
	data, err := read.Get()
	fmt.Println(string(data), err)
	// Output: from a batch <nil>
}
