package container

import (
	"context"
	"errors"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/image/layer"
	"dsec/internal/snapshot"
	"dsec/internal/snapshot/freeze"
)

// How long a sandbox may stand still for a snapshot: well below what clients take for a
// broken connection.
const packHold = 60 * time.Second

var _ backend.Packer = (*instance)(nil)

// Pack implements backend.Packer.
func (i *instance) Pack(ctx context.Context, o backend.PackOptions) (res layer.Result, man snapshot.Manifest, err error) {
	if i.spec.Image == nil {
		return res, man, errs.New(errs.NotSupported, "container.pack", "the sandbox has no image")
	}
	layers, release, err := i.b.cfg.Layers.Acquire(ctx, i.spec.Image)
	if err != nil {
		return res, man, err
	}
	defer release()
	upper, err := unix.Open(filepath.Join(i.b.dir.Name(), i.id, "upper"), unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return res, man, errs.Wrap(errs.InternalError, "container.pack", "open the writable layer", err)
	}
	defer unix.Close(upper)
	group := i.b.cgroups.Freezer(i.id)
	frozen, err := group.Freeze(ctx, freeze.Limits{Hold: packHold})
	if err != nil {
		return res, man, err
	}
	defer func() {
		if terr := frozen.Thaw(); terr != nil { // it may stand still: try once more, as adoption would
			err = errors.Join(err, terr, group.Thaw())
		}
	}()
	return snapshot.Pack(ctx, snapshot.Options{
		Upper: upper, Blob: o.Data, Meta: o.Meta, IDs: snapshot.IDs{First: i.handle.FirstID, Count: rangeSize},
		LeaveOut: o.LeaveOut, Platform: platform(&i.spec, layers), Progress: o.Progress,
	})
}
