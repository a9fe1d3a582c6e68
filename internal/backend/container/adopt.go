package container

import (
	"context"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/snapshot/freeze"
)

// Adopt implements backend.Backend.
func (b *Backend) Adopt(ctx context.Context, spec backend.Spec, raw json.RawMessage) (backend.Instance, error) {
	lost := func(why string, err error) error {
		return errs.New(errs.SandboxLost, "container.adopt", why).Because(err)
	}
	var h handle
	if err := json.Unmarshal(raw, &h); err != nil {
		return nil, lost("its handle is unreadable", err)
	}
	if h.PID <= 1 || h.Generation != spec.Generation {
		return nil, lost("its handle is of another generation", nil)
	}
	// Only what is sure makes it lost: out of descriptors, say, it lives on, with its ids.
	b.ids.claim(h.FirstID, spec.ID)
	unsure := func(err error) error {
		return errs.Wrap(errs.InternalError, "container.adopt", "look at its first process", err)
	}
	pidfd, err := unix.PidfdOpen(h.PID, unix.PIDFD_NONBLOCK)
	if err == unix.ESRCH || err == unix.EINVAL || err == unix.ENOENT { // the last two: the pid is a thread's now
		b.ids.put(h.FirstID)
		return nil, lost("its first process has ended", err)
	}
	if err != nil {
		return nil, unsure(err)
	}
	// The descriptor came first: if the process behind it has the right start time, it
	// is ours and cannot be exchanged any more.
	ticks, err := startTicks(h.PID)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ESRCH) {
		unix.Close(pidfd)
		return nil, unsure(err)
	}
	if err != nil || ticks != h.StartTicks {
		unix.Close(pidfd)
		b.ids.put(h.FirstID)
		return nil, lost("its first process has ended and the pid is another's", err)
	}
	if err := b.adoptStill(ctx, spec); err != nil {
		unix.Close(pidfd)
		return nil, unsure(err)
	}
	i := watch(b, spec, h, pidfd)
	i.still.paused, i.still.since = spec.Paused, time.Now()
	i.count(b.loadReads(spec.ID))
	b.mu.Lock()
	b.instances[spec.ID] = i
	b.mu.Unlock()
	return i, nil
}

// adoptStill makes the sandbox stand still or run, as its record says. An edge that died while it made a snapshot or
// paused the sandbox left it frozen; one that died while it resumed it may have let it run.
func (b *Backend) adoptStill(ctx context.Context, spec backend.Spec) error {
	group := b.cgroups.Freezer(spec.ID)
	switch frozen := group.IsFrozen(); {
	case frozen && !spec.Paused:
		return b.thaw(spec.ID)
	case spec.Paused: // frozen already, or on its way
		_, err := b.freeze(ctx, spec.ID, freeze.Limits{Hold: -1})
		return err
	}
	return nil
}

// List implements backend.Backend.
func (b *Backend) List(context.Context) ([]string, error) {
	entries, err := os.ReadDir(b.dir.Name())
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	var ids []string
	for _, e := range entries {
		seen[e.Name()] = true
		ids = append(ids, e.Name())
	}
	groups, err := b.cgroups.List()
	if err != nil {
		return nil, err
	}
	for _, g := range groups {
		if !seen[g] {
			ids = append(ids, g)
		}
	}
	return ids, nil
}

// Audit implements backend.Backend. Namespaces and mounts have no names of their own:
// they live exactly as long as the processes counted here.
func (b *Backend) Audit(ctx context.Context) ([]backend.Resource, error) {
	ids, err := b.List(ctx)
	if err != nil {
		return nil, err
	}
	var out []backend.Resource
	for _, id := range ids {
		dir := filepath.Join(b.dir.Name(), id)
		if _, err := os.Lstat(dir); err == nil {
			out = append(out, backend.Resource{Kind: "directory", Name: dir, Sandbox: id})
		}
		for _, p := range b.cgroups.Paths(id) {
			out = append(out, backend.Resource{Kind: "cgroup", Name: p, Sandbox: id})
		}
		pids, err := b.cgroups.PIDs(id)
		if err != nil {
			return nil, err
		}
		for _, pid := range pids {
			out = append(out, backend.Resource{Kind: "process", Name: strconv.Itoa(pid), Sandbox: id})
		}
	}
	return out, nil
}
