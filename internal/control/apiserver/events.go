package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"mime"
	"net/http"
	"strconv"
	"strings"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control/watcher"
)

const (
	eventsPerRead  = 256
	eventKeepAlive = 15 * time.Second
)

type eventsInput struct {
	From   uint64   `query:"from" doc:"Events after this revision, as a list or an event gave it. Not given: all that are kept."`
	Follow bool     `query:"follow" doc:"Go on with new events as they happen."`
	Label  []string `query:"label,explode" maxItems:"16" doc:"key=value; only events of sandboxes that have all given."`
	// LastEventID is what a browser's EventSource sends when it connects again.
	LastEventID string `header:"Last-Event-ID" doc:"As from, for server-sent events."`
}

// events streams what happened after a revision: nothing missing, nothing twice.
func (s *Server) events(ctx context.Context, req *request, hr *http.Request, in *eventsInput) error {
	labels, err := parseLabels(in.Label)
	if err != nil {
		return err
	}
	from := in.From
	if in.LastEventID != "" {
		if from, err = strconv.ParseUint(in.LastEventID, 10, 64); err != nil {
			return badField("Last-Event-ID", "is not a revision")
		}
	}
	filter := watcher.EventFilter{Labels: labels}
	_, leave, err := s.quotas.connect(req.principal.TokenID)
	if err != nil {
		return err
	}
	defer leave()
	// Read before the header goes out, so that a revision that is not kept is a plain error.
	batch, next, err := s.cfg.Registry.Events(from, filter, eventsPerRead)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.drain, func() { cancel(errs.New(errs.ShuttingDown, "events", "the server is stopping")) })()
	defer s.sessions.add(req.principal, cancel)()
	out := s.newEventWriter(req, hr)
	defer out.lines.end()
	if err := out.lines.start(); err != nil {
		return err
	}
	for {
		if err := out.events(batch); err != nil {
			return err
		}
		if len(batch) == 0 && next >= s.cfg.Registry.Revision() {
			if !in.Follow {
				return nil
			}
			if err := s.awaitEvent(ctx, out, next); err != nil {
				return out.fail(req, err)
			}
		}
		if batch, next, err = s.cfg.Registry.Events(next, filter, eventsPerRead); err != nil {
			return out.fail(req, err)
		}
	}
}

// awaitEvent waits for a revision above rev. Its error is why the stream has to end.
func (s *Server) awaitEvent(ctx context.Context, out *eventWriter, rev uint64) error {
	for {
		wctx, cancel := context.WithTimeout(ctx, eventKeepAlive)
		err := s.cfg.Registry.Wait(wctx, rev)
		cancel()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		}
		if err := out.keepAlive(); err != nil {
			return err
		}
	}
}

// eventWriter writes events as lines or as server-sent events.
type eventWriter struct {
	lines *lines
	sse   bool
	buf   bytes.Buffer
}

func (s *Server) newEventWriter(req *request, hr *http.Request) *eventWriter {
	w := &eventWriter{sse: wantsSSE(hr.Header.Get("Accept"))}
	contentType := "application/x-ndjson"
	if w.sse {
		contentType = "text/event-stream"
	}
	w.lines = s.newLines(req, contentType)
	return w
}

func wantsSSE(accept string) bool {
	for part := range strings.SplitSeq(accept, ",") {
		if t, _, err := mime.ParseMediaType(part); err == nil && t == "text/event-stream" {
			return true
		}
	}
	return false
}

func (w *eventWriter) events(batch []v1.Event) error {
	if len(batch) == 0 {
		return nil
	}
	w.buf.Reset()
	for i := range batch {
		raw, err := json.Marshal(&batch[i])
		if err != nil {
			return errs.Wrap(errs.InternalError, "events", "encode", err)
		}
		if w.sse {
			fmt.Fprintf(&w.buf, "id: %d\nevent: %s\ndata: %s\n\n", batch[i].Revision, batch[i].Type, raw)
		} else {
			w.buf.Write(raw)
			w.buf.WriteByte('\n')
		}
	}
	return w.lines.raw(w.buf.Bytes())
}

// keepAlive keeps proxies from closing a quiet stream, in the one form that has comments.
func (w *eventWriter) keepAlive() error {
	if !w.sse {
		return nil
	}
	return w.lines.raw([]byte(": still here\n\n"))
}

// fail ends the stream with err as its last line, and returns err.
func (w *eventWriter) fail(req *request, err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, errs.Canceled) {
		return err // the client is gone
	}
	raw, merr := json.Marshal(v1.Event{Time: time.Now().UTC(), Error: problemOf(req, err)})
	if merr != nil {
		return merr
	}
	if w.sse {
		raw = fmt.Appendf(nil, "event: error\ndata: %s\n\n", raw)
	} else {
		raw = append(raw, '\n')
	}
	if werr := w.lines.raw(raw); werr != nil {
		return werr
	}
	return err
}
