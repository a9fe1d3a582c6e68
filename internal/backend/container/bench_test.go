package container

import (
	"context"
	"os"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

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

// BenchmarkPause is a pause, the resume after it and the first program then, of an idle sandbox and of one that has
// touched memory.
func BenchmarkPause(b *testing.B) {
	for _, mib := range []int{0, 64, 256} {
		b.Run(strconv.Itoa(mib)+"MiB", func(b *testing.B) {
			n := newNode(b)
			be := n.open(b)
			b.Cleanup(func() { be.Close() })
			x := boxOn(b, be, roomy)
			if mib > 0 {
				x.fill("anon", mib)
			}
			x.pause() // the swap is made
			x.resume()
			var took [3][]time.Duration
			lap := func(part int, do func()) {
				start := time.Now()
				do()
				took[part] = append(took[part], time.Since(start))
			}
			for b.Loop() {
				x.sh("true")
				time.Sleep(time.Second / 2) // what the last resume fetches is back
				lap(0, func() { x.pause() })
				lap(1, x.resume)
				lap(2, func() { x.sh("true") })
			}
			for part, name := range []string{"pause", "resume", "exec"} {
				slices.Sort(took[part])
				b.ReportMetric(float64(took[part][len(took[part])/2])/1e6, "p50-"+name+"-ms")
				b.ReportMetric(float64(took[part][len(took[part])-1])/1e6, "max-"+name+"-ms")
			}
			b.ReportMetric(0, "ns/op")
		})
	}
}
