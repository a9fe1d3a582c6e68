package chunk

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sort"
	"strings"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
)

// CollectOptions of a Collector. Zero values mean the defaults, negative times none.
type CollectOptions struct {
	// Grace is the age below which nothing is deleted (1 h). It only spares work: that
	// what is being written stays does not depend on it.
	Grace time.Duration
	// Settle is how long a listing of the store may be behind, twice (2 min, for NFS; a
	// local directory and S3 are never behind).
	Settle time.Duration
	// RewriteBelow is the part of a pack that must be needed for it to stay as it is (0.5).
	RewriteBelow float64
	// MergeFrom is the number of packs under an eighth of PackSize at which these are
	// put together (64).
	MergeFrom int
	// RewriteMax bounds the bytes of packs that are read to be rewritten in one pass (4 GiB).
	RewriteMax int64
	PackSize   int64         // of packs that are written (32 MiB)
	Parallel   int           // objects read or deleted at once (8)
	LeaseTTL   time.Duration // of the collector itself (15 min)

	Now  func() time.Time // time.Now
	Rand io.Reader        // of ids; crypto/rand
}

func (o *CollectOptions) fill() {
	def := func(d *time.Duration, v time.Duration) {
		if *d == 0 {
			*d = v
		}
		*d = max(*d, 0)
	}
	def(&o.Grace, time.Hour)
	def(&o.Settle, 2*time.Minute)
	def(&o.LeaseTTL, 15*time.Minute)
	if o.RewriteBelow == 0 {
		o.RewriteBelow = 0.5
	}
	if o.MergeFrom == 0 {
		o.MergeFrom = 64
	}
	if o.RewriteMax == 0 {
		o.RewriteMax = 4 << 30
	}
	if o.PackSize == 0 {
		o.PackSize = defaultPack
	}
	if o.Parallel == 0 {
		o.Parallel = 8
	}
	if o.Now == nil {
		o.Now = time.Now
	}
	if o.Rand == nil {
		o.Rand = rand.Reader
	}
}

// Report says what a pass did.
type Report struct {
	Layers         int   // roots
	NeededChunks   int64 // different ones
	NeededBytes    int64 // compressed
	Condemned      int   // objects that were found to be unneeded in this pass
	CondemnedBytes int64
	Deleted        int // objects condemned by an earlier pass
	Spared         int // condemned objects that are needed after all
	Rewritten      int // packs of which what is needed was copied
	CopiedBytes    int64
	Expired        int // leases of writers that fell silent
	Waiting        int // condemnations that wait for writers or for time to pass
	// Damaged names packs that roots need and which are missing or cannot be read. Nothing
	// is done about them; the layers can be put again. While another collector is at work
	// they may be of a layer that has just been taken out of the roots.
	Damaged []string
}

// Collector deletes what no root needs.
type Collector struct {
	store object.Store
	opts  CollectOptions
}

// NewCollector returns a Collector. There should be one at a time per store, see doc.go.
func NewCollector(s object.Store, opts CollectOptions) *Collector {
	opts.fill()
	return &Collector{store: s, opts: opts}
}

// pass is one Collect under way.
type pass struct {
	*Collector
	lease   *lease
	now     time.Time       // by the store's clock
	live    map[string]bool // leases, by id
	other   bool            // another collector is at work
	records []*condemnation
	packs   map[id]object.Info
	others  []object.Info // maps, metadata, tables of moved chunks
	marks   *marks
	report  Report
}

// Collect makes one pass; what becomes unneeded is gone after three, Settle apart. It
// calls roots once and deletes nothing that a layer of its answer needs, nor what a
// Session put or relies on that had not ended when roots was called. roots must read
// the record of all layers as it is at that time. A layer that was once left out must
// not come back but by being put again.
//
// Errors: roots's, store_corrupt (a map of a root is damaged: then nothing can be known
// to be unneeded), the store's own. A pass that failed or was killed is made up for by
// the next.
func (c *Collector) Collect(ctx context.Context, roots func(context.Context) ([]Layer, error)) (Report, error) {
	i, err := newID(c.opts.Rand)
	if err != nil {
		return Report{}, err
	}
	l, err := takeLease(ctx, c.store, i, leaseBody{TTLMS: c.opts.LeaseTTL.Milliseconds(), Collector: true}, c.opts.Now)
	if err != nil {
		return Report{}, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), c.opts.LeaseTTL/4)
		defer cancel()
		l.end(ctx)
	}()
	p := &pass{Collector: c, lease: l, packs: map[id]object.Info{}}
	if err := p.run(ctx, roots); err != nil {
		return p.report, fmt.Errorf("collect garbage: %w", err)
	}
	return p.report, nil
}

