package up

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/backend/container"
	"dsec/internal/backend/container/cgroup"
	"dsec/internal/backend/container/scratch"
	"dsec/internal/backend/hollow"
	"dsec/internal/control"
	"dsec/internal/control/store"
	"dsec/internal/doctor"
	"dsec/internal/edge"
	"dsec/internal/edge/local"
	"dsec/internal/edge/pressure"
	"dsec/internal/image/account"
	"dsec/internal/image/lazy"
	"dsec/internal/image/object"
	imagestore "dsec/internal/image/store"
	"dsec/internal/keeper"
	"dsec/internal/slack"
	"dsec/internal/swap"
)

// Options of a node.
type Options struct {
	Data    string // directory; see the package comment
	Listen  string // of the API: "HOST:PORT" or "unix:PATH"
	TLS     *tls.Config
	Guest   []byte // the guest's binary
	Version string
	Log     *slog.Logger

	Slots            int64   // sandboxes at once
	CPUOvercommit    float64 // sum of CPU limits over what the machine has
	MemoryOvercommit float64
	Swap             swap.Option // where paused sandboxes' memory goes
	ReserveMemory    int64       // bytes that must be free for another sandbox to be admitted
	ReserveDisk      int64

	Objects       Objects       // where images are kept
	Loading       lazy.Mode     // how image data is loaded on demand
	ReadAhead     int64         // bytes of it fetched ahead of a reader, at most; 0: none
	BuildCache    int64         // bytes of what builds keep for later ones; 0: no limit
	BuildCacheAge time.Duration // how long that stays without use; 0: for ever
	Collapse      int64         // small layers are merged if they are smaller; 0: never
	ImageCache    int64         // bytes of image data that this node keeps of them; 0: no limit
}

// Defaults of Options: limits are not reservations, agents wait most of the time, and
// admission looks at what really is free.
const (
	DefaultListen           = "127.0.0.1:7070"
	DefaultData             = "/var/lib/dsec"
	DefaultSlots            = 4000
	DefaultCPUOvercommit    = 2000
	DefaultMemoryOvercommit = 100
	DefaultReadAhead        = 4 << 20
	DefaultReserveMemory    = 512 << 20
	DefaultReserveDisk      = 1 << 30
	DefaultBuildCache       = 20 << 30
	DefaultBuildCacheAge    = 14 * 24 * time.Hour
)

// Info says where a running node answers.
type Info struct {
	PID     int       `json:"pid"`
	URL     string    `json:"url"`    // for clients on this machine
	Listen  string    `json:"listen"` // Options.Listen
	Node    string    `json:"node"`
	Version string    `json:"version"`
	Started time.Time `json:"started_at"`
	// Backends that work here.
	Backends []v1.Backend `json:"backends"`
	Lazy     lazy.Mode    `json:"lazy"`     // how readers wait for data of images
	LazyWhy  string       `json:"lazy_why"` // why so
}

// node is what Run starts, in this order, and stops in the opposite one.
type node struct {
	opts       Options
	lock       *os.File
	fresh      *fresh // nil: a node has used the data directory before
	control    *control.Control
	objects    object.Store
	metrics    *prometheus.Registry
	keepers    *keeper.Client
	readers    *account.Book
	images     *imagestore.Store
	layers     *local.Images
	swap       *swap.Space
	containers *container.Backend
	hollow     *hollow.Backend
	edge       *edge.Edge
}

// stopTime bounds the end of a node, of which what runs through the edge may take a half to
// end by itself.
const stopTime = 20 * time.Second

