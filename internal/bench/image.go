package bench

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"time"

	v1 "dsec/api/v1"
	"dsec/client"
)

// ImageOptions say what Image measures.
type ImageOptions struct {
	Size     int64  // of the image that is made
	Busybox  string // a static busybox on this machine: the image's programs
	Parallel int    // sandboxes at once in the second cold start
	Repeat   int    // cold starts one by one
	// Archives are compressed images of tar, docker save or OCI layout: what they take in the
	// object store is compared with their own size.
	Archives []string
}

const (
	imageFile = 256 << 10 // bytes of one file
	coldPart  = 20        // one file of so many is read by the first command
)

// Image measures an image from its import on: made of files of which half does not
// compress, started on a node that has nothing of it, alone and many times at once, and
// read when all of it is there. Put a link before the server's store (--store-rate) to
// measure cold starts.
func Image(ctx context.Context, d DSec, o ImageOptions) (out []Result, err error) {
	name := d.Spec.Labels["job"]
	d.Spec.Image = name
	// What a start reads is recorded and helps the next ones: the second series is of an
	// image that never started, with the same files.
	other := d
	other.Spec.Image = name + "-2"
	defer func() {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
		defer cancel()
		for _, n := range []string{name, other.Spec.Image} {
			if derr := d.Client.DeleteImage(cctx, n); derr != nil && !errors.Is(derr, client.ErrNotFound) {
				err = errors.Join(err, derr)
			}
		}
	}()
	steps := []func() (Result, error){
		func() (Result, error) { return importImage(ctx, d, o) },
		func() (Result, error) { return coldStarts(ctx, d, o, "image cold", o.Repeat, 1) },
		func() (Result, error) {
			if _, err := importImage(ctx, other, o); err != nil {
				return Result{}, err
			}
			if err := evict(ctx, d); err != nil { // what both have is else not evicted
				return Result{}, err
			}
			return coldStarts(ctx, other, o, "image cold at once", o.Parallel, o.Parallel)
		},
		func() (Result, error) {
			if err := awaitTrace(ctx, d); err != nil {
				return Result{}, err
			}
			if err := evict(ctx, other); err != nil {
				return Result{}, err
			}
			return coldStarts(ctx, d, o, "image cold again", o.Repeat, 1)
		},
		func() (Result, error) { return warmRead(ctx, d, o) },
	}
	for _, s := range steps {
		r, err := s()
		if r.Name != "" {
			out = append(out, r)
		}
		if err != nil || r.Errors > 0 {
			return out, err
		}
	}
	if len(o.Archives) == 0 {
		return out, nil
	}
	r, err := storedSize(ctx, d, o)
	return append(out, r), err
}

func importImage(ctx context.Context, d DSec, o ImageOptions) (Result, error) {
	busybox, err := os.ReadFile(o.Busybox)
	if err != nil {
		return Result{}, fmt.Errorf("read a static busybox for the image: %w", err)
	}
	before, err := d.Client.ImageUsage(ctx)
	if err != nil {
		return Result{}, err
	}
	r, err := run(ctx, "image import", d.Name(), Load{N: 1, Parallel: 1}, func(ctx context.Context, _, _ int) (time.Duration, error) {
		pr, pw := io.Pipe()
		defer pr.Close()
		go func() { pw.CloseWithError(writeImage(pw, d.Spec.Image, busybox, o.Size)) }()
		return timed(func() error {
			_, err := d.Client.Import(ctx, d.Spec.Image, pr, client.ImportOptions{Format: client.FormatTar})
			return err
		})
	})
	if err != nil || r.OK == 0 {
		return r, err
	}
	r.throughput(o.Size)
	after, err := d.Client.ImageUsage(ctx)
	if err == nil {
		r.extra("stored_part", float64(after.StoredBytes-before.StoredBytes)/float64(o.Size))
	}
	return r, err
}

