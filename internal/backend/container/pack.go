package container

import (
	"bufio"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
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
	var mapped map[string]bool
	if o.Next != nil {
		if mapped, err = i.mapped(); err != nil {
			return res, man, err
		}
	}
	return snapshot.Pack(ctx, snapshot.Options{
		Since: o.Since, Next: o.Next, Stopped: frozen.Since(), Mapped: mapped,
		Upper: upper, Blob: o.Data, Meta: o.Meta, IDs: snapshot.IDs{First: i.handle.FirstID, Count: rangeSize},
		LeaveOut: o.LeaveOut, Platform: platform(&i.spec, layers), Progress: o.Progress,
	})
}

// mapped lists the files that the sandbox's processes have mapped to write to. A mapping of a
// file that has no name any more does not count: neither has the snapshot it, but if another
// name is left, that one is not known; so all files with several names count then ("").
func (i *instance) mapped() (map[string]bool, error) {
	pids, err := i.b.cgroups.PIDs(i.id)
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, "container.pack", "list the sandbox's processes", err)
	}
	files := map[string]bool{}
	for _, pid := range pids {
		f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/maps")
		if err == nil {
			err = addMapped(files, f)
			f.Close()
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) { // else it ended
			return nil, errs.Wrap(errs.InternalError, "container.pack", "read what a process has mapped", err)
		}
	}
	return files, nil
}

// addMapped reads a process's maps: lines of address, permissions, offset, device, inode and path.
func addMapped(files map[string]bool, r io.Reader) error {
	s := bufio.NewScanner(r)
	for s.Scan() {
		f := strings.SplitN(s.Text(), " ", 6)
		if len(f) < 6 || len(f[1]) != 4 || f[1][3] != 's' || f[4] == "0" {
			continue
		}
		path := strings.TrimLeft(f[5], " ")
		if !strings.HasPrefix(path, "/") || strings.HasPrefix(path, "/dev/") || strings.HasPrefix(path, "/memfd:") || strings.HasPrefix(path, "/SYSV") {
			continue
		}
		if name, gone := strings.CutSuffix(path, " (deleted)"); gone {
			files[""] = true
			path = name
		}
		files[strings.ReplaceAll(path, `\012`, "\n")] = true
	}
	return s.Err()
}
