package snapshot

import (
	"fmt"
	"path"
	"strings"

	"dsec/api/v1/errs"
)

// Bounds of what a caller may ask to leave out.
const (
	maxPatterns   = 1000
	maxPatternLen = 4096
)

// pattern is one line of [Options.LeaveOut], cut into the names it matches one by one.
type pattern struct {
	segs    []segment
	dirOnly bool
}

type segment struct {
	text string
	any  bool // "**": any number of names
	glob bool
}

// state is how far a pattern has got on the way to a directory.
type state struct {
	p *pattern
	i int
}

// compileLeaveOut returns the states of the tree's root.
func compileLeaveOut(list []string) ([]state, error) {
	if len(list) > maxPatterns {
		return nil, errs.New(errs.BadRequest, phase, fmt.Sprintf("%d patterns to leave out (limit %d)", len(list), maxPatterns))
	}
	var out []state
	for _, text := range list {
		p, err := compile(text)
		if err != nil {
			return nil, errs.New(errs.BadRequest, phase, fmt.Sprintf("leave out %.200q: %v", text, err))
		}
		out = addState(out, state{p, 0})
	}
	return out, nil
}

func compile(text string) (*pattern, error) {
	if len(text) > maxPatternLen {
		return nil, fmt.Errorf("%d bytes (limit %d)", len(text), maxPatternLen)
	}
	rest, anchored := strings.CutPrefix(text, "/")
	p := &pattern{dirOnly: strings.HasSuffix(rest, "/")}
	rest = strings.TrimSuffix(rest, "/")
	if !anchored {
		p.segs = append(p.segs, segment{any: true})
	}
	for s := range strings.SplitSeq(rest, "/") {
		switch {
		case s == "" || s == "." || s == "..":
			return nil, fmt.Errorf("the name %q in it", s)
		case s == "**":
			if n := len(p.segs); n == 0 || !p.segs[n-1].any {
				p.segs = append(p.segs, segment{any: true})
			}
			continue
		}
		if _, err := path.Match(s, ""); err != nil {
			return nil, fmt.Errorf("%q is not a pattern", s)
		}
		p.segs = append(p.segs, segment{text: s, glob: strings.ContainsAny(s, `*?[\`)})
	}
	if len(p.segs) == 1 && p.segs[0].any {
		return nil, fmt.Errorf("it is everything")
	}
	return p, nil
}

// addState adds s and what "**" of no names makes of it.
func addState(list []state, s state) []state {
	for {
		for i := len(list) - 1; i >= 0 && list[i].p == s.p; i-- { // a pattern's states are side by side
			if list[i] == s {
				return list
			}
		}
		list = append(list, s)
		if !s.p.segs[s.i].any || s.i+1 == len(s.p.segs) {
			return list
		}
		s.i++
	}
}

// match steps from a directory's states to those of the name in it, and says whether a
// pattern ends there.
func match(states []state, name string, isDir bool) (next []state, matched bool) {
	for _, s := range states {
		seg, last := s.p.segs[s.i], s.i+1 == len(s.p.segs)
		switch {
		case seg.any:
			next = addState(next, s)
			matched = matched || last && (isDir || !s.p.dirOnly)
		case !seg.matches(name):
		case last:
			matched = matched || isDir || !s.p.dirOnly
		default:
			next = addState(next, state{s.p, s.i + 1})
		}
	}
	return next, matched
}

func (s segment) matches(name string) bool {
	if !s.glob {
		return s.text == name
	}
	ok, _ := path.Match(s.text, name) // the pattern was checked
	return ok
}
