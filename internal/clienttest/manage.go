package clienttest

import (
	"archive/tar"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

func (s *Server) importImage(w http.ResponseWriter, r *http.Request) error {
	http.NewResponseController(w).EnableFullDuplex()
	// net/http cannot end a full-duplex request whose body was not read to its end, and a tar ends before it.
	defer io.Copy(io.Discard, r.Body)
	img := v1.Image{Name: r.FormValue("name"), Digest: "sha256:" + strings.Repeat("cd", 32), CreatedAt: time.Now()}
	img.Config.Labels = map[string]string{"format": r.FormValue("format")}
	tr := tar.NewReader(r.Body)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			line(w, v1.ImageProgress{Error: v1.ProblemOf(errs.New(errs.ImageCorrupt, "image.read", "the archive is damaged").Because(err))})
			return nil
		}
		img.Files++
		img.Bytes += h.Size
		line(w, v1.ImageProgress{Phase: "unpack", Done: img.Bytes, Entries: img.Files})
	}
	s.mu.Lock()
	s.images[img.Name] = img
	s.mu.Unlock()
	line(w, v1.ImageProgress{Phase: "commit", Image: &img})
	return nil
}

func (s *Server) listImages(w http.ResponseWriter, _ *http.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := v1.ImageList{Items: []v1.Image{}}
	for _, img := range s.images {
		l.Items = append(l.Items, img)
	}
	slices.SortFunc(l.Items, func(a, b v1.Image) int { return strings.Compare(a.Name, b.Name) })
	return answer(w, http.StatusOK, l)
}

func (s *Server) image(name string) (v1.Image, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	img, ok := s.images[name]
	if !ok {
		return img, errs.New(errs.ImageNotFound, "image.find", fmt.Sprintf("there is no image %q", name))
	}
	return img, nil
}

func (s *Server) getImage(w http.ResponseWriter, r *http.Request) error {
	img, err := s.image(r.PathValue("name"))
	if err != nil {
		return err
	}
	return answer(w, http.StatusOK, img)
}

func (s *Server) removeImage(w http.ResponseWriter, r *http.Request) error {
	if _, err := s.image(r.PathValue("name")); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.images, r.PathValue("name"))
	s.mu.Unlock()
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) snapshot(w http.ResponseWriter, r *http.Request) error {
	var req v1.SnapshotRequest
	if err := body(r, &req); err != nil {
		return err
	}
	b, err := s.find(r.PathValue("id"))
	if err != nil {
		return err
	}
	s.mu.Lock()
	name := v1.SnapshotPrefix + req.Name
	if req.Name == "" {
		name = fmt.Sprintf("%smade-%d", v1.SnapshotPrefix, len(s.images))
	}
	if req.Image != "" {
		name = req.Image
	}
	img := v1.Image{Name: name, Digest: fmt.Sprintf("sha256:%064x", len(s.images)), CreatedAt: time.Now(), Snapshot: &v1.Snapshot{Source: b.info.ID}}
	s.images[name] = img
	s.mu.Unlock()
	line(w, v1.ImageProgress{Phase: "pack", Done: 1})
	line(w, v1.ImageProgress{Phase: "commit", Image: &img})
	return nil
}

func (s *Server) listSnapshots(w http.ResponseWriter, _ *http.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := v1.ImageList{Items: []v1.Image{}}
	for _, img := range s.images {
		if img.Snapshot != nil {
			l.Items = append(l.Items, img)
		}
	}
	return answer(w, http.StatusOK, l)
}

func (s *Server) removeSnapshot(w http.ResponseWriter, r *http.Request) error {
	name := v1.SnapshotPrefix + r.PathValue("name")
	if _, err := s.image(name); err != nil {
		return err
	}
	s.mu.Lock()
	delete(s.images, name)
	s.mu.Unlock()
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) theNode() v1.Node {
	s.mu.Lock()
	defer s.mu.Unlock()
	paused := int64(0)
	for _, b := range s.boxes {
		if b.info.State == v1.StatePaused {
			paused++
		}
	}
	return v1.Node{
		Paused: paused, Swap: v1.Swap{TotalBytes: 8 << 30, UsedBytes: paused * Freed}, FreeMemory: 10 << 30,
		ID: Node, Epoch: 1, Hostname: "host", Version: "test", Backends: []v1.Backend{v1.BackendContainer}, StartedAt: time.Now(), Ready: true,
		Capacity: v1.Resources{Slots: 100, CPUMillis: 2000, MemoryBytes: 4 << 30}, Sandboxes: int64(len(s.boxes)),
	}
}

func (s *Server) nodes(w http.ResponseWriter, _ *http.Request) error {
	return answer(w, http.StatusOK, v1.NodeList{Items: []v1.Node{s.theNode()}})
}

func (s *Server) node(w http.ResponseWriter, r *http.Request) error {
	if r.PathValue("id") != Node {
		return errs.New(errs.NodeNotFound, "node.find", "there is no node "+r.PathValue("id"))
	}
	return answer(w, http.StatusOK, s.theNode())
}

func (s *Server) createToken(w http.ResponseWriter, r *http.Request) error {
	var req v1.TokenRequest
	if err := body(r, &req); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	t := v1.Token{ID: fmt.Sprintf("t%d", len(s.tokens)+1), Name: req.Name, Project: "root", Rights: req.Rights, CreatedAt: time.Now()}
	if req.TTL > 0 {
		end := t.CreatedAt.Add(req.TTL.Duration())
		t.ExpiresAt = &end
	}
	s.tokens[t.ID] = t
	t.Secret = "secret-" + t.ID
	return answer(w, http.StatusCreated, t)
}

func (s *Server) listTokens(w http.ResponseWriter, _ *http.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	l := v1.TokenList{Items: []v1.Token{}}
	for _, t := range s.tokens {
		l.Items = append(l.Items, t)
	}
	return answer(w, http.StatusOK, l)
}

func (s *Server) removeToken(w http.ResponseWriter, r *http.Request) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.tokens[r.PathValue("id")]; !ok {
		return errs.New(errs.TokenNotFound, "token.find", "there is no token "+r.PathValue("id"))
	}
	delete(s.tokens, r.PathValue("id"))
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) health(w http.ResponseWriter, _ *http.Request) error {
	return answer(w, http.StatusOK, v1.Health{OK: true, Version: "test", Checks: map[string]string{"node": "ok"}})
}

func (s *Server) metrics(w http.ResponseWriter, _ *http.Request) error {
	_, err := io.WriteString(w, "# TYPE process_resident_memory_bytes gauge\nprocess_resident_memory_bytes 1.048576e+06\n"+
		"go_memstats_heap_inuse_bytes 524288\ngo_goroutines 10\ngo_threads 8\nprocess_open_fds 20\n")
	return err
}
