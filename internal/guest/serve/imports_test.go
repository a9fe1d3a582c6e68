package serve

import (
	"os/exec"
	"strings"
	"testing"
)

// The guest is resident thousands of times on a machine: what these packages cost in
// start time and private memory is not theirs to spend.
func TestImportsStaySmall(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-deps", "dsec/cmd/dsec-guest").Output()
	if err != nil {
		t.Fatal(err)
	}
	for p := range strings.FieldsSeq(string(out)) {
		switch p {
		case "net/http", "crypto/tls", "encoding/json", "encoding/gob", "log/slog", "log", "regexp", "text/template", "os/exec", "os/user",
			"archive/tar", "compress/gzip", "math/big", "testing":
			t.Errorf("the guest links %s", p)
		}
		if strings.HasPrefix(p, "google.golang.org/") || strings.HasPrefix(p, "github.com/") {
			t.Errorf("the guest links %s", p)
		}
	}
}
