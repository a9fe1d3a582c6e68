package container

import (
	"context"
	"os"
	"strconv"
	"sync/atomic"
	"testing"

	v1 "dsec/api/v1"
)

// BenchmarkCreateDelete is the backend's part of a create and a removal, by 16 callers.
func BenchmarkCreateDelete(b *testing.B) {
	n := newNode(b)
	be := n.open(b)
	b.Cleanup(func() { be.Close() })
	var next atomic.Uint64
	par := 8 // times two cores
	if s := os.Getenv("DSEC_BENCH_PARALLEL"); s != "" {
		var err error
		if par, err = strconv.Atoi(s); err != nil {
			b.Fatal(err)
		}
	}
	b.SetParallelism(par)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			s := spec(v1.SandboxID("benchm", 1, next.Add(1)))
			i, err := be.Create(context.Background(), s, nil)
			if err != nil {
				b.Error(err)
				return
			}
			if err := be.Delete(context.Background(), i.ID()); err != nil {
				b.Error(err)
				return
			}
		}
	})
}
