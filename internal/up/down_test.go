package up

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
)

type stuck struct{ ids, gone []string }

func (s *stuck) List(context.Context) ([]string, error) { return s.ids, nil }

func (s *stuck) Delete(_ context.Context, id string) error {
	if strings.HasPrefix(id, "bad") {
		return errors.New("does not go")
	}
	s.gone = append(s.gone, id)
	return nil
}

func TestOneSandboxThatStaysKeepsNoOther(t *testing.T) {
	t.Parallel()
	var bad []string
	for i := range 20 {
		bad = append(bad, fmt.Sprintf("bad%d", i))
	}
	a, b := &stuck{ids: append(slices.Clone(bad), "a1", "a2")}, &stuck{ids: []string{"b1"}}
	removed, left, err := removeAll(t.Context(), a, b)
	if removed != 3 || !slices.Equal(left, bad) || len(a.gone) != 2 || len(b.gone) != 1 {
		t.Errorf("removed %d: %v %v; left %v", removed, a.gone, b.gone, left)
	}
	if err == nil || !strings.Contains(err.Error(), "bad0: does not go") || !strings.Contains(err.Error(), "20 are left") || strings.Contains(err.Error(), "bad9") {
		t.Errorf("it says %v", err)
	}
}