// Run runs a node until ctx ends or a part of it fails. ready is called once it answers.
// Sandboxes outlive Run; the next one adopts them.
func Run(ctx context.Context, opts Options, ready func(Info, string)) (err error) {
	n := &node{opts: opts, metrics: prometheus.NewRegistry()}
	defer func() {
		cctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTime)
		defer cancel()
		err = errors.Join(err, n.stop(cctx))
	}()
	token, err := n.start(ctx)
	if err != nil && n.fresh != nil && n.layers == nil { // nothing is mounted below it yet
		err = errors.Join(err, n.endKeepers(ctx), n.fresh.restore())
	}
	if err != nil {
		return err
	}
	info := Info{PID: os.Getpid(), URL: url(n.control.Addr(), opts.TLS), Listen: opts.Listen, Node: n.edge.ID(), Version: opts.Version, Started: time.Now().UTC(), Backends: n.edge.Node().Backends}
	info.Lazy, info.LazyWhy = n.images.Cache().Mode(), "the first that works here"
	if opts.Loading != "" && opts.Loading != lazy.Auto {
		info.LazyWhy = "--image-loading asks for it"
	}
	if err := n.publish(info); err != nil {
		return err
	}
	ready(info, token)
	select {
	case <-ctx.Done():
		return nil
	case err := <-n.control.Failed():
		return fmt.Errorf("the control plane failed: %w", err)
	case <-n.edge.Done():
		return errors.New("the edge stopped serving")
	}
}

// url is where clients on this machine reach the API. One that listens on every address
// is reached by a name of its certificate, or on loopback.
func url(address net.Addr, secure *tls.Config) string {
	if address.Network() == "unix" {
		return "unix://" + address.String()
	}
	scheme, at := "http://", address.String()
	if secure != nil {
		scheme = "https://"
	}
	if tcp, ok := address.(*net.TCPAddr); ok && tcp.IP.IsUnspecified() {
		at = net.JoinHostPort(certified(secure), strconv.Itoa(tcp.Port))
	}
	return scheme + at
}

// certified is a host that a certificate is good for; without one, loopback.
func certified(secure *tls.Config) string {
	if secure != nil && len(secure.Certificates) > 0 {
		leaf, err := x509.ParseCertificate(secure.Certificates[0].Certificate[0])
		if err == nil {
			for _, name := range leaf.DNSNames {
				if !strings.HasPrefix(name, "*") {
					return name
				}
			}
			if len(leaf.IPAddresses) > 0 {
				return leaf.IPAddresses[0].String()
			}
		}
	}
	return "127.0.0.1"
}

// NeedRoot refuses whoever cannot run a node.
func NeedRoot() error {
	if os.Geteuid() == 0 {
		return nil
	}
	return errs.New(errs.PermissionDenied, "up", "a node needs root: it makes namespaces, mounts and control groups").
		Advise("run this as root, with sudo say; the other verbs need only a token")
}

func (n *node) path(name string) string { return filepath.Join(n.opts.Data, name) }

func (n *node) start(ctx context.Context) (token string, err error) {
	if err := NeedRoot(); err != nil {
		return "", err
	}
	if n.opts.Data, err = filepath.Abs(n.opts.Data); err != nil {
		return "", err
	}
	_, err = os.Lstat(n.opts.Data)
	existed := err == nil
	if err := os.MkdirAll(n.opts.Data, 0o700); err != nil {
		return "", err
	}
	if n.lock, err = takeOver(ctx, n.opts.Data); err != nil {
		return "", err
	}
	if n.fresh, err = untouched(n.opts.Data, existed); err != nil {
		return "", err
	}
	if err := raiseLimits(n.opts.Slots, n.opts.Log); err != nil {
		return "", err
	}
	if err := doctor.DataDir(ctx, n.opts.Data); errors.Is(err, errs.DataUnsuitable) {
		return "", err
	} else if err != nil { // a full disk, say, must not keep us from what runs already
		n.opts.Log.Warn("creates may fail: a try of the data directory did; see 'dsec doctor'", "err", err)
	}
	raiseSettings(doctor.SettingsDir, n.opts.Slots, n.opts.Log)
	slack.RelaxMonitor()
	o := &n.opts.Objects
	if n.objects, err = o.open(ctx, n.opts.Data); err != nil {
		return "", err
	}
	if token, err = loadToken(n.path("root.token")); errors.Is(err, errs.DataCorrupt) {
		return "", corrupt(err, "clients with the root token are refused until they have a new one: 'rm %[1]s/root.token', then 'dsec up --data %[1]s' makes one and writes it to the context file; sandboxes, images and other tokens are not touched", n.opts.Data)
	} else if err != nil {
		return "", err
	}
	n.control, err = control.Start(ctx, control.Config{
		Listen: n.opts.Listen, Edges: 1, RootToken: token, DataDir: n.path("etcd"), TLS: n.opts.TLS,
		Objects: control.Objects{Store: n.objects, Name: o.name(n.opts.Data), Own: o.Store == "", Behind: o.behind(n.opts.Data)},
		Metrics: n.metrics, Log: n.opts.Log, Version: n.opts.Version, CollapseBelow: n.opts.Collapse,
		BuildCacheAge: n.opts.BuildCacheAge, BuildCacheBytes: n.opts.BuildCache,
	})
	if errors.Is(err, errs.DataCorrupt) {
		return "", corrupt(err, "it holds tokens, image names and claims of idempotency keys, which are lost; sandboxes and image contents are not: 'mv %[1]s/etcd %[1]s/etcd.damaged', then 'dsec up'", n.opts.Data)
	}
	if err != nil {
		return "", fmt.Errorf("start the control plane: %w", err)
	}
	if err := n.startEdge(ctx, n.control.Store()); err != nil {
		return "", err
	}
	wait, cancel := context.WithTimeout(ctx, stopTime)
	defer cancel()
	return token, n.control.WaitEdge(wait, 1)
}

