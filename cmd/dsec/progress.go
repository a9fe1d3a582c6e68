package main

import (
	"fmt"
	"io"
	"sync"

	"github.com/vbauerster/mpb/v8"
	"github.com/vbauerster/mpb/v8/decor"
)

// progress shows how far long work is: a bar when stderr is a terminal, else lines when
// the phase changes. Its methods may be called from several goroutines.
type progress struct {
	mu    sync.Mutex
	out   io.Writer
	pool  *mpb.Progress // nil: plain
	bar   *mpb.Bar
	name  string
	bytes bool
	phase string
	ended bool
}

// progress starts showing work of total (0: unknown) bytes or pieces. Pieces whose
// results are printed on the terminal need no bar.
func (a *app) progress(name string, total int64, bytes bool) *progress {
	p := &progress{out: a.aside(), name: name, bytes: bytes}
	if isTerminal(a.stderr) && (bytes || !isTerminal(a.stdout)) {
		p.pool = mpb.New(mpb.WithOutput(a.stderr), mpb.WithWidth(40))
		p.start(name, total)
	}
	return p
}

// aside is where to say how long work goes on: not where a failure's object would be read.
func (a *app) aside() io.Writer {
	if a.asJSON && !isTerminal(a.stderr) {
		return io.Discard
	}
	return a.stderr
}

func (p *progress) start(name string, total int64) {
	count := decor.CountersNoUnit("%d / %d")
	if p.bytes {
		count = decor.CountersKibiByte("% .1f / % .1f")
	}
	if total <= 0 {
		count = decor.CurrentNoUnit("%d")
		if p.bytes {
			count = decor.CurrentKibiByte("% .1f")
		}
	}
	opts := []mpb.BarOption{mpb.PrependDecorators(decor.Name(name + " ")), mpb.AppendDecorators(count), mpb.BarRemoveOnComplete()}
	if p.bytes {
		opts = append(opts, mpb.AppendDecorators(decor.Name(" "), decor.AverageSpeed(decor.SizeB1024(0), "% .1f")))
	}
	p.bar = p.pool.AddBar(total, opts...)
}

// set says how much is done.
func (p *progress) set(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bar != nil && !p.ended {
		p.bar.SetCurrent(n)
	}
}

// sent is set while no phase has begun: what is sent no longer counts once the server
// says where it is.
func (p *progress) sent(n int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.bar != nil && !p.ended && p.phase == "" {
		p.bar.SetCurrent(n)
	}
}

// step begins a phase with a total of its own.
func (p *progress) step(phase string, done, total int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	if phase != p.phase {
		p.phase = phase
		if p.pool == nil {
			fmt.Fprintf(p.out, "%s: %s\n", p.name, phase)
			return
		}
		p.bar.Abort(true)
		p.start(p.name+" "+phase, total)
	}
	if p.bar != nil {
		if total > 0 {
			p.bar.SetTotal(total, false)
		}
		p.bar.SetCurrent(done)
	}
}

// end removes the bar; it may be called twice.
func (p *progress) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	p.ended = true
	if p.pool != nil {
		p.bar.Abort(true)
		p.pool.Wait()
	}
}
