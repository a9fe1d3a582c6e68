package account

import (
	"slices"
	"testing"
	"time"

	"dsec/internal/image/lazy"
)

// Who saves accounts is told of those that changed and of no others, and again of one that could not be saved.
func TestChanged(t *testing.T) {
	t.Parallel()
	b, err := New(time.Now)
	if err != nil {
		t.Fatal(err)
	}
	b.open["a"], b.open["b"], b.open["idle"] = &entry{space: 1}, &entry{space: 2}, &entry{space: 3}
	told := func(done bool) (ids []string) {
		b.Changed(func(id string) bool { ids = append(ids, id); return done })
		slices.Sort(ids)
		return ids
	}
	b.Count("a", "", lazy.Use{Read: 1})
	b.Count("b", "", lazy.Use{Read: 1})
	b.Count("nobody", "", lazy.Use{Read: 1})
	if got := told(false); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("told of %v", got)
	}
	b.Close("b")
	if got := told(true); !slices.Equal(got, []string{"a"}) {
		t.Errorf("told again of %v", got)
	}
	if got := told(true); len(got) != 0 {
		t.Errorf("told of %v, which did not change", got)
	}
}
