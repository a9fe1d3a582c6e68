package lazy

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// Filler is where a blob's bytes come from.
type Filler interface {
	// Bounds are the sorted boundaries of the blob's chunks: chunk i is
	// [Bounds()[i], Bounds()[i+1]), the first boundary is 0, the last the blob's
	// size. The slice is kept and not changed.
	Bounds() []int64
	// Hole says that chunk i is all zeros; holes are never fetched.
	Hole(i int) bool
	// Fetch fetches the chunks [i, j) and hands their verified bytes to put, each
	// chunk's in order and without the holes; it returns nil only when all was put.
	// put is not for concurrent use, copies what it is given, and its error ends
	// the fetch. Errors that are not retryable (package errs) go to the readers at
	// once, others are tried again until the deadline. What was put whole chunks of
	// before an error is kept.
	Fetch(ctx context.Context, i, j int, put func(off int64, p []byte) error) error
}

// Grouped is a Filler that knows which bytes belong together: those of one file.
type Grouped interface {
	// Group returns the bytes [first, end) of the group that off is in; end is 0 if that is
	// not known, or not yet. It must be quick, and is for concurrent use.
	Group(off int64) (first, end int64)
}

// Holder keeps descriptors beyond the death of this process (package keeper).
// Files given to Put stay open until Drop.
type Holder interface {
	Put(ctx context.Context, name string, files []*os.File) error
	Take(ctx context.Context, name string) ([]*os.File, error)
	List(ctx context.Context) ([]string, error)
	Drop(ctx context.Context, name string) error
}

// Mode is how readers are stopped until their bytes are there.
type Mode string

// Modes.
const (
	Auto     Mode = "auto"
	Fanotify Mode = "fanotify" // pre-content events on the sparse file itself: Linux 6.14
	FUSE     Mode = "fuse"
)

// Modes are all there are.
func Modes() []Mode { return []Mode{Auto, Fanotify, FUSE} }

// Accountant is told what was done for whom. Readers wait for its answers. It is for
// concurrent use.
type Accountant interface {
	// Owner says whose the thread pid is; "" is nobody that is known. The thread is stopped
	// in a read until the answer. pid is 0 if it is out of sight of this process.
	Owner(pid int) string
	// Count adds what was done with a blob for an owner; "" is nobody, as when a blob is
	// warmed. Over all owners, Reads, Read and Fetched add up to those of the blob's Stats.
	Count(owner, digest string, u Use)
}

// Use is what was done with a blob for somebody.
type Use struct {
	Reads   int64
	Read    int64         // bytes asked for
	Waited  int64         // bytes of them that were not there
	Wait    time.Duration // for those, by all readers together
	Fetched int64         // bytes fetched for who was first to ask, ahead of its reads too
}

// Add adds another use.
func (u *Use) Add(o Use) {
	u.Reads += o.Reads
	u.Read += o.Read
	u.Waited += o.Waited
	u.Wait += o.Wait
	u.Fetched += o.Fetched
}

// Options say how a cache works. Zero values mean the defaults.
type Options struct {
	// Limit is how many bytes of data the cache should hold; 0 is no limit. Above
	// it, what is unused goes. Reads never fail because of it.
	Limit int64
	// Readahead is how far ahead of a sequential reader is fetched, at most (default
	// 4 MiB, negative: not at all).
	Readahead int64
	// Mode is fanotify, fuse, or auto (the default): what works, fanotify first.
	Mode Mode
	// Holder keeps the descriptors on which readers depend. Without one the death of
	// the process lets them through: for tests and tools only.
	Holder Holder
	// Reopen finds the filler of a blob that was in use when an earlier process died
	// and which is read before anyone opens it. Without it such reads wait.
	Reopen func(ctx context.Context, digest string, size int64) (Filler, error)
	// Accountant is told of every read that reaches a blob, and of what is fetched.
	Accountant Accountant

	Deadline   time.Duration // of a read: then it fails (default 30 s)
	RetryPause time.Duration // before the first retry; it doubles up to 2 s (default 50 ms)
	Parallel   int           // fetches at once (default 16)
	Queue      int           // fetches ahead that may wait for their turn; more are left out (default 64)
	MaxFetch   int64         // bytes in one fetch of neighbours (default 4 MiB)
	ColdAfter  time.Duration // chunks of blobs in use are evicted when unread for so long (default 10 min)
	SaveEvery  time.Duration // how often what is filled is made durable (default 5 s)
	LockWait   time.Duration // for the process before this one to end (default 5 s)

	Now    func() time.Time // default time.Now
	Random func() float64   // in [0, 1), spreads retries
	BootID string           // of this boot (default: the kernel's)
	Log    *slog.Logger
}

