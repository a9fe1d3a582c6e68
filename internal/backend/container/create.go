package container

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/backend/container/cgroup"
	"dsec/internal/backend/container/mount"
	"dsec/internal/backend/container/spawn"
	"dsec/internal/image"
	"dsec/internal/image/lazy"
	"dsec/internal/step"
)

// namespaces of every container.
const namespaces = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET |
	unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWCGROUP

// Descriptors that the guest is started with; internal/guest knows the same numbers.
const (
	guestChannel  = 3
	guestListener = 4
)

const guestSocket = "guest.sock"

// channelBuffer is what a guest's channel may hold in the kernel, used only while data is on its way.
const channelBuffer = 1 << 20

// monitorSlack is the timer slack of the guest's runtime monitor: see internal/guest/proc/slack.go.
const monitorSlack = 2 * time.Millisecond

// limits of a sandbox's processes for what the kernel counts by user: the usual ones. They hold for each
// user in it, and the node's own for all of them together (see stage).
var limits = []struct {
	resource int
	most     uint64
}{{unix.RLIMIT_MSGQUEUE, 819200}, {unix.RLIMIT_SIGPENDING, 4096}, {unix.RLIMIT_MEMLOCK, 8 << 20}}

// creation carries what the steps of one create hand on to each other.
type creation struct {
	b        *Backend
	spec     backend.Spec
	firstID  uint32
	layers   []int
	release  func()
	dir      int // the sandbox's directory
	channel  *os.File
	child    *spawn.Child
	userns   int
	low      []int  // descriptor numbers lent for the child
	calm     func() // ends its hurry
	instance *instance
}

// Create implements backend.Backend.
func (b *Backend) Create(ctx context.Context, spec backend.Spec, report backend.StepReport) (backend.Instance, error) {
	if b.guest < 0 {
		return nil, guestless("container.create")
	}
	b.mu.Lock()
	if i, ok := b.instances[spec.ID]; ok && i.handle.Generation == spec.Generation {
		b.mu.Unlock()
		return i, nil
	}
	b.mu.Unlock()

	c := &creation{b: b, spec: spec, dir: -1, userns: -1}
	defer c.closeTemporary()
	err := step.Run(ctx, []step.Step{
		{Name: "layers", Do: c.acquireLayers},
		{Name: "cgroup", Do: c.makeGroup, Undo: c.removeGroup},
		{Name: "directory", Do: c.makeDirectory, Undo: c.removeDirectory},
		{Name: "clone", Do: c.clone, Undo: c.kill},
		{Name: "root", Do: c.sendRoot},
		{Name: "guest", Do: c.awaitGuest},
	}, step.Report(report))
	if err != nil {
		return nil, c.explain(err)
	}
	b.mu.Lock()
	b.instances[spec.ID] = c.instance
	b.mu.Unlock()
	return c.instance, nil
}

// explain maps what the kernel says to the error table.
func (c *creation) explain(err error) error {
	switch {
	case errors.Is(err, errs.ImageUnsupported):
	case errors.Is(err, errClone) && errors.Is(err, unix.ENOSPC):
		err = short("namespaces", "raise user.max_*_namespaces of the machine (sysctl), or remove sandboxes", err)
	case errors.Is(err, errClone) && errors.Is(err, unix.EAGAIN):
		err = short("process ids", "raise kernel.pid_max and kernel.threads-max of the machine (sysctl), or remove sandboxes", err)
	case errors.Is(err, unix.EMFILE):
		err = short("open files", "raise the server's limit ('ulimit -Hn', or LimitNOFILE= of its service) and restart it, or remove sandboxes", err)
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		err = errs.Wrap(errs.DiskFull, "container.create", "no space for the sandbox", err)
	case errors.Is(err, unix.EROFS):
		err = errs.New(errs.BackendUnusable, "container.create", "the file system of sandboxes' own layers failed and is read-only; most often the disk of the data directory was full").
			Because(err).Advise("free disk space in the data directory, then restart the server with 'dsec down --keep' and 'dsec up', which makes it anew; sandboxes that run now cannot write any more")
	case errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.EAGAIN), errors.Is(err, errNoRange):
		err = errs.Wrap(errs.NodeFull, "container.create", "the node ran out of a kernel resource", err)
	default:
		err = errs.Wrap(errs.InternalError, "container.create", "could not start the sandbox", err)
	}
	return err
}

// errClone is of a clone that the kernel refused.
var errClone = errors.New("clone into namespaces")

// short is the error of a node that has no more of something, with what to do.
func short(of, advice string, cause error) error {
	return errs.New(errs.NodeFull, "container.create", "the node has no "+of+" left").With("resource", of).Because(cause).Advise(advice)
}