func (p *pass) run(ctx context.Context, roots func(context.Context) ([]Layer, error)) error {
	st, err := p.store.Stat(ctx, p.lease.key(0))
	if err != nil {
		return err
	}
	p.now = st.Modified
	if err := p.leases(ctx); err != nil {
		return err
	}
	if p.records, err = loadCondemned(ctx, p.store); err != nil {
		return err
	}
	// Which condemnations can be carried out is settled before the roots are read: the
	// sessions they waited for have recorded by then what they ever will.
	ready, err := p.advance(ctx)
	if err != nil {
		return err
	}
	layers, err := roots(ctx)
	if err != nil {
		return fmt.Errorf("ask for the layers that stay: %w", err)
	}
	p.report.Layers = len(layers)
	if err := p.list(ctx); err != nil {
		return err
	}
	if p.marks, err = mark(ctx, p.store, layers, p.opts.Parallel); err != nil {
		return err
	}
	p.count()
	for _, r := range ready {
		if err := p.carryOut(ctx, r); err != nil {
			return err
		}
	}
	return p.condemn(ctx)
}

// leases finds whose writers are alive, and deletes those of others.
func (p *pass) leases(ctx context.Context) error {
	type state struct {
		newest object.Info
		keys   []string
	}
	all := map[string]*state{}
	err := p.store.List(ctx, leaseClass, func(i object.Info) error {
		id, _, ok := strings.Cut(strings.TrimPrefix(i.Key, leaseClass), ".")
		if !ok || id == p.lease.id.String() {
			return nil
		}
		s := all[id]
		if s == nil {
			s = &state{}
			all[id] = s
		}
		s.keys = append(s.keys, i.Key)
		if i.Key > s.newest.Key {
			s.newest = i
		}
		return nil
	})
	if err != nil {
		return err
	}
	p.live = map[string]bool{}
	for id, s := range all {
		body, err := p.body(ctx, s.newest.Key)
		if err != nil {
			return err
		}
		if p.now.Sub(s.newest.Modified) <= time.Duration(body.TTLMS)*time.Millisecond+p.opts.Settle {
			p.live[id] = true
			p.other = p.other || body.Collector
			continue
		}
		// From here on it cannot confirm anything, unless it has been renewed meanwhile.
		for _, k := range s.keys {
			if err := p.store.Delete(ctx, k); err != nil {
				return err
			}
		}
		left, err := p.leaseThere(ctx, id)
		if err != nil {
			return err
		}
		if left {
			p.live[id] = true
			p.other = p.other || body.Collector
		} else {
			p.report.Expired++
		}
	}
	return nil
}

func (p *pass) leaseThere(ctx context.Context, id string) (bool, error) {
	found := errors.New("found")
	err := p.store.List(ctx, leaseClass+id+".", func(object.Info) error { return found })
	if errors.Is(err, found) {
		return true, nil
	}
	return false, err
}

// body reads a lease. One that cannot be read counts as one of a collector, which is
// waited for most.
func (p *pass) body(ctx context.Context, key string) (body leaseBody, err error) {
	b, err := object.ReadAll(ctx, p.store, key, 0, -1, 4096)
	if err != nil && !errors.Is(err, errs.ObjectNotFound) && !errors.Is(err, errs.StoreCorrupt) {
		return body, err
	}
	if err != nil || json.Unmarshal(b, &body) != nil || body.TTLMS <= 0 {
		return leaseBody{TTLMS: unknownTTL.Milliseconds(), Collector: true}, nil
	}
	return body, nil
}

func (p *pass) liveLeases() []string {
	ids := make([]string, 0, len(p.live))
	for id := range p.live {
		ids = append(ids, id)
	}
	sort.Strings(ids)
	return ids
}

// ended says whether none of the leases is there any more.
func (p *pass) ended(ctx context.Context, ids []string) (bool, error) {
	for _, id := range ids {
		if p.live[id] {
			return false, nil
		}
		// A listing of all may miss one that is being renewed.
		if left, err := p.leaseThere(ctx, id); left || err != nil {
			return false, err
		}
	}
	return true, nil
}

// advance moves condemnations on and returns those to carry out.
func (p *pass) advance(ctx context.Context) (ready []*condemnation, err error) {
	for _, c := range p.records {
		if c.bad != nil {
			if err := p.retire(ctx, c); err != nil { // what it lists is found again
				return nil, err
			}
			continue
		}
		settled := p.now.Sub(c.modified) >= p.opts.Settle
		if c.stage == stageListed && settled {
			c.Leases = p.liveLeases()
			if err := c.put(ctx, p.store, stageWaiting); err != nil {
				return nil, err
			}
		}
		over := false
		if c.stage == stageWaiting {
			if over, err = p.ended(ctx, c.Leases); err != nil {
				return nil, err
			}
		}
		switch {
		case over:
			ready = append(ready, c)
		case c.stage == stageDone && settled && !p.other:
			if err := p.retire(ctx, c); err != nil {
				return nil, err
			}
		default:
			p.report.Waiting++
		}
	}
	return ready, nil
}