func (o *Options) fill() error {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
	}
	def(&o.Deadline, 30*time.Second)
	def(&o.RetryPause, 50*time.Millisecond)
	def(&o.ColdAfter, 10*time.Minute)
	def(&o.SaveEvery, 5*time.Second)
	def(&o.LockWait, 5*time.Second)
	if o.Readahead == 0 {
		o.Readahead = 4 << 20
	}
	if o.Mode == "" {
		o.Mode = Auto
	}
	if o.Parallel == 0 {
		o.Parallel = 16
	}
	if o.Queue == 0 {
		o.Queue = 64
	}
	if o.MaxFetch == 0 {
		o.MaxFetch = 4 << 20
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Random == nil {
		o.Random = rand.Float64
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	var err error
	if o.BootID == "" {
		o.BootID, err = bootID()
	}
	return err
}

// Cache is a directory of data blobs that fill when they are read. It is safe for
// concurrent use.
type Cache struct {
	dir   string
	opts  Options
	log   *slog.Logger
	mode  Mode
	lock  *os.File
	epoch time.Time

	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	kick   chan struct{} // wakes the janitor
	gate   *gate

	mu     sync.Mutex
	blobs  map[string]*blob
	done   map[*blob]bool // complete since the janitor looked
	fuse   *fuseServer
	closed bool
	gone   Stats // of blobs that were removed

	trimMu   sync.Mutex
	used     atomic.Int64 // bytes of filled chunks
	inflight atomic.Int64
	evicted  atomic.Int64
}

var digestRE = regexp.MustCompile(`^[0-9a-f]{64}$`)

// Open opens the cache in dir, which is this process's alone from here to Close.
// If an earlier process died, what it served is served on at once, with the
// descriptors that opts.Holder kept. Errors: not_supported (the mode does not work
// here), state_conflict (another process has the cache), disk_full, internal_error.
func Open(ctx context.Context, dir string, opts Options) (*Cache, error) {
	if err := opts.fill(); err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, diskError("find cache", err)
	}
	if err := os.MkdirAll(filepath.Join(dir, "blobs"), 0o700); err != nil {
		return nil, diskError("make cache directory", err)
	}
	c := &Cache{
		dir: dir, opts: opts, log: opts.Log, epoch: opts.Now().Add(-time.Hour), gate: newGate(opts.Parallel),
		blobs: map[string]*blob{}, done: map[*blob]bool{}, kick: make(chan struct{}, 1),
	}
	if c.lock, err = takeLock(ctx, filepath.Join(dir, "lock"), opts.LockWait); err != nil {
		return nil, err
	}
	c.ctx, c.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := c.start(ctx); err != nil {
		c.cancel()
		c.stop()
		return nil, err
	}
	return c, nil
}

func takeLock(ctx context.Context, path string, wait time.Duration) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, diskError("open cache lock", err)
	}
	ctx, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		select {
		case <-time.After(5 * time.Millisecond):
		case <-ctx.Done():
			f.Close()
			return nil, errs.New(errs.StateConflict, phase, "another process has the cache "+filepath.Dir(path))
		}
	}
}

const (
	blobName = "lazy/blob/"
	fuseName = "lazy/fuse"
)

func (c *Cache) start(ctx context.Context) error {
	if err := c.load(); err != nil {
		return err
	}
	if err := c.adopt(ctx); err != nil {
		return err
	}
	mode, err := choose(c.dir, c.opts.Mode)
	if err != nil {
		return err
	}
	c.mode = mode
	if mode == FUSE && c.fuse == nil {
		if c.fuse, err = c.startFUSE(ctx); err != nil {
			return err
		}
	}
	c.tasks.Add(1)
	go func() {
		defer c.tasks.Done()
		c.janitor()
	}()
	return nil
}

