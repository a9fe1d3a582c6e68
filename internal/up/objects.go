package up

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"dsec/internal/image/account"
	"dsec/internal/image/lazy"
	"dsec/internal/image/object"
	imagestore "dsec/internal/image/store"
	"dsec/internal/keeper"

	"golang.org/x/sys/unix"
)

// Objects says where images are kept.
type Objects struct {
	Store    string // directory, or s3://BUCKET[/PREFIX]; empty: DATA/store
	Endpoint string // of S3: a URL
	Region   string
	// Credentials of S3.
	AccessKey, SecretKey string

	// A link that is put before the store, for tests and measurements.
	Rate    int64 // bytes per second; 0: no limit
	Latency time.Duration
}

const s3Scheme = "s3://"

// open opens the store.
func (o *Objects) open(ctx context.Context, data string) (s object.Store, err error) {
	if where, ok := strings.CutPrefix(o.Store, s3Scheme); ok {
		bucket, prefix, _ := strings.Cut(where, "/")
		if prefix != "" && !strings.HasSuffix(prefix, "/") {
			prefix += "/"
		}
		s, err = object.OpenS3(ctx, object.S3Config{
			Endpoint: o.Endpoint, Region: o.Region, Bucket: bucket, Prefix: prefix, AccessKey: o.AccessKey, SecretKey: o.SecretKey,
		})
	} else {
		s, err = object.OpenDir(ctx, o.dir(data))
	}
	if err != nil {
		return nil, fmt.Errorf("open the object store %s: %w", o.name(data), err)
	}
	if o.Rate > 0 || o.Latency > 0 {
		s = object.Throttle(s, o.Rate, o.Latency)
	}
	return s, nil
}

func (o *Objects) dir(data string) string {
	if o.Store == "" {
		return filepath.Join(data, "store")
	}
	return o.Store
}

func (o *Objects) name(data string) string {
	if strings.HasPrefix(o.Store, s3Scheme) {
		return o.Store
	}
	return o.dir(data)
}

// behind says whether listings of the store may show others' changes late: of directories
// all but those on a disk of this machine.
func (o *Objects) behind(data string) bool {
	if strings.HasPrefix(o.Store, s3Scheme) {
		return false
	}
	var st unix.Statfs_t
	if err := unix.Statfs(o.dir(data), &st); err != nil {
		return true
	}
	switch st.Type {
	case unix.EXT4_SUPER_MAGIC, unix.XFS_SUPER_MAGIC, unix.BTRFS_SUPER_MAGIC, unix.TMPFS_MAGIC, unix.F2FS_SUPER_MAGIC, unix.OVERLAYFS_SUPER_MAGIC:
		return false
	}
	return true
}

// openImages opens this node's cache of the object store.
func (n *node) openImages(ctx context.Context) (err error) {
	cfg := keepers(n.opts.Data)
	cfg.Log = n.opts.Log
	if n.keepers, err = keeper.Start(ctx, cfg); err != nil {
		return fmt.Errorf("start the keepers: %w", err)
	}
	readAhead := n.opts.ReadAhead
	if readAhead == 0 {
		readAhead = -1
	}
	if n.readers, err = account.New(time.Now); err != nil {
		return err
	}
	n.images, err = imagestore.Open(ctx, n.path(imagesDir), imagestore.Options{
		Objects: n.objects, Log: n.opts.Log, Lazy: lazy.Options{Mode: n.opts.Loading, Readahead: readAhead, Limit: n.opts.ImageCache, Holder: n.keepers, Accountant: n.readers},
	})
	if err != nil {
		return fmt.Errorf("open the image store: %w", err)
	}
	if err := n.metrics.Register(newCacheMetrics(n.images.Cache(), n.readers)); err != nil {
		return err
	}
	n.opts.Log.Info("images are loaded on demand", "mode", n.images.Cache().Mode())
	return nil
}

const (
	imagesDir  = "images"
	keeperDir  = "keeper"
	keeperVerb = "keeper"
)

// keepers of a data directory hold what its node's readers depend on.
func keepers(data string) keeper.Config {
	return keeper.Config{Dir: filepath.Join(data, keeperDir), Verb: []string{keeperVerb}}
}

// endKeepers ends those of a start that failed before anything was mounted.
func (n *node) endKeepers(ctx context.Context) error {
	var err error
	if n.images != nil {
		err = n.images.Close()
		n.images = nil
	}
	if n.keepers != nil {
		err = errors.Join(err, n.keepers.Stop(ctx))
		n.keepers = nil
	}
	return err
}

// Keeper is the process of a keeper: what the verb of keepers runs. It returns the exit code.
func Keeper(args []string) int {
	return keeper.Main(args, []string{keeperVerb}, keeper.Hooks{Abandoned: func(ctx context.Context, held *keeper.Client) error {
		dir := filepath.Join(filepath.Dir(held.Dir()), imagesDir)
		if _, err := os.Stat(dir); err != nil {
			return err
		}
		return lazy.Abandoned(ctx, imagestore.DataDir(dir), lazy.Options{Holder: held})
	}})
}
