package client

import (
	"context"
	"fmt"
	"strings"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// Resolved is the sandbox that a short form of an id means, or why there is none.
type Resolved struct {
	ID  string
	Err error
}

// Resolve returns the sandbox that each ref means: a whole id as it is, whether there is
// such a sandbox or not; else the one whose id begins with ref. As the ids of a node begin
// alike, ref may also be the beginning of an id's last ten characters. The server is asked,
// for its list, only if a ref is no whole id; the error is of that.
//
// A Resolved's error is errs.SandboxNotFound, or errs.BadRequest if several are meant.
func (c *Client) Resolve(ctx context.Context, refs ...string) ([]Resolved, error) {
	out := make([]Resolved, len(refs))
	found := map[string][]string{} // by ref that has to be looked up
	for i, ref := range refs {
		if _, _, err := v1.ParseSandboxID(ref); err == nil {
			out[i].ID = ref
		} else if v1.InSandboxID(ref) {
			found[ref] = nil
		}
	}
	if len(found) > 0 {
		for sb, err := range c.All(ctx, ListOptions{}) {
			if err != nil {
				return nil, err
			}
			for ref := range found {
				if strings.HasPrefix(sb.ID, ref) || strings.HasPrefix(v1.UniquePart(sb.ID), ref) {
					found[ref] = append(found[ref], sb.ID)
				}
			}
		}
	}
	for i, ref := range refs {
		if out[i].ID == "" {
			out[i] = choose(ref, found[ref])
		}
	}
	return out, nil
}

// maxCandidates is how many ids an error names.
const maxCandidates = 8

func choose(ref string, ids []string) Resolved {
	switch len(ids) {
	case 0:
		return Resolved{Err: errs.New(errs.SandboxNotFound, "client.resolve", fmt.Sprintf("no sandbox has the id %q, or one that begins so", ref)).
			Advise("check the id with 'dsec ls'; a short form is the beginning of an id, or of its last ten characters")}
	case 1:
		return Resolved{ID: ids[0]}
	}
	names := strings.Join(ids[:min(len(ids), maxCandidates)], ", ")
	if n := len(ids) - maxCandidates; n > 0 {
		names += fmt.Sprintf(" and %d more", n)
	}
	return Resolved{Err: errs.New(errs.BadRequest, "client.resolve", fmt.Sprintf("%q is the beginning of %d ids: %s", ref, len(ids), names)).
		Advise("write more of the id that is meant; its last ten characters alone will do")}
}