// load finds the blobs on disk.
func (c *Cache) load() error {
	list, err := os.ReadDir(filepath.Join(c.dir, "blobs"))
	if err != nil {
		return diskError("list cache", err)
	}
	for _, e := range list {
		if !digestRE.MatchString(e.Name()) {
			continue
		}
		b := newBlob(c, e.Name())
		st, have, err := loadState(b.dir, c.opts.BootID)
		var fi os.FileInfo
		if err == nil {
			fi, err = os.Stat(b.file())
		}
		if err == nil && fi.Size() != st.t.size() {
			err = badState("data of another size")
		}
		if err != nil {
			// Half made, half removed, or damaged: if anyone reads it, that is
			// found when it is opened.
			c.log.Warn("blob state not usable", "blob", b.digest, "error", err)
			if open, oerr := openRaw(b.file()); oerr != nil || !open {
				os.RemoveAll(b.dir)
			}
			continue
		}
		b.setUp(st, st.t, have)
		b.used = fi.ModTime()
		c.blobs[b.digest] = b
	}
	return nil
}

// adopt takes over what an earlier process served.
func (c *Cache) adopt(ctx context.Context) error {
	if c.opts.Holder == nil {
		return nil
	}
	names, err := c.opts.Holder.List(ctx)
	if err != nil {
		return err
	}
	for _, name := range names {
		digest, isBlob := strings.CutPrefix(name, blobName)
		if !isBlob && name != fuseName {
			continue
		}
		files, err := c.opts.Holder.Take(ctx, name)
		if err != nil {
			return err
		}
		if isBlob {
			err = c.adoptBlob(ctx, digest, files)
		} else {
			c.fuse, err = c.adoptFUSE(files)
		}
		if err != nil {
			// It stays held: readers wait rather than see zeros.
			c.log.Error("descriptors not taken over", "name", name, "error", err)
			for _, f := range files {
				f.Close()
			}
		}
	}
	return nil
}

func (c *Cache) adoptBlob(ctx context.Context, digest string, files []*os.File) error {
	b := c.blobs[digest]
	lost := b == nil
	if lost {
		if len(files) != fanFiles {
			return badState("descriptors are missing")
		}
		b = newBlob(c, digest)
		if err := b.restart(ctx, files[fanData]); err != nil {
			return err
		}
	}
	b.op.Lock()
	defer b.op.Unlock()
	d, err := adoptFan(b, files)
	if err != nil {
		return err
	}
	if lost {
		c.blobs[digest] = b
	}
	b.mu.Lock()
	b.data, b.dev = files[fanData], d
	b.mu.Unlock()
	d.start()
	return nil
}

// restart begins anew with a blob that is mounted and of which nothing is known any more: all
// of it counts as missing, and what is fetched is what is there. If nobody knows its chunks
// either its readers are refused until it is not mounted any more.
func (b *blob) restart(ctx context.Context, data *os.File) error {
	fi, err := data.Stat()
	if err != nil {
		return diskError("look at blob", err)
	}
	var f Filler
	err = badState("nothing known of blob " + b.digest)
	if b.c.opts.Reopen != nil {
		ctx, cancel := context.WithTimeout(ctx, b.c.opts.Deadline/againShare)
		f, err = b.c.opts.Reopen(ctx, b.digest, fi.Size())
		cancel()
	}
	var t *table
	if err == nil {
		t, err = newTable(f, fi.Size())
	}
	if err != nil {
		b.c.log.Error("the state of a blob in use is lost, and its readers are refused", "blob", b.digest, "error", err)
		f = refusal{size: max(fi.Size(), 1), err: errs.Wrap(errs.ImageCorrupt, phase, "serve a blob whose state is lost", err)}
		if t, err = newTable(f, max(fi.Size(), 1)); err != nil {
			return err
		}
		b.setUp(nil, t, newBitmap(t.n()))
		b.setFiller(f)
		return nil
	}
	b.c.log.Warn("the state of a blob in use was lost, and it is fetched again", "blob", b.digest)
	if err := os.MkdirAll(b.dir, 0o700); err != nil {
		return diskError("create blob", err)
	}
	st, err := createState(b.dir, b.c.opts.BootID, t, newBitmap(t.n()))
	if err != nil {
		return err
	}
	b.setUp(st, t, newBitmap(t.n()))
	b.setFiller(f)
	return nil
}

