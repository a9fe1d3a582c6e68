package apiserver

import (
	"encoding/json"
	"net/http"
	"time"

	"dsec/api/v1/errs"
)

// lines writes one JSON document per line, each flushed. A reader that takes none for the
// timeout ends the request: nobody else waits for it.
type lines struct {
	req     *request
	rc      *http.ResponseController
	enc     *json.Encoder
	timeout time.Duration
}

func (s *Server) newLines(req *request, contentType string) *lines {
	h := req.Header()
	h.Set("Content-Type", contentType)
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // proxies must not hold lines back
	enc := json.NewEncoder(req)
	enc.SetEscapeHTML(false)
	return &lines{req: req, rc: http.NewResponseController(req), enc: enc, timeout: s.cfg.StreamTimeout}
}

// write sends one document.
func (l *lines) write(v any) error {
	if err := l.arm(); err != nil {
		return err
	}
	if err := l.enc.Encode(v); err != nil {
		return lostReader(err)
	}
	return l.flush()
}

func (l *lines) raw(b []byte) error {
	if err := l.arm(); err != nil {
		return err
	}
	if _, err := l.req.Write(b); err != nil {
		return lostReader(err)
	}
	return l.flush()
}

// start sends the header, so that the client knows that the stream is open.
func (l *lines) start() error {
	if err := l.arm(); err != nil {
		return err
	}
	l.req.WriteHeader(http.StatusOK)
	return l.flush()
}

func (l *lines) arm() error {
	return lostReader(l.rc.SetWriteDeadline(time.Now().Add(l.timeout)))
}

func (l *lines) flush() error { return lostReader(l.rc.Flush()) }

// end lifts the deadline, which would hit the connection's next request.
func (l *lines) end() { _ = l.rc.SetWriteDeadline(time.Time{}) }

func lostReader(err error) error {
	if err == nil {
		return nil
	}
	return errs.New(errs.RequestCanceled, "response.write", "the reader went away or stopped reading").Because(err)
}
