package main

import (
	"slices"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"dsec/internal/swap"
	"dsec/internal/up"
)

// A detached server has every flag that it was started with.
func TestDetachedServersHaveAllFlags(t *testing.T) {
	t.Parallel()
	f := upFlags{
		opts: up.Options{
			Listen: "unix:/x", Swap: swap.Option{Kind: swap.File, Bytes: 3 << 30}, BuildCacheAge: time.Hour,
			Objects: up.Objects{Store: "s3://x", Endpoint: "http://x", Region: "r", Rate: 1, Latency: time.Second},
		},
		cert: "/cert", key: "/key", level: "info", loading: "fuse", insecure: true,
	}
	args, err := f.args("/data", "/context")
	if err != nil {
		t.Fatal(err)
	}
	c := (&app{}).upCmd()
	c.Flags().VisitAll(func(flag *pflag.Flag) {
		if flag.Name != "detach" && flag.Name != "json" && !slices.Contains(args, "--"+flag.Name) {
			t.Errorf("--%s is not passed on", flag.Name)
		}
	})
	c.Flags().String("context", "", "") // the root's
	if err := c.ParseFlags(args[1:]); err != nil {
		t.Fatal(err)
	}
	if got := c.Flag("swap").Value.String(); got != "file:3 GiB" {
		t.Errorf("--swap is passed on as %s", got)
	}
}
