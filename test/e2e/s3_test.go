package e2e

import (
	"context"
	"io"
	"net"
	"strings"
	"sync"
	"testing"

	"dsec/api/v1/errs"
	"dsec/client"
	"dsec/internal/image/object"
	"dsec/internal/image/object/objecttest"
	"dsec/test/bed"
)

// link passes connections on to a server until it is cut.
type link struct {
	t        *testing.T
	to, addr string

	mu       sync.Mutex
	listener net.Listener
	conns    map[net.Conn]bool
	wg       sync.WaitGroup
}

func newLink(t *testing.T, to string) *link {
	l := &link{t: t, to: to, addr: "127.0.0.1:0", conns: map[net.Conn]bool{}}
	l.mend()
	t.Cleanup(l.cut)
	return l
}

// mend lets connections through, at the same address as before.
func (l *link) mend() {
	l.t.Helper()
	listener, err := net.Listen("tcp", l.addr)
	if err != nil {
		l.t.Fatal(err)
	}
	l.mu.Lock()
	l.listener, l.addr = listener, listener.Addr().String()
	l.mu.Unlock()
	l.wg.Go(func() {
		for {
			in, err := listener.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", l.to)
			if err != nil {
				in.Close()
				continue
			}
			l.mu.Lock()
			if l.listener != listener { // cut meanwhile
				in.Close()
				out.Close()
			}
			l.conns[in], l.conns[out] = true, true
			l.mu.Unlock()
			pass := func(to, from net.Conn) {
				_, _ = io.Copy(to, from) // ends with either
				to.Close()
				from.Close()
			}
			l.wg.Go(func() { pass(in, out) })
			l.wg.Go(func() { pass(out, in) })
		}
	})
}

// cut ends all connections and refuses new ones.
func (l *link) cut() {
	l.mu.Lock()
	if l.listener != nil {
		l.listener.Close()
		l.listener = nil
	}
	for c := range l.conns {
		c.Close()
	}
	clear(l.conns)
	l.mu.Unlock()
	l.wg.Wait()
}

