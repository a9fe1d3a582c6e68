package container

import (
	"bytes"
	"encoding/binary"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"dsec/internal/image/lazy"
)

// Readers counts what sandboxes read of their images' data (package account).
type Readers interface {
	// Open begins a sandbox's account: the processes in the PID namespace of pid are its.
	Open(id string, pid int, before lazy.Use) error
	// Of returns what the sandbox used.
	Of(id string) lazy.Use
	// Changed calls told for each open account with more on it than when told last returned true for it.
	Changed(told func(id string) bool)
	// Close ends the account.
	Close(id string)
}

// readsFile, in a sandbox's directory, has what the sandbox used, for the next process
// of this node. What was counted since it was written last is lost with the process.
const (
	readsFile = "reads"
	saveEvery = time.Second
)

// reads is the account of one instance.
type reads struct {
	mu    sync.Mutex
	open  bool
	saved lazy.Use
}

// count begins the sandbox's account with what an earlier process counted.
func (i *instance) count(before lazy.Use) {
	if i.b.cfg.Readers == nil {
		return
	}
	i.reads.mu.Lock()
	defer i.reads.mu.Unlock()
	// It fails only for a process that has ended, and that does not read.
	i.reads.open = i.b.cfg.Readers.Open(i.id, i.handle.PID, before) == nil
	i.reads.saved = before
}

// stopCounting ends the account; nothing is written to the sandbox's directory any more.
func (i *instance) stopCounting() {
	i.reads.mu.Lock()
	defer i.reads.mu.Unlock()
	if i.reads.open {
		i.reads.open = false
		i.b.cfg.Readers.Close(i.id)
	}
}

// used is what the sandbox read of its image so far.
func (i *instance) used() lazy.Use {
	if i.b.cfg.Readers == nil {
		return lazy.Use{}
	}
	return i.b.cfg.Readers.Of(i.id)
}

// saveReads writes what the sandbox read, if that is more than is in the file.
func (i *instance) saveReads() error {
	i.reads.mu.Lock()
	defer i.reads.mu.Unlock()
	use := i.used()
	if !i.reads.open || use == i.reads.saved {
		return nil
	}
	p, err := binary.Append(nil, binary.LittleEndian, use)
	if err != nil {
		return err
	}
	fd, err := unix.Openat(int(i.b.dir.Fd()), filepath.Join(i.id, readsFile), unix.O_WRONLY|unix.O_CREAT|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	// One write of a few bytes: there is no half of it for whoever reads after a crash.
	if _, err := unix.Pwrite(fd, p, 0); err != nil {
		return err
	}
	i.reads.saved = use
	return nil
}

// loadReads reads what an earlier process saved; nothing, if that is not all there.
func (b *Backend) loadReads(id string) (use lazy.Use) {
	p, err := os.ReadFile(filepath.Join(b.dir.Name(), id, readsFile))
	if err != nil {
		return use
	}
	if err := binary.Read(bytes.NewReader(p), binary.LittleEndian, &use); err != nil {
		return lazy.Use{}
	}
	return use
}

// startSaving saves what all sandboxes read every so often, until the function that it
// returns is called.
func (b *Backend) startSaving(every time.Duration) (stop func()) {
	end := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		t := time.NewTicker(every)
		defer t.Stop()
		for {
			select {
			case <-t.C:
				b.saveAllReads()
			case <-end:
				return
			}
		}
	})
	return func() {
		close(end)
		wg.Wait()
	}
}

// saveAllReads tries to save what changed: what a sandbox read is nothing to fail for. However many sandboxes
// there are, only those that read cost something.
func (b *Backend) saveAllReads() {
	b.cfg.Readers.Changed(func(id string) bool {
		b.mu.Lock()
		i := b.instances[id]
		b.mu.Unlock()
		return i != nil && i.saveReads() == nil // else it is being created, or tried again next time
	})
}