func (c *creation) closeTemporary() {
	if c.calm != nil {
		c.calm()
	}
	if c.low != nil { // the child has executed the guest, or is dead
		c.b.low.put(c.low)
	}
	if c.release != nil {
		c.release()
	}
	for _, fd := range []int{c.dir, c.userns} {
		if fd >= 0 {
			unix.Close(fd)
		}
	}
	if c.instance == nil && c.channel != nil {
		c.channel.Close()
	}
}

func (c *creation) acquireLayers(ctx context.Context) (err error) {
	if c.spec.Image == nil {
		return errs.New(errs.ImageNotFound, "container.layers", "no image was given")
	}
	c.layers, c.release, err = c.b.cfg.Layers.Acquire(ctx, c.spec.Image)
	return err
}

func (c *creation) makeGroup(context.Context) error {
	s := c.spec.Sandbox
	defer func() { c.calm = c.b.hurry(c.spec.ID) }()
	return c.b.cgroups.Create(c.spec.ID, cgroup.Limits{MemoryBytes: s.MemoryBytes, PIDs: s.PIDs, Idle: s.QoS == v1.QoSBest})
}

func (c *creation) removeGroup(ctx context.Context) error { return c.b.removeGroup(ctx, c.spec.ID) }

// makeDirectory makes the writable layer, with the files of /etc that name the sandbox.
func (c *creation) makeDirectory(context.Context) (err error) {
	if c.firstID, err = c.b.ids.take(c.spec.ID); err != nil {
		return err
	}
	root := int(c.b.dir.Fd())
	if err := unix.Mkdirat(root, c.spec.ID, 0o700); err != nil && err != unix.EEXIST {
		return fmt.Errorf("make directory: %w", err)
	}
	if c.dir, err = unix.Openat(root, c.spec.ID, unix.O_DIRECTORY|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("open directory: %w", err)
	}
	id := int(c.firstID)
	for _, d := range []struct {
		name string
		mode uint32
	}{{"upper", 0o755}, {"work", 0o700}} {
		if err := unix.Mkdirat(c.dir, d.name, d.mode); err != nil && err != unix.EEXIST {
			return fmt.Errorf("make %s: %w", d.name, err)
		}
		if err := unix.Fchownat(c.dir, d.name, id, id, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return fmt.Errorf("own %s: %w", d.name, err)
		}
	}
	if err := c.checkMountPoints(); err != nil {
		return err
	}
	return c.writeEtc(id)
}

func (c *creation) removeDirectory(context.Context) error {
	err := c.b.removeDirectory(c.spec.ID)
	if c.firstID != 0 {
		c.b.ids.put(c.firstID)
	}
	return err
}

