package bench

import (
	"context"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"path"
	"time"

	"dsec/client"
)

// Files writes files of size bytes into a sandbox and reads them back, and checks
// length and checksum both ways. N is the number of files; each worker has a sandbox.
func Files(ctx context.Context, d DSec, l Load, size int64, dir string) (out []Result, err error) {
	if err := l.validate(); err != nil {
		return nil, err
	}
	b, err := fill(ctx, d, l.Parallel, l.Parallel)
	if err != nil {
		return nil, err
	}
	defer func() { err = removed(ctx, b, d.Name(), l.Parallel, err) }()
	block := randomBlock()
	want := crc32.New(crc32.MakeTable(crc32.Castagnoli))
	if _, err := io.Copy(want, newContent(block, size)); err != nil {
		return nil, err
	}
	file := path.Join(dir, "dsec-bench-file")
	sb := func(worker int) *client.Sandbox { return b.all[worker].(dsecBox).sb }

	up, err := withServerMemory(ctx, d.Client, func() (Result, error) {
		return run(ctx, "file up", d.Name(), l, func(ctx context.Context, worker, _ int) (time.Duration, error) {
			return timed(func() error { return upload(ctx, sb(worker), file, newContent(block, size), size) })
		})
	})
	up.throughput(size)
	out = append(out, up)
	if err != nil || up.OK == 0 {
		return out, err
	}
	down, err := withServerMemory(ctx, d.Client, func() (Result, error) {
		return run(ctx, "file down", d.Name(), l, func(ctx context.Context, worker, _ int) (time.Duration, error) {
			return timed(func() error { return download(ctx, sb(worker), file, size, want.Sum32()) })
		})
	})
	down.throughput(size)
	return append(out, down), err
}

func (r *Result) throughput(size int64) {
	if r.Seconds > 0 {
		r.extra("MiB_per_s", float64(r.OK)*float64(size)/(1<<20)/r.Seconds)
	}
	r.extra("bytes", float64(size))
}

func upload(ctx context.Context, sb *client.Sandbox, file string, r io.Reader, size int64) error {
	w, err := sb.Files().Create(ctx, file, client.WriteOptions{})
	if err != nil {
		return err
	}
	if _, err := io.CopyBuffer(onlyWriter{w}, r, make([]byte, 256<<10)); err != nil {
		w.Abort()
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	if e := w.Entry(); e == nil || e.Size != size {
		return fmt.Errorf("the file that arrived is not %d bytes long: %+v", size, e)
	}
	return nil
}

type onlyWriter struct{ io.Writer }

func download(ctx context.Context, sb *client.Sandbox, file string, size int64, want uint32) error {
	r, err := sb.Files().Open(ctx, file, 0, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	h := &summed{h: crc32.New(crc32.MakeTable(crc32.Castagnoli))}
	if _, err := r.WriteTo(h); err != nil {
		return err
	}
	if h.n != size || h.h.Sum32() != want {
		return fmt.Errorf("read %d bytes with checksum %08x; written were %d with %08x", h.n, h.h.Sum32(), size, want)
	}
	return nil
}

type summed struct {
	h hash.Hash32
	n int64
}

func (s *summed) Write(p []byte) (int, error) {
	s.n += int64(len(p))
	return s.h.Write(p)
}

// randomBlock is what files repeat: random, so that nothing on the way can make it small.
func randomBlock() []byte {
	block := make([]byte, 1<<20)
	rand.NewChaCha8([32]byte{}).Read(block)
	return block
}

// content is size bytes of the block, repeated.
type content struct {
	block []byte
	off   int
	left  int64
}

func newContent(block []byte, size int64) io.Reader { return &content{block: block, left: size} }

func (c *content) Read(p []byte) (int, error) {
	if c.left == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(int64(len(p)), c.left)], c.block[c.off:])
	c.off = (c.off + n) % len(c.block)
	c.left -= int64(n)
	return n, nil
}
