package control_test

import (
	"os/exec"
	"strings"
	"testing"
)

// The control plane drives edges over the network only, and what lies below it must not
// know of it. Of images it knows the object store and what is in it, to collect garbage.
func TestImportBoundaries(t *testing.T) {
	t.Parallel()
	deps := func(pkg string) []string {
		out, err := exec.CommandContext(t.Context(), "go", "list", "-deps", pkg).CombinedOutput()
		if err != nil {
			t.Fatalf("go list %s: %v\n%s", pkg, err, out)
		}
		return strings.Fields(string(out))
	}
	for pkg, forbidden := range map[string][]string{
		"dsec/internal/control": {"dsec/internal/edge", "dsec/internal/backend", "dsec/internal/guest", "dsec/client", "dsec/cmd",
			"dsec/internal/image/layer", "dsec/internal/image/lazy", "dsec/internal/image/store", "dsec/internal/image/source"},
		"dsec/internal/control/placement": {"dsec/aether", "net/http", "go.etcd.io"},
		"dsec/internal/control/watcher":   {"dsec/aether", "net/http", "go.etcd.io"},
		"dsec/internal/control/iam":       {"dsec/aether", "net/http", "go.etcd.io"},
		"dsec/internal/control/store":     {"dsec/aether", "net/http", "go.etcd.io"},
		"dsec/internal/control/edges":     {"go.etcd.io", "dsec/internal/control/store"},
		"dsec/internal/control/apiserver": {"go.etcd.io"},
		"dsec/internal/capability":        {"dsec/aether", "dsec/internal/control", "net/http"},
	} {
		for _, dep := range deps(pkg) {
			for _, f := range forbidden {
				if dep == f || strings.HasPrefix(dep, f+"/") {
					t.Errorf("%s imports %s", pkg, dep)
				}
			}
		}
	}
}