// clone starts the guest in its namespaces, joined to its group and mapped to its ids,
// waiting for its root.
func (c *creation) clone(ctx context.Context) error {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("socket pair: %w", err)
	}
	c.channel = os.NewFile(uintptr(pair[0]), "guest channel")
	defer unix.Close(pair[1])
	if err := unix.SetNonblock(pair[1], false); err != nil { // the guest boots with plain reads
		return err
	}
	for _, fd := range pair { // the default holds half of a frame's usual window
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, channelBuffer); err != nil {
			return fmt.Errorf("socket pair: %w", err)
		}
	}
	listener, err := listen(c.dir)
	if err != nil {
		return fmt.Errorf("guest socket: %w", err)
	}
	defer unix.Close(listener)
	log := c.b.log.fd()
	group, err := c.b.cgroups.Open(c.spec.ID)
	if err != nil {
		return err
	}
	defer group.Close()

	if c.low, err = c.b.low.take(ctx); err != nil {
		return err
	}
	files := append([]int{pair[1], listener}, group.JoinFDs...)
	for i, fd := range files {
		if err := unix.Dup3(fd, c.low[i], unix.O_CLOEXEC); err != nil {
			return fmt.Errorf("lend descriptor: %w", err)
		}
	}
	channel, lowListener, join := c.low[0], c.low[1], c.low[2:len(files)]
	p := &spawn.Program{}
	p.OwnFiles(c.b.low.below)
	p.CloseExcept(append([]int{c.b.null, log, channel, lowListener, c.b.guest}, join...)...)
	p.AwaitByte(channel)
	for _, fd := range join {
		p.Write("join cgroup", fd, []byte("0"))
	}
	p.BecomeRoot()
	if err := p.LoopbackUp(0); err != nil { // the lowest number, as what is kept is above the guest's own
		return err
	}
	// Nothing inside may change the network: each change holds a lock of the whole machine, and
	// most holes of the kernel's network code want this capability.
	p.DropCapability(unix.CAP_NET_ADMIN)
	p.DropCapability(unix.CAP_SYS_NICE) // over what is not its own, such as PID 1's timers
	for _, l := range limits {
		p.Limit(l.resource, min(l.most, c.b.hardLimits[l.resource]))
	}
	p.Setsid()
	p.TimerSlack(monitorSlack)
	for from, to := range map[int]int{c.b.null: 0, log: 2, channel: guestChannel, lowListener: guestListener} {
		if from <= guestListener {
			return fmt.Errorf("descriptor %d is in the way: the edge was started with closed standard descriptors", from)
		}
		p.Dup(from, to)
	}
	p.Dup(log, 1)
	// As many processors as the sandbox has: with one, as most have, a guest starts faster
	// and is smaller. The runtime need not look for the group's limit itself, whose files it would keep open.
	procs := min(max(1, (c.spec.Sandbox.CPUMillis+999)/1000), 4)
	env := []string{"GOMAXPROCS=" + strconv.FormatInt(procs, 10), "GODEBUG=containermaxprocs=0,asyncpreemptoff=1", "GOTRACEBACK=single"}
	if err := p.Exec(c.b.guest, []string{"dsec-guest", "--container"}, env); err != nil {
		return err
	}
	child, err := c.b.stage.start(c.firstID, namespaces, group.CloneInto, p)
	if err != nil {
		return fmt.Errorf("%w: %w", errClone, err)
	}
	c.child = child
	if c.instance, err = newInstance(c, child); err != nil {
		unix.Close(child.PIDFD)
		return err
	}
	c.instance.count(lazy.Use{})
	if c.spec.Sandbox.QoS == v1.QoSLatency {
		if err := c.b.cores.share(child.PID); err != nil {
			return err
		}
	}
	for _, file := range []string{"uid_map", "gid_map"} {
		line := "0 " + strconv.FormatUint(uint64(c.firstID), 10) + " " + strconv.Itoa(rangeSize) + "\n"
		if err := writeProc(child.PID, file, line); err != nil {
			return fmt.Errorf("map ids: %w", err)
		}
	}
	if c.userns, err = unix.Open("/proc/"+strconv.Itoa(child.PID)+"/ns/user", unix.O_RDONLY|unix.O_CLOEXEC, 0); err != nil {
		return fmt.Errorf("open user namespace: %w", err)
	}
	if _, err := c.channel.Write([]byte{0}); err != nil {
		return fmt.Errorf("release child: %w", err)
	}
	return nil
}