// refusal is the filler of a blob of which nothing can be had.
type refusal struct {
	size int64
	err  error
}

func (r refusal) Bounds() []int64 { return []int64{0, r.size} }
func (r refusal) Hole(int) bool   { return false }

func (r refusal) Fetch(context.Context, int, int, func(int64, []byte) error) error { return r.err }

func (c *Cache) blobDir(digest string) string { return filepath.Join(c.dir, "blobs", digest) }
func (b *blob) file() string                  { return filepath.Join(b.dir, dataFile) }

// seconds since the epoch, which lies before the cache was opened.
func (c *Cache) seconds() uint32 { return uint32(c.opts.Now().Sub(c.epoch) / time.Second) }

func (c *Cache) grow(n int64) {
	if used := c.used.Add(n); c.opts.Limit > 0 && used > c.opts.Limit {
		c.wake()
	}
}

func (c *Cache) wake() {
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

// makeRoom evicts for n bytes that the disk has no room for.
func (c *Cache) makeRoom(n int64) bool {
	before := c.evicted.Load()
	c.trim(max(0, c.used.Load()-max(n, 64<<20)))
	return c.evicted.Load() > before
}

// Blob makes the blob with a digest (hex SHA-256) and size ready to be read: the
// caller mounts [Blob.Path] and closes the handle when the mount is gone. It is
// idempotent; handles are counted. Errors: image_corrupt (the filler's chunks do not
// fit), state_conflict (it is mounted and its readers were let through unguarded:
// end what uses it and try again), disk_full, shutting_down, internal_error.
func (c *Cache) Blob(ctx context.Context, digest string, size int64, f Filler) (*Blob, error) {
	if !digestRE.MatchString(digest) {
		return nil, errs.New(errs.ImageCorrupt, phase, "not a SHA-256: "+digest)
	}
	t, err := newTable(f, size)
	if err != nil {
		return nil, err
	}
	for {
		h, err := c.handle(digest)
		if err != nil {
			return nil, err
		}
		again, err := h.b.ready(ctx, t, f)
		if err == nil && !again {
			return h, nil
		}
		h.Close()
		if err != nil {
			return nil, err
		}
	}
}

// handle counts one more that has the blob, of which nothing may be there yet.
func (c *Cache) handle(digest string) (*Blob, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errs.New(errs.ShuttingDown, phase, "the cache is closed")
	}
	b := c.blobs[digest]
	if b == nil {
		b = newBlob(c, digest)
		c.blobs[digest] = b
	}
	b.refs++
	return &Blob{b: b}, nil
}

// ready sets the blob up and guards it.
func (b *blob) ready(ctx context.Context, t *table, f Filler) (again bool, err error) {
	b.op.Lock()
	defer b.op.Unlock()
	if b.gone {
		return true, nil
	}
	if b.st != nil && !b.t.is(t) {
		return false, errs.New(errs.ImageCorrupt, phase, "blob "+b.digest+" is cut in another way than before")
	}
	if b.st == nil && b.dev != nil {
		return false, errs.New(errs.StateConflict, phase, "blob "+b.digest+" is in use and its state was lost: end what uses it")
	}
	if b.st == nil {
		if err := b.create(t); err != nil {
			return false, err
		}
	}
	if b.data == nil {
		d, err := os.OpenFile(b.file(), os.O_RDWR, 0)
		if err != nil {
			return false, diskError("open blob", err)
		}
		b.mu.Lock()
		b.data = d
		b.mu.Unlock()
	}
	b.setFiller(f)
	b.mu.Lock()
	b.used = b.c.opts.Now()
	b.mu.Unlock()
	if b.dev != nil || b.complete() && !b.c.crowded() {
		return false, nil
	}
	return false, b.guard(ctx)
}