// writeImage writes the image as a tar. Its name is in it, so that no two are the same.
func writeImage(w io.Writer, name string, busybox []byte, size int64) error {
	tw := tar.NewWriter(w)
	put := func(h tar.Header, p []byte) error {
		h.ModTime, h.Size = time.Unix(1, 0), int64(len(p))
		if err := tw.WriteHeader(&h); err != nil {
			return err
		}
		_, err := tw.Write(p)
		return err
	}
	for _, dir := range []string{"bin", "data", "dev", "etc", "proc", "sys", "tmp"} {
		if err := put(tar.Header{Name: dir, Typeflag: tar.TypeDir, Mode: 0o755}, nil); err != nil {
			return err
		}
	}
	if err := put(tar.Header{Name: "bin/busybox", Typeflag: tar.TypeReg, Mode: 0o755}, busybox); err != nil {
		return err
	}
	if err := put(tar.Header{Name: "etc/name", Typeflag: tar.TypeReg, Mode: 0o644}, []byte(name)); err != nil {
		return err
	}
	for _, c := range []string{"sh", "cat", "cp", "dd"} {
		if err := put(tar.Header{Name: "bin/" + c, Typeflag: tar.TypeSymlink, Linkname: "busybox", Mode: 0o777}, nil); err != nil {
			return err
		}
	}
	noise := rand.NewChaCha8([32]byte{1})
	p := bytes.Repeat([]byte("the quick brown fox jumps over the lazy dog; "), imageFile/45+1)[:imageFile]
	for i := int64(0); i*imageFile < size; i++ {
		for off := 0; off < imageFile; off += 4096 {
			noise.Read(p[off : off+2048]) //nolint:errcheck // never fails
		}
		if err := put(tar.Header{Name: dataFile(i), Typeflag: tar.TypeReg, Mode: 0o644}, p); err != nil {
			return err
		}
	}
	return tw.Close()
}

func dataFile(i int64) string { return fmt.Sprintf("data/%06d", i) }

// firstCommand reads one file of every coldPart, spread over all of the image.
func firstCommand(size int64) []string {
	last := (size+imageFile-1)/imageFile - 1
	// One process reads them all: many at once would measure forks.
	script := fmt.Sprintf("cat $(i=0; while [ $i -le %d ]; do printf '/data/%%06d ' $i; i=$((i+%d)); done) >/dev/null", last, coldPart)
	return []string{"-c", script}
}

// coldStarts evicts the image, creates n sandboxes and runs the first command in each.
// With parallel 1 the image is evicted before each of them.
func coldStarts(ctx context.Context, d DSec, o ImageOptions, name string, n, parallel int) (Result, error) {
	img, err := d.Client.Image(ctx, d.Spec.Image)
	if err != nil {
		return Result{}, err
	}
	var size int64
	for _, l := range img.Layers {
		size += l.DataBytes
	}
	if err := evict(ctx, d); err != nil {
		return Result{}, err
	}
	before, err := fetchedBytes(ctx, d)
	if err != nil {
		return Result{}, err
	}
	var b boxes
	r, err := run(ctx, name, d.Name(), Load{N: n, Parallel: parallel}, func(ctx context.Context, _, i int) (time.Duration, error) {
		if parallel == 1 && i > 0 {
			if _, err := b.remove(ctx, d.Name(), 1); err != nil {
				return 0, err
			}
			b.all = nil
			if err := evict(ctx, d); err != nil {
				return 0, err
			}
		}
		return timed(func() error {
			x, err := d.Create(ctx)
			if err != nil {
				return err
			}
			b.add(x)
			return x.Exec(ctx, "/bin/sh", firstCommand(o.Size)...)
		})
	})
	if after, ferr := fetchedBytes(ctx, d); ferr == nil {
		rounds := 1
		if parallel == 1 {
			rounds = n
		}
		r.extra("fetched_part", float64(after-before)/float64(size)/float64(rounds))
		r.extra("fetched_bytes", float64(after-before)/float64(rounds))
	} else if err == nil {
		err = ferr
	}
	if _, rerr := b.remove(ctx, d.Name(), parallel); err == nil {
		err = rerr
	}
	return r, err
}

// awaitTrace waits until what the first start read is known.
func awaitTrace(ctx context.Context, d DSec) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		nodes, err := d.Client.WarmImage(ctx, d.Spec.Image, client.WarmOptions{})
		if err != nil {
			return err
		}
		if len(nodes) > 0 && nodes[0].Trace {
			return nil
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return fmt.Errorf("what a start of image %s read is not recorded: %w", d.Spec.Image, ctx.Err())
		}
	}
}

func evict(ctx context.Context, d DSec) error {
	nodes, err := d.Client.EvictImage(ctx, d.Spec.Image, "")
	for _, n := range nodes {
		if err == nil && n.InUse > 0 {
			err = fmt.Errorf("node %s has %d layers of the image in use: it cannot be made cold", n.Node, n.InUse)
		}
	}
	return err
}

// fetchedBytes is what all nodes have fetched of image data.
func fetchedBytes(ctx context.Context, d DSec) (int64, error) {
	text, err := d.Client.Metrics(ctx)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if v, ok := strings.CutPrefix(line, "dsec_image_cache_fetched_bytes_total "); ok {
			var n float64
			_, err := fmt.Sscan(v, &n)
			return int64(n), err
		}
	}
	return 0, errors.New("the server's metrics have no dsec_image_cache_fetched_bytes_total: its nodes are elsewhere")
}

