package snapshot_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/image"
	"dsec/internal/snapshot"

	"pgregory.net/rapid"
)

func layerN(n int, size int64) image.Layer {
	return image.Layer{MetaDigest: fmt.Sprintf("%064x", n+1), MetaSize: size, DataDigest: fmt.Sprintf("%064x", 1000+n)}
}

func chainOf(sizes ...int64) snapshot.Chain {
	var c snapshot.Chain
	for i, s := range sizes {
		c = c.On(layerN(i, s))
	}
	return c
}

func TestChainsAreChecked(t *testing.T) {
	t.Parallel()
	c := chainOf(1, 2, 3, 4, 5)
	if err := c.Check(); err != nil {
		t.Fatal(err)
	}
	if err := (snapshot.Chain)(nil).Check(); err != nil {
		t.Error(err)
	}
	for name, change := range map[string]func(c snapshot.Chain) snapshot.Chain{
		"a layer is missing":  func(c snapshot.Chain) snapshot.Chain { return append(c[:1:1], c[2:]...) },
		"the lowest missing":  func(c snapshot.Chain) snapshot.Chain { return c[1:] },
		"two are exchanged":   func(c snapshot.Chain) snapshot.Chain { c[1], c[2] = c[2], c[1]; return c },
		"another layer":       func(c snapshot.Chain) snapshot.Chain { c[2].Layer.MetaDigest = fmt.Sprintf("%064x", 99); return c },
		"another data blob":   func(c snapshot.Chain) snapshot.Chain { c[2].Layer.DataDigest = ""; return c },
		"another view":        func(c snapshot.Chain) snapshot.Chain { c[4].View = c[3].View; return c },
		"another replacement": func(c snapshot.Chain) snapshot.Chain { c[2].Replaces = []image.Layer{layerN(7, 1)}; return c },
	} {
		bad := change(append(snapshot.Chain(nil), c...))
		if err := bad.Check(); !errors.Is(err, errs.ImageCorrupt) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// Whatever is flattened in whatever order, the chain holds, its view stays, and it survives JSON.
func TestFlattenedChainsStayValid(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		c := chainOf(make([]int64, rapid.IntRange(1, 12).Draw(rt, "layers"))...)
		view := c.View()
		for i := range rapid.IntRange(1, 6).Draw(rt, "times") {
			from := rapid.IntRange(0, len(c)-1).Draw(rt, "from")
			to := rapid.IntRange(from+1, len(c)).Draw(rt, "to")
			was := append(snapshot.Chain(nil), c...)
			next, err := c.Replace(from, to, layerN(100+i, 1))
			if err != nil {
				rt.Fatal(err)
			}
			if !reflect.DeepEqual(was, c) {
				rt.Fatal("the old chain was changed")
			}
			c = next
			if err := c.Check(); err != nil {
				rt.Fatal(err)
			}
		}
		if c.View() != view {
			rt.Fatalf("the view is %s and was %s", c.View(), view)
		}
		raw, err := json.Marshal(c)
		var back snapshot.Chain
		if err != nil || json.Unmarshal(raw, &back) != nil || back.Check() != nil || back.View() != view {
			rt.Fatalf("%v: %s", err, raw)
		}
		if c = c.On(layerN(200, 1)); c.Check() != nil || c[len(c)-1].Parent != view {
			rt.Fatal("nothing fits on it any more")
		}
	})
	for _, r := range [][2]int{{-1, 1}, {0, 4}, {2, 2}, {2, 1}} {
		if _, err := chainOf(1, 1, 1).Replace(r[0], r[1], layerN(9, 1)); err == nil {
			t.Errorf("%v was replaced", r)
		}
	}
}

func TestPlan(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		p     snapshot.Policy
		sizes []int64
		want  string
	}{
		{"nothing to do", snapshot.Policy{Small: 10}, []int64{100, 100, 100}, "[]"},
		{"empty", snapshot.Policy{Small: 10, Layers: 1}, nil, "[]"},
		{"small neighbours", snapshot.Policy{Small: 10}, []int64{100, 1, 2, 100, 3, 4}, "[{1 3} {4 6}]"},
		{"until they are large", snapshot.Policy{Small: 10}, []int64{6, 6, 6, 6}, "[{0 2} {2 4}]"},
		{"shared layers stay", snapshot.Policy{Keep: 2, Small: 10}, []int64{1, 1, 1, 1}, "[{2 4}]"},
		{"too many: the least to rewrite", snapshot.Policy{Layers: 3}, []int64{50, 10, 10, 50, 20}, "[{1 3} {3 5}]"},
		{"too many, with shared ones", snapshot.Policy{Keep: 3, Layers: 2}, []int64{1, 1, 1, 9, 9, 9}, "[{3 6}]"},
		{"all shared", snapshot.Policy{Keep: 5, Layers: 1}, []int64{1, 1, 1}, "[]"},
	} {
		if got := fmt.Sprint(c.p.Plan(chainOf(c.sizes...))); got != c.want {
			t.Errorf("%s: got %s, want %s", c.name, got, c.want)
		}
	}
}

// A chain is checked against the parts that it was composed of, also when their layers were merged since.
func TestChainsAreCheckedAgainstTheirParts(t *testing.T) {
	t.Parallel()
	base, tool := chainOf(1, 2), snapshot.Chain(nil).On(layerN(10, 1)).On(layerN(1, 2)).On(layerN(11, 1)) // the second layer of base, too
	parts := []snapshot.Chain{base, tool}
	var c snapshot.Chain
	for _, n := range []int{0, 10, 1, 11, 20, 21} {
		c = c.On(layerN(n, 1))
	}
	if err := c.CheckParts(parts); err != nil {
		t.Fatal(err)
	}
	for _, r := range []snapshot.Range{{From: 0, To: 2}, {From: 1, To: 5}, {From: 4, To: 6}} {
		merged, err := c.Replace(r.From, r.To, layerN(30, 1))
		if err == nil {
			err = errors.Join(merged.Check(), merged.CheckParts(parts))
		}
		if err != nil {
			t.Errorf("%+v merged: %v", r, err)
		}
	}
	other := snapshot.Chain(nil).On(layerN(0, 1)).On(layerN(2, 1)).On(layerN(1, 1))
	broken := append(snapshot.Chain(nil), tool...)
	broken[1].Parent = "else"
	for what, parts := range map[string][]snapshot.Chain{
		"other order": {tool, base}, "one missing": {tool}, "one more": {base, tool, other}, "another layer": {base, tool[:1], other}, "a part that is not whole": {base, broken},
		"more than there is": {c, snapshot.Chain(nil).On(layerN(40, 1))},
	} {
		if err := c.CheckParts(parts); !errors.Is(err, errs.ImageCorrupt) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := c.CheckParts(nil); err != nil {
		t.Error(err)
	}
}
