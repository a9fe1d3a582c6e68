package e2e

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "dsec/api/v1"
	"dsec/client"
	"dsec/internal/image/object/objecttest"
	"dsec/test/bed"
)

// Images and snapshots are in S3, and a node that has nothing of them reads them there.
func TestImagesInS3(t *testing.T) {
	t.Parallel()
	s3 := objecttest.S3(t)
	b := bed.New(t, bed.Options{
		NoImage: true, Env: []string{"AWS_ACCESS_KEY_ID=" + s3.AccessKey, "AWS_SECRET_ACCESS_KEY=" + s3.SecretKey},
		Flags: []string{"--store", "s3://" + s3.Bucket + "/some/prefix", "--store-endpoint", s3.Endpoint},
	})
	sums := noisy(t, b, "far", 8, 1<<20)
	c := b.Client(t)
	sb := b.Sandbox(t, c, client.Spec{Image: "far"})
	if res, err := sb.Run(t.Context(), "sh", "-c", "echo changed >/etc/new; cat /data/00 /data/01 >/both"); err != nil || res.Code != 0 {
		t.Fatalf("%+v, %v", res, err)
	}
	b.Must(t, "snapshot", sb.ID(), "one")
	bed.Remove(t, sb)
	b.Must(t, "down", "--data", b.Data, "--keep")
	forgetImages(t, b)
	if _, err := os.Stat(filepath.Join(b.Data, "store")); err == nil {
		t.Error("there is a directory of objects, too")
	}
	if err := b.Up(t.Context()); err != nil {
		t.Fatal(err)
	}
	c = b.Client(t)
	sb = b.Sandbox(t, c, client.Spec{Image: "snap:one"})
	checkSums(t, sb, sums)
	if res, err := sb.Run(t.Context(), "sh", "-c", "cat /etc/new && cat /data/00 /data/01 | cmp - /both && rm /both"); err != nil || res.Code != 0 || string(res.Stdout) != "changed\n" {
		t.Errorf("%+v, %v", res, err)
	}
	n := 0
	for child, err := range sb.Fork(t.Context(), 2, client.ForkOptions{}) {
		if err != nil {
			t.Fatal(err)
		}
		if res, err := child.Run(t.Context(), "sh", "-c", "test ! -e /both && cat /etc/new"); err != nil || string(res.Stdout) != "changed\n" {
			t.Errorf("%+v, %v", res, err)
		}
		bed.Remove(t, child)
		n++
	}
	if n != 2 {
		t.Errorf("%d children", n)
	}
	bed.Remove(t, sb)
	b.Must(t, "snapshot", "rm", "one")
	b.Must(t, "image", "gc")
	used := bed.JSON[v1.ImageUsage](t, b, "image", "du", "--json")
	if used.StoredBytes < 8<<20 {
		t.Errorf("%d bytes are stored of 8 MiB", used.StoredBytes)
	}
	b.Must(t, "image", "rm", "far")
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
