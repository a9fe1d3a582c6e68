package peers

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"

	"dsec/internal/bench"
)

// DockerSocket is where Docker's engine listens unless told otherwise.
const DockerSocket = "/var/run/docker.sock"

// ErrNoDocker says that there is nothing to compare with.
var ErrNoDocker = errors.New("no Docker engine here")

// Docker is a bench.Target: containers without a network, kept alive by one sleeping
// process, as a sandbox is by its guest.
type Docker struct {
	http    *http.Client
	image   string
	version string
}

// NewDocker connects to the engine at socket and checks that it answers and has the image.
func NewDocker(ctx context.Context, socket, image string) (*Docker, error) {
	if _, err := os.Stat(socket); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoDocker, err)
	}
	d := &Docker{image: image, http: &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, "unix", socket)
		},
		MaxIdleConnsPerHost: 256,
		DisableCompression:  true,
	}}}
	var v struct{ Version string }
	if err := d.call(ctx, http.MethodGet, "/version", nil, &v); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoDocker, err)
	}
	d.version = v.Version
	if err := d.call(ctx, http.MethodGet, "/images/"+url.PathEscape(image)+"/json", nil, nil); err != nil {
		return nil, fmt.Errorf("the Docker engine has no image %s (docker pull or import it first): %w", image, err)
	}
	return d, nil
}

// Name implements bench.Target.
func (d *Docker) Name() string { return "docker " + d.version }

// Create implements bench.Target: create and start.
func (d *Docker) Create(ctx context.Context) (bench.Box, error) {
	spec := map[string]any{
		"Image": d.image, "Entrypoint": []string{"sleep"}, "Cmd": []string{"2147483647"},
		"HostConfig": map[string]any{"NetworkMode": "none"},
	}
	var made struct{ ID string }
	if err := d.call(ctx, http.MethodPost, "/containers/create", spec, &made); err != nil {
		return nil, fmt.Errorf("create container: %w", err)
	}
	c := &container{d, made.ID}
	if err := d.call(ctx, http.MethodPost, "/containers/"+c.id+"/start", nil, nil); err != nil {
		c.Remove(context.WithoutCancel(ctx))
		return nil, fmt.Errorf("start container: %w", err)
	}
	return c, nil
}

type container struct {
	d  *Docker
	id string
}

// Exec implements bench.Box: the three calls that it takes to know the exit code.
func (c *container) Exec(ctx context.Context, path string, args ...string) error {
	spec := map[string]any{"Cmd": append([]string{path}, args...), "AttachStdout": true, "AttachStderr": true}
	var made struct{ ID string }
	if err := c.d.call(ctx, http.MethodPost, "/containers/"+c.id+"/exec", spec, &made); err != nil {
		return fmt.Errorf("create exec: %w", err)
	}
	// The answer's end is the command's.
	if err := c.d.call(ctx, http.MethodPost, "/exec/"+made.ID+"/start", map[string]any{"Detach": false}, nil); err != nil {
		return fmt.Errorf("start exec: %w", err)
	}
	var end struct {
		Running  bool
		ExitCode int
	}
	if err := c.d.call(ctx, http.MethodGet, "/exec/"+made.ID+"/json", nil, &end); err != nil {
		return fmt.Errorf("inspect exec: %w", err)
	}
	if end.Running || end.ExitCode != 0 {
		return fmt.Errorf("%s: running %t, exit code %d", path, end.Running, end.ExitCode)
	}
	return nil
}

// Remove implements bench.Box.
func (c *container) Remove(ctx context.Context) error {
	if err := c.d.call(ctx, http.MethodDelete, "/containers/"+c.id+"?force=true", nil, nil); err != nil {
		return fmt.Errorf("remove container: %w", err)
	}
	return nil
}

// call does one request and reads the whole answer.
func (d *Docker) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://docker"+path, body)
	if err != nil {
		return err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := d.http.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 400 {
		var e struct{ Message string }
		if json.Unmarshal(b, &e) != nil || e.Message == "" {
			e.Message = string(b[:min(len(b), 200)])
		}
		return fmt.Errorf("%s: %s", resp.Status, e.Message)
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(b, out)
}
