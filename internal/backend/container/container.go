package container

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/backend/container/cgroup"
	"dsec/internal/backend/container/mount"
)

// Layers gives out the shared, detached mounts of an image's layers, highest first.
// The caller owns the returned descriptors' use until release.
type Layers interface {
	Acquire(ctx context.Context, image *v1.Image) (mounts []int, release func(), err error)
}

// Config of a Backend.
type Config struct {
	Dir        string // owned by this backend
	Writable   string // where sandboxes' own layers are; see package scratch
	Guest      []byte // the guest binary; nil: sandboxes can be listed, audited and removed, not made
	CgroupRoot string // /sys/fs/cgroup
	CgroupName string // parent group for all sandboxes of this node, unique on the host
	Layers     Layers
	FirstID    uint32  // first host uid and gid that sandboxes may have
	Readers    Readers // nil: what sandboxes read is not counted
	Swap       Swap    // nil: sandboxes cannot be paused
}

// Backend implements backend.Backend.
type Backend struct {
	cfg     Config
	dir     *os.File // Config.Writable/sandboxes, detached
	log     *guestLog
	cgroups *cgroup.Hierarchy
	guest   int // the guest binary, O_PATH

	hardLimits map[int]uint64 // of this process: no sandbox can have more
	null       int
	low        *lowFiles
	stage      *stage
	dev        int // the /dev of all sandboxes
	visible    *visible
	seccomp    []byte // filter program
	ids        *ranges
	cores      *coreCookie // nil: without
	noCores    error       // why
	stopSaving func()      // nil: nothing is saved
	// Each holds one for a sandbox whose memory moves out, or in.
	paging, fetching chan struct{}

	mu        sync.Mutex
	instances map[string]*instance
}

var _ backend.Backend = (*Backend)(nil)

// New prepares this node for containers.
func New(cfg Config) (*Backend, error) {
	b := &Backend{cfg: cfg, guest: -1, null: -1, dev: -1, instances: map[string]*instance{}, ids: newRanges(cfg.FirstID),
		paging: make(chan struct{}, pagers), fetching: make(chan struct{}, pagers)}
	if err := b.prepare(); err != nil {
		b.Close()
		return nil, fmt.Errorf("prepare containers: %w", err)
	}
	return b, nil
}

func (b *Backend) prepare() error {
	sandboxes := filepath.Join(b.cfg.Writable, "sandboxes")
	for _, d := range []string{b.cfg.Dir, sandboxes} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return err
		}
	}
	var err error
	if b.log, err = openGuestLog(filepath.Join(b.cfg.Dir, "guests.log"), guestLogMost, guestLogEvery); err != nil {
		return err
	}
	dir, err := mount.Detached(sandboxes)
	if err != nil {
		return err
	}
	b.dir = os.NewFile(uintptr(dir), sandboxes)
	if b.cgroups, err = cgroup.Open(filepath.Join(b.cfg.Dir, "cgroups.json"), b.cfg.CgroupRoot, "/proc/self/cgroup", b.cfg.CgroupName); err != nil {
		return err
	}
	if b.cfg.Guest == nil {
		return nil
	}
	if b.guest, err = installGuest(b.cfg.Dir, b.cfg.Guest); err != nil {
		return err
	}
	if b.null, err = unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0); err != nil {
		return err
	}
	if b.dev, err = mount.Dev(); err != nil {
		return err
	}
	if b.visible, err = newVisible(); err != nil {
		return err
	}
	if b.low, err = newLowFiles(b.null, b.guest, b.log.fd()); err != nil {
		return err
	}
	b.hardLimits = map[int]uint64{}
	for _, l := range limits {
		var now unix.Rlimit
		if err := unix.Getrlimit(l.resource, &now); err != nil {
			return err
		}
		b.hardLimits[l.resource] = now.Max
	}
	if b.stage, err = newStage(); err != nil {
		return err
	}
	b.cores, b.noCores = newCoreCookie(schedCore)
	if b.seccomp, err = seccompProgram(); err != nil {
		return err
	}
	if b.cfg.Readers != nil {
		b.stopSaving = b.startSaving(saveEvery)
	}
	return nil
}

// installGuest puts the binary where guests execute it, and opens it. Its mode matters:
// who may execute but not read a program cannot trace the process either, or read its
// /proc entries, not even as root of the user namespace that it runs in (kernel:
// would_dump). So nothing in a sandbox can reach PID 1's memory or descriptors.
func installGuest(dir string, binary []byte) (int, error) {
	path := filepath.Join(dir, "dsec-guest") // also the name that ps shows
	if installed(path, binary) {             // a full disk must not keep us from the sandboxes that run
		return unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
	}
	tmp := path + ".new"
	defer os.Remove(tmp) // there only on errors
	if err := os.WriteFile(tmp, binary, 0o711); err != nil {
		return -1, fmt.Errorf("install guest: %w", err)
	}
	if err := os.Chmod(tmp, 0o711); err != nil {
		return -1, fmt.Errorf("install guest: %w", err)
	}
	if err := os.Rename(tmp, path); err != nil { // running guests keep the old file
		return -1, fmt.Errorf("install guest: %w", err)
	}
	return unix.Open(path, unix.O_PATH|unix.O_CLOEXEC, 0)
}

// installed tells whether path is the binary already.
func installed(path string, binary []byte) bool {
	st, err := os.Lstat(path)
	if err != nil || st.Mode() != 0o711 || st.Size() != int64(len(binary)) {
		return false
	}
	have, err := os.ReadFile(path)
	return err == nil && bytes.Equal(have, binary)
}

// guestless is the error of a backend that cannot make sandboxes.
func guestless(phase string) error {
	return errs.New(errs.BackendUnusable, phase, "the backend was opened without a guest, to remove sandboxes only")
}

// Kind implements backend.Backend.
func (b *Backend) Kind() v1.Backend { return v1.BackendContainer }

// Withdraw removes what the node holds for containers beyond single sandboxes, of which
// none may be left. The backend is of no use after it.
func (b *Backend) Withdraw() error { return b.cgroups.RemoveAll() }

// Close implements backend.Backend.
func (b *Backend) Close() error {
	if b.stopSaving != nil {
		b.stopSaving()
		b.stopSaving = nil
		b.saveAllReads()
	}
	if b.dir != nil {
		b.dir.Close()
	}
	if b.log != nil {
		b.log.close()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.low != nil {
		b.low.close()
	}
	if b.stage != nil {
		b.stage.close()
	}
	if b.visible != nil {
		b.visible.close()
	}
	if b.cores != nil {
		b.cores.close()
	}
	for _, fd := range []*int{&b.guest, &b.null, &b.dev} {
		if *fd >= 0 {
			unix.Close(*fd)
			*fd = -1
		}
	}
	for _, i := range b.instances {
		i.close()
	}
	return nil
}
