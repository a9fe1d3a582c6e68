package apiserver_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/control"
	"dsec/internal/control/controltest"
)

const documentFile = "../../../docs/openapi.json"

// go test ./internal/control/apiserver -run TestOpenAPIDocument -update writes the file.
var update = flag.Bool("update", false, "write docs/openapi.json")

func document(t *testing.T) []byte {
	w := newWorld(t, func(_ *control.Config, ec *controltest.Config) { ec.ID = "none" })
	_, _, raw := w.do("GET", "/openapi.json", nil, anonymous())
	var out bytes.Buffer
	if err := json.Indent(&out, []byte(raw), "", "  "); err != nil {
		t.Fatal(err)
	}
	return append(bytes.TrimSpace(out.Bytes()), '\n')
}

func TestOpenAPIDocumentIsUpToDate(t *testing.T) {
	got := document(t)
	if *update {
		if err := os.WriteFile(documentFile, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	kept, err := os.ReadFile(documentFile)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, kept) {
		t.Error("docs/openapi.json is not what the server serves; run this test with -update")
	}
}

type apiDocument struct {
	OpenAPI string                                `json:"openapi"`
	Paths   map[string]map[string]json.RawMessage `json:"paths"`
}

type apiOperation struct {
	ID          string                `json:"operationId"`
	Summary     string                `json:"summary"`
	Description string                `json:"description"`
	Tags        []string              `json:"tags"`
	Security    []map[string][]string `json:"security"`
	Parameters  []struct {
		Name, In, Description string
		Required              bool
	} `json:"parameters"`
	RequestBody *struct{ Content map[string]any } `json:"requestBody"`
	Responses   map[string]struct {
		Description string
		Content     map[string]struct{ Schema map[string]any }
	} `json:"responses"`
}

func TestOpenAPIDocumentIsValidAndComplete(t *testing.T) {
	raw := document(t)
	var doc apiDocument
	if err := json.Unmarshal(raw, &doc); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(doc.OpenAPI, "3.1") {
		t.Errorf("version %s", doc.OpenAPI)
	}
	var tree any
	if err := json.Unmarshal(raw, &tree); err != nil {
		t.Fatal(err)
	}
	checkRefs(t, tree, tree)
	for _, route := range []string{
		"POST /v1/sandboxes", "POST /v1/sandboxes/batch", "GET /v1/sandboxes", "GET /v1/sandboxes/{id}", "DELETE /v1/sandboxes/{id}",
		"POST /v1/sandboxes/delete", "POST /v1/sandboxes/pause", "POST /v1/sandboxes/resume", "GET /v1/sandboxes/usage",
		"POST /v1/sandboxes/{id}/pause", "POST /v1/sandboxes/{id}/resume", "POST /v1/sandboxes/{id}/hint", "POST /v1/sandboxes/{id}/capability", "GET /v1/events", "POST /v1/images", "GET /v1/images",
		"GET /v1/images/{name}", "DELETE /v1/images/{name}", "GET /v1/nodes", "GET /v1/nodes/{id}", "POST /v1/tokens", "GET /v1/tokens",
		"DELETE /v1/tokens/{id}", "GET /v1/health", "GET /metrics", "GET /v1/aether",
	} {
		method, path, _ := strings.Cut(route, " ")
		if doc.Paths[path][strings.ToLower(method)] == nil {
			t.Errorf("%s is missing", route)
		}
	}
	ids := map[string]bool{}
	for path, methods := range doc.Paths {
		for method, rawOp := range methods {
			var op apiOperation
			if err := json.Unmarshal(rawOp, &op); err != nil {
				t.Fatal(err)
			}
			checkOperation(t, strings.ToUpper(method)+" "+path, path, op)
			if ids[op.ID] {
				t.Errorf("operation id %s is used twice", op.ID)
			}
			ids[op.ID] = true
		}
	}
}

func checkOperation(t *testing.T, name, path string, op apiOperation) {
	t.Helper()
	if op.ID == "" || op.Summary == "" || op.Description == "" || len(op.Tags) != 1 {
		t.Errorf("%s is poorly described: %+v", name, op)
	}
	params := map[string]bool{}
	for _, p := range op.Parameters {
		if p.Description == "" {
			t.Errorf("%s: parameter %s is not described", name, p.Name)
		}
		if p.In == "path" {
			params[p.Name] = p.Required
		}
	}
	for _, m := range regexp.MustCompile(`\{(\w+)\}`).FindAllStringSubmatch(path, -1) {
		if !params[m[1]] {
			t.Errorf("%s: path parameter %s is not declared", name, m[1])
		}
		delete(params, m[1])
	}
	if len(params) > 0 {
		t.Errorf("%s: declared but not in the path: %v", name, params)
	}
	wantStatus := []string{"400", "500"}
	if len(op.Security) > 0 {
		wantStatus = append(wantStatus, "401", "403")
	}
	success := false
	for status, r := range op.Responses {
		if status < "400" {
			success = true
			continue
		}
		if status == "503" && path == "/v1/health" {
			continue
		}
		if r.Content["application/problem+json"].Schema["$ref"] != "#/components/schemas/Problem" {
			t.Errorf("%s: %s is not a Problem: %v", name, status, r.Content)
		}
		for _, m := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(r.Description, -1) {
			if row := errs.Lookup(errs.Code(m[1])); string(row.Code) != m[1] || fmt.Sprint(row.HTTP) != status {
				t.Errorf("%s: code %s under status %s", name, m[1], status)
			}
		}
	}
	if !success {
		t.Errorf("%s has no success", name)
	}
	for _, s := range wantStatus {
		if _, ok := op.Responses[s]; !ok {
			t.Errorf("%s: %s is not documented", name, s)
		}
	}
}

// checkRefs follows every $ref.
func checkRefs(t *testing.T, root, at any) {
	switch v := at.(type) {
	case map[string]any:
		if ref, ok := v["$ref"].(string); ok {
			node := root
			for part := range strings.SplitSeq(strings.TrimPrefix(ref, "#/"), "/") {
				m, _ := node.(map[string]any)
				node = m[part]
			}
			if node == nil {
				t.Errorf("%s leads nowhere", ref)
			}
		}
		for _, sub := range v {
			checkRefs(t, root, sub)
		}
	case []any:
		for _, sub := range v {
			checkRefs(t, root, sub)
		}
	}
}
