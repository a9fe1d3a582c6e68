package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"time"

	"dsec/api/v1/errs"
	"dsec/client"
)

// exampleSandbox is a sandbox of a server that stands for 'dsec up'.
func exampleSandbox() (*client.Sandbox, func()) {
	c, stop := exampleServer()
	sb, err := c.Create(context.Background(), client.Spec{Image: "busybox"})
	if err != nil {
		log.Fatal(err)
	}
	return sb, stop
}

// A command's own failure is a result; an error is the platform's, and says whether to try
// again and whom to blame.
func ExampleSandbox_Exec() {
	sb, stop := exampleSandbox() // c.Create(ctx, client.Spec{Image: "debian"})
	defer stop()
	ctx := context.Background()
	r, err := sb.Exec(ctx, client.Cmd{Path: "sh", Args: []string{"-c", "cat; exit 3"}, Dir: "/tmp", Timeout: time.Minute}, client.Input([]byte("from stdin\n")))
	if err != nil {
		e := client.ErrorOf(err)
		log.Fatal(e.Code, e.Retryable, e.Infra, e.RetryAfter)
	}
	fmt.Printf("%d %s", r.Code, r.Stdout)
	r, err = sb.Run(ctx, "no-such-command")
	fmt.Println(r.Code, errors.Is(r.Err, errs.CommandNotFound), err)
	// Output:
	// 3 from stdin
	// 127 true <nil>
}

// A command that nobody is connected to: started, found again by its tag, waited for.
func ExampleSandbox_StartDetached() {
	sb, stop := exampleSandbox()
	defer stop()
	ctx := context.Background()
	cmd := client.Command("sh", "-c", "echo working; exit 4")
	cmd.Tag = "job"
	if _, err := sb.StartDetached(ctx, cmd); err != nil {
		log.Fatal(err)
	}
	exit, err := sb.Wait(ctx, client.Selector{Tag: "job"})
	fmt.Println(exit.Code, err)
	p, err := sb.Attach(ctx, client.Selector{Tag: "job"}, client.IO{Stdout: os.Stdout}, client.AttachOptions{})
	if err != nil {
		log.Fatal(err)
	}
	p.Wait()
	// Output:
	// 4 <nil>
	// working
}

func ExampleFiles_CopyIn() {
	sb, stop := exampleSandbox()
	defer stop()
	ctx := context.Background()
	dir, err := os.MkdirTemp("", "example-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "main.py"), []byte("print(42)\n"), 0o644); err != nil {
		log.Fatal(err)
	}
	files := sb.Files()
	if err := files.CopyIn(ctx, dir, "/tmp/project", client.CopyOptions{}); err != nil {
		log.Fatal(err)
	}
	list, _, err := files.List(ctx, "/tmp/project", 1, 0)
	for _, e := range list {
		fmt.Println(e.Name, e.Size)
	}
	fmt.Println(err, files.CopyOut(ctx, "/tmp/project", filepath.Join(dir, "back"), client.CopyOptions{}))
	// Output:
	// main.py 10
	// <nil> <nil>
}

// A service inside a sandbox, reached without any port of this machine.
func ExampleSandbox_Dial() {
	sb, stop := exampleSandbox()
	defer stop()
	port, end := exampleService() // what listens in the sandbox
	defer end()
	web := &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return sb.Dial(ctx, "", port) },
	}}
	defer web.CloseIdleConnections()
	resp, err := web.Get("http://sandbox/")
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	fmt.Println(string(b), err)
	// Output: served <nil>
}

// The same service at a port of this machine, for programs that know nothing of sandboxes.
func ExampleSandbox_Forward() {
	sb, stop := exampleSandbox()
	defer stop()
	port, end := exampleService()
	defer end()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		log.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error)
	go func() { ended <- sb.Forward(ctx, l, port, client.ForwardOptions{}) }()
	resp, err := http.Get("http://" + l.Addr().String())
	if err != nil {
		log.Fatal(err)
	}
	b, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	fmt.Println(string(b), err)
	cancel()
	fmt.Println(<-ended)
	// Output:
	// served <nil>
	// <nil>
}

// exampleService listens where the example's sandbox has its loopback.
func exampleService() (port int, end func()) {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "served") }))
	return s.Listener.Addr().(*net.TCPAddr).Port, s.Close
}

func ExampleClient_Stats() {
	sb, stop := exampleSandbox()
	defer stop()
	for _, s := range sb.Client().Stats(context.Background(), sb.ID()) {
		if s.Err != nil {
			log.Fatal(s.Err)
		}
		fmt.Println(s.Sandbox.Usage.PeakMemoryBytes>>20, "MiB at most")
	}
	// Output: 2 MiB at most
}

// All sandboxes of a job, and their end.
func ExampleClient_All() {
	c, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	job := map[string]string{"job": "eval7"}
	for sb, err := range c.CreateMany(ctx, client.Spec{Image: "busybox", Labels: job}, 3) {
		if err != nil {
			log.Fatal(err, sb)
		}
	}
	n := 0
	for sb, err := range c.All(ctx, client.ListOptions{Labels: job}) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(sb.State, sb.Spec.Image)
		id, err := c.Resolve(ctx, sb.ID[12:]) // ids may be cut short, as on the command line
		if err != nil || id[0].ID != sb.ID {
			log.Fatal(err, id)
		}
		if err := c.Delete(ctx, sb.ID); err == nil {
			n++
		}
	}
	fmt.Println(n, "removed")
	// Output:
	// running busybox
	// running busybox
	// running busybox
	// 3 removed
}

func ExampleClient_Events() {
	c, stop := exampleServer()
	defer stop()
	ctx := context.Background()
	sb, err := c.Create(ctx, client.Spec{Image: "busybox"})
	if err != nil {
		log.Fatal(err)
	}
	if err := sb.Delete(ctx); err != nil {
		log.Fatal(err)
	}
	for e, err := range c.Events(ctx, client.EventOptions{}) { // Follow: true goes on
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(e.Type)
	}
	_, err = sb.Get(ctx)
	fmt.Println(errors.Is(err, client.ErrGone))
	// Output:
	// state
	// removed
	// true
}

func ExampleClient_ImportPath() {
	c, stop := exampleServer()
	defer stop()
	dir, err := os.MkdirTemp("", "example-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := os.WriteFile(filepath.Join(dir, "tool"), []byte("#!/bin/sh\n"), 0o755); err != nil {
		log.Fatal(err)
	}
	img, err := c.ImportPath(context.Background(), "toolkit", dir, client.ImportOptions{}) // a directory, tar, docker-archive or OCI layout
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(img.Name, img.Files)
	// Output: toolkit 2
}
