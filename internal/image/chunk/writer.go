package chunk

import (
	"context"
	"crypto/rand"
	"io"
	"runtime"
	"sync"
	"time"

	"dsec/internal/image/object"

	"github.com/klauspost/compress/zstd"
)

// Options of a Writer. Zero values mean the defaults.
type Options struct {
	Workers  int   // goroutines that hash and compress (all cores)
	Uploads  int   // packs on their way to the store at once (2)
	PackSize int64 // bytes at which a pack is full (32 MiB)
	// Level of compression; the fastest, which takes 7 % more space than the next and less
	// than half its time. Readers do not care.
	Level    zstd.EncoderLevel
	LeaseTTL time.Duration // how long the store waits for a writer that is silent (15 min)
	Refresh  time.Duration // age at which the index of what the store has is brought up to date (1 min)
	// IndexMemory bounds that index (512 MiB: some 33 million chunks, 3 TB of data). Past
	// it, what further packs hold is not found and may be stored twice.
	IndexMemory int64
	Damage      *Damage // packs that are not relied on (none)

	Now  func() time.Time // time.Now
	Rand io.Reader        // of ids; crypto/rand
}

func (o *Options) fill() {
	if o.Workers == 0 {
		o.Workers = runtime.GOMAXPROCS(0)
	}
	if o.Uploads == 0 {
		o.Uploads = 2
	}
	if o.Level == 0 {
		o.Level = zstd.SpeedFastest
	}
	if o.PackSize == 0 {
		o.PackSize = defaultPack
	}
	if o.LeaseTTL == 0 {
		o.LeaseTTL = 15 * time.Minute
	}
	if o.Refresh == 0 {
		o.Refresh = time.Minute
	}
	if o.IndexMemory == 0 {
		o.IndexMemory = 512 << 20
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Rand == nil {
		o.Rand = rand.Reader
	}
}

// Writer puts layers into a store. It keeps an index of what the store has between
// sessions, and may be used concurrently.
type Writer struct {
	store object.Store
	opts  Options
	index *index

	mu      sync.Mutex
	loaded  time.Time // when the index was last brought up to date
	loading bool
	loads   sync.WaitGroup
	stop    context.CancelFunc
	running context.Context
	randMu  sync.Mutex
}

// NewWriter returns a Writer; Close it.
func NewWriter(store object.Store, opts Options) *Writer {
	opts.fill()
	w := &Writer{store: store, opts: opts, index: newIndex(store, opts.IndexMemory)}
	w.running, w.stop = context.WithCancel(context.Background())
	return w
}

// Close waits for what the Writer does in the background.
func (w *Writer) Close() {
	w.stop()
	w.loads.Wait()
}

func (w *Writer) newID() (id, error) {
	w.randMu.Lock()
	defer w.randMu.Unlock()
	return newID(w.opts.Rand)
}

// refresh brings the index up to date: the first time before anything is written, later
// in the background, since a chunk that is not found yet only costs space.
func (w *Writer) refresh(ctx context.Context) error {
	w.mu.Lock()
	first := w.loaded.IsZero()
	if !first && (w.loading || w.opts.Now().Sub(w.loaded) < w.opts.Refresh) {
		w.mu.Unlock()
		return nil
	}
	if first {
		defer w.mu.Unlock()
		if err := w.index.refresh(ctx, 16); err != nil {
			return err
		}
		w.loaded = w.opts.Now()
		return nil
	}
	w.loading = true
	w.mu.Unlock()
	w.loads.Go(func() {
		err := w.index.refresh(w.running, 16)
		w.mu.Lock()
		defer w.mu.Unlock()
		w.loading = false
		if err == nil {
			w.loaded = w.opts.Now()
		}
	})
	return nil
}
