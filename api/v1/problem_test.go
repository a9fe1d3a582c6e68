package v1_test

import (
	"testing"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// A hint of an error's own reaches the user over HTTP, and is no detail there.
func TestProblemKeepsTheHint(t *testing.T) {
	t.Parallel()
	for _, e := range []*errs.Error{
		errs.New(errs.BadRequest, "x", "y"),
		errs.New(errs.BadRequest, "x", "y").With("field", "f"),
		errs.New(errs.BadRequest, "x", "y").Advise("do z"),
		errs.New(errs.BadRequest, "x", "y").With("field", "f").Advise("do z"),
	} {
		p := v1.ProblemOf(e)
		back := errs.Of(p.Err())
		if p.Hint != e.Hint() || back.Hint() != e.Hint() || back.Details["field"] != e.Details["field"] {
			t.Errorf("%+v became %+v and %+v", e, p, back)
		}
		if _, there := p.Details["hint"]; there {
			t.Errorf("%+v", p)
		}
	}
}