func (b *blob) create(t *table) error {
	err := os.MkdirAll(b.dir, 0o700)
	var f *os.File
	if err == nil {
		f, err = os.OpenFile(b.file(), os.O_CREATE|os.O_RDWR, 0o600)
	}
	if err != nil {
		return diskError("create blob", err)
	}
	err = f.Truncate(t.size()) // what it may hold from earlier is punched out before it is guarded
	var st *state
	if err == nil {
		st, err = createState(b.dir, b.c.opts.BootID, t, newBitmap(t.n()))
	}
	if err != nil {
		f.Close()
		return diskError("create blob", err)
	}
	b.setUp(st, t, newBitmap(t.n()))
	b.mu.Lock()
	b.data = f
	b.mu.Unlock()
	return nil
}

// guard puts something between the blob and its readers. b.op is held.
func (b *blob) guard(ctx context.Context) error {
	release, ok := lease(b.data)
	if !ok {
		if b.complete() {
			return nil // mounted since it was; it cannot be evicted, that is all
		}
		b.broken = true
		return errs.New(errs.StateConflict, phase, "blob "+b.digest+" is in use and its guard was lost: end what uses it")
	}
	defer release()
	b.broken = false
	if err := b.punchUnclaimed(); err != nil {
		return err
	}
	var d device
	if b.c.mode == FUSE {
		d = b.c.fuse.add(b)
	} else {
		f, err := newFan(ctx, b)
		if err != nil {
			return err
		}
		defer f.start()
		d = f
	}
	b.mu.Lock()
	b.dev = d
	b.unsure = false
	clear(b.pins)
	b.mu.Unlock()
	return nil
}

// punchUnclaimed frees what lies in chunks that are not filled: the crash of a
// machine leaves some. Nobody has the blob open.
func (b *blob) punchUnclaimed() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i := 0; i < b.t.n(); i++ {
		if b.chunk[i] != missing {
			continue
		}
		j := i + 1
		for j < b.t.n() && b.chunk[j] == missing && b.flight[j] == nil {
			j++
		}
		if b.flight[i] == nil {
			if err := unix.Fallocate(int(b.data.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, b.t.bounds[i], b.t.bounds[j]-b.t.bounds[i]); err != nil {
				return diskError("clear blob", err)
			}
		}
		i = j - 1
	}
	return nil
}

// crowded says that evicting may be needed soon, so that even complete blobs
// should stay guarded: unguarded ones cannot be evicted while they are open.
func (c *Cache) crowded() bool {
	return c.opts.Limit > 0 && c.used.Load() > c.opts.Limit/4*3
}

// completed is told that all of b is there.
func (c *Cache) completed(b *blob) {
	c.mu.Lock()
	c.done[b] = true
	c.mu.Unlock()
	c.wake()
}

// janitor makes what is filled durable, lets go of blobs that are complete or
// unused, and keeps the limit.
func (c *Cache) janitor() {
	t := time.NewTicker(c.opts.SaveEvery)
	defer t.Stop()
	for {
		tick := false
		select {
		case <-c.ctx.Done():
			return
		case <-t.C:
			tick = true
		case <-c.kick:
		}
		c.mu.Lock()
		var list []*blob
		for _, b := range c.blobs {
			if tick || c.done[b] || b.refs == 0 {
				list = append(list, b)
			}
		}
		clear(c.done)
		c.mu.Unlock()
		for _, b := range list {
			c.tend(b)
		}
		if c.opts.Limit > 0 && c.used.Load() > c.opts.Limit {
			c.trim(c.opts.Limit / 10 * 9)
		}
	}
}

// tend saves b and drops its guard if that is not needed any more.
func (c *Cache) tend(b *blob) {
	b.op.Lock()
	defer b.op.Unlock()
	if b.gone || b.data == nil {
		return
	}
	if err := b.save(); err != nil {
		c.log.Warn("what is filled is not saved", "blob", b.digest, "error", err)
	}
	if b.dev != nil && b.complete() && !c.crowded() {
		if _, isFan := b.dev.(*fan); isFan {
			c.release(b, true)
		}
	}
	c.mu.Lock()
	idle := b.refs == 0
	c.mu.Unlock()
	if idle {
		c.retire(b)
	}
}

