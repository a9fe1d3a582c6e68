package aether

import (
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// The guest links these packages into every sandbox: what they pull in is paid for there.
func TestImportsStaySmall(t *testing.T) {
	t.Parallel()
	out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", "dsec/aether", "dsec/aether/msg", "dsec/api/v1/errs").CombinedOutput()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, out)
	}
	deps := strings.Fields(string(out))
	if !slices.Contains(deps, "dsec/aether/msg") {
		t.Fatalf("unexpected output %q", out)
	}
	for _, d := range deps {
		switch {
		case strings.HasPrefix(d, "google.golang.org/"), d == "net/http", d == "crypto/tls", strings.HasPrefix(d, "encoding/json"),
			d == "encoding/gob", d == "encoding/xml", d == "text/template", d == "regexp",
			strings.HasPrefix(d, "dsec/") && d != "dsec/aether" && d != "dsec/aether/msg" && d != "dsec/api/v1/errs":
			t.Errorf("%s must not be linked", d)
		}
	}
}
