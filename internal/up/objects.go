package up

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/lazy"
	"dsec/internal/image/object"
	imagestore "dsec/internal/image/store"
	"dsec/internal/keeper"
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

// binder is what bind needs of the control plane's store.
type binder interface {
	ObjectStore(ctx context.Context, id string) (string, error)
}

// idKey is the object that says which object store it is.
const idKey = "dsec-store"

// bind makes sure that this is the object store which has the catalogue's images, and
// that it is no other cluster's: a collector deletes what its own catalogue does not know.
// mine says that the store is the data directory's own.
func bind(ctx context.Context, b binder, s object.Store, name string, mine bool, fresh string) error {
	recorded, err := b.ObjectStore(ctx, "")
	if err != nil {
		return fmt.Errorf("ask which object store is this cluster's: %w", err)
	}
	p, err := object.ReadAll(ctx, s, idKey, 0, -1, 64)
	if err != nil && !errors.Is(err, errs.ObjectNotFound) {
		return fmt.Errorf("ask the object store %s which it is: %w", name, err)
	}
	held := string(p)
	refuse := func(why string) *errs.Error {
		return errs.New(errs.DataUnsuitable, "up.store", "the object store "+name+" "+why)
	}
	switch {
	case recorded != "" && held == recorded:
		return nil
	case recorded != "" && held == "":
		return refuse("is not the one that has this cluster's images: it is empty").Advise("is it mounted? name the store with --store")
	case recorded != "":
		return refuse("is not the one that has this cluster's images").Advise("name the store that the cluster was started with: --store")
	case held != "" && !mine:
		used := false
		err := s.List(ctx, "meta/", func(object.Info) error { used = true; return errStop })
		if err != nil && !errors.Is(err, errStop) {
			return err
		}
		if used {
			return refuse("has the images of another cluster, which would be taken for garbage").Advise("give each cluster a directory or prefix of its own")
		}
	case held == "":
		if err := s.Put(ctx, idKey, int64(len(fresh)), bytes.NewReader([]byte(fresh))); err != nil {
			return fmt.Errorf("mark the object store %s: %w", name, err)
		}
		held = fresh
	}
	if recorded, err = b.ObjectStore(ctx, held); err != nil {
		return fmt.Errorf("record the object store: %w", err)
	}
	if recorded != held {
		return refuse("was taken at the same moment as another one; start again")
	}
	return nil
}

var errStop = errors.New("stop")

// openImages opens the object store and this node's cache of it.
func (n *node) openImages(ctx context.Context) (err error) {
	o := &n.opts.Objects
	if n.objects, err = o.open(ctx, n.opts.Data); err != nil {
		return err
	}
	if err := bind(ctx, n.control.Store(), n.objects, o.name(n.opts.Data), o.Store == "", fmt.Sprintf("%016x%016x", random(), random())); err != nil {
		return err
	}
	cfg := keepers(n.opts.Data)
	cfg.Log = n.opts.Log
	if n.keepers, err = keeper.Start(ctx, cfg); err != nil {
		return fmt.Errorf("start the keepers: %w", err)
	}
	n.images, err = imagestore.Open(ctx, n.path(imagesDir), imagestore.Options{
		Objects: n.objects, Log: n.opts.Log, Lazy: lazy.Options{Limit: n.opts.ImageCache, Holder: n.keepers},
	})
	if err != nil {
		return fmt.Errorf("open the image store: %w", err)
	}
	n.opts.Log.Info("images are loaded on demand", "mode", n.images.Cache().Mode(), "store", o.name(n.opts.Data))
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
