package edge

import (
	"encoding/json"
	"errors"
	"io/fs"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	v1 "dsec/api/v1"
	"dsec/internal/backend"
)

// Each sandbox's memory is read every meterEvery, and with every change of its state and whenever somebody asks
// for its usage. A round is spread over that time, and pauses for meterPause at least after each meterBatch
// sandboxes: however many there are, it takes about a hundredth of a core.
const (
	meterEvery = 10 * time.Second
	meterBatch = 16
	meterPause = 10 * time.Millisecond
)

// metersFile has the meters of all sandboxes, for the next process of this node: it is written after each round
// and at the end. What a process that was killed counted since is lost, but for the memory's integral, which
// goes on from the last reading in the file.
const metersFile = "usage"

// meter adds up of a sandbox what no counter of the kernel does.
type meter struct {
	sent atomic.Int64 // bytes that its guest sent

	mu       sync.Mutex
	at       time.Time // of the last reading; zero: none yet
	bytes    int64     // then
	integral float64   // GiB·s until then
}

// metered is what is kept of a meter.
type metered struct {
	At       time.Time `json:"at"`
	Bytes    int64     `json:"bytes"`
	Integral float64   `json:"gib_s"`
	Sent     int64     `json:"sent,omitempty"`
}

// read takes a reading. Between two of them the memory is taken to have grown evenly.
func (m *meter) read(now time.Time, bytes int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if seconds := now.Sub(m.at).Seconds(); !m.at.IsZero() && seconds > 0 {
		m.integral += (float64(m.bytes) + float64(bytes)) / 2 / (1 << 30) * seconds
	}
	m.at, m.bytes = now, bytes
}

func (m *meter) save() metered {
	m.mu.Lock()
	defer m.mu.Unlock()
	return metered{m.at, m.bytes, m.integral, m.sent.Load()}
}

func (m *meter) restore(k metered) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.at, m.bytes, m.integral = k.At, k.Bytes, k.Integral
	m.sent.Store(k.Sent)
}

// fill completes the sandbox's usage that its backend has read at that time.
func (s *sandbox) fill(u *v1.Usage, now time.Time) {
	s.meter.read(now, u.MemoryBytes)
	k := s.meter.save()
	u.MemoryGiBSeconds, u.SentBytes = k.Integral, k.Sent
	u.PausedSeconds = s.pausedFor(now).Seconds()
}

// pausedFor is for how long the sandbox was paused in all.
func (s *sandbox) pausedFor(now time.Time) time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.view.PausedAt == nil {
		return s.stood
	}
	return s.stood + max(0, now.Sub(*s.view.PausedAt))
}

// leaves tells s's meter that its state changes. With s.mu held.
func (e *Edge) leaves(s *sandbox) { e.readMemory(s, s.instance, e.cfg.Now()) }

func (e *Edge) readMemory(s *sandbox, instance backend.Instance, now time.Time) {
	if counter, ok := instance.(backend.MemoryCounter); ok {
		if n, err := counter.MemoryBytes(); err == nil { // else it has ended
			s.meter.read(now, n)
		}
	}
}

// meterAll reads the memory of all sandboxes, again and again, until the edge stops.
func (e *Edge) meterAll() {
	wait := time.NewTimer(meterEvery)
	defer wait.Stop()
	pause := func(d time.Duration) bool {
		wait.Reset(d)
		select {
		case <-wait.C:
			return true
		case <-e.stop:
			return false
		}
	}
	for {
		all := e.all()
		batches := (len(all) + meterBatch - 1) / meterBatch
		between := max(meterPause, meterEvery/time.Duration(max(1, batches)))
		for i, s := range all {
			if i%meterBatch == meterBatch-1 && !pause(between) {
				return
			}
			s.mu.Lock()
			instance := s.instance
			s.mu.Unlock()
			e.readMemory(s, instance, e.cfg.Now())
		}
		if !pause(between) {
			return
		}
		e.saveMeters()
	}
}

func (e *Edge) all() []*sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]*sandbox, 0, len(e.sandboxes))
	for _, s := range e.sandboxes {
		all = append(all, s)
	}
	return all
}

// saveMeters tries to: what was counted is nothing to fail for.
func (e *Edge) saveMeters() {
	kept := map[string]metered{}
	for _, s := range e.all() {
		if k := s.meter.save(); k != (metered{}) {
			kept[s.snapshot().ID] = k
		}
	}
	if len(kept) == 0 && !e.metersKept {
		return
	}
	b, err := json.Marshal(kept)
	if err == nil {
		tmp := e.path(metersFile + ".new")
		if err = os.WriteFile(tmp, b, 0o600); err == nil {
			err = os.Rename(tmp, e.path(metersFile))
		}
	}
	if err != nil {
		e.cfg.Log.Warn("what sandboxes used cannot be kept; tried again", "err", err)
		return
	}
	e.metersKept = len(kept) > 0
}

// loadMeters reads what an earlier process kept.
func (e *Edge) loadMeters() {
	b, err := os.ReadFile(e.path(metersFile))
	if err == nil {
		err = json.Unmarshal(b, &e.meters)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		e.cfg.Log.Warn("what sandboxes used until now is lost", "err", err)
		e.meters = nil
	}
	e.metersKept = len(e.meters) > 0
}

// Totals of all sandboxes that this process has had.
type Totals struct {
	MemoryBytes   int64 // of those there are, as last read
	GiBSeconds    float64
	PausedSeconds float64
	SentBytes     int64
}

func (t *Totals) add(s *sandbox, now time.Time) {
	k := s.meter.save()
	t.GiBSeconds += k.Integral
	t.PausedSeconds += s.pausedFor(now).Seconds()
	t.SentBytes += k.Sent
}

// Totals sums the meters up.
func (e *Edge) Totals() Totals {
	e.mu.Lock()
	defer e.mu.Unlock()
	t, now := e.past, e.cfg.Now()
	for _, s := range e.sandboxes {
		t.add(s, now)
		t.MemoryBytes += s.meter.save().Bytes
	}
	return t
}

// countedConn counts what comes from a guest.
type countedConn struct {
	net.Conn
	n *atomic.Int64
}

func (c countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// counted is conn with its reads counted in n. It can be written to as directly as conn can.
func counted(conn net.Conn, n *atomic.Int64) net.Conn {
	c := countedConn{conn, n}
	if raw, ok := conn.(syscall.Conn); ok {
		return struct {
			countedConn
			syscall.Conn
		}{c, raw}
	}
	return c
}
