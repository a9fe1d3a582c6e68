package clienttest

import (
	"net/http"
	"slices"
	"time"

	v1 "dsec/api/v1"
)

// Freed is what a pause frees.
const Freed = 64 << 20

// used is what every sandbox uses.
func used() *v1.Usage {
	return &v1.Usage{
		CPUSeconds: 0.5, MemoryBytes: 1 << 20, PeakMemoryBytes: 2 << 20, Processes: 1, SwapBytes: 3 << 20, MemoryGiBSeconds: 12.5,
		PausedSeconds: 90, IOReadBytes: 4 << 20, IOWrittenBytes: 5 << 20, SentBytes: 6 << 20,
	}
}

// labelled are the ids of those that have labels; none without any.
func (s *Server) labelled(labels map[string]string) (ids []string) {
	if len(labels) == 0 {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, b := range s.boxes {
		ok := true
		for k, v := range labels {
			ok = ok && b.info.Spec.Labels[k] == v
		}
		if ok {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// turn takes a sandbox from running to paused, or back. It fails if that was asked for with
// Fail("one of turn").
func (s *Server) turn(id string, to v1.State) v1.PauseResult {
	b, err := s.find(id)
	if err != nil {
		return v1.PauseResult{ID: id, Error: v1.ProblemOf(err)}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	r := v1.PauseResult{ID: id, State: to, Changed: b.info.State != to, TookMS: 1}
	if !r.Changed {
		return r
	}
	b.info.State, b.info.PausedAt, b.info.PauseReason = to, nil, ""
	b.info.Generation++
	if to == v1.StatePaused {
		now := time.Now()
		b.info.PausedAt, b.info.PauseReason = &now, v1.PauseRequested
		b.info.Pauses++
		r.FreedBytes = Freed
	}
	s.event(v1.EventState, b.info)
	return r
}

func (s *Server) turnMany(to v1.State) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		var req v1.PauseRequest
		if err := body(r, &req); err != nil {
			return err
		}
		for _, id := range append(req.IDs, s.labelled(req.Labels)...) {
			if err := s.failure("one of turn"); err != nil {
				line(w, v1.PauseResult{ID: id, Error: v1.ProblemOf(err)})
				continue
			}
			if s.failure("turn breaks off") != nil {
				break
			}
			line(w, s.turn(id, to))
		}
		return nil
	}
}

func (s *Server) turnOne(to v1.State) func(http.ResponseWriter, *http.Request) error {
	return func(w http.ResponseWriter, r *http.Request) error {
		res := s.turn(r.PathValue("id"), to)
		if err := res.Error.Err(); err != nil {
			return err
		}
		return answer(w, http.StatusOK, res)
	}
}

// hint pauses what is not used for a minute.
func (s *Server) hint(w http.ResponseWriter, r *http.Request) error {
	var req v1.HintRequest
	if err := body(r, &req); err != nil {
		return err
	}
	b, err := s.find(r.PathValue("id"))
	if err != nil {
		return err
	}
	res := v1.HintResult{ID: r.PathValue("id"), Action: "keep", HoldCost: float64(req.NextCall), MoveCost: 60, MemoryBytes: Freed, Why: "the next call is near"}
	if req.NextCall > 60 {
		s.turn(res.ID, v1.StatePaused)
		res.Action, res.Why = "pause", "the next call is far"
	}
	s.mu.Lock()
	info := b.info
	s.mu.Unlock()
	res.Sandbox = &info
	return answer(w, http.StatusOK, res)
}

// Freeze makes all later readings of usage one and the same, as a node's are that many look at.
func (s *Server) Freeze() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.frozen = time.Now()
}

func (s *Server) usage(w http.ResponseWriter, r *http.Request) error {
	l := v1.UsageList{Nodes: []v1.NodeUsage{{Node: s.theNode(), At: time.Now(), CPUMillis: 2000, MemoryBytes: 24 << 30}}}
	n := &l.Nodes[0]
	s.mu.Lock()
	if s.frozen.IsZero() {
		s.usages++
	} else {
		n.At = s.frozen
	}
	reads := s.usages
	s.mu.Unlock()
	n.CPUSeconds = float64(reads)
	add := func(sb v1.Sandbox) {
		u := used()
		u.CPUSeconds *= float64(reads) // what was used and read grows with each reading
		u.IOReadBytes *= int64(reads)
		n.Items = append(n.Items, v1.SandboxUsage{
			ID: sb.ID, Node: Node, State: sb.State, QoS: sb.Spec.QoS, Labels: sb.Spec.Labels, CPUMillis: sb.Spec.CPUMillis, MemoryBytes: sb.Spec.MemoryBytes, Usage: u,
		})
	}
	ids := r.URL.Query()["id"]
	for _, id := range ids {
		b, err := s.find(id)
		if err != nil {
			l.Unknown = append(l.Unknown, v1.SandboxUsage{ID: id, Error: v1.ProblemOf(err)})
			continue
		}
		add(b.info)
	}
	if len(ids) == 0 {
		for _, sb := range s.selected(r) {
			add(sb)
		}
	}
	return answer(w, http.StatusOK, l)
}
