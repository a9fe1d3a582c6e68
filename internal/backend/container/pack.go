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
	k, err := snapshot.Begin(snapshot.Options{
		Since: o.Since, Next: o.Next,
		Upper: upper, Blob: o.Data, Meta: o.Meta, IDs: snapshot.IDs{First: i.handle.FirstID, Count: rangeSize},
		LeaveOut: o.LeaveOut, Platform: platform(&i.spec, layers), Progress: o.Progress,
	})
	if err != nil {
		return res, man, err
	}
	defer k.Close()
	if o.Times == nil {
		o.Times = &backend.PackTimes{}
	}
	if err := i.readAhead(ctx, k, o.Times); err != nil {
		return res, man, err
	}
	if err := i.standingStill(ctx, k, o.Times, k.Walk); err != nil {
		return res, man, err
	}
	return k.Finish()
}

// readAheads is how often what there is to read is read while the sandbox runs: once more for
// what it wrote meanwhile.
const readAheads = 2

// readAhead reads what it can of a large pack before the sandbox stands still.
func (i *instance) readAhead(ctx context.Context, k *snapshot.Packing, t *backend.PackTimes) error {
	begun := time.Now()
	for range readAheads {
		worth, wait, err := k.Worth(ctx, time.Now())
		if err != nil || !worth {
			return err
		}
		select {
		case <-time.After(wait):
		case <-ctx.Done():
			return errs.Wrap(errs.RequestCanceled, "container.pack", "wait for what was just written", ctx.Err())
		}
		if err := i.standingStill(ctx, k, t, nil); err != nil {
			return err
		}
		if err := k.ReadAhead(ctx); err != nil {
			return err
		}
		t.Ahead = time.Since(begun)
	}
	return nil
}

// standingStill freezes the sandbox, marks that, and runs f if there is one.
func (i *instance) standingStill(ctx context.Context, k *snapshot.Packing, t *backend.PackTimes, f func(context.Context) error) (err error) {
	end, err := i.still.begin(ctx, "container.pack")
	if err != nil {
		return err
	}
	defer end()
	if i.still.paused { // it stands still already, and stays so
		return i.mark(ctx, k, i.still.since, f)
	}
	group := i.b.cgroups.Freezer(i.id)
	frozen, err := i.b.freeze(ctx, i.id, freeze.Limits{Hold: packHold})
	if err != nil {
		return err
	}
	defer func() {
		if terr := frozen.Thaw(); terr != nil { // it may stand still: try once more, as adoption would
			err = errors.Join(err, terr, group.Thaw())
		}
		t.Frozen = max(t.Frozen, time.Since(frozen.Since()))
	}()
	return i.mark(ctx, k, frozen.Since(), f)
}

// mark tells the pack since when the sandbox has stood still, and runs f if there is one.
func (i *instance) mark(ctx context.Context, k *snapshot.Packing, since time.Time, f func(context.Context) error) error {
	mapped, err := i.mapped()
	if err != nil {
		return err
	}
	k.Mark(snapshot.Still{Since: since, Mapped: mapped})
	if f != nil {
		return f(ctx)
	}
	return nil
}

// mapped lists the files that the sandbox's processes have mapped to write to. A file that has
// no name any more does not count: neither has the snapshot it. If another name than the mapped one is
// left, it is not known ("").
func (i *instance) mapped() (map[string]bool, error) {
	pids, err := i.b.cgroups.PIDs(i.id)
	if err != nil {
		return nil, errs.Wrap(errs.InternalError, "container.pack", "list the sandbox's processes", err)
	}
	files := map[string]bool{}
	for _, pid := range pids {
		f, err := os.Open("/proc/" + strconv.Itoa(pid) + "/maps")
		if err == nil {
			err = addMapped(files, f, func(address string) bool {
				var st unix.Stat_t
				err := unix.Stat("/proc/"+strconv.Itoa(pid)+"/map_files/"+address, &st)
				return err != nil || st.Nlink > 0
			})
			f.Close()
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) { // else it ended
			return nil, errs.Wrap(errs.InternalError, "container.pack", "read what a process has mapped", err)
		}
	}
	return files, nil
}

// addMapped reads a process's maps: lines of address, permissions, offset, device, inode and path.
// named tells whether what is mapped at an address has a name.
func addMapped(files map[string]bool, r io.Reader, named func(address string) bool) error {
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
		if strings.HasSuffix(path, " (deleted)") { // or that is its name
			if named(f[0]) {
				files[""] = true
			}
			continue
		}
		files[strings.ReplaceAll(path, `\012`, "\n")] = true
	}
	return s.Err()
}
