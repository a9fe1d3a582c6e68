package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"

	"dsec/api/v1/errs"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// fetch downloads a blob, in pieces of at most a slot to sink, resuming where a
// connection broke. Its digest is for the reader to check, its size is checked.
func (s *session) fetch(ctx context.Context, what string, d v1.Descriptor, sink func(p []byte) error) error {
	buf := make([]byte, min(slotSize, max(d.Size, 1)))
	var off int64
	failures, resumes := 0, 0
	for {
		n, err := s.fetchFrom(ctx, what, d, off, buf, sink)
		off += n
		var cut *cutError
		if !errors.As(err, &cut) {
			return err
		}
		if failures++; n > 0 {
			failures = 1
		}
		if resumes++; failures >= s.opts.Retry.Attempts || resumes > s.opts.Retry.Resumes {
			return s.broken(fmt.Sprintf("%s (%d of %d bytes came)", what, off, d.Size), cut, resumes)
		}
		if err := s.opts.Sleep(ctx, s.opts.backoff(failures)); err != nil {
			return err
		}
	}
}

// fetchFrom downloads what follows the first off bytes and returns how many it
// passed on. A cutError says that the rest may be had by asking again.
func (s *session) fetchFrom(ctx context.Context, what string, d v1.Descriptor, off int64, buf []byte, sink func(p []byte) error) (int64, error) {
	if off == d.Size {
		return 0, nil
	}
	header := http.Header{}
	if off > 0 {
		header.Set("Range", fmt.Sprintf("bytes=%d-%d", off, d.Size-1))
	}
	resp, err := s.do(ctx, http.MethodGet, s.url("blobs/"+d.Digest.String()), what, nil, header, http.StatusOK, http.StatusPartialContent)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	skip := off
	if resp.StatusCode == http.StatusPartialContent {
		at, ok := rangeStart(resp.Header.Get("Content-Range"))
		if !ok || at != off {
			return 0, errs.New(errs.RegistryDown, s.phase(), fmt.Sprintf("%s answers the range %.60q instead of that from %d", s.host(), resp.Header.Get("Content-Range"), off))
		}
		skip = 0
	}
	if n := resp.ContentLength; n >= 0 && n != d.Size-off+skip {
		return 0, errs.New(errs.ImageCorrupt, s.phase(), fmt.Sprintf("%s has %d bytes on %s instead of %d", what, n+off-skip, s.host(), d.Size))
	}
	cut := func(got int64, err error) (int64, error) {
		if ctx.Err() != nil {
			return got, context.Cause(ctx)
		}
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return got, &cutError{err, off + got}
	}
	// A registry without ranges begins anew: what is there already passes by.
	if _, err := io.CopyN(io.Discard, resp.Body, skip); err != nil {
		return cut(0, err)
	}
	var got int64
	for off+got < d.Size {
		p := buf[:min(int64(len(buf)), d.Size-off-got)]
		n, rerr := io.ReadFull(resp.Body, p)
		if n > 0 {
			if err := sink(p[:n]); err != nil {
				return got, err
			}
			got += int64(n)
		}
		if rerr != nil {
			return cut(got, rerr)
		}
	}
	if n, _ := io.ReadFull(resp.Body, buf[:1]); n > 0 {
		return got, errs.New(errs.ImageCorrupt, s.phase(), fmt.Sprintf("%s has more than %d bytes on %s", what, d.Size, s.host()))
	}
	return got, nil
}

// rangeStart reads the first number of "bytes 10-19/20".
func rangeStart(v string) (int64, bool) {
	v, ok := strings.CutPrefix(strings.TrimSpace(v), "bytes ")
	from, _, dash := strings.Cut(v, "-")
	n, err := strconv.ParseInt(strings.TrimSpace(from), 10, 64)
	return n, ok && dash && err == nil && n >= 0
}
