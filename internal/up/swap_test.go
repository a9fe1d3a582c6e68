package up

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"dsec/client"
	"dsec/internal/swap"
)

// The node's own swap is there from the first pause on, outlives the server as long as a sandbox may need it, and goes
// with the last one, or with the node.
func TestSwapComesAndGoes(t *testing.T) {
	s := newSite(t)
	ctx := t.Context()
	data := filepath.Join(s.dir, "node")
	if err := os.Mkdir(data, 0o700); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(data, "swap", "dsec.swap")
	var n *node
	var c *client.Client
	stop := func() {
		t.Helper()
		if n == nil {
			return
		}
		c.Close()
		sctx, cancel := context.WithTimeout(context.Background(), 2*stopTime)
		defer cancel()
		if err := n.stop(sctx); err != nil {
			t.Error(err)
		}
		n = nil
	}
	t.Cleanup(func() {
		stop()
		if _, err := RemoveSandboxes(context.Background(), data); err != nil {
			t.Error(err)
		}
	})
	start := func() {
		t.Helper()
		n = &node{metrics: prometheus.NewRegistry(), opts: Options{
			Data: data, Listen: "unix:" + filepath.Join(s.dir, "api.sock"), Guest: s.guest, Version: "test", Log: slog.New(slog.DiscardHandler),
			Slots: 10, CPUOvercommit: 100, MemoryOvercommit: 100, Swap: swap.Option{Kind: swap.File, Bytes: 32 << 20},
		}}
		token, err := n.start(ctx)
		if err != nil {
			t.Fatal(err)
		}
		if c, err = client.New(client.Options{URL: url(n.control.Addr(), nil), Token: token}); err != nil {
			t.Fatal(err)
		}
	}
	on := func(want bool) {
		t.Helper()
		b, err := os.ReadFile("/proc/swaps")
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(string(b), path+" "); got != want {
			t.Fatalf("in use: %v, want %v: %s", got, want, b)
		}
		if _, err := os.Stat(filepath.Dir(path)); (err == nil) != want {
			t.Fatalf("its directory: %v", err)
		}
	}
	pause := func() { // as much as a pause does of it
		t.Helper()
		release, err := n.swap.Take(ctx, 1<<20)
		if err != nil {
			t.Fatal(err)
		}
		release()
		on(true)
	}

	start()
	on(false)
	if got := n.edge.Node().Swap.TotalBytes; got < 32<<20 {
		t.Errorf("before it is made it is said to have %d bytes", got)
	}
	if _, err := c.ImportPath(ctx, "base", base(t), client.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	sb, err := c.Create(ctx, client.Spec{Image: "base"})
	if err != nil {
		t.Fatal(err)
	}
	pause()
	resources, _, err := n.edge.Audit(ctx)
	if err != nil {
		t.Fatal(err)
	}
	told := 0
	for _, r := range resources {
		if r.Kind == "swap" && r.Name == path && r.Sandbox == "" {
			told++
		}
	}
	if told != 1 {
		t.Errorf("the audit tells of it %d times: %v", told, resources)
	}
	made, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	stop()
	on(true)

	start()
	pause()
	if now, err := os.Stat(path); err != nil || !os.SameFile(made, now) {
		t.Errorf("another file, %v", err)
	}
	if err := c.Sandbox(sb.ID()).Delete(ctx); err != nil {
		t.Fatal(err)
	}
	stop()
	on(false)

	start()
	if _, err = c.Create(ctx, client.Spec{Image: "base"}); err != nil {
		t.Fatal(err)
	}
	pause()
	stop()
	on(true)
	if removed, err := RemoveSandboxes(ctx, data); err != nil || removed != 1 {
		t.Errorf("%d removed, %v", removed, err)
	}
	on(false)
}
