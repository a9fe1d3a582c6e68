package container

import (
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"time"
)

// What guests say themselves is short, but each sandbox that dies of a panic adds to it, and a
// guest that was taken over could write without end.
const (
	guestLogMost  = 16 << 20
	guestLogKept  = 1 << 20 // of the end, in another file, when it gets more
	guestLogEvery = time.Second
)

// guestLog is the file that all guests have as their standard output and error: for panics, in
// the main. Its size is looked at every so often; between two looks, only the disk limits it.
type guestLog struct {
	file *os.File // for appending; the guests have it too, so that it can only be cut, not exchanged
	most int64
	stop func()
	wg   sync.WaitGroup
}

func openGuestLog(path string, most int64, every time.Duration) (*guestLog, error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	stop := make(chan struct{})
	l := &guestLog{file: f, most: most, stop: sync.OnceFunc(func() { close(stop) })}
	_ = l.trim() // tried again at the next look
	l.wg.Go(func() {
		tick := time.NewTicker(every)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				_ = l.trim()
			case <-stop:
				return
			}
		}
	})
	return l, nil
}

// trim empties the file if it is too large, and keeps its end beside it. On a full disk it
// keeps nothing.
func (l *guestLog) trim() error {
	st, err := l.file.Stat()
	if err != nil || st.Size() <= l.most {
		return err
	}
	return errors.Join(l.keep(st.Size()), l.file.Truncate(0))
}

func (l *guestLog) keep(size int64) error {
	kept := min(size, guestLogKept)
	f, err := os.OpenFile(l.file.Name()+".old", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, io.NewSectionReader(l.file, size-kept, kept))
	return errors.Join(err, f.Close())
}

// tail returns the end of the log, for an error's text.
func (l *guestLog) tail() string {
	const most = 2000
	st, err := l.file.Stat()
	if err != nil || st.Size() == 0 {
		return ""
	}
	data := make([]byte, min(most, st.Size()))
	n, err := l.file.ReadAt(data, st.Size()-int64(len(data)))
	if err != nil && err != io.EOF {
		return ""
	}
	return "; the guests' log " + l.file.Name() + " ends: " + strings.TrimSpace(string(data[:n]))
}

// fd is what guests are started with.
func (l *guestLog) fd() int { return int(l.file.Fd()) }

func (l *guestLog) close() {
	l.stop()
	l.wg.Wait()
	l.file.Close()
}
