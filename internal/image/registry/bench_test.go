package registry_test

import (
	"archive/tar"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"dsec/internal/image/export"
	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
	"dsec/internal/image/registry"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

const (
	benchLayers = 4
	benchFiles  = 4096 // in each layer
	benchFile   = 64 << 10
)

// benchRegistry serves a 1 GiB image from files, so that what the process holds
// in memory is the puller's.
func benchRegistry(b *testing.B, kind types.MediaType) *httptest.Server {
	b.Helper()
	dir := b.TempDir()
	man := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	cfg := v1.ConfigFile{OS: "linux", Architecture: "amd64"}
	cfg.RootFS.Type = "layers"
	for i := range benchLayers {
		d := benchLayer(b, dir, kind, i)
		man.Layers = append(man.Layers, d)
		cfg.RootFS.DiffIDs = append(cfg.RootFS.DiffIDs, d.Digest)
	}
	put := func(v any) (v1.Hash, []byte) {
		p, err := json.Marshal(v)
		if err != nil {
			b.Fatal(err)
		}
		sum := sha256.Sum256(p)
		h := v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum[:])}
		if err := os.WriteFile(filepath.Join(dir, h.Hex), p, 0o600); err != nil {
			b.Fatal(err)
		}
		return h, p
	}
	h, p := put(cfg)
	man.Config = v1.Descriptor{MediaType: types.OCIConfigJSON, Digest: h, Size: int64(len(p))}
	_, manifest := put(man)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.Contains(r.URL.Path, "/manifests/"):
			w.Header().Set("Content-Type", string(man.MediaType))
			w.Write(manifest)
		case strings.Contains(r.URL.Path, "/blobs/sha256:"):
			http.ServeFile(w, r, filepath.Join(dir, r.URL.Path[len(r.URL.Path)-64:]))
		}
	}))
	b.Cleanup(s.Close)
	return s
}

// benchLayer writes files of which about half compresses away.
func benchLayer(b *testing.B, dir string, kind types.MediaType, num int) v1.Descriptor {
	b.Helper()
	f, err := os.CreateTemp(dir, "layer")
	if err != nil {
		b.Fatal(err)
	}
	defer f.Close()
	sum := sha256.New()
	var z io.WriteCloser
	if kind == types.OCILayerZStd {
		z, err = zstd.NewWriter(io.MultiWriter(f, sum))
	} else {
		z, err = gzip.NewWriterLevel(io.MultiWriter(f, sum), gzip.BestSpeed)
	}
	if err != nil {
		b.Fatal(err)
	}
	w := tar.NewWriter(z)
	for i := range benchFiles {
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("l%d/d%d/f%d", num, i/100, i), Mode: 0o644, Size: benchFile}); err != nil {
			b.Fatal(err)
		}
		p := noise(uint64(num*benchFiles+i), benchFile/2) + strings.Repeat(fmt.Sprintf("line %8d of a text\n", i), benchFile/2/23+1)
		if _, err := io.WriteString(w, p[:benchFile]); err != nil {
			b.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	if err := z.Close(); err != nil {
		b.Fatal(err)
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		b.Fatal(err)
	}
	h := v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(sum.Sum(nil))}
	if err := os.Rename(f.Name(), filepath.Join(dir, h.Hex)); err != nil {
		b.Fatal(err)
	}
	return v1.Descriptor{MediaType: kind, Digest: h, Size: size}
}

// cpu is the time on CPUs so far, which other work on the machine does not change
// as it does that on the clock. The registry's part is in it.
func cpu(b *testing.B) float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// peakHeap samples what the heap has from the system until stopped.
func peakHeap() (stop func() float64) {
	runtime.GC()
	var peak atomic.Uint64
	done, gone := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(gone)
		var m runtime.MemStats
		for {
			runtime.ReadMemStats(&m)
			peak.Store(max(peak.Load(), m.HeapInuse))
			select {
			case <-done:
				return
			case <-time.After(20 * time.Millisecond):
			}
		}
	}()
	return func() float64 {
		close(done)
		<-gone
		return float64(peak.Load()) / (1 << 20)
	}
}

func BenchmarkPull1GiB(b *testing.B) {
	for _, kind := range []types.MediaType{types.OCILayer, types.OCILayerZStd} {
		b.Run(string(kind[strings.LastIndexByte(string(kind), '+')+1:]), func(b *testing.B) {
			s := benchRegistry(b, kind)
			b.SetBytes(benchLayers * benchFiles * benchFile)
			heap, began := peakHeap(), cpu(b)
			var res registry.Result
			for b.Loop() {
				_, _, err := imagetest.Build(b, layer.Options{}, func(lb *layer.Builder) error {
					var err error
					res, err = registry.Pull(b.Context(), strings.TrimPrefix(s.URL, "http://")+"/x:1", lb, registry.Options{Platform: "linux/amd64", SpoolDir: b.TempDir()})
					return err
				})
				if err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric((cpu(b)-began)/float64(b.N), "cpu-s/op")
			b.ReportMetric(heap(), "peak-heap-MiB")
			b.ReportMetric(float64(res.SpoolPeak)/(1<<20), "spool-MiB")
			b.ReportMetric(float64(res.Downloaded)/(1<<20), "downloaded-MiB")
		})
	}
}

func BenchmarkPush1GiB(b *testing.B) {
	src := benchRegistry(b, types.OCILayerZStd)
	l, _, err := imagetest.Build(b, layer.Options{}, func(lb *layer.Builder) error {
		_, err := registry.Pull(b.Context(), strings.TrimPrefix(src.URL, "http://")+"/x:1", lb, registry.Options{Platform: "linux/amd64", SpoolDir: b.TempDir()})
		return err
	})
	if err != nil {
		b.Fatal(err)
	}
	sink := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		io.Copy(io.Discard, r.Body)
		w.Header().Set("Location", "/v2/x/blobs/uploads/1")
		w.WriteHeader(map[string]int{"HEAD": 404, "POST": 202, "PATCH": 202, "PUT": 201, "GET": 200}[r.Method])
	}))
	b.Cleanup(sink.Close)
	for _, c := range []export.Compression{export.Gzip, export.Zstd, export.None} {
		b.Run("compression="+string(c), func(b *testing.B) {
			b.SetBytes(benchLayers * benchFiles * benchFile)
			heap, began := peakHeap(), cpu(b)
			for b.Loop() {
				opts := registry.PushOptions{Options: registry.Options{SpoolDir: b.TempDir()}, Compression: c}
				img := export.Image{Layers: []export.Layer{export.Merged(export.TarOptions{}, reader(b, l))}}
				if _, err := registry.Push(b.Context(), strings.TrimPrefix(sink.URL, "http://")+"/x:1", img, opts); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric((cpu(b)-began)/float64(b.N), "cpu-s/op")
			b.ReportMetric(heap(), "peak-heap-MiB")
		})
	}
}