// startEdge starts what runs sandboxes, as an edge of the control plane that has s.
func (n *node) startEdge(ctx context.Context, s store.Store) error {
	if err := n.openImages(ctx); err != nil {
		return err
	}
	n.layers = local.New(n.images)
	backends, err := n.backends(ctx)
	if err != nil {
		return err
	}
	n.edge, err = edge.Start(ctx, n.edgeConfig(backends, s))
	if errors.Is(err, errs.DataCorrupt) {
		what := "it tells which sandboxes run"
		if edge.IdentityDamaged(err) {
			what = "it says which node this is, by whose name the sandboxes that run are known"
		}
		return corrupt(err, what+", so none of them can be taken over: 'dsec down --data %s' removes them all, and the file; then 'dsec up' starts anew, with images and tokens", n.opts.Data)
	}
	if err != nil {
		return fmt.Errorf("start the edge: %w", err)
	}
	return n.metrics.Register(newUsageMetrics(n.edge))
}

// corrupt says what becomes of a data directory with a damaged file.
func corrupt(cause error, format, data string) error {
	return errs.New(errs.DataCorrupt, "up", errs.Of(cause).Message+"; "+fmt.Sprintf(format, data)).Because(errs.Of(cause).Cause)
}

// backends prepares those this build has. One that cannot work here is left out, with
// the reason in the log and in 'dsec doctor'.
func (n *node) backends(ctx context.Context) (out []backend.Backend, err error) {
	if n.hollow, err = hollow.New(n.path("hollow")); err != nil {
		return nil, err
	}
	if n.swap, err = swap.New(swap.Config{Dir: n.path(swapDir), Option: n.opts.Swap}); err != nil {
		return nil, err
	}
	if n.containers, err = Containers(ctx, n.opts.Data, n.opts.Guest, n.layers, n.readers, n.swap); err != nil {
		n.opts.Log.Error("containers do not work on this machine; see 'dsec doctor'", "err", err)
		return []backend.Backend{n.hollow}, nil
	}
	return []backend.Backend{n.containers, n.hollow}, nil
}

// Containers opens the container backend of a data directory; without a guest, to remove
// what is there.
func Containers(ctx context.Context, data string, guest []byte, layers container.Layers, readers container.Readers, swap container.Swap) (*container.Backend, error) {
	writable := filepath.Join(data, "writable")
	needed, err := scratch.Needed(data)
	if err != nil {
		return nil, err
	}
	if needed {
		free, _, err := freeSpace(data)
		if err != nil {
			return nil, err
		}
		if writable, err = scratch.Mount(ctx, data, max(free*9/10, 256<<20)); err != nil {
			return nil, err
		}
	}
	return container.New(container.Config{
		Dir: filepath.Join(data, "container"), Writable: writable, Guest: guest, CgroupRoot: cgroupRoot,
		CgroupName: cgroup.NameOf(data), Layers: layers, FirstID: firstID, Readers: readers, Swap: swap,
	})
}

