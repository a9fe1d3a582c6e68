// Package trace keeps in an object store what the first start of an image read of its
// data, so that other nodes can fetch that in advance. A trace is a hint: one that is lost
// or damaged costs time and nothing else. It knows data blobs by digest, and no kernel.
package trace

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"slices"
	"strings"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
)

const (
	prefix = "trace/"
	limit  = 8 << 20 // bytes of one trace
	phase  = "image.trace"
)

// Range is one run of bytes that readers wanted.
type Range struct {
	Off  int64 `json:"off"`
	Len  int64 `json:"len"`
	AtMS int64 `json:"at_ms"` // after the recording began
}

// Trace is what was read, in order, by data blob.
type Trace map[string][]Range

// First returns a trace of what was read first, up to so many bytes.
func (t Trace) First(limit int64) Trace {
	type read struct {
		blob string
		Range
	}
	var all []read
	for d, list := range t {
		for _, r := range list {
			all = append(all, read{d, r})
		}
	}
	slices.SortStableFunc(all, func(a, b read) int {
		return cmp.Or(cmp.Compare(a.AtMS, b.AtMS), strings.Compare(a.blob, b.blob))
	})
	out := Trace{}
	for _, r := range all {
		if r.Len <= 0 || r.Len > limit {
			break
		}
		limit -= r.Len
		out[r.blob] = append(out[r.blob], r.Range)
	}
	return out
}

func key(image string) string { return prefix + strings.TrimPrefix(image, "sha256:") }

// Put keeps the trace of an image, by digest, unless there is one or it is empty.
func Put(ctx context.Context, s object.Store, image string, t Trace) error {
	if len(t) == 0 {
		return nil
	}
	_, err := s.Stat(ctx, key(image))
	if !errors.Is(err, errs.ObjectNotFound) {
		return err
	}
	p, err := json.Marshal(t)
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "encode trace", err)
	}
	if len(p) > limit {
		return errs.New(errs.BodyTooLarge, phase, "the trace of image "+image+" is too large")
	}
	return s.Put(ctx, key(image), int64(len(p)), bytes.NewReader(p))
}

// Get returns the trace of an image, or nil if there is none that can be used.
func Get(ctx context.Context, s object.Store, image string) (Trace, error) {
	p, err := object.ReadAll(ctx, s, key(image), 0, -1, limit)
	if errors.Is(err, errs.ObjectNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var t Trace
	if json.Unmarshal(p, &t) != nil {
		return nil, nil
	}
	return t, nil
}

// Clean removes the traces of all images but those of keep, by digest.
func Clean(ctx context.Context, s object.Store, keep map[string]bool) (removed int, err error) {
	var gone []string
	err = s.List(ctx, prefix, func(i object.Info) error {
		if !keep["sha256:"+strings.TrimPrefix(i.Key, prefix)] {
			gone = append(gone, i.Key)
		}
		return nil
	})
	for _, k := range gone {
		if err == nil {
			err = s.Delete(ctx, k)
		}
	}
	return len(gone), err
}
