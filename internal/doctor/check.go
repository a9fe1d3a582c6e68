package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend/container"
	"dsec/internal/backend/container/scratch"
	"dsec/internal/image"
	"dsec/internal/image/lazy"
	"dsec/internal/image/object"
	imagestore "dsec/internal/image/store"
)

// Status of a check.
type Status string

// Statuses. A node starts with warnings, not with failures.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Check is one thing looked at.
type Check struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Detail string `json:"detail"`
	Fix    string `json:"fix,omitempty"`
}

// Checks looks at everything a node on dataDir with this many sandboxes needs, by
// trying it where that is possible.
func Checks(ctx context.Context, dataDir string, guest []byte, sandboxes int) []Check {
	var out []Check
	add := func(name string, bad Status, fix string, detail string, err error) {
		c := Check{Name: name, Status: OK, Detail: detail}
		if err != nil {
			c.Status, c.Detail, c.Fix = bad, err.Error(), fix
		}
		out = append(out, c)
	}
	var uname unix.Utsname
	err := unix.Uname(&uname)
	add("kernel", Fail, "", unix.ByteSliceToString(uname.Release[:]), err)
	if os.Geteuid() != 0 {
		add("root", Fail, "run as root", "", errors.New("not root: nothing else can be tried"))
		return out
	}
	add("root", Fail, "", "yes", nil)

	// In the data directory's own file system, unless that is the very thing that is wrong.
	where, name := existing(dataDir), "file system of "+dataDir
	dataErr := DataDir(ctx, where)
	if errors.Is(dataErr, errs.DataUnsuitable) {
		add(name, Fail, errs.Lookup(errs.DataUnsuitable).Hint, "", errors.New(errs.Of(dataErr).Message))
		where = ""
	}
	tmp, err := os.MkdirTemp(where, "dsec-doctor-")
	if err != nil {
		add("temporary directory", Fail, "make room in "+orDefault(where, os.TempDir()), "", err)
		return out
	}
	defer os.RemoveAll(tmp)
	mode, err := loading(tmp)
	add("images on demand", Fail, "use a kernel ≥ 6.14, or ≥ 6.9 with FUSE", mode, err)
	img, store, err := tryImage(ctx, tmp)
	add("EROFS from a file", Fail, "use a kernel ≥ 6.12 with CONFIG_EROFS_FS_BACKED_BY_FILE", "mounted without a loop device", err)
	if err == nil {
		defer store.Close()
		detail, freezes, classes, classErr, err := tryContainer(ctx, tmp, guest, store, img)
		add("containers", Fail, "use a kernel ≥ 6.15 with user namespaces, overlayfs and idmapped mounts; see the detail", detail, err)
		if err == nil {
			add("snapshots", Warn, "mount the cgroup v1 freezer at /sys/fs/cgroup/freezer, or use cgroup v2; all else works without", "sandboxes can be frozen", freezes)
			add("cpu classes", Warn, "use a kernel ≥ 5.15 with CONFIG_FAIR_GROUP_SCHED and CONFIG_SCHED_CORE, or turn SMT off; else be sandboxes slow those of class ls", classes, classErr)
		}
	}
	if where != "" {
		needed, err := scratch.Needed(where)
		detail := "sandboxes write to the data directory"
		if needed {
			detail = "ext4 without a journal: sandboxes write to an image file of their own"
			err = errors.Join(err, present("mkfs.ext4"))
		}
		add(name, Fail, "install e2fsprogs", detail, err)
	}

	out = append(out, checkSettings(SettingsDir, int64(sandboxes))...)
	out = append(out, checkCorePattern(SettingsDir))
	var files syscall.Rlimit
	err = syscall.Getrlimit(syscall.RLIMIT_NOFILE, &files)
	if want := FilesFor(int64(sandboxes)); err == nil && files.Max < want && !mayLift(want) {
		err = fmt.Errorf("%d; %d sandboxes need about %d", files.Max, sandboxes, want)
	}
	add("open files", Warn, fmt.Sprintf("ulimit -Hn %d, or LimitNOFILE= of the service", FilesFor(int64(sandboxes))), strconv.FormatUint(files.Max, 10), err)

	var s unix.Statfs_t
	err = unix.Statfs(existing(dataDir), &s)
	free := int64(s.Bavail) * s.Bsize
	if err == nil && free < 4<<30 {
		err = fmt.Errorf("%d MiB free", free>>20)
	}
	add("disk", Warn, "free some, or choose another --data", fmt.Sprintf("%d MiB free", free>>20), err)
	add("mmdebstrap", Warn, "apt-get install mmdebstrap (only for building Debian images)", "present", present("mmdebstrap"))
	return out
}

// Backend is a kind of isolation and whether it works here.
type Backend struct {
	Name   v1.Backend `json:"name"`
	Usable bool       `json:"usable"`
	Detail string     `json:"detail"`
}

