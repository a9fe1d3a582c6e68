package chunk

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"dsec/internal/image/layer"
	"dsec/internal/image/object"
	"dsec/internal/image/object/objecttest"
	"dsec/internal/image/source"

	"github.com/klauspost/compress/zstd"
)

// The benchmarks use this machine's /usr, up to 1 GiB of it, as a layer.
const (
	benchTree  = "/usr"
	benchBytes = 1 << 30
)

type fileList struct {
	path string
	size int64
}

// benchFiles lists files below the tree, in the order of their names, up to the limit.
func benchFiles(tb testing.TB, limit int64) (files []fileList) {
	total := int64(0)
	err := filepath.WalkDir(benchTree, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		if total += fi.Size(); total > limit {
			return filepath.SkipAll
		}
		files = append(files, fileList{path, fi.Size()})
		return nil
	})
	if err != nil {
		tb.Fatal(err)
	}
	return files
}

// benchLayer builds a layer of files; change may replace a file's content or drop it.
func benchLayer(tb testing.TB, files []fileList, change func(i int, b []byte) []byte) (data *os.File, size int64, meta []byte) {
	data, err := os.CreateTemp(tb.TempDir(), "data")
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { data.Close() })
	b := layer.NewBuilder(data, layer.Options{})
	for i, f := range files {
		content, err := os.ReadFile(f.path)
		if err != nil {
			tb.Fatal(err)
		}
		if change != nil {
			if content = change(i, content); content == nil {
				continue
			}
		}
		if err := b.File(context.Background(), f.path, layer.Attr{Perm: 0o644}, int64(len(content)), bytes.NewReader(content)); err != nil {
			tb.Fatal(err)
		}
	}
	var m bytes.Buffer
	res, err := b.Finish(&m)
	if err != nil {
		tb.Fatal(err)
	}
	if err := data.Sync(); err != nil {
		tb.Fatal(err)
	}
	return data, res.DataSize, m.Bytes()
}

func openBenchDir(tb testing.TB) object.Store {
	d, err := object.OpenDir(context.Background(), tb.TempDir())
	if err != nil {
		tb.Fatal(err)
	}
	return d
}

// cpuTime is what the process has used, which other work on the machine changes less
// than the time on the wall.
func cpuTime(tb testing.TB) time.Duration {
	var r syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &r); err != nil {
		tb.Fatal(err)
	}
	return time.Duration(r.Utime.Nano() + r.Stime.Nano())
}

func mustBegin(tb testing.TB, w *Writer) *Session {
	tb.Helper()
	s, err := w.Begin(context.Background())
	if err != nil {
		tb.Fatal(err)
	}
	return s
}

// BenchmarkPut puts a layer of 1 GiB into a directory that is empty, and again after
// every twentieth file has changed. It reports sizes beside the speed.
func BenchmarkPut(b *testing.B) {
	files := benchFiles(b, benchBytes)
	data, size, _ := benchLayer(b, files, nil)
	whole := b // whose directories outlive those of its parts
	var m *Map
	var st Stats
	var s object.Store
	var w *Writer
	for _, level := range []zstd.EncoderLevel{zstd.SpeedFastest, zstd.SpeedDefault} {
		b.Run("First-"+level.String(), func(b *testing.B) {
			b.SetBytes(size)
			cpu := time.Duration(0)
			for range b.N {
				b.StopTimer()
				s = openBenchDir(whole)
				w = NewWriter(s, Options{Level: level})
				b.StartTimer()
				cpu -= cpuTime(b)
				ses := mustBegin(b, w)
				name, got, err := ses.PutData(context.Background(), Blob{R: data, Size: size})
				if err != nil {
					b.Fatal(err)
				}
				if err := ses.Commit(context.Background()); err != nil {
					b.Fatal(err)
				}
				w.Close()
				b.StopTimer()
				cpu += cpuTime(b)
				st = got
				if m, err = LoadMap(context.Background(), s, name); err != nil {
					b.Fatal(err)
				}
				b.StartTimer()
			}
			b.ReportMetric(float64(st.Bytes-st.HoleBytes)/float64(st.Chunks)/1024, "KiB/chunk")
			b.ReportMetric(float64(len(m.encode()))/float64(m.Len()), "mapB/chunk")
			b.ReportMetric(float64(st.Stored)/(1<<20), "storedMiB")
			b.ReportMetric(float64(st.NewBytes)/(1<<20), "uniqueMiB")
			b.ReportMetric(float64(size)/(1<<20)*float64(b.N)/cpu.Seconds(), "MiB/cpu-s")
		})
	}
	if w == nil {
		return
	}
	changed, changedSize, _ := benchLayer(b, files, func(i int, p []byte) []byte {
		if i%20 == 7 {
			copy(p[len(p)/2:], fmt.Sprintf("changed %d", i))
			p = append(p, "longer"...)
		}
		return p
	})
	b.Run("Changed", func(b *testing.B) {
		b.SetBytes(changedSize)
		for n := range b.N {
			w := NewWriter(s, Options{})
			ses := mustBegin(b, w)
			_, got, err := ses.PutData(context.Background(), Blob{R: changed, Size: changedSize})
			if err != nil {
				b.Fatal(err)
			}
			ses.Close(context.Background())
			w.Close()
			if n == 0 && b.N == 1 { // later ones find all of it
				st = got
			}
		}
		b.ReportMetric(100*float64(st.NewBytes)/float64(changedSize), "%new")
		b.ReportMetric(float64(st.Stored)/(1<<20), "storedMiB")
	})
}