// All that images need of an object store works with one in S3: imports, cold starts, snapshots, forks, garbage,
// restarts; and while it cannot be reached nothing is served that is not there.
func TestImagesInS3(t *testing.T) {
	t.Parallel()
	s3 := objecttest.S3(t)
	network := newLink(t, strings.TrimPrefix(s3.Endpoint, "http://"))
	b := bed.New(t, bed.Options{
		NoImage: true, Env: []string{"AWS_ACCESS_KEY_ID=" + s3.AccessKey, "AWS_SECRET_ACCESS_KEY=" + s3.SecretKey},
		Flags: []string{"--store", "s3://" + s3.Bucket + "/cluster", "--store-endpoint", "http://" + network.addr},
	})
	ctx, c := t.Context(), b.Client(t)
	s3.Prefix = "cluster/"
	direct, err := object.OpenS3(ctx, s3)
	if err != nil {
		t.Fatal(err)
	}
	defer direct.CloseIdle()
	packed := func() (n int64) {
		t.Helper()
		if err := direct.List(ctx, "pack/", func(i object.Info) error { n += i.Size; return nil }); err != nil {
			t.Fatal(err)
		}
		return n
	}
	sums := noisy(t, b, "far", 8, 1<<20)
	noisy(t, b, "going", 8, 1<<20)
	before := packed()
	if before < 16<<20 {
		t.Fatalf("S3 has %d bytes of packs", before)
	}
	cold := func() {
		t.Helper()
		b.Must(t, "down", "--data", b.Data, "--keep")
		forgetImages(t, b)
		if err := b.Up(ctx); err != nil {
			t.Fatal(err)
		}
		c = b.Client(t)
	}

	cold()
	sb := b.Sandbox(t, c, client.Spec{Image: "far"})
	checkSums(t, sb, sums)
	if res, err := sb.Run(ctx, "sh", "-c", "dd if=/dev/urandom of=/new bs=1M count=2 2>/dev/null; sha256sum /new >/new.sum"); err != nil || res.Code != 0 {
		t.Fatal(res, err)
	}
	img, err := sb.Snapshot(ctx, "in-s3", client.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	whole := func(sb *client.Sandbox) {
		t.Helper()
		if res, err := sb.Run(ctx, "sha256sum", "-c", "/new.sum"); err != nil || res.Code != 0 {
			t.Errorf("%+v, %v", res, err)
		}
	}
	for child, err := range sb.Fork(ctx, 2, client.ForkOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		whole(child)
		bed.Remove(t, child)
	}
	bed.Remove(t, sb)
	b.Must(t, "image", "rm", "going")
	b.Must(t, "image", "gc", "--grace", "0")
	b.Must(t, "image", "gc", "--grace", "0") // packs that were copied go one after the other
	if after := packed(); after > before-4<<20 {
		t.Errorf("after the collection S3 has %d bytes of packs, %d before", after, before)
	}

	cold()
	sb = b.Sandbox(t, c, client.Spec{Image: img.Name})
	whole(sb)
	noisy(t, b, "other", 1, 1<<20)
	b.Must(t, "image", "evict", "other")
	network.cut()
	// Before anything reads: a process that waits for the store cannot be frozen.
	b.Fails(t, 1, string(errs.StoreUnavailable), "snapshot", sb.ID(), "none")
	var all sync.WaitGroup
	all.Go(func() { b.Fails(t, 1, string(errs.StoreUnavailable), "create", "other") })
	all.Go(func() { b.Fails(t, 1, string(errs.StoreUnavailable), "image", "import", "none", t.TempDir()) })
	all.Go(func() { b.Fails(t, 1, string(errs.StoreUnavailable), "image", "gc") })
	all.Go(func() {
		res, err := sb.Run(ctx, "cat", "/data/07")
		if err != nil || res.Code == 0 || len(res.Stdout) > 0 || !strings.Contains(string(res.Stderr), "Input/output error") {
			t.Errorf("a read from a store that is away: code %d, %d bytes, %q, %v", res.Code, len(res.Stdout), res.Stderr, err)
		}
	})
	all.Wait()
	// One that waits meanwhile goes on when it is back.
	all.Go(func() { checkSums(t, sb, sums) })
	network.mend()
	all.Wait()
	b.Must(t, "image", "import", "again", tree(t, map[string]string{"file": "content"}))
	snapped, err := sb.Snapshot(ctx, "after", client.SnapshotOptions{})
	if err != nil {
		t.Fatal(err)
	}
	again := b.Sandbox(t, c, client.Spec{Image: snapped.Name})
	checkSums(t, again, sums)
	bed.Remove(t, b.Sandbox(t, c, client.Spec{Image: "other"}))
}

// A service that is not there is named, and so is a bucket that is not.
func TestS3ThatIsNotThere(t *testing.T) {
	t.Parallel()
	s3 := objecttest.S3(t)
	keys := []string{"AWS_ACCESS_KEY_ID=" + s3.AccessKey, "AWS_SECRET_ACCESS_KEY=" + s3.SecretKey}
	for _, c := range []struct {
		bucket, endpoint, says string
		env                    []string
	}{
		{s3.Bucket, "http://127.0.0.1:9", "127.0.0.1:9", keys},
		{"nowhere", s3.Endpoint, "nowhere", keys},
		{s3.Bucket, s3.Endpoint, "denied", []string{keys[0], "AWS_SECRET_ACCESS_KEY=wrong"}},
	} {
		_, done, err := bed.Open(context.WithoutCancel(t.Context()), bed.Options{
			NoImage: true, Env: c.env, Flags: []string{"--store", "s3://" + c.bucket, "--store-endpoint", c.endpoint},
		})
		if err == nil {
			t.Errorf("%s at %s: it is up", c.bucket, c.endpoint)
			if err := done(); err != nil {
				t.Error(err)
			}
			continue
		}
		if !strings.Contains(strings.ToLower(err.Error()), c.says) {
			t.Errorf("%s at %s: %v", c.bucket, c.endpoint, err)
		}
	}
}
