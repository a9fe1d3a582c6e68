package apiserver

import (
	"context"
	"slices"
	"strings"
	"sync"

	v1 "dsec/api/v1"
	"dsec/internal/control/watcher"
)

type usesInput struct {
	ID    []string `query:"id,explode" maxItems:"200" doc:"Sandbox ids; else all that have the labels." example:"saaaaaabbbbbcccccccccc"`
	Label []string `query:"label,explode" maxItems:"16" doc:"key=value; all given must match." example:"job=train-7"`
}

type usesOutput struct{ Body v1.UsageList }

// uses is GET /v1/sandboxes/usage: one call of each node with what is asked for.
func (s *Server) uses(ctx context.Context, req *request, in *usesInput) (*usesOutput, error) {
	labels, err := parseLabels(in.Label)
	switch {
	case err != nil:
		return nil, err
	case len(in.ID) > 0 && len(labels) > 0:
		return nil, badField("label", "give ids or labels, not both")
	}
	all := len(in.ID) == 0 && len(labels) == 0
	out := &usesOutput{v1.UsageList{Nodes: []v1.NodeUsage{}}}
	of := map[string][]v1.SandboxUsage{} // by node
	for _, node := range s.cfg.Registry.Nodes() {
		if all { // one without sandboxes has a line, too
			of[node.ID] = nil
		}
	}
	if len(in.ID) == 0 {
		for _, sb := range s.cfg.Registry.List(watcher.Filter{Labels: labels}).Items {
			if sb.State == v1.StateLost {
				continue
			}
			of[sb.Node] = append(of[sb.Node], usageOf(&sb))
		}
	}
	ids := slices.Clone(in.ID)
	slices.Sort(ids)
	for _, id := range slices.Compact(ids) {
		node, sb, err := s.cfg.Registry.Locate(id)
		switch {
		case err != nil:
			out.Body.Unknown = append(out.Body.Unknown, v1.SandboxUsage{ID: id, Error: problemOf(req, err)})
		case sb == nil:
			of[node.ID] = append(of[node.ID], v1.SandboxUsage{ID: id, Node: node.ID})
		default:
			of[node.ID] = append(of[node.ID], usageOf(sb))
		}
	}
	ctx, cancel := context.WithTimeout(ctx, getTimeout)
	defer cancel()
	var wg sync.WaitGroup
	var mu sync.Mutex
	for id, items := range of {
		node, err := s.cfg.Registry.Node(id)
		if err != nil { // it went this moment, and its sandboxes with it
			continue
		}
		wg.Go(func() {
			u := s.usageAt(ctx, req, node, items, all)
			mu.Lock()
			defer mu.Unlock()
			out.Body.Nodes = append(out.Body.Nodes, u)
		})
	}
	wg.Wait()
	slices.SortFunc(out.Body.Nodes, func(a, b v1.NodeUsage) int { return strings.Compare(a.Node.ID, b.Node.ID) })
	return out, nil
}

func usageOf(sb *v1.Sandbox) v1.SandboxUsage {
	return v1.SandboxUsage{
		ID: sb.ID, Node: sb.Node, State: sb.State, QoS: sb.Spec.QoS, Labels: sb.Spec.Labels, CPUMillis: sb.Spec.CPUMillis, MemoryBytes: sb.Spec.MemoryBytes,
	}
}

// usageAt asks a node for what items use.
func (s *Server) usageAt(ctx context.Context, req *request, node v1.Node, items []v1.SandboxUsage, all bool) v1.NodeUsage {
	var ids []string
	if !all {
		for _, it := range items {
			ids = append(ids, it.ID)
		}
	}
	u, err := s.cfg.Edges.Usage(ctx, node, ids)
	if err != nil {
		u = v1.NodeUsage{At: s.cfg.Now().UTC(), Error: problemOf(req, err)}
	}
	said := make(map[string]*v1.SandboxUsage, len(u.Items))
	for i := range u.Items {
		said[u.Items[i].ID] = &u.Items[i]
	}
	kept := make([]v1.SandboxUsage, 0, len(items))
	for _, it := range items {
		if r := said[it.ID]; r != nil {
			it.Usage, it.Error = r.Usage, r.Error
			if r.State != "" { // the edge knows best
				it.State = r.State
			}
		}
		if it.Error != nil {
			it.Error.RequestID = req.id
		}
		kept = append(kept, it)
	}
	u.Node, u.Items = node, kept
	return u
}