// BenchmarkGzipTar is what the same tree takes as a gzip-compressed tar, the yardstick.
func BenchmarkGzipTar(b *testing.B) {
	files := benchFiles(b, benchBytes)
	var n atomic.Int64
	for range b.N {
		n.Store(0)
		total := int64(0)
		z, err := gzip.NewWriterLevel(countWriter{&n}, gzip.DefaultCompression)
		if err != nil {
			b.Fatal(err)
		}
		for _, f := range files {
			if err := tarFile(z, f); err != nil {
				b.Fatal(err)
			}
			total += f.size
		}
		if err := z.Close(); err != nil {
			b.Fatal(err)
		}
		b.SetBytes(total)
	}
	b.ReportMetric(float64(n.Load())/(1<<20), "tgzMiB")
}

func tarFile(w io.Writer, f fileList) error {
	b, err := os.ReadFile(f.path)
	if err != nil {
		return err
	}
	head := make([]byte, 512)
	copy(head, f.path)
	_, err = w.Write(append(append(head, b...), make([]byte, -len(b)&511)...))
	return err
}

type countWriter struct{ n *atomic.Int64 }

func (w countWriter) Write(p []byte) (int, error) { w.n.Add(int64(len(p))); return len(p), nil }

// BenchmarkSmallPut is a whole session for 1 MiB that is new on top of 1 GiB that is not.
func BenchmarkSmallPut(b *testing.B) {
	files := benchFiles(b, 256<<20)
	data, size, _ := benchLayer(b, files, nil)
	s := openBenchDir(b)
	w := NewWriter(s, Options{})
	defer w.Close()
	ses := mustBegin(b, w)
	if _, _, err := ses.PutData(context.Background(), Blob{R: data, Size: size}); err != nil {
		b.Fatal(err)
	}
	if err := ses.Commit(context.Background()); err != nil {
		b.Fatal(err)
	}
	b.ResetTimer()
	for i := range b.N {
		blob := randomBlocks(uint64(i)+1000, 256)
		ses := mustBegin(b, w)
		if _, _, err := ses.PutLayer(context.Background(), Blob{R: bytes.NewReader(blob[:8192]), Size: 8192}, Blob{R: bytes.NewReader(blob), Size: int64(len(blob))}); err != nil {
			b.Fatal(err)
		}
		if err := ses.Commit(context.Background()); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRead reads a layer back from a directory: all of it, and single chunks.
func BenchmarkRead(b *testing.B) {
	files := benchFiles(b, 512<<20)
	data, size, _ := benchLayer(b, files, nil)
	s := objecttest.Counting(openBenchDir(b))
	w := NewWriter(s, Options{})
	defer w.Close()
	ses := mustBegin(b, w)
	name, _, err := ses.PutData(context.Background(), Blob{R: data, Size: size})
	if err != nil {
		b.Fatal(err)
	}
	defer ses.Close(context.Background())
	m, err := LoadMap(context.Background(), s, name)
	if err != nil {
		b.Fatal(err)
	}
	r, err := NewReader(s, ReaderOptions{})
	if err != nil {
		b.Fatal(err)
	}
	b.Run("All", func(b *testing.B) {
		var n atomic.Int64
		s.Reset()
		for range b.N {
			if err := r.Read(context.Background(), m, 0, m.Len(), func(_ int, p []byte) error { n.Add(int64(len(p))); return nil }); err != nil {
				b.Fatal(err)
			}
		}
		b.SetBytes(n.Load() / int64(b.N))
		b.ReportMetric(float64(s.Of(objecttest.Get, "pack").Calls)/float64(b.N), "gets")
	})
	b.Run("One", func(b *testing.B) {
		var n atomic.Int64
		for i := range b.N {
			k := i * 7919 % m.Len()
			if err := r.Read(context.Background(), m, k, k+1, func(_ int, p []byte) error { n.Add(int64(len(p))); return nil }); err != nil {
				b.Fatal(err)
			}
		}
		b.SetBytes(n.Load() / int64(b.N))
	})
}

// BenchmarkImport is from a directory to a committed layer, with the builder before it.
func BenchmarkImport(b *testing.B) {
	dir := "/usr/lib"
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		b.Fatal("needs " + dir)
	}
	for range b.N {
		s := openBenchDir(b)
		w := NewWriter(s, Options{})
		data, err := os.CreateTemp(b.TempDir(), "data")
		if err != nil {
			b.Fatal(err)
		}
		lb := layer.NewBuilder(data, layer.Options{})
		if _, err := source.Path(context.Background(), dir, lb, source.Options{}); err != nil {
			b.Fatal(err)
		}
		var meta bytes.Buffer
		res, err := lb.Finish(&meta)
		if err != nil {
			b.Fatal(err)
		}
		b.SetBytes(res.DataSize)
		ses := mustBegin(b, w)
		if _, _, err := ses.PutLayer(context.Background(), Blob{R: bytes.NewReader(meta.Bytes()), Size: int64(meta.Len())}, Blob{R: data, Size: res.DataSize}); err != nil {
			b.Fatal(err)
		}
		if err := ses.Commit(context.Background()); err != nil {
			b.Fatal(err)
		}
		w.Close()
		data.Close()
		os.Remove(data.Name())
	}
}
