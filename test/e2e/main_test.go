package e2e

import (
	"os"
	"testing"

	"dsec/test/bed"
)

// shared is the server of this package's tests. Tests run side by side on it: they may
// look only at what they made themselves.
var shared *bed.Bed

func TestMain(m *testing.M) {
	os.Exit(bed.Main(m, bed.Options{}, func(b *bed.Bed) { shared = b }))
}