func writeProc(pid int, file, data string) error {
	fd, err := unix.Open("/proc/"+strconv.Itoa(pid)+"/"+file, unix.O_WRONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	_, err = unix.Write(fd, []byte(data))
	return err
}

// listen binds the guest's socket in the sandbox's directory on the host, which lies
// outside of every sandbox's root. A relative address through /proc keeps any data
// directory below the 108 bytes of a socket's name.
func listen(dir int) (int, error) {
	if err := unix.Unlinkat(dir, guestSocket, 0); err != nil && err != unix.ENOENT {
		return -1, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return -1, err
	}
	err = unix.Bind(fd, &unix.SockaddrUnix{Name: "/proc/self/fd/" + strconv.Itoa(dir) + "/" + guestSocket})
	if err == nil {
		err = unix.Listen(fd, 16)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// kill ends what clone started and waits for its end.
func (c *creation) kill(ctx context.Context) error {
	if c.child == nil {
		return nil
	}
	err := c.instance.kill(ctx)
	c.child.Release()
	c.instance.close()
	c.instance = nil
	return err
}

// sendRoot composes the root and hands it to the guest, which meanwhile starts on
// another core.
func (c *creation) sendRoot(context.Context) error {
	var lowers []int
	defer func() {
		for _, fd := range lowers {
			unix.Close(fd)
		}
	}()
	for _, l := range c.layers {
		fd, err := mount.Idmapped(l, c.userns)
		if err != nil {
			return err
		}
		lowers = append(lowers, fd)
	}
	upper, err := unix.Openat(c.dir, "upper", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(upper)
	work, err := unix.Openat(c.dir, "work", unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(work)
	root, err := mount.Overlay(lowers, upper, work)
	if err != nil {
		return err
	}
	defer unix.Close(root)
	dev, err := mount.Idmapped(c.b.dev, c.userns)
	if err != nil {
		return err
	}
	defer unix.Close(dev)
	sys, err := image.Clone(c.b.stage.sys)
	if err != nil {
		return err
	}
	defer unix.Close(sys)
	events, err := c.b.cgroups.OpenMemoryEvents(c.spec.ID)
	if err != nil {
		return err
	}
	defer unix.Close(events)

	s := c.spec.Sandbox
	cpus := c.b.visible.cpus(s.CPUMillis)
	views, err := c.b.visible.views(cpus, s.MemoryBytes)
	if err != nil {
		return err
	}
	defer closeViews(views)
	fds := []int{root, dev, sys, events}
	paths := make([]string, len(views))
	for i, v := range views {
		fds, paths[i] = append(fds, v.fd), v.path
	}
	cfg := &msg.BootConfig{
		Views: paths, Cpus: uint32(cpus),
		Sandbox: c.spec.ID, Generation: c.spec.Generation, Hostname: hostname(&c.spec), User: s.User, Cwd: s.WorkDir, Env: s.Env,
		Seccomp: c.b.seccomp, ShmBytes: uint64(s.MemoryBytes / 2), MemoryBytes: uint64(s.MemoryBytes),
	}
	if c.spec.Image != nil {
		applyImage(cfg, c.spec)
	}
	if len(c.spec.SecretEnv) > 0 {
		env := make(map[string]string, len(cfg.Env)+len(c.spec.SecretEnv))
		maps.Copy(env, cfg.Env)
		maps.Copy(env, c.spec.SecretEnv)
		cfg.Env = env
	}
	body := cfg.AppendWire(make([]byte, 4))
	binary.BigEndian.PutUint32(body, uint32(len(body)-4))
	raw, err := c.channel.SyscallConn()
	if err != nil {
		return err
	}
	// The head goes with the descriptors; the rest may need several writes.
	var werr error
	if err := raw.Write(func(fd uintptr) bool {
		_, werr = unix.SendmsgN(int(fd), body[:4], unix.UnixRights(fds...), nil, 0)
		return werr != unix.EAGAIN
	}); err != nil {
		return err
	}
	if werr != nil {
		return fmt.Errorf("send root: %w", werr)
	}
	_, err = c.channel.Write(body[4:])
	return err
}

// applyImage puts the image's defaults below those of the spec.
func applyImage(cfg *msg.BootConfig, spec backend.Spec) {
	ic := spec.Image.Config
	env := make(map[string]string, len(ic.Env)+len(cfg.Env))
	for _, kv := range ic.Env {
		if k, v, ok := strings.Cut(kv, "="); ok {
			env[k] = v
		}
	}
	for k, v := range cfg.Env {
		env[k] = v
	}
	cfg.Env = env
	if cfg.User == "" {
		cfg.User = ic.User
	}
	if cfg.Cwd == "" {
		cfg.Cwd = ic.WorkDir
	}
}

// bootTime is how long a guest may take to answer; far more than it needs on a busy
// node, so that only a broken one meets it.
const bootTime = 30 * time.Second

// awaitGuest waits for the guest's word that it stands in its root.
func (c *creation) awaitGuest(ctx context.Context) error {
	deadline := time.Now().Add(bootTime)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := c.channel.SetReadDeadline(deadline); err != nil {
		return err
	}
	// Its death does not close the channel: our lent descriptors hold the other end too.
	answered, channel, died := make(chan struct{}), c.channel, c.instance.done
	defer close(answered)
	go func() {
		select {
		case <-answered:
		case <-ctx.Done():
			channel.SetReadDeadline(time.Unix(1, 0))
		case <-died:
			channel.SetReadDeadline(time.Unix(1, 0))
		}
	}()
	answer := make([]byte, 4096)
	n, err := c.channel.Read(answer[:1])
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil && !c.instance.ended() && errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("the guest did not answer within %v%s", bootTime, c.b.log.tail())
	case err != nil: // it died: of a failed call before its exec, or in its start
		return errors.Join(fmt.Errorf("the guest died%s", c.b.log.tail()), c.child.Err())
	case n == 1 && answer[0] != 0:
		n, _ = c.channel.Read(answer)
		return fmt.Errorf("the guest could not set up: %s", answer[:n])
	}
	c.child.Release()
	if err := c.channel.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	conn, err := net.FileConn(c.channel) // duplicates the descriptor
	if err != nil {
		return err
	}
	c.channel.Close()
	c.instance.first = conn
	return nil
}

// handle is what Adopt needs to find a container again.
type handle struct {
	PID        int    `json:"pid"`
	StartTicks uint64 `json:"start_ticks"` // field 22 of /proc/PID/stat: a pid alone may be another's
	FirstID    uint32 `json:"first_id"`
	Generation uint64 `json:"generation"`
}

func (h handle) json() json.RawMessage {
	b, err := json.Marshal(h)
	if err != nil {
		panic(err) // numbers always marshal
	}
	return b
}