// swapDir has the node's own swap.
const swapDir = "swap"

const cgroupRoot = "/sys/fs/cgroup"

// firstID is the first host id that sandboxes have, above those of people and services.
const firstID = 1 << 20

func (n *node) edgeConfig(backends []backend.Backend, s store.Store) edge.Config {
	listen := "unix:" + n.path("edge.sock")
	if len(listen) > 100 { // a socket's name has room for 107 bytes
		listen = "tcp:127.0.0.1:0"
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	_, memory, _ := memoryInfo()
	return edge.Config{
		Dir: n.path("edge"), Listen: listen, Hostname: host, Version: n.opts.Version, Backends: backends, Images: n.layers,
		Cluster: cluster{s}, Swap: n.swap,
		Capacity: v1.Resources{
			Slots: n.opts.Slots, CPUMillis: int64(float64(runtime.NumCPU()) * 1000 * n.opts.CPUOvercommit),
			MemoryBytes: int64(float64(memory) * n.opts.MemoryOvercommit),
		},
		Largest: v1.Resources{CPUMillis: int64(runtime.NumCPU()) * 1000, MemoryBytes: memory}, // more would never be there
		Reserve: edge.Reserve{MemoryBytes: n.opts.ReserveMemory, DiskBytes: n.opts.ReserveDisk},
		Costs:   edge.Costs{Memory: memory},
		Log:     n.opts.Log, Now: time.Now, Random: random,
		Memory: func() (pressure.Reading, error) {
			free, _, err := memoryInfo()
			return pressure.Reading{FreeBytes: free, Stall: pressure.Stall("/proc/pressure/memory")}, err
		},
		BusyTime: func() time.Duration {
			busy, err := busyTime()
			if err != nil {
				n.opts.Log.Error("look at the processors", "err", err)
			}
			return busy
		},
		FreeSpace: func() (disk, memory int64) {
			disk, memory, err := freeSpace(n.opts.Data)
			if err != nil {
				n.opts.Log.Error("look at free space", "err", err)
			}
			return disk, memory
		},
		Shortage: func() (resource, text, advice string) { return shortOfPIDs("/proc") },
	}
}

func random() uint64 {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails (Go ≥ 1.24)
	return binary.LittleEndian.Uint64(b[:])
}

// cluster is what an edge sees of the control plane's store.
type cluster struct{ store.Store }

func (c cluster) Register(ctx context.Context, node v1.Node) (edge.Registration, error) {
	return c.Store.Register(ctx, node)
}

func (n *node) stop(ctx context.Context) error {
	var all []error
	if n.control != nil {
		n.control.Drain()
	}
	if n.edge != nil {
		ectx, cancel := context.WithTimeout(ctx, stopTime/2)
		all = append(all, n.edge.Close(ectx))
		cancel()
	}
	if n.control != nil {
		all = append(all, n.control.Close(ctx))
	}
	if n.containers != nil {
		if left, err := n.containers.List(ctx); err == nil && len(left) == 0 { // nothing is paused
			all = append(all, n.swap.Remove(ctx))
		}
		all = append(all, n.containers.Close())
	}
	if n.hollow != nil {
		all = append(all, n.hollow.Close())
	}
	if n.layers != nil {
		n.layers.Close()
	}
	if n.images != nil {
		all = append(all, n.images.Close())
	}
	if n.keepers != nil {
		all = append(all, n.keepers.Close())
	}
	if n.lock != nil {
		all = append(all, remove(n.path("run.json")), n.lock.Close())
	}
	return errors.Join(all...)
}

func remove(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// publish writes run.json, which says that the node is up.
func (n *node) publish(info Info) error {
	b, err := json.MarshalIndent(info, "", "  ")
	if err != nil {
		return err
	}
	b = append(b, '\n')
	tmp := n.path("run.json.new")
	if err := os.WriteFile(tmp, b, 0o600); err != nil {
		// On a full disk there may still be room in the file that a killed node left.
		if os.Remove(tmp); overwrite(n.path("run.json"), b) != nil {
			return err
		}
		return nil
	}
	return os.Rename(tmp, n.path("run.json"))
}

func overwrite(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil {
		err = f.Truncate(int64(len(b)))
	}
	return errors.Join(err, f.Close())
}

// lingerTime bounds how long what a killed node had just forked may hold its lock.
const lingerTime = 5 * time.Second

// takeOver is acquire for a node that may have been killed a moment ago.
func takeOver(ctx context.Context, data string) (*os.File, error) {
	for deadline := time.Now().Add(lingerTime); ; {
		lock, err := acquire(filepath.Join(data, "lock"))
		if !errors.Is(err, errs.NodeRunning) || !died(data) || time.Now().After(deadline) {
			return lock, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// died tells whether the process that published run.json has ended, or is ending.
func died(data string) bool {
	var info Info
	b, err := os.ReadFile(filepath.Join(data, "run.json"))
	if err != nil || json.Unmarshal(b, &info) != nil || info.PID <= 0 {
		return false
	}
	return ended(info.PID)
}

// ended tells whether pid is no process any more, or one that will never run again: killed a
// moment ago it still has its id and its lock, and as a zombie it has them as long as its parent likes.
func ended(pid int) bool {
	if errors.Is(unix.Kill(pid, 0), unix.ESRCH) {
		return true
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH)
	}
	// PID (NAME) STATE PPID PGRP SESSION TTY TPGID FLAGS …, where NAME may hold anything.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(fields) < 7 {
		return false
	}
	const exiting = 0x4 // PF_EXITING
	flags, err := strconv.ParseUint(fields[6], 10, 64)
	return fields[0] == "Z" || fields[0] == "X" || err == nil && flags&exiting != 0
}

// acquire takes the data directory for this process.
func acquire(path string) (*os.File, error) {
	for {
		f, err := flock(path)
		if err != nil {
			return nil, err
		}
		held, herr := f.Stat()
		there, terr := os.Stat(path)
		if herr == nil && terr == nil && os.SameFile(held, there) {
			return f, nil
		}
		f.Close() // a start that failed removed it from under us
		if herr != nil || terr != nil && !errors.Is(terr, fs.ErrNotExist) {
			return nil, errors.Join(herr, terr)
		}
	}
}

func flock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, errs.New(errs.NodeRunning, "up", "a node already runs on "+filepath.Dir(path))
		}
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return f, nil
}

// loadToken returns the root token's secret, made at the first start.
func loadToken(path string) (string, error) {
	b, err := os.ReadFile(path)
	if err == nil {
		if !tokenForm.Match(b) {
			return "", errs.New(errs.DataCorrupt, "up", path+" is damaged: it does not hold a token")
		}
		return strings.TrimSpace(string(b)), nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	var secret [24]byte
	_, _ = rand.Read(secret[:])
	token := "dsec_" + hex.EncodeToString(secret[:])
	// Under its name only when it is whole: a crash must not leave an empty token.
	if err := os.WriteFile(path+".new", []byte(token+"\n"), 0o600); err != nil {
		return "", err
	}
	return token, os.Rename(path+".new", path)
}

// tokenForm is that of a token made by loadToken.
var tokenForm = regexp.MustCompile(`^dsec_[0-9a-f]{48}\n$`)

func freeSpace(dir string) (disk, memory int64, err error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, 0, err
	}
	memory, _, err = memoryInfo()
	return int64(s.Bavail) * s.Bsize, memory, err
}

// memoryInfo reads what is available and what the machine has.
func memoryInfo() (available, total int64, err error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) < 2 {
			continue
		}
		kib, _ := strconv.ParseInt(f[1], 10, 64)
		switch f[0] {
		case "MemTotal:":
			total = kib << 10
		case "MemAvailable:":
			return kib << 10, total, nil // it comes after MemTotal
		}
	}
	return 0, total, errors.New("/proc/meminfo has no MemAvailable")
}