// Backends tells of every backend that there is or will be, given what Checks found.
func Backends(checks []Check) []Backend {
	container := Backend{v1.BackendContainer, true, "Linux namespaces and control groups"}
	for _, c := range checks {
		if c.Status == Fail {
			container.Usable, container.Detail = false, c.Name+": "+c.Detail
			break
		}
	}
	out := []Backend{container, {v1.BackendHollow, true, "keeps state and runs nothing: for tests of the control plane"}}
	for _, later := range []v1.Backend{v1.BackendMicroVM, v1.BackendFullVM, v1.BackendFnCall} {
		out = append(out, Backend{later, false, "not in this version"})
	}
	return out
}

func orDefault(s, other string) string {
	if s == "" {
		return other
	}
	return s
}

func existing(dir string) string {
	for {
		if _, err := os.Stat(dir); err == nil || dir == "/" || dir == "." {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

func present(tool string) error {
	_, err := exec.LookPath(tool)
	return err
}

func readNumber(path string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
}

// loading says how data of images can be loaded when it is read, and why not otherwise.
func loading(dir string) (string, error) {
	r := lazy.Probe(dir)
	switch r.Mode {
	case lazy.Fanotify:
		return "fanotify: readers of the file itself wait", nil
	case lazy.FUSE:
		return fmt.Sprintf("FUSE; not fanotify: %v", r.Fanotify), nil
	}
	return "", fmt.Errorf("neither way works: fanotify: %w; FUSE: %w", r.Fanotify, r.FUSE)
}

// tryImage imports and mounts an empty image.
func tryImage(ctx context.Context, tmp string) (image.Image, *imagestore.Store, error) {
	root := filepath.Join(tmp, "root")
	if err := os.Mkdir(root, 0o755); err != nil {
		return image.Image{}, nil, err
	}
	objects, err := object.OpenDir(ctx, filepath.Join(tmp, "store"))
	if err != nil {
		return image.Image{}, nil, err
	}
	store, err := imagestore.Open(ctx, filepath.Join(tmp, "images"), imagestore.Options{Objects: objects})
	if err != nil {
		return image.Image{}, nil, err
	}
	img, err := store.ImportPath(ctx, root, imagestore.ImportOptions{})
	if err == nil {
		var fd int
		if fd, err = mount(ctx, store, img); err == nil {
			err = unix.Close(fd)
		}
	}
	if err != nil {
		store.Close()
		return image.Image{}, nil, err
	}
	return img, store, nil
}

// mount mounts an image of one layer without data.
func mount(ctx context.Context, store *imagestore.Store, img image.Image) (int, error) {
	files, release, err := store.Use(ctx, img.Layers[0])
	if err != nil {
		return -1, err
	}
	defer release()
	return image.Mount(ctx, files)
}

// mountedLayer gives out one mount.
type mountedLayer struct{ fd int }

// Acquire implements container.Layers.
func (m mountedLayer) Acquire(context.Context, *v1.Image) ([]int, func(), error) {
	return []int{m.fd}, func() {}, nil
}

// tryContainer runs one real sandbox and removes it; freezes is nil if it could be frozen, classErr if best
// effort does not disturb others.
func tryContainer(ctx context.Context, tmp string, guest []byte, store *imagestore.Store, img image.Image) (detail string, freezes error, classes string, classErr, err error) {
	fd, err := mount(ctx, store, img)
	if err != nil {
		return "", nil, "", nil, err
	}
	defer unix.Close(fd)
	b, err := container.New(container.Config{
		Dir: filepath.Join(tmp, "container"), Writable: tmp, Guest: guest, CgroupRoot: "/sys/fs/cgroup",
		CgroupName: fmt.Sprintf("dsec-%08x", os.Getpid()), Layers: mountedLayer{fd}, FirstID: 1 << 20,
	})
	if err != nil {
		return "", nil, "", nil, err
	}
	defer func() { err = errors.Join(err, b.Withdraw(), b.Close()) }()
	took, err := container.Try(ctx, b)
	classes, classErr = b.CPUClasses()
	return fmt.Sprintf("one started in %v, cgroup v%d", took.Round(100_000), b.CgroupVersion()), b.CanFreeze(), classes, classErr, err
}

// FilesFor is how many open files a server with so many sandboxes may have: two for each, and as many
// again for connections and what is being created or packed.
func FilesFor(sandboxes int64) uint64 { return 3*uint64(sandboxes) + 1024 }

// mayLift tells whether 'dsec up' can raise the hard limit of open files so far.
func mayLift(files uint64) bool {
	most, err := readNumber(filepath.Join(SettingsDir, "fs/nr_open"))
	if err != nil || uint64(most) < files {
		return false
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	return unix.Capget(&header, &caps[0]) == nil && caps[0].Effective&(1<<unix.CAP_SYS_RESOURCE) != 0
}
