package apiserver

import (
	"errors"
	"io"
	"net/http"
	"sync/atomic"
	"time"

	"dsec/api/v1/errs"
)

// After a failure the rest of a request's body is read for a while: a client that is
// still sending would otherwise get a broken pipe instead of the reason.
const (
	drainBytes = 64 << 20
	drainTime  = 3 * time.Second
)

// drain reads what is left of a body once the answer is out.
func drain(rc *http.ResponseController, body io.Reader) {
	_ = rc.Flush()
	_ = rc.SetReadDeadline(time.Now().Add(drainTime))
	_, _ = io.Copy(io.Discard, io.LimitReader(body, drainBytes))
}

// tracked is a body that remembers whether its end was reached.
type tracked struct {
	io.Reader
	ended atomic.Bool
}

// Read implements io.Reader.
func (t *tracked) Read(p []byte) (int, error) {
	n, err := t.Reader.Read(p)
	if err == io.EOF {
		t.ended.Store(true)
	}
	return n, err
}

// Close does nothing: who has had enough closes a body, after which the rest of it could
// not be read. net/http closes its own.
func (t *tracked) Close() error { return nil }

// upload hands a body on through a pipe, whose reader can be interrupted at any time.
// With a deadline on the connection instead, the body could not be read any further,
// and net/http would take what follows for the next request.
type upload struct {
	r     *io.PipeReader
	done  chan struct{} // closed when the body is no longer read
	ended atomic.Bool
}

var errInterrupted = errors.New("nobody reads the upload any more")

// startUpload reads body until it ends, or sends nothing for idle.
func startUpload(body io.Reader, idle time.Duration) *upload {
	r, w := io.Pipe()
	u := &upload{r: r, done: make(chan struct{})}
	body = &watched{Reader: body, limit: idle, stalled: func() {
		w.CloseWithError(errs.New(errs.DeadlineExceeded, "image.import", "nothing came of the upload for "+idle.String()))
	}}
	go func() {
		defer close(u.done)
		_, err := io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{body}, make([]byte, 64<<10))
		u.ended.Store(err == nil)
		w.CloseWithError(err) // nil: the end of the body
	}()
	return u
}

// watched calls stalled when one Read takes longer than limit.
type watched struct {
	io.Reader
	limit   time.Duration
	stalled func()
}

// Read implements io.Reader.
func (w *watched) Read(p []byte) (int, error) {
	defer time.AfterFunc(w.limit, w.stalled).Stop()
	return w.Reader.Read(p)
}

func (u *upload) interrupt() { u.r.CloseWithError(errInterrupted) }

// finish is called once the answer is out.
func (u *upload) finish(rc *http.ResponseController, body io.Reader) {
	u.interrupt()
	if !u.ended.Load() {
		_ = rc.SetReadDeadline(time.Now().Add(drainTime))
		<-u.done
		drain(rc, body)
	}
}