// retire drops the guard of a blob without handles, once nobody has it open.
func (c *Cache) retire(b *blob) {
	b.mu.Lock()
	busy := len(b.flight) > 0
	b.mu.Unlock()
	if busy || b.dev != nil && b.dev.mounted() {
		return
	}
	release, ok := lease(b.data)
	if !ok {
		return
	}
	defer release()
	if b.dev != nil {
		c.release(b, true)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if b.refs == 0 {
		b.mu.Lock()
		if len(b.flight) == 0 {
			b.data.Close()
			b.data = nil
		}
		b.mu.Unlock()
	}
}

// release ends b's device. b.op is held.
func (c *Cache) release(b *blob, forget bool) {
	d := b.dev
	if d == nil {
		return
	}
	d.close(forget)
	if forget {
		b.mu.Lock()
		b.dev = nil
		b.mu.Unlock()
	}
}

// Mode is the mode in use for blobs that are opened now.
func (c *Cache) Mode() Mode { return c.mode }

// Close ends serving; what is filled is made durable. Reads of blobs that are
// mounted wait, held up by the Holder's descriptors, until the cache is opened again.
// Without a Holder it refuses with state_conflict while an incomplete blob is mounted.
func (c *Cache) Close() error {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil
	}
	blobs := make([]*blob, 0, len(c.blobs))
	for _, b := range c.blobs {
		blobs = append(blobs, b)
	}
	c.mu.Unlock()
	if c.opts.Holder == nil {
		for _, b := range blobs {
			b.op.Lock()
			open := b.dev != nil && !b.complete() && (b.dev.mounted() || isOpen(b.data))
			b.op.Unlock()
			if open {
				return errs.New(errs.StateConflict, phase, "blob "+b.digest+" is incomplete and mounted")
			}
		}
	}
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	return c.stop()
}

func isOpen(f *os.File) bool {
	release, ok := lease(f)
	if ok {
		release()
	}
	return !ok
}

func (c *Cache) stop() error {
	var all []error
	// A server that is not to be held any more; others are handed on.
	c.mu.Lock()
	blobs := make([]*blob, 0, len(c.blobs))
	for _, b := range c.blobs {
		blobs = append(blobs, b)
	}
	c.mu.Unlock()
	if c.fuse != nil {
		c.fuse.stop()
	}
	for _, b := range blobs {
		b.op.Lock()
		if b.dev != nil {
			free := !b.dev.mounted() && !isOpen(b.data)
			c.release(b, free)
		}
		b.op.Unlock()
	}
	c.tasks.Wait()
	for _, b := range blobs {
		b.op.Lock()
		all = append(all, b.save())
		c.shrink(b)
		b.op.Unlock()
	}
	if c.fuse != nil {
		all = append(all, c.fuse.end())
	}
	all = append(all, c.lock.Close())
	return errors.Join(all...)
}

// Blob is a handle of a blob in use.
type Blob struct {
	b    *blob
	once sync.Once
}

// Path is the file to give to EROFS as its device, while the handle is open. The
// kernel must not have opened it before: it would not be stopped at what is missing.
func (h *Blob) Path() string {
	h.b.op.Lock()
	defer h.b.op.Unlock()
	if h.b.dev != nil {
		return h.b.dev.path()
	}
	return h.b.file()
}

// Close says that the caller's mount is gone. If that is not so yet, the blob is
// served on until it is.
func (h *Blob) Close() error {
	h.once.Do(func() {
		c := h.b.c
		h.b.mu.Lock()
		h.b.used = c.opts.Now()
		h.b.mu.Unlock()
		c.mu.Lock()
		h.b.refs--
		c.mu.Unlock()
		c.wake()
	})
	return nil
}

// Progress is how much of a blob is there.
type Progress struct {
	Filled int64 `json:"filled"` // bytes, holes not counted
	Total  int64 `json:"total"`  // the same when complete
	Left   int   `json:"left"`   // chunks
}

// Progress returns how much is there.
func (h *Blob) Progress() Progress {
	b := h.b
	b.mu.Lock()
	defer b.mu.Unlock()
	p := Progress{Filled: b.bytes, Total: b.bytes, Left: b.left}
	for k, s := range b.chunk {
		if s != filled {
			p.Total += b.t.len(k)
		}
	}
	return p
}

