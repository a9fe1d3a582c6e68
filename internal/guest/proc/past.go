package proc

// Bounds of what is kept of ended processes.
const (
	// keepEnded processes are known with their exit, and when that is not enough for
	// all, keepOthers that nobody is likely to ask for are among them.
	keepEnded  = 4096
	keepOthers = 256
	// keepOutput bounds the memory of all ended processes' output.
	keepOutput = 4 << 20
	// largeOutput is given up before what is smaller: one process that prints much does
	// not take the output of many others.
	largeOutput = keepOutput / 16
	// briefSpec is what is kept of a command line.
	briefSpec = 1 << 10
	// sweepEvery so many ends the output is counted anew, which looks at all of them.
	sweepEvery = 64
)

// remember adds p, which has ended, and gives up what is beyond the bounds. t.mu is held.
func (t *Table) remember(p *Process) {
	p.left = !p.Log.isHeld()
	if brief, cut := p.Spec.Brief(briefSpec); cut {
		p = p.past(brief)
	}
	t.past = append(t.past, p)
	t.kept += p.Log.cost()
	if t.unswept++; t.kept > keepOutput || t.unswept >= sweepEvery {
		t.sweep()
	}
	// A little more than the bound, so that it is not done at each end.
	if len(t.past) > keepEnded+sweepEvery {
		t.forget(len(t.past) - keepEnded)
	}
}

// wanted says whether somebody may well ask for p later: it has a name, was started to
// run by itself, or lost who followed it.
func (p *Process) wanted() bool { return p.Spec.Tag != "" || p.Spec.Keep || p.left }

// rank is the order in which output is given up.
func (p *Process) rank(cost int) int {
	rank := 0
	if p.wanted() {
		rank = 2
	}
	if cost <= largeOutput {
		rank++
	}
	return rank
}

// sweep gives up output until what is left is within its bound: by rank, the oldest
// first, and never the last process's. t.mu is held.
func (t *Table) sweep() {
	t.unswept, t.kept = 0, 0
	for _, p := range t.past {
		if !p.given {
			t.kept += p.Log.cost()
		}
	}
	if t.kept <= keepOutput {
		return
	}
	for rank := 0; rank < 4; rank++ {
		for i, p := range t.past[:len(t.past)-1] {
			if t.kept <= keepOutput-largeOutput { // some room, or the next end would sweep again
				return
			}
			cost := 0
			if !p.given {
				cost = p.Log.cost()
			}
			if cost == 0 || p.rank(cost) != rank {
				continue
			}
			p.Log.Discard()
			t.past[i] = p.past(p.Spec)
			t.past[i].given = true
			t.kept -= cost
		}
	}
}

// forget drops n ended processes: the oldest that nobody is likely to ask for, as long as
// there are more than keepOthers, then the oldest. t.mu is held.
func (t *Table) forget(n int) {
	others := 0
	for _, p := range t.past {
		if !p.wanted() {
			others++
		}
	}
	first := min(n, max(0, others-keepOthers)) // to drop of the others
	rest := n - first                          // to drop of the wanted
	keep := t.past[:0]
	for _, p := range t.past {
		left := &first
		if p.wanted() {
			left = &rest
		}
		if *left == 0 {
			keep = append(keep, p)
			continue
		}
		*left--
		t.lost++
		p.Log.Discard()
	}
	clear(t.past[len(keep):])
	t.past = keep
}

// past is what is kept of p, which has ended.
func (p *Process) past(spec Spec) *Process {
	p.mu.Lock()
	defer p.mu.Unlock()
	return &Process{
		Pid: p.Pid, Spec: spec, User: p.User, Started: p.Started, Log: p.Log,
		table: p.table, order: p.order, left: p.left, done: p.done, exit: p.exit, over: true,
	}
}

// Order numbers processes in the order of their starts, from 1.
func (p *Process) Order() uint64 { return p.order }

// Brief is s without what makes it longer than about most bytes: the environment, then the
// last arguments.
func (s *Spec) Brief(most int) (brief Spec, cut bool) {
	b := *s
	n := len(s.Cmd) + len(s.Cwd)
	for _, a := range s.Args {
		n += len(a) + 16
	}
	args := n
	for k, v := range s.Env {
		n += len(k) + len(v) + 32
	}
	if n <= most {
		return b, false
	}
	b.Env = nil
	if args <= most {
		return b, true
	}
	b.Args = nil
	n = len(s.Cmd) + len(s.Cwd)
	for _, a := range s.Args {
		room := most - n - 16
		if len(a) > room {
			b.Args = append(b.Args, string([]byte(a[:max(0, room)]))+"…") // a copy: a may be huge
			break
		}
		b.Args = append(b.Args, a)
		n += len(a) + 16
	}
	return b, true
}
