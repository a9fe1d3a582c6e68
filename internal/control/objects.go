package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
)

// Objects is the object store that has the catalogue's images.
type Objects struct {
	Store object.Store
	Name  string // for messages
	// Own says that nobody else can have it: it lies in the data directory.
	Own bool
	// Behind says that listings may show others' changes late, as on a network file system.
	Behind bool
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
		return errs.New(errs.DataUnsuitable, "control.objects", "the object store "+name+" "+why)
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