// Stats of a blob since the cache was opened, or of all.
type Stats struct {
	Reads   int64 `json:"reads"`
	Hits    int64 `json:"hits"`    // reads that waited for nothing
	Failed  int64 `json:"failed"`  // reads that got an error
	Read    int64 `json:"read"`    // bytes that readers asked for
	Fetched int64 `json:"fetched"` // bytes
	Ahead   int64 `json:"ahead"`   // bytes of them that were fetched ahead of a reader
	Fetches int64 `json:"fetches"`
	Evicted int64 `json:"evicted"` // bytes
	Cached  int64 `json:"cached"`  // bytes there now
}

func (b *blob) counts() Stats {
	s := &b.stats
	out := Stats{
		Hits: s.hits.Load(), Failed: s.failed.Load(), Read: s.read.Load(), Fetched: s.fetched.Load(), Ahead: s.ahead.Load(),
		Fetches: s.fetches.Load(), Evicted: s.evicted.Load(),
	}
	out.Reads = out.Hits + s.misses.Load() + out.Failed
	b.mu.Lock()
	out.Cached = b.bytes
	b.mu.Unlock()
	return out
}

// Stats counts what was done for the blob.
func (h *Blob) Stats() Stats { return h.b.counts() }

// Stats returns the counts of every blob by digest.
func (c *Cache) Stats() map[string]Stats {
	c.mu.Lock()
	blobs := make([]*blob, 0, len(c.blobs))
	for _, b := range c.blobs {
		blobs = append(blobs, b)
	}
	c.mu.Unlock()
	out := make(map[string]Stats, len(blobs))
	for _, b := range blobs {
		out[b.digest] = b.counts()
	}
	return out
}

// Totals are the counts of all blobs since the cache was opened, also of those that went.
func (c *Cache) Totals() Stats {
	c.mu.Lock()
	all := c.gone
	blobs := make([]*blob, 0, len(c.blobs))
	for _, b := range c.blobs {
		blobs = append(blobs, b)
	}
	c.mu.Unlock()
	for _, b := range blobs {
		all.add(b.counts())
	}
	return all
}

func (s *Stats) add(o Stats) {
	s.Reads += o.Reads
	s.Hits += o.Hits
	s.Failed += o.Failed
	s.Read += o.Read
	s.Fetched += o.Fetched
	s.Ahead += o.Ahead
	s.Fetches += o.Fetches
	s.Evicted += o.Evicted
	s.Cached += o.Cached
}

// Used is how many bytes of data the cache holds.
func (c *Cache) Used() int64 { return c.used.Load() }

// Limit is what Options said; 0 is none.
func (c *Cache) Limit() int64 { return c.opts.Limit }

// Unclaimed lists blobs that an earlier process served and that nobody has opened
// in this one. They are served until they are not mounted any more.
func (c *Cache) Unclaimed() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []string
	for d, b := range c.blobs {
		if b.refs == 0 && b.guarded() {
			out = append(out, d)
		}
	}
	return out
}

func (b *blob) guarded() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.dev != nil
}

// read answers for one read: it waits for the bytes, counts, and pins them under
// key. An error that is shutting_down is not for the reader: the next process answers.
func (b *blob) readFor(key uint64, pid int, off, n int64) error {
	owner, waited := "", int64(0)
	acct := b.c.opts.Accountant
	if acct != nil {
		owner, waited = acct.Owner(pid), b.absent(off, n)
	}
	start := b.c.opts.Now()
	i, j := b.t.chunks(off, n)
	b.record(off, n)
	b.observe(owner, off, n)
	hit := b.tryPin(key, i, j)
	var err error
	if !hit {
		ctx, cancel := context.WithTimeout(b.c.ctx, b.c.opts.Deadline)
		err = b.serve(ctx, key, owner, i, j)
		cancel()
		if b.c.ctx.Err() != nil && err != nil {
			return errs.New(errs.ShuttingDown, phase, "the cache is closed")
		}
	}
	b.stats.read.Add(n)
	switch {
	case err != nil:
		b.stats.failed.Add(1)
	case hit:
		b.stats.hits.Add(1)
	default:
		b.stats.misses.Add(1)
	}
	if acct != nil {
		u := Use{Reads: 1, Read: n}
		if !hit {
			u.Waited, u.Wait = waited, b.c.opts.Now().Sub(start)
		}
		acct.Count(owner, b.digest, u)
	}
	return err
}
