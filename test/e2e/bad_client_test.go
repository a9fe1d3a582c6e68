package e2e

import (
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"dsec/client"
	"dsec/test/bed"
)

// settled waits until the server holds nothing for clients that are gone.
func settled(t *testing.T, b *bed.Bed, goroutines, fds float64) {
	t.Helper()
	c := b.Client(t)
	bed.Eventually(t, "the server has let go of the clients", func() error {
		m := bed.Metrics(t, c)
		if m["dsec_aether_connections"] > 0 || m["dsec_edge_streams"] > 1 || m["go_goroutines"] > goroutines+5 || m["process_open_fds"] > fds+5 { // the watcher has one stream
			return fmt.Errorf("connections %v, streams %v, goroutines %v of %v, descriptors %v of %v",
				m["dsec_aether_connections"], m["dsec_edge_streams"], m["go_goroutines"], goroutines, m["process_open_fds"], fds)
		}
		return nil
	})
}

func TestAKilledClientLeavesNothingBehind(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	sb := b.Sandbox(t, c, client.Spec{})
	sb.Run(t.Context(), "true")
	c.Close()
	m := bed.Metrics(t, c)
	goroutines, fds := m["go_goroutines"], m["process_open_fds"]
	stored := files(t, filepath.Join(b.Data, "images"))

	// kill runs a command until ready says that it is in the middle of its work. Its
	// stdin stays open.
	kill := func(stdin []byte, ready func() error, args ...string) {
		t.Helper()
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		cmd := b.Command(t.Context(), args...)
		cmd.Stdin = r
		err = cmd.Start()
		r.Close()
		if err != nil {
			t.Fatal(err)
		}
		go w.Write(stdin) // fails when the command is dead
		bed.Eventually(t, strings.Join(args, " ")+" is at work", ready)
		if err := cmd.Process.Kill(); err != nil {
			t.Fatal(err)
		}
		cmd.Wait()
	}
	look := b.Client(t)
	inside := func(script string) func() error {
		return func() error {
			res, err := look.Sandbox(sb.ID()).Run(t.Context(), "sh", "-c", script)
			if err == nil && res.Code != 0 {
				err = fmt.Errorf("exit code %d of %s", res.Code, script)
			}
			return err
		}
	}
	much := make([]byte, 3<<20)
	kill(much, inside("pidof cat"), "exec", "-i", sb.ID(), "--", "cat")
	kill(nil, inside("pidof yes"), "exec", sb.ID(), "--", "sh", "-c", "yes & sleep 1000")
	kill(much, inside("[ $(stat -c %s /tmp/up) -ge 3000000 ]"), "cp", "-", sb.ID()+":/tmp/up")
	archive := tarOf(t, entry{name: "f", data: strings.Repeat("x", 8<<20)})
	kill(archive[:6<<20], func() error {
		if maps.Equal(files(t, filepath.Join(b.Data, "images")), stored) {
			return fmt.Errorf("nothing of the import is stored")
		}
		return nil
	}, "image", "import", "vanishing", "-")

	// Without its client, cat's input has ended, and so has cat.
	bed.Eventually(t, "cat has ended", inside("! pidof cat"))
	look.Close()
	settled(t, b, goroutines, fds)
	bed.Eventually(t, "the import's files are gone", func() error {
		if now := files(t, filepath.Join(b.Data, "images")); !maps.Equal(now, stored) {
			return fmt.Errorf("%v", now)
		}
		return nil
	})
	b.Fails(t, 1, "image_not_found", "image", "inspect", "vanishing")
}

func TestAClientThatStopsReadingHarmsNobody(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	c := b.Client(t)
	sb := b.Sandbox(t, c, client.Spec{})
	if err := sb.Files().WriteFrom(t.Context(), "/tmp/big", io.LimitReader(&pattern{}, 32<<20), client.WriteOptions{}); err != nil {
		t.Fatal(err)
	}
	before, err := b.Memory()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	// Stuck readers, on the connection that others use and on their own.
	const stuck = 8
	var started, ended sync.WaitGroup
	release := make(chan struct{})
	for i := range stuck {
		from := c
		if i%2 == 0 {
			from = b.Client(t)
		}
		h := from.Sandbox(sb.ID())
		w := &stuckWriter{release: release}
		w.first.Add(1)
		started.Add(1)
		go func() { w.first.Wait(); started.Done() }()
		if i%4 < 2 {
			p, err := h.Start(ctx, client.Command("yes"), client.IO{Stdout: w})
			if err != nil {
				t.Fatal(err)
			}
			ended.Go(func() { p.Wait() })
			continue
		}
		r, err := h.Files().Open(ctx, "/tmp/big", 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		ended.Go(func() { io.Copy(struct{ io.Writer }{w}, r); r.Close() })
	}
	started.Wait()
	// Others go on meanwhile, on the same connection too.
	for range 50 {
		res, err := sb.Run(t.Context(), "head", "-c", "200000", "/tmp/big")
		if err != nil || len(res.Stdout) != 200000 {
			t.Fatalf("exec beside stuck readers: %d bytes, %v", len(res.Stdout), err)
		}
	}
	after, err := b.Memory()
	if err != nil {
		t.Fatal(err)
	}
	if after-before > 64<<20 {
		t.Errorf("the server's memory grew from %d to %d MiB", before>>20, after>>20)
	}
	cancel()
	close(release)
	ended.Wait()
	bed.Eventually(t, "the processes of the stuck readers are dead", func() error {
		res, err := sb.Run(t.Context(), "pidof", "yes")
		if err == nil && res.Code == 0 {
			err = fmt.Errorf("still there: %s", res.Stdout)
		}
		return err
	})
}

// stuckWriter takes one write and then nothing until it is released.
type stuckWriter struct {
	first   sync.WaitGroup
	once    sync.Once
	release chan struct{}
}

func (w *stuckWriter) Write(p []byte) (int, error) {
	w.once.Do(w.first.Done)
	<-w.release
	return len(p), nil
}
