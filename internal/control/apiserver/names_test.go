package apiserver

import (
	"errors"
	"net/url"
	"path"
	"strings"
	"testing"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// A name that is accepted can be asked for again: it survives a URL's path as it is.
func FuzzImageName(f *testing.F) {
	for _, s := range []string{"debian:12", "team/tool", "../x", "a//b", "a/./b", "sha256:ab", "a%2fb", "ü", "a\nb", "/", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if name == "" || checkImageName(name) != nil {
			return
		}
		u, err := url.Parse("/v1/images/" + name)
		if err != nil || u.Path != "/v1/images/"+name || path.Clean(u.Path) != u.Path || u.RawQuery != "" || u.Fragment != "" {
			t.Fatalf("%q becomes %v, %v", name, u, err)
		}
	})
}

// Whatever a client sends as a batch, what goes on to the edge as a whole names only
// guests' methods and the one sandbox.
func FuzzRelayWhole(f *testing.F) {
	op := func(method, target string) *msg.BatchOp { return &msg.BatchOp{Method: method, Target: target} }
	f.Add("sa", (&msg.Batch{Ops: []*msg.BatchOp{op("process.exec", "sa")}}).AppendWire(nil))
	f.Add("sa", (&msg.Batch{Ops: []*msg.BatchOp{op("process.exec", ""), op("sandbox.delete", "sa")}}).AppendWire(nil))
	f.Add("sa", (&msg.Batch{Ops: []*msg.BatchOp{op("batch", "sa")}}).AppendWire(nil))
	f.Add("", []byte{0xff})
	f.Fuzz(func(t *testing.T, target string, body []byte) {
		if !relayWhole(&msg.Open{Method: aether.MethodBatch, Target: target, Body: body}) {
			return
		}
		var b msg.Batch
		if err := b.ParseWire(body); err != nil || target == "" {
			t.Fatalf("relayed a batch that does not parse: %v", err)
		}
		for _, op := range b.Ops {
			group, _, _ := strings.Cut(op.Method, ".")
			if group == "sandbox" || group == "edge" || group == "image" || op.Method == aether.MethodBatch || op.Target != "" && op.Target != target {
				t.Fatalf("relayed %q for %q in a batch for %q", op.Method, op.Target, target)
			}
		}
	})
}

func FuzzLabels(f *testing.F) {
	f.Add("a=b", "c=d")
	f.Add("=", "a==b")
	f.Fuzz(func(t *testing.T, a, b string) {
		labels, err := parseLabels([]string{a, b})
		if err != nil {
			if !errors.Is(err, errs.BadRequest) {
				t.Fatal(err)
			}
			return
		}
		for k, v := range labels {
			if k == "" || k+"="+v != a && k+"="+v != b {
				t.Fatalf("%q, %q give %q=%q", a, b, k, v)
			}
		}
	})
}
