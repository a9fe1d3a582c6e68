package apiserver

import (
	"context"
	"net/http"
	"sync"

	v1 "dsec/api/v1"
	"dsec/internal/image/chunk"
)

type usageOutput struct{ Body v1.ImageUsage }

// usage measures what images take in the object store and on the nodes.
func (s *Server) usage(ctx context.Context, _ *request, _ *struct{}) (*usageOutput, error) {
	if s.cfg.Objects == nil {
		return nil, noObjects("image.usage")
	}
	out := v1.ImageUsage{Items: []v1.ImageUse{}, Nodes: []v1.ImageCache{}}
	cached := map[string]map[string]int64{} // layer, node
	for _, n := range s.cfg.Registry.Nodes() {
		c, err := s.cfg.Edges.ImageCache(ctx, n)
		if err != nil {
			return nil, err
		}
		for _, l := range c.Layers {
			if cached[l.MetaDigest] == nil {
				cached[l.MetaDigest] = map[string]int64{}
			}
			cached[l.MetaDigest][n.ID] += l.CachedBytes
		}
		c.Layers = nil
		out.Nodes = append(out.Nodes, c)
	}
	images := s.catalog.list("")
	var layers []chunk.Layer
	number := map[chunk.Layer]int{}
	having := map[chunk.Layer]map[string]bool{} // which images
	for _, img := range images {
		for _, l := range img.Layers {
			c := chunkLayer(l)
			if l.MetaObject == "" {
				continue
			}
			if _, ok := number[c]; !ok {
				number[c] = len(layers)
				layers = append(layers, c)
				having[c] = map[string]bool{}
			}
			having[c][img.Digest] = true
		}
	}
	u, err := chunk.MeasureUsage(ctx, s.cfg.Objects, layers)
	if err != nil {
		return nil, err
	}
	out.StoredBytes, out.Builds = u.Stored, s.buildUsage()
	for _, img := range images {
		use := v1.ImageUse{Name: img.Name, Digest: img.Digest, Cached: map[string]int64{}}
		for _, l := range img.Layers {
			use.Bytes += l.MetaBytes + l.DataBytes
			for node, n := range cached[l.MetaDigest] {
				use.Cached[node] += n
			}
			c := chunkLayer(l)
			n, ok := number[c]
			if !ok {
				continue
			}
			lu := u.Layers[n]
			if len(having[c]) > 1 {
				use.SharedStored += lu.OwnStored + lu.SharedStored + lu.MetaStored
			} else {
				use.OwnStored += lu.OwnStored + lu.MetaStored
				use.SharedStored += lu.SharedStored
			}
		}
		out.Items = append(out.Items, use)
	}
	return &usageOutput{out}, nil
}

type warmInput struct {
	Image string `query:"image" required:"true" minLength:"1" maxLength:"255" doc:"Name or digest."`
	All   bool   `query:"all" doc:"Everything, not only what earlier starts read."`
	Node  string `query:"node" maxLength:"64" doc:"One node; by default all."`
}

// warm has nodes fetch an image, and streams how far each is.
func (s *Server) warm(ctx context.Context, req *request, _ *http.Request, in *warmInput) error {
	img, err := s.catalog.resolve(in.Image)
	if err != nil {
		return err
	}
	nodes, err := s.nodes(in.Node)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	out := s.newLines(req, "application/x-ndjson")
	defer out.end()
	var mu sync.Mutex
	write := func(p v1.WarmProgress) error {
		mu.Lock()
		defer mu.Unlock()
		err := out.write(p)
		if err != nil {
			cancel() // nobody reads it any more
		}
		return err
	}
	var wg sync.WaitGroup
	for _, n := range nodes {
		wg.Go(func() {
			last, err := s.cfg.Edges.WarmImage(ctx, n, v1.EdgeWarm{Image: img, All: in.All}, func(done, total int64) error {
				return write(v1.WarmProgress{Node: n.ID, Done: done, Total: total})
			})
			if err != nil {
				last = v1.WarmProgress{Node: n.ID, End: true, Error: problemOf(req, err)}
			}
			_ = write(last) // its failure ends the others
		})
	}
	wg.Wait()
	return nil
}

// nodes returns one, or all.
func (s *Server) nodes(id string) ([]v1.Node, error) {
	if id == "" {
		return s.cfg.Registry.Nodes(), nil
	}
	n, err := s.cfg.Registry.Node(id)
	return []v1.Node{n}, err
}

type evictInput struct {
	Image string `query:"image" required:"true" minLength:"1" maxLength:"255" doc:"Name or digest."`
	Node  string `query:"node" maxLength:"64" doc:"One node; by default all."`
}

type evictOutput struct{ Body v1.EvictReports }

// evict has nodes drop what they have of an image.
func (s *Server) evict(ctx context.Context, req *request, in *evictInput) (*evictOutput, error) {
	img, err := s.catalog.resolve(in.Image)
	if err != nil {
		return nil, err
	}
	nodes, err := s.nodes(in.Node)
	if err != nil {
		return nil, err
	}
	out := v1.EvictReports{Items: make([]v1.EvictReport, len(nodes))}
	var wg sync.WaitGroup
	for i, n := range nodes {
		wg.Go(func() {
			r, err := s.cfg.Edges.EvictImage(ctx, n, img.Layers)
			if err != nil {
				r = v1.EvictReport{Error: problemOf(req, err)}
			}
			r.Node = n.ID
			out.Items[i] = r
		})
	}
	wg.Wait()
	return &evictOutput{out}, nil
}