// retire deletes a condemnation, its last stage at the end.
func (p *pass) retire(ctx context.Context, c *condemnation) error {
	for stage := stageListed; stage <= c.stage; stage++ {
		if err := p.store.Delete(ctx, condemnedKey(c.id, stage)); err != nil {
			return err
		}
	}
	c.Keys = nil
	return nil
}

func (p *pass) list(ctx context.Context) error {
	for _, class := range []string{packClass, mapClass, metaClass, movedClass} {
		err := p.store.List(ctx, class, func(i object.Info) error {
			if class != packClass {
				p.others = append(p.others, i)
			} else if pack, ok := parseID(strings.TrimPrefix(i.Key, packClass)); ok {
				p.packs[pack] = i
			}
			return nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// count fills the report, and finds packs that are needed but are not there.
func (p *pass) count() {
	for pack, l := range p.marks.packs {
		l.sort()
		if _, ok := p.packs[pack]; ok {
			p.report.NeededChunks += int64(len(l.chunks))
			p.report.NeededBytes += l.bytes()
		} else if !p.marks.covered(pack, p.packs) {
			p.report.Damaged = append(p.report.Damaged, pack.packKey())
		}
	}
	sort.Strings(p.report.Damaged)
}

// carryOut deletes what is condemned and still not needed.
func (p *pass) carryOut(ctx context.Context, c *condemnation) error {
	var keys []string
	for _, k := range c.Keys {
		if !deletable(k) || p.marks.needed(k, p.packs) {
			p.report.Spared++
			continue
		}
		keys = append(keys, k)
	}
	err := each(ctx, p.opts.Parallel, keys, func(ctx context.Context, k string) error {
		// A collector that was asleep for longer than its lease must not go on.
		if err := p.lease.check(); err != nil {
			return err
		}
		return p.store.Delete(ctx, k)
	})
	if err != nil {
		return err
	}
	p.report.Deleted += len(keys)
	for _, k := range keys {
		if pack, ok := parseID(strings.TrimPrefix(k, packClass)); ok {
			delete(p.packs, pack)
		}
	}
	if err := c.put(ctx, p.store, stageDone); err != nil {
		return err
	}
	p.report.Waiting++
	return nil
}

func deletable(key string) bool {
	for _, class := range []string{packClass, mapClass, metaClass, movedClass} {
		if strings.HasPrefix(key, class) {
			return true
		}
	}
	return false
}

const perCondemnation = 50_000 // keys

// condemn lists what is not needed, for later passes to delete.
func (p *pass) condemn(ctx context.Context) error {
	listed := map[string]bool{}
	for _, c := range p.records {
		for _, k := range c.Keys {
			listed[k] = true
		}
	}
	for _, k := range p.report.Damaged {
		listed[k] = true
	}
	var keys []string
	condemn := func(i object.Info) {
		keys = append(keys, i.Key)
		p.report.Condemned++
		p.report.CondemnedBytes += i.Size
	}
	old := func(i object.Info) bool { return p.now.Sub(i.Modified) >= p.opts.Grace && !listed[i.Key] }
	for _, i := range p.others {
		if old(i) && !p.marks.needed(i.Key, p.packs) {
			condemn(i)
		}
	}
	var partly []partial
	for pack, i := range p.packs {
		switch {
		case !old(i):
		case !p.marks.needed(i.Key, p.packs):
			condemn(i)
		default:
			partly = append(partly, partial{pack, i, p.marks.packs[pack].bytes()})
		}
	}
	rewritten, err := p.rewrite(ctx, partly)
	for _, i := range rewritten {
		condemn(i)
	}
	sort.Strings(keys)
	for len(keys) > 0 {
		n := min(len(keys), perCondemnation)
		i, ierr := newID(p.opts.Rand)
		if ierr != nil {
			return ierr
		}
		c := &condemnation{Keys: keys[:n], id: i.String()}
		if err := c.put(ctx, p.store, stageListed); err != nil {
			return err
		}
		p.report.Waiting++
		keys = keys[n:]
	}
	return err
}

// partial is a pack of which something is needed.
type partial struct {
	pack   id
	info   object.Info
	needed int64
}

// rewrite copies what is needed of packs that mostly are not, and of small ones if there
// are many, to new packs. It returns the packs that need not stay then.
func (p *pass) rewrite(ctx context.Context, all []partial) (done []object.Info, err error) {
	var chosen, small []partial
	for _, x := range all {
		switch {
		case float64(x.needed) < p.opts.RewriteBelow*float64(x.info.Size-headerLen-trailerLen):
			chosen = append(chosen, x)
		case x.info.Size < p.opts.PackSize/8:
			small = append(small, x)
		}
	}
	if len(small) >= p.opts.MergeFrom {
		chosen = append(chosen, small...)
	}
	sort.Slice(chosen, func(i, j int) bool {
		a, b := &chosen[i], &chosen[j]
		if x, y := a.needed*b.info.Size, b.needed*a.info.Size; x != y {
			return x < y
		}
		return a.info.Key < b.info.Key
	})
	w := rewriter{p: p}
	budget := p.opts.RewriteMax
	for _, x := range chosen {
		if budget -= x.info.Size; budget < 0 {
			break
		}
		if err := w.copy(ctx, x); err != nil {
			if errors.Is(err, errs.StoreCorrupt) {
				p.report.Damaged = append(p.report.Damaged, x.info.Key)
				continue
			}
			return w.done, err
		}
	}
	err = w.flush(ctx)
	return w.done, err
}

// rewriter copies chunks into new packs.
type rewriter struct {
	p    *pass
	to   *packBuilder
	from []*moved      // tables of to
	full []object.Info // packs that are copied whole once to is stored
	done []object.Info
	dec  decoder
}

// copy copies the needed chunks of a pack, each verified, or none.
func (w *rewriter) copy(ctx context.Context, x partial) error {
	b, err := object.ReadAll(ctx, w.p.store, x.info.Key, 0, x.info.Size, x.info.Size)
	if err != nil {
		return err
	}
	if err := w.verify(x, b); err != nil {
		return err
	}
	var t *moved
	for _, c := range w.p.marks.packs[x.pack].chunks {
		if w.to == nil {
			i, err := newID(w.p.opts.Rand)
			if err != nil {
				return err
			}
			w.to, t = newPack(i, nil), nil
		}
		if t == nil {
			t = &moved{from: x.pack, to: w.to.id}
			w.from = append(w.from, t)
		}
		off, stored := uint32(c>>32), uint32(c)
		e := w.dec.entries[off]
		at := w.to.add(e.digest, b[off:][:stored], int(e.length))
		t.offs = append(t.offs, [2]uint32{off, at.off})
		w.p.report.CopiedBytes += int64(stored)
		if int64(len(w.to.buf)) >= w.p.opts.PackSize {
			if err := w.flush(ctx); err != nil {
				return err
			}
		}
	}
	if w.full = append(w.full, x.info); w.to == nil {
		w.done, w.full = append(w.done, w.full...), nil
	}
	w.p.report.Rewritten++
	return nil
}

// verify checks the pack and every chunk of it that is needed.
func (w *rewriter) verify(x partial, b []byte) error {
	if int64(len(b)) != x.info.Size || len(b) < headerLen {
		return corrupt(x.info.Key, "it is shorter than it was", nil)
	}
	if err := checkHeader(x.pack, b[:headerLen]); err != nil {
		return err
	}
	_, start, err := parseTrailer(x.pack, x.info.Size, b)
	if err != nil {
		return err
	}
	entries, err := parseIndex(x.pack, x.info.Size, b[start:])
	if err != nil {
		return err
	}
	if err := w.dec.use(entries); err != nil {
		return err
	}
	for _, c := range w.p.marks.packs[x.pack].chunks {
		off, stored := uint32(c>>32), uint32(c)
		e, ok := w.dec.entries[off]
		if !ok || e.stored != stored {
			return corrupt(x.info.Key, fmt.Sprintf("it has no chunk of %d bytes at %d", stored, off), nil)
		}
		if err := w.dec.check(x.pack, e, b[off:][:stored]); err != nil {
			return err
		}
	}
	return nil
}

// flush stores the pack, and then where its chunks came from.
func (w *rewriter) flush(ctx context.Context) error {
	if w.to == nil {
		return nil
	}
	if err := w.p.lease.check(); err != nil {
		return err
	}
	b := w.to.finish()
	if err := w.p.store.Put(ctx, w.to.id.packKey(), int64(len(b)), bytes.NewReader(b)); err != nil {
		return err
	}
	err := each(ctx, w.p.opts.Parallel, w.from, func(ctx context.Context, t *moved) error {
		b := t.encode()
		return w.p.store.Put(ctx, t.key(), int64(len(b)), bytes.NewReader(b))
	})
	if err != nil {
		return err
	}
	w.to, w.from = nil, nil
	w.done, w.full = append(w.done, w.full...), nil
	return nil
}
