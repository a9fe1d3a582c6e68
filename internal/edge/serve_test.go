package edge

import (
	"os"
	"strings"
	"testing"

	"dsec/aether"
)

// The protocol's page names every method of an edge.
func TestMethodsAreDocumented(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../../docs/aether.md")
	if err != nil {
		t.Fatal(err)
	}
	for method := range new(Edge).handlers() {
		if !strings.Contains(string(page), "`"+method+"`") {
			t.Errorf("docs/aether.md does not have %s", method)
		}
	}
}

// Apiservers relay clients' streams by the method's name alone.
func TestControlMethodsAreNotRelayed(t *testing.T) {
	t.Parallel()
	for method := range (&Edge{}).handlers() {
		if g := aether.GuestGroup(method); g != "" || method == aether.MethodBatch {
			t.Errorf("%s would be relayed for clients, as of group %q", method, g)
		}
	}
}