const (
	readRounds = 15
	readPasses = 8 // over the files in each round
)

// warmRead reads files of the image in a sandbox and copies of them in the sandbox's own
// file system in turn, from the kernel's memory: copies that came there from the disk, as
// the image's files did, and copies as they were written.
func warmRead(ctx context.Context, d DSec, o ImageOptions) (r Result, err error) {
	if _, err := d.Client.WarmImage(ctx, d.Spec.Image, client.WarmOptions{All: true, Progress: func(v1.WarmProgress) {}}); err != nil {
		return r, err
	}
	x, err := d.Create(ctx)
	if err != nil {
		return r, err
	}
	var b boxes
	b.add(x)
	defer func() {
		if _, rerr := b.remove(ctx, d.Name(), 1); err == nil {
			err = rerr
		}
	}()
	part := min(o.Size, 64<<20)
	sh := func(format string, args ...any) error {
		return x.Exec(ctx, "/bin/sh", "-c", fmt.Sprintf("for_all() { i=0; while [ $i -lt %d ]; do $1 $(printf %%06d $i) || exit 1; i=$((i+1)); done; }; ", part/imageFile)+fmt.Sprintf(format, args...))
	}
	list := func(dir string) string {
		return fmt.Sprintf("$(i=0; while [ $i -lt %d ]; do printf '%s/%%06d ' $i; i=$((i+1)); done)", part/imageFile, dir)
	}
	read := func(dir string) (time.Duration, error) {
		return timed(func() error {
			return sh("f=%q; i=0; while [ $i -lt %d ]; do cat $f; i=$((i+1)); done >/dev/null", list(dir), readPasses)
		})
	}
	// Without a copy in memory on the way, so that it has to be read.
	if err := sh("mkdir /tmp/read /tmp/written && cp %s /tmp/written && put() { dd if=/data/$1 of=/tmp/read/$1 bs=256k oflag=direct 2>/dev/null; }; for_all put", list("/data")); err != nil {
		return r, err
	}
	var from, written []float64
	r, err = run(ctx, "image read", d.Name(), Load{N: readRounds, Parallel: 1}, func(context.Context, int, int) (time.Duration, error) {
		for _, copies := range []struct {
			dir  string
			took *[]float64
		}{{"/tmp/read", &from}, {"/tmp/written", &written}} {
			took, err := read(copies.dir)
			if err != nil {
				return 0, err
			}
			*copies.took = append(*copies.took, took.Seconds()*1e3)
		}
		return read("/data")
	})
	if err == nil && r.OK > 0 {
		slices.Sort(from)
		slices.Sort(written)
		r.extra("MiB_per_s", float64(part*readPasses)/(1<<20)/(r.Latency.P50/1e3))
		r.extra("times_a_plain_file", r.Latency.P50/from[len(from)/2])
		r.extra("times_a_file_just_written", r.Latency.P50/written[len(written)/2])
	}
	return r, err
}

// storedSize imports archives and compares what they add to the object store with their size.
func storedSize(ctx context.Context, d DSec, o ImageOptions) (r Result, err error) {
	before, err := d.Client.ImageUsage(ctx)
	if err != nil {
		return r, err
	}
	var names []string
	defer func() {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), removeTimeout)
		defer cancel()
		for _, n := range names {
			err = errors.Join(err, d.Client.DeleteImage(cctx, n))
		}
	}()
	var size int64
	for _, a := range o.Archives {
		fi, err := os.Stat(a)
		if err != nil {
			return r, err
		}
		size += fi.Size()
	}
	r, err = run(ctx, "images stored", d.Name(), Load{N: len(o.Archives), Parallel: 1}, func(ctx context.Context, _, i int) (time.Duration, error) {
		name := fmt.Sprintf("%s-%d", d.Spec.Labels["job"], i)
		return timed(func() error {
			_, err := d.Client.ImportPath(ctx, name, o.Archives[i], client.ImportOptions{})
			if err == nil {
				names = append(names, name)
			}
			return err
		})
	})
	if err != nil || r.Errors > 0 {
		return r, err
	}
	after, err := d.Client.ImageUsage(ctx)
	if err != nil {
		return r, err
	}
	r.extra("archives_bytes", float64(size))
	r.extra("stored_bytes", float64(after.StoredBytes-before.StoredBytes))
	r.extra("times_the_archives", float64(after.StoredBytes-before.StoredBytes)/float64(size))
	return r, nil
}
