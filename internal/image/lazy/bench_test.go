package lazy_test

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"dsec/internal/image/lazy"

	"golang.org/x/sys/unix"
)

func modes(b *testing.B, run func(b *testing.B, mode lazy.Mode)) {
	needRoot(b)
	for _, mode := range []lazy.Mode{lazy.Fanotify, lazy.FUSE} {
		b.Run(string(mode), func(b *testing.B) { run(b, mode) })
	}
}

func benchOpen(b *testing.B, l *testLayer, src lazy.Filler, opts lazy.Options) (*reader, *lazy.Blob, func()) {
	c := openCache(b, b.TempDir(), opts)
	h, err := c.Blob(context.Background(), l.digest, int64(len(l.data)), src)
	if err != nil {
		b.Fatal(err)
	}
	m := mountBlob(b, l, h.Path())
	r := openBig(b, l, m)
	return r, h, func() {
		r.f.Close()
		unix.Close(m)
		h.Close()
		for c.Close() != nil {
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// Cold reads of one block each, of chunks that a fetch gives at once: what is left
// is the cost above the fetch, writing the chunk (about 142 KiB) included. Medians,
// since others use the machine.
func BenchmarkColdRead(b *testing.B) {
	modes(b, func(b *testing.B, mode lazy.Mode) {
		const size = 64 << 20
		l := buildLayer(b, size, 1)
		var took, put []time.Duration
		for len(took) < b.N {
			src := newSource(l.data, 1)
			r, _, done := benchOpen(b, l, putTimer{src, &put}, lazy.Options{Mode: mode, Readahead: -1})
			unix.Fadvise(int(r.f.Fd()), 0, 0, unix.FADV_RANDOM)
			p := make([]byte, 4096)
			for k := 0; k < len(src.bounds)-1 && len(took) < b.N; k++ {
				start := time.Now()
				if _, err := r.f.ReadAt(p, src.bounds[k]); err != nil {
					b.Fatal(err)
				}
				took = append(took, time.Since(start))
			}
			done()
		}
		slices.Sort(took)
		slices.Sort(put)
		b.ReportMetric(float64(took[len(took)/2].Nanoseconds()), "ns/read")
		b.ReportMetric(float64(put[len(put)/2].Nanoseconds()), "ns-put/read")
	})
}

// Reads of a complete lazy blob and of a plain file in turn: the ratio of their times.
func BenchmarkWarmRatio(b *testing.B) {
	needRoot(b)
	const size = 64 << 20
	l := buildLayer(b, size, 1)
	path := b.TempDir() + "/data"
	// Written chunk by chunk as well: one big write gets bigger pages in the kernel's
	// cache, which is worth up to a tenth until they come from the disk.
	whole, err := os.Create(path)
	if err != nil {
		b.Fatal(err)
	}
	cuts := newSource(l.data, 1).bounds
	for k := range len(cuts) - 1 {
		if _, err := whole.WriteAt(l.data[cuts[k]:cuts[k+1]], cuts[k]); err != nil {
			b.Fatal(err)
		}
	}
	whole.Close()
	m := mountBlob(b, l, path)
	defer unix.Close(m)
	plain := openBig(b, l, m)
	defer plain.f.Close()
	for _, cached := range []bool{true, false} {
		b.Run(fmt.Sprintf("kernel-cache=%v", cached), func(b *testing.B) {
			modes(b, func(b *testing.B, mode lazy.Mode) {
				lazyR, h, done := benchOpen(b, l, newSource(l.data, 1), lazy.Options{Mode: mode, SaveEvery: 20 * time.Millisecond})
				defer done()
				if err := h.Fill(context.Background()); err != nil {
					b.Fatal(err)
				}
				for end := time.Now().Add(2 * time.Second); lazy.Guarded(h) && time.Now().Before(end); {
					time.Sleep(time.Millisecond)
				}
				var took [2][]time.Duration
				p := make([]byte, 1<<20)
				for i := range b.N + 1 {
					for k := range 2 {
						k ^= i & 1
						r := []*reader{plain, lazyR}[k]
						if !cached {
							r.forget()
						}
						start := time.Now()
						for off := int64(0); off < size; off += int64(len(p)) {
							if _, err := r.f.ReadAt(p, off); err != nil {
								b.Fatal(err)
							}
						}
						took[k] = append(took[k], time.Since(start))
					}
				}
				for k := range took {
					took[k] = took[k][1:]
					slices.Sort(took[k])
				}
				n := len(took[0])
				b.ReportMetric(float64(took[1][n/2])/float64(took[0][n/2]), "lazy/plain-median")
				b.ReportMetric(float64(took[1][0])/float64(took[0][0]), "lazy/plain-best")
			})
		})
	}
}

// putTimer notes how long writing takes.
type putTimer struct {
	*source
	took *[]time.Duration
}

func (p putTimer) Fetch(ctx context.Context, i, j int, put func(int64, []byte) error) error {
	return p.source.Fetch(ctx, i, j, func(off int64, b []byte) error {
		start := time.Now()
		defer func() { *p.took = append(*p.took, time.Since(start)) }()
		return put(off, b)
	})
}

// Reads of what is there, of a blob that is still guarded: one event each.
func BenchmarkGuardedRead(b *testing.B) {
	modes(b, func(b *testing.B, mode lazy.Mode) {
		for _, limit := range []int64{0, 1 << 40} {
			b.Run(fmt.Sprintf("evictable=%v", limit > 0), func(b *testing.B) {
				const size = 32 << 20
				l := buildLayer(b, size, 1)
				r, h, done := benchOpen(b, l, newSource(l.data, 1), lazy.Options{Mode: mode, Readahead: -1, Limit: limit})
				defer done()
				if err := r.check(0, size-1<<20); err != nil {
					b.Fatal(err)
				}
				unix.Fadvise(int(r.f.Fd()), 0, 0, unix.FADV_RANDOM)
				p := make([]byte, 4096)
				before := h.Stats().Reads
				b.ResetTimer()
				for i := range b.N {
					k := int64(i) % (size>>12 - 512)
					if k == 0 {
						b.StopTimer()
						r.forget()
						b.StartTimer()
					}
					if _, err := r.f.ReadAt(p, k<<12); err != nil {
						b.Fatal(err)
					}
				}
				b.StopTimer()
				b.ReportMetric(float64(h.Stats().Reads-before)/float64(b.N), "events/op")
				b.ReportMetric(float64(h.Stats().Reads-before)/b.Elapsed().Seconds(), "events/s")
			})
		}
	})
}

// Many readers of a cold blob, as the first second of many sandboxes.
func BenchmarkColdParallel(b *testing.B) {
	modes(b, func(b *testing.B, mode lazy.Mode) {
		const size = 64 << 20
		l := buildLayer(b, size, 1)
		b.SetBytes(size)
		for range b.N {
			b.StopTimer()
			r, _, done := benchOpen(b, l, newSource(l.data, 1), lazy.Options{Mode: mode})
			b.StartTimer()
			var wg sync.WaitGroup
			for k := range 64 {
				wg.Add(1)
				go func() {
					defer wg.Done()
					p := make([]byte, 1<<20)
					r.f.ReadAt(p, int64(k)<<20)
				}()
			}
			wg.Wait()
			b.StopTimer()
			done()
		}
	})
}

// What one more guarded blob costs: 1 GiB of 100 KiB chunks.
func BenchmarkMemory(b *testing.B) {
	modes(b, func(b *testing.B, mode lazy.Mode) {
		bounds := []int64{0}
		for len(bounds) <= 10000 {
			bounds = append(bounds, int64(len(bounds))*100<<10)
		}
		for range b.N {
			c := openCache(b, b.TempDir(), lazy.Options{Mode: mode})
			src := &source{bounds: bounds, holes: map[int]bool{}}
			heap := func() (uint64, int) {
				runtime.GC()
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				return m.HeapAlloc + m.StackInuse, rss()
			}
			const n = 300
			m0, r0 := heap()
			start := time.Now()
			var hs []*lazy.Blob
			for i := range n {
				h, err := c.Blob(context.Background(), fmt.Sprintf("%064x", i), bounds[len(bounds)-1], src)
				if err != nil {
					b.Fatal(err)
				}
				hs = append(hs, h)
			}
			took := time.Since(start)
			m1, r1 := heap()
			b.ReportMetric(float64(m1-m0)/n, "heap-B/blob")
			b.ReportMetric(float64(r1-r0)/n, "RSS-B/blob")
			b.ReportMetric(float64(took.Microseconds())/n, "us/open")
			for _, h := range hs {
				h.Close()
			}
			c.Close()
		}
	})
}

func rss() int {
	p, _ := os.ReadFile("/proc/self/smaps_rollup")
	for _, line := range strings.Split(string(p), "\n") {
		var k int
		if _, err := fmt.Sscanf(line, "Rss: %d kB", &k); err == nil {
			return k << 10
		}
	}
	return 0
}
