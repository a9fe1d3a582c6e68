package client

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	"strings"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// SnapshotOptions changes a snapshot.
type SnapshotOptions struct {
	// LeaveOut are patterns of paths that the snapshot must not have: "/etc/app.key",
	// "*.pem", ".aws/credentials", "/var/cache/**". Without a leading slash they hold at any depth.
	LeaveOut []string
	// Progress is called from one goroutine with each report of the server.
	Progress func(v1.ImageProgress)
}

// Snapshot keeps the files that the sandbox changed as an image, snap:NAME, from which
// [Client.Create] starts sandboxes. The sandbox stands still for a moment and runs on.
// Without a name one is made up.
func (s *Sandbox) Snapshot(ctx context.Context, name string, o SnapshotOptions) (*Image, error) {
	if err := element(s.id, false, errs.SandboxNotFound); err != nil {
		return nil, err
	}
	img, err := s.c.makeImage(ctx, "/v1/sandboxes/"+s.id+"/snapshot", v1.SnapshotRequest{Name: name, LeaveOut: o.LeaveOut}, o.Progress)
	if err != nil {
		return nil, about("snapshot sandbox", s.id, err)
	}
	return img, nil
}

// MakeImage is Snapshot with a plain image as its result, called name, which replaces one that has the
// name. It says of running it what config says; nil: what the sandbox's image and spec did.
func (s *Sandbox) MakeImage(ctx context.Context, name string, config *v1.ImageConfig, o SnapshotOptions) (*Image, error) {
	if err := element(s.id, false, errs.SandboxNotFound); err != nil {
		return nil, err
	}
	img, err := s.c.makeImage(ctx, "/v1/sandboxes/"+s.id+"/snapshot", v1.SnapshotRequest{Image: name, Config: config, LeaveOut: o.LeaveOut}, o.Progress)
	if err != nil {
		return nil, about("make image", name, err)
	}
	return img, nil
}

// makeImage does a request that tells its progress and ends with an image.
func (c *Client) makeImage(ctx context.Context, path string, req any, progress func(v1.ImageProgress)) (*Image, error) {
	return imageOf(stream[v1.ImageProgress](ctx, c, http.MethodPost, path, nil, req), progress)
}

// imageOf reads progress up to the image at its end.
func imageOf(lines iter.Seq2[v1.ImageProgress, error], progress func(v1.ImageProgress)) (*Image, error) {
	for p, err := range lines {
		switch {
		case err != nil:
			return nil, err
		case p.Error != nil:
			return nil, p.Error.Err()
		case p.Image != nil:
			return p.Image, nil
		case progress != nil:
			progress(p)
		}
	}
	return nil, errs.New(errs.ConnectionLost, "client.read", "the answer ended without a result")
}

// Snapshots returns all snapshots, by name.
func (c *Client) Snapshots(ctx context.Context) ([]Image, error) {
	var l v1.ImageList
	if err := c.call(ctx, http.MethodGet, "/v1/snapshots", nil, nil, &l); err != nil {
		return nil, fmt.Errorf("list snapshots: %w", err)
	}
	return l.Items, nil
}

// GetSnapshot returns one snapshot. Names may have their snap: or not.
func (c *Client) GetSnapshot(ctx context.Context, name string) (*Image, error) {
	path, err := snapshotPath(name)
	if err != nil {
		return nil, err
	}
	var img Image
	if err := c.call(ctx, http.MethodGet, path, nil, nil, &img); err != nil {
		return nil, about("get snapshot", name, err)
	}
	return &img, nil
}

// DeleteSnapshot removes a snapshot that nothing needs: errs.ImageInUse lists what does.
func (c *Client) DeleteSnapshot(ctx context.Context, name string) error {
	path, err := snapshotPath(name)
	if err != nil {
		return err
	}
	if err := c.call(ctx, http.MethodDelete, path, nil, nil, nil); err != nil {
		return about("delete snapshot", name, err)
	}
	return nil
}

func snapshotPath(name string) (string, error) {
	name = strings.TrimPrefix(name, v1.SnapshotPrefix)
	return "/v1/snapshots/" + name, element(name, false, errs.ImageNotFound)
}
