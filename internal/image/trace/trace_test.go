package trace

import (
	"reflect"
	"strings"
	"testing"

	"dsec/internal/image/object"
)

func TestTracesAreKeptOnceAndCleaned(t *testing.T) {
	t.Parallel()
	s, err := object.OpenDir(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	one, two := "sha256:"+strings.Repeat("1", 64), "sha256:"+strings.Repeat("2", 64)
	first := Trace{"blob": {{Off: 4096, Len: 8192, AtMS: 3}}}
	for _, x := range []Trace{{}, first, {"blob": {{Off: 1, Len: 1}}}} {
		if err := Put(t.Context(), s, one, x); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := Get(t.Context(), s, one); err != nil || !reflect.DeepEqual(got, first) {
		t.Errorf("%v, %v", got, err)
	}
	if got, err := Get(t.Context(), s, two); err != nil || got != nil {
		t.Errorf("of an image without one: %v, %v", got, err)
	}
	if err := s.Put(t.Context(), key(two), 1, strings.NewReader("{")); err != nil {
		t.Fatal(err)
	}
	if got, err := Get(t.Context(), s, two); err != nil || got != nil {
		t.Errorf("a damaged one: %v, %v", got, err)
	}
	if n, err := Clean(t.Context(), s, map[string]bool{one: true}); err != nil || n != 1 {
		t.Errorf("%d removed, %v", n, err)
	}
	if got, err := Get(t.Context(), s, one); err != nil || got == nil {
		t.Errorf("one that is kept: %v, %v", got, err)
	}
}

func TestFirst(t *testing.T) {
	t.Parallel()
	tr := Trace{"a": {{Off: 0, Len: 10, AtMS: 1}, {Off: 50, Len: 10, AtMS: 9}}, "b": {{Off: 7, Len: 5, AtMS: 3}}}
	for limit, want := range map[int64]Trace{
		100: tr,
		24:  {"a": {{Off: 0, Len: 10, AtMS: 1}}, "b": {{Off: 7, Len: 5, AtMS: 3}}},
		14:  {"a": {{Off: 0, Len: 10, AtMS: 1}}},
		9:   {},
	} {
		if got := tr.First(limit); !reflect.DeepEqual(got, want) {
			t.Errorf("up to %d bytes: %v", limit, got)
		}
	}
	// A range that no reader made ends it.
	if got := (Trace{"a": {{Len: -5}, {Len: 5, AtMS: 1}}}).First(100); len(got) != 0 {
		t.Errorf("%v", got)
	}
}
