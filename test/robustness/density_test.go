package robustness

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"dsec/internal/bench"
	"dsec/test/bed"
)

// A density run by the program itself: all live at once and answer, one request removes all, nothing is left
// on the machine, and the report says so. How many a machine holds is for docs/density, not for a test.
func TestDensityRun(t *testing.T) {
	t.Parallel()
	b := bed.New(t, bed.Options{})
	dir := filepath.Join(t.TempDir(), "report")
	const n = 60
	b.Must(t, "bench", "density", "--data", b.Data, "--image", bed.Image, "--count", "60", "--parallel", "8", "--points", "6", "--execs", "120", "--settle", "100ms", "--min-free", "64MiB", "--report", dir)
	data, err := os.ReadFile(filepath.Join(dir, "density.json"))
	if err != nil {
		t.Fatal(err)
	}
	var d bench.Density
	if err := json.Unmarshal(data, &d); err != nil {
		t.Fatal(err)
	}
	if d.Live != n || d.Create.OK != n || d.Exec.OK != 120 || d.Remove.OK != n || d.Audit != "clean" || len(d.Points) != 6 {
		t.Errorf("%+v", d)
	}
	if d.Guests.Looked != n || d.Guests.Threads < 3*n || d.Guests.PSS < 100<<10 || d.Server.With == 0 || d.UsedBytes == 0 {
		t.Errorf("guests %+v, server %+v, %d bytes used", d.Guests, d.Server, d.UsedBytes)
	}
	for _, name := range []string{"density.md", "density.svg"} {
		if s, err := os.Stat(filepath.Join(dir, name)); err != nil || s.Size() < 1000 {
			t.Errorf("%s: %v, %v", name, s, err)
		}
	}
}
