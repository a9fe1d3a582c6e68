// Package layers holds no code: its test keeps the direction of imports (docs/architecture.md).
package layers

import (
	"os/exec"
	"strings"
	"testing"
)

// ranks orders the packages: each may import those of a lower rank, and those of its
// own group. The longest prefix counts.
var ranks = []struct {
	prefix string
	rank   int
}{
	{"dsec/api/v1", 0},
	{"dsec/aether", 1},
	{"dsec/internal/step", 1},
	{"dsec/internal/slack", 1},
	{"dsec/internal/capability", 1},
	{"dsec/internal/swap", 1},
	{"dsec/internal/keeper", 1},
	{"dsec/internal/guest", 2},
	{"dsec/internal/image", 3},
	{"dsec/internal/snapshot", 4},
	{"dsec/internal/backend", 5},
	{"dsec/internal/edge", 6},
	{"dsec/client", 6},
	{"dsec/internal/control", 7},
	{"dsec/internal/bench", 7},
	{"dsec/bench/peers", 8},
	{"dsec/internal/doctor", 7},
	{"dsec/internal/up", 8},
	{"dsec/cmd", 9},
	{"dsec/examples", 9},
	{"dsec/internal/clienttest", 10},
	{"dsec/test", 10},
	{"dsec/internal/layers", 10},
}

// forbidden are imports that the order alone would allow.
var forbidden = []struct{ from, to, why string }{
	{"dsec/internal/control", "dsec/internal/edge", "the control plane reaches edges over Aether only"},
	{"dsec/internal/control", "dsec/internal/backend", "the control plane knows no backend"},
	{"dsec/internal/backend/hollow", "dsec/internal/backend/container", "backends do not know each other"},
	{"dsec/cmd/dsec-guest", "net/http", "thousands of guests run"},
	{"dsec/cmd/dsec-guest", "encoding/json", "thousands of guests run"},
	{"dsec/cmd/dsec-guest", "google.golang.org/protobuf/proto", "thousands of guests run"},
	{"dsec/client", "dsec/internal/edge", "the SDK is for other people's programs"},
	{"dsec/client", "dsec/internal/control", "the SDK is for other people's programs"},
}

func rank(pkg string) (group string, rank int) {
	best := -1
	for i, r := range ranks {
		if (pkg == r.prefix || strings.HasPrefix(pkg, r.prefix+"/")) && (best < 0 || len(r.prefix) > len(ranks[best].prefix)) {
			best = i
		}
	}
	if best < 0 {
		return "", -1
	}
	return ranks[best].prefix, ranks[best].rank
}

func TestImportsGoOneWay(t *testing.T) {
	t.Parallel()
	out, err := exec.Command("go", "list", "-f", `{{.ImportPath}} {{join .Imports " "}}`, "dsec/...").Output()
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(out)) {
		f := strings.Fields(line)
		group, r := rank(f[0])
		if r < 0 {
			t.Errorf("%s has no place in the order of packages", f[0])
			continue
		}
		for _, to := range f[1:] {
			if !strings.HasPrefix(to, "dsec/") {
				continue
			}
			if g, tr := rank(to); tr > r || (tr == r && g != group) {
				t.Errorf("%s imports %s, which is not below it", f[0], to)
			}
		}
	}
	for _, rule := range forbidden {
		out, err := exec.Command("go", "list", "-deps", "-f", "{{.ImportPath}}", rule.from+"/...").Output()
		if err != nil {
			t.Fatal(err)
		}
		for dep := range strings.FieldsSeq(string(out)) {
			if dep == rule.to || strings.HasPrefix(rule.to, "dsec/") && strings.HasPrefix(dep, rule.to+"/") {
				t.Errorf("%s links %s: %s", rule.from, dep, rule.why)
			}
		}
	}
}
