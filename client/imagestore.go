package client

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// ImageUsage says what images take, in the object store and on nodes.
func (c *Client) ImageUsage(ctx context.Context) (*v1.ImageUsage, error) {
	var u v1.ImageUsage
	if err := c.call(ctx, http.MethodGet, "/v1/store/usage", nil, nil, &u); err != nil {
		return nil, fmt.Errorf("measure images: %w", err)
	}
	return &u, nil
}

// CollectImages removes from the object store what no image needs and is older than grace,
// and returns the last pass; each, if not nil, is told of every pass.
func (c *Client) CollectImages(ctx context.Context, grace time.Duration, each func(v1.CollectReport)) (*v1.CollectReport, error) {
	q := url.Values{"grace_s": {strconv.FormatInt(int64(grace/time.Second), 10)}}
	for r, err := range streamBody[v1.CollectReport](ctx, c, http.MethodPost, "/v1/store/collect", q, http.Header{}, nil) {
		if err == nil && r.Error != nil {
			err = r.Error.Err()
		}
		if err != nil {
			return nil, fmt.Errorf("collect images: %w", err)
		}
		if each != nil {
			each(r)
		}
		if r.Done {
			return &r, nil
		}
	}
	return nil, fmt.Errorf("collect images: %w", errs.New(errs.ConnectionLost, "client.read", "the answer ended without a result"))
}

// WarmOptions changes what WarmImage does.
type WarmOptions struct {
	All  bool   // everything, not only what the image's first start read
	Node string // one node; empty: all
	// Progress is called with each line of the server, from one goroutine.
	Progress func(v1.WarmProgress)
}

// WarmImage has nodes fetch an image in advance and returns the last line of each. The
// error is that of the first node that failed.
func (c *Client) WarmImage(ctx context.Context, name string, o WarmOptions) ([]v1.WarmProgress, error) {
	q := url.Values{"image": {name}, "all": {strconv.FormatBool(o.All)}}
	if o.Node != "" {
		q.Set("node", o.Node)
	}
	var last []v1.WarmProgress
	var failed error
	for p, err := range streamBody[v1.WarmProgress](ctx, c, http.MethodPost, "/v1/store/warm", q, http.Header{}, nil) {
		if err != nil {
			return last, about("warm image", name, err)
		}
		if o.Progress != nil {
			o.Progress(p)
		}
		if !p.End {
			continue
		}
		last = append(last, p)
		if p.Error != nil && failed == nil {
			failed = about("warm image", name, p.Error.Err())
		}
	}
	return last, failed
}

// EvictImage has nodes drop what they have of an image; an empty node means all. The error
// is that of the first node that failed.
func (c *Client) EvictImage(ctx context.Context, name, node string) ([]v1.EvictReport, error) {
	q := url.Values{"image": {name}}
	if node != "" {
		q.Set("node", node)
	}
	var r v1.EvictReports
	if err := c.call(ctx, http.MethodPost, "/v1/store/evict", q, nil, &r); err != nil {
		return nil, about("evict image", name, err)
	}
	for _, n := range r.Items {
		if n.Error != nil {
			return r.Items, about("evict image", name, n.Error.Err())
		}
	}
	return r.Items, nil
}

// CollapseOptions changes what CollapseImage does.
type CollapseOptions struct {
	Below int64 // layers that are smaller are merged; 0: [v1.DefaultCollapse]
	// Progress is called from one goroutine with each report of the server.
	Progress func(v1.ImageProgress)
}

// CollapseImage merges neighbouring small layers of an image and returns it as it is then. Its name,
// its digest and what it shows stay.
func (c *Client) CollapseImage(ctx context.Context, name string, o CollapseOptions) (*Image, error) {
	q := url.Values{"image": {name}}
	if o.Below != 0 {
		q.Set("below", strconv.FormatInt(o.Below, 10))
	}
	img, err := imageOf(streamBody[v1.ImageProgress](ctx, c, http.MethodPost, "/v1/store/collapse", q, http.Header{}, nil), o.Progress)
	if err != nil {
		return nil, about("collapse image", name, err)
	}
	return img, nil
}
