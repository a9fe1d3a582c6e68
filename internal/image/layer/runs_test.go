package layer_test

import (
	"os"
	"strings"
	"testing"

	"dsec/internal/image/imagetest"
	"dsec/internal/image/layer"
)

func TestRunsAreTheFiles(t *testing.T) {
	t.Parallel()
	contents := map[string]string{
		"one": strings.Repeat("1", 70_000), "dir/two": strings.Repeat("2", 4097), "three": strings.Repeat("3", 8192),
		"holes": "h" + strings.Repeat("\x00", 300_000) + strings.Repeat("H", 5000), "small": "in the metadata",
	}
	var steps []step
	for name, c := range contents {
		steps = append(steps, file(name, c))
	}
	steps = append(steps, link("again", "one"), symlink("sym", "one"))
	l, res := imagetest.MustBuild(t, layer.Options{}, run(t, steps))
	meta, err := os.Open(l.Meta)
	if err != nil {
		t.Fatal(err)
	}
	defer meta.Close()
	runs, err := layer.ReadRuns(t.Context(), meta, res.MetaSize, res.DataSize)
	if err != nil {
		t.Fatal(err)
	}
	data, err := os.ReadFile(l.Data)
	if err != nil {
		t.Fatal(err)
	}
	found := map[byte]int64{}
	for off := int64(0); off < res.DataSize; {
		first, end := runs.At(off)
		if first != off || end <= off {
			t.Fatalf("the run at %d is %d to %d", off, first, end)
		}
		c := data[off]
		if f, e := runs.At(end - 1); f != first || e != end {
			t.Errorf("the last byte of the run at %d is of %d to %d", off, f, e)
		}
		if c != 'h' && strings.Trim(string(data[first:end]), string(c)+"\x00") != "" {
			t.Errorf("the run at %d has more than a file of %q", off, c)
		}
		found[c] += end - first
		off = end
	}
	want := map[byte]int64{'1': 18 * 4096, '2': 8192, '3': 8192}
	for c, n := range want {
		if found[c] != n {
			t.Errorf("the file of %q has %d bytes, want %d", c, found[c], n)
		}
	}
	for _, off := range []int64{-1, res.DataSize, 1 << 60} {
		if first, end := runs.At(off); first != 0 || end != 0 {
			t.Errorf("outside, at %d: %d to %d", off, first, end)
		}
	}
}
