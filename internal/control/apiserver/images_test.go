package apiserver_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

func TestImageLife(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	data := make([]byte, 3<<20)
	rand.Read(data)
	_, _, raw := w.do("POST", "/v1/images?name=team/tool:1&format=tar", bytes.NewReader(data))
	progress := lines[v1.ImageProgress](t, raw)
	last := progress[len(progress)-1]
	if last.Image == nil || last.Image.Name != "team/tool:1" || last.Image.Bytes != int64(len(data)) || len(progress) < 3 {
		t.Fatalf("%d lines, the last is %+v", len(progress), last)
	}
	digest := last.Image.Digest
	for _, ref := range []string{"team/tool:1", digest} {
		if img := want[v1.Image](w, 200, "GET", "/v1/images/"+ref, nil); img.Digest != digest {
			t.Errorf("%s is %+v", ref, img)
		}
	}
	if l := want[v1.ImageList](w, 200, "GET", "/v1/images", nil); len(l.Items) != 2 || l.Items[1].Name != "team/tool:1" {
		t.Errorf("catalogue %+v", l)
	}
	sb := w.create(map[string]any{"image": digest})
	if p := w.problem("image_in_use", "DELETE", "/v1/images/team/tool:1", nil); p.Status != 409 {
		t.Errorf("%+v", p)
	}
	if img := want[v1.Image](w, 200, "GET", "/v1/images/team/tool:1", nil); img.Digest != digest {
		t.Error("a refused removal took the name")
	}
	// A second name for the same contents can go while the first one is in use.
	w.do("POST", "/v1/images?name=alias", bytes.NewReader(data))
	want[struct{}](w, 204, "DELETE", "/v1/images/alias", nil)
	want[struct{}](w, 204, "DELETE", "/v1/sandboxes/"+sb.ID, nil)
	want[struct{}](w, 204, "DELETE", "/v1/images/team/tool:1", nil)
	w.problem("image_not_found", "GET", "/v1/images/team/tool:1", nil)
	if p := w.problem("image_not_found", "GET", "/v1/images/snap:none", nil); !strings.Contains(p.Hint, "snapshot ls") {
		t.Errorf("the hint of a snapshot that is not there: %q", p.Hint)
	}
	w.problem("image_not_found", "POST", "/v1/sandboxes", map[string]any{"image": "team/tool:1"})
}

func TestImportThatTheEdgeRefusesAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.edge.OnImport(func(context.Context, *aether.Stream, *msg.ImageImportRequest) (v1.Image, error) {
		return v1.Image{}, errs.New(errs.ImageUnsupported, "image.detect", "this is a cat picture")
	})
	if p := w.problem("image_unsupported", "POST", "/v1/images?name=cat", strings.NewReader(strings.Repeat("meow", 1<<20))); p.Status != 422 {
		t.Errorf("%+v", p)
	}
	w.problem("image_not_found", "GET", "/v1/images/cat", nil)
}

// The reason reaches a client that is in the midst of a long upload.
func TestImportThatFailsHalfWay(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.edge.OnImport(func(ctx context.Context, s *aether.Stream, _ *msg.ImageImportRequest) (v1.Image, error) {
		if _, err := s.Recv(ctx); err != nil {
			return v1.Image{}, err
		}
		if err := s.SendMessage(ctx, &msg.ImageProgress{Phase: "receive", Done: 1}); err != nil {
			return v1.Image{}, err
		}
		return v1.Image{}, errs.New(errs.ImageCorrupt, "image.tar", "bad header at offset 512")
	})
	status, _, raw := w.do("POST", "/v1/images?name=torn", io.LimitReader(zeros{}, 20<<20))
	progress := lines[v1.ImageProgress](t, raw)
	if last := progress[len(progress)-1]; status != 200 || last.Error == nil || last.Error.Code != "image_corrupt" || last.Error.RequestID == "" {
		t.Errorf("%d %s", status, raw)
	}
	w.problem("image_not_found", "GET", "/v1/images/torn", nil)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestUploadThatBreaksOffMakesNoImage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ended := make(chan error, 1)
	got := make(chan struct{})
	w.edge.OnImport(func(ctx context.Context, s *aether.Stream, _ *msg.ImageImportRequest) (v1.Image, error) {
		close(got)
		for {
			if _, err := s.Recv(ctx); err != nil {
				ended <- err
				return v1.Image{}, err
			}
		}
	})
	pr, pw := io.Pipe()
	ctx, cancel := context.WithCancel(t.Context())
	req := w.request(ctx, "POST", "/v1/images?name=half", pr)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if res, err := w.client.Do(req); err == nil {
			res.Body.Close()
		}
	}()
	if _, err := pw.Write(make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	<-got
	cancel()
	pw.CloseWithError(context.Canceled) // not the end of the body, which may win over cancel
	<-done
	if err := <-ended; err == io.EOF {
		t.Error("the edge took half an upload for the whole")
	}
	w.problem("image_not_found", "GET", "/v1/images/half", nil)
}

