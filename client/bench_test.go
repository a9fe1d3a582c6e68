package client_test

import (
	"testing"

	"dsec/client"
	"dsec/internal/clienttest"
)

// The cost of one small operation over the data plane and back, with the
// fake guest in the same process: allocations of both ends count.
func BenchmarkCall(b *testing.B) {
	s := clienttest.New(b)
	c, err := client.New(client.Options{URL: s.URL, Token: clienttest.Token})
	if err != nil {
		b.Fatal(err)
	}
	defer c.Close()
	sb, err := c.Create(b.Context(), client.Spec{Image: "busybox"})
	if err != nil {
		b.Fatal(err)
	}
	b.Run("one", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := sb.Guest(b.Context()); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("parallel", func(b *testing.B) {
		b.ReportAllocs()
		b.SetParallelism(16)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				if _, err := sb.Guest(b.Context()); err != nil {
					b.Error(err)
					return
				}
			}
		})
	})
}