// Some imports run at a time; others wait for their turn, and take it when it comes.
func TestImportsTakeTurns(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *control.Config, _ *controltest.Config) { c.Imports = 2 })
	var running, most atomic.Int32
	full, release := make(chan struct{}, 8), make(chan struct{})
	w.edge.OnImport(func(ctx context.Context, s *aether.Stream, req *msg.ImageImportRequest) (v1.Image, error) {
		n := running.Add(1)
		defer running.Add(-1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		full <- struct{}{}
		<-release
		for {
			if _, err := s.Recv(ctx); errors.Is(err, io.EOF) {
				return v1.Image{Digest: "sha256:" + strings.Repeat("b", 64), Layers: []v1.Layer{}}, nil
			} else if err != nil {
				return v1.Image{}, err
			}
		}
	})
	var wg sync.WaitGroup
	for i := range 6 {
		wg.Go(func() {
			if status, _, raw := w.do("POST", fmt.Sprint("/v1/images?name=i", i), "tar"); status != 200 || !strings.Contains(raw, `"image"`) {
				t.Errorf("import %d: %d %s", i, status, raw)
			}
		})
	}
	<-full
	<-full
	close(release)
	wg.Wait()
	if n := most.Load(); n != 2 {
		t.Errorf("%d imports ran at once, want 2", n)
	}
}

// An upload that sends nothing does not keep its turn.
func TestStalledUploadIsGivenUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *control.Config, _ *controltest.Config) { c.UploadTimeout = 50 * time.Millisecond })
	pr, pw := io.Pipe()
	defer pw.Close()
	go pw.Write([]byte("begin"))
	_, _, raw := w.do("POST", "/v1/images?name=slow", pr)
	progress := lines[v1.ImageProgress](t, raw)
	if p := progress[len(progress)-1].Error; p == nil || p.Code != "deadline_exceeded" || !strings.Contains(p.Message, "upload") {
		t.Errorf("it says %s", raw)
	}
}

// A body that is refused before its end must neither hide the answer behind a broken
// pipe nor be taken for the connection's next request.
func TestARefusedBodyIsAnsweredAndNotTheNextRequest(t *testing.T) {
	w := newWorld(t)
	for i := range 20 {
		for path, body := range map[string]io.Reader{
			"/v1/sandboxes":             strings.NewReader(`{"image":"` + strings.Repeat("x", 4<<20) + `"}`),
			"/v1/sandboxes/batch":       io.MultiReader(strings.NewReader(`{"image":"` + strings.Repeat("x", 4<<20) + `"}`)), // chunked
			"/v1/images?name=x":         io.MultiReader(strings.NewReader(strings.Repeat("refuse me", 1<<18))),
			"/v1/images?name=bad%20one": strings.NewReader(strings.Repeat("x", 4<<20)),
		} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, w.base+path, body)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Authorization", "Bearer "+rootToken)
			req.Header.Set("Content-Type", "application/json")
			resp, err := w.client.Do(req)
			if err != nil {
				t.Fatalf("round %d, %s: %v", i, path, err)
			}
			answer, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || !strings.Contains(string(answer), `"code"`) && !strings.Contains(path, "name=x") {
				t.Errorf("round %d, %s: status %d, %q, %v", i, path, resp.StatusCode, answer, err)
			}
			if status, _, _ := w.do(http.MethodGet, "/v1/health", nil); status != 200 {
				t.Errorf("round %d, after %s: health %d", i, path, status)
			}
		}
	}
}

// An export is the bytes that the edge sends; one that fails half-way cannot be taken for whole.
func TestExport(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.do("POST", "/v1/images?name=team/tool:1", strings.NewReader("any bytes"))
	digest := want[v1.Image](w, 200, "GET", "/v1/images/team/tool:1", nil).Digest
	w.problem("image_not_found", "GET", "/v1/export?name=none", nil)
	if p := w.problem("image_not_found", "GET", "/v1/export?name=team/tool:1", nil); p.Status != 404 {
		t.Errorf("refused by the edge: %+v", p)
	}
	w.problem("missing_right", "GET", "/v1/export?name="+digest, nil, as(w.token(v1.RightRead)))
	data := bytes.Repeat([]byte("tar"), 1<<20)
	var half bool
	w.edge.OnExport(func(ctx context.Context, s *aether.Stream, req *v1.Image) error {
		if req.Digest != digest {
			t.Errorf("asked for %s, want %s", req.Digest, digest)
		}
		for part := range slices.Chunk(data, 200<<10) {
			if err := s.Send(ctx, aether.KindStdout, part); err != nil {
				return err
			}
			if half {
				return errs.New(errs.ImageCorrupt, "image.export", "a block is damaged")
			}
		}
		return nil
	})
	for _, ref := range []string{"team/tool:1", digest} {
		status, h, got := w.do("GET", "/v1/export?name="+ref, nil)
		if status != 200 || h.Get("Content-Type") != "application/x-tar" || got != string(data) {
			t.Errorf("of %s: %d, %d bytes, %v", ref, status, len(got), h)
		}
	}
	half = true
	resp, err := http.DefaultClient.Do(w.request(t.Context(), "GET", "/v1/export?name="+digest, nil))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if got, err := io.ReadAll(resp.Body); err == nil || len(got) >= len(data) {
		t.Errorf("%d bytes of %d read as a whole: %v", len(got), len(data), err)
	}
}
