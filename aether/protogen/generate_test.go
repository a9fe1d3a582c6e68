package main

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestGeneratedCodeIsCurrent(t *testing.T) {
	t.Parallel()
	files, err := generate("../proto")
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range files {
		got, err := os.ReadFile(filepath.Join("../msg", name))
		if err != nil {
			t.Error(err)
		} else if !bytes.Equal(got, want) {
			t.Errorf("msg/%s is not what aether/proto says; run 'go generate ./aether/msg'", name)
		}
	}
}

func TestRefusesWhatItCannotBound(t *testing.T) {
	t.Parallel()
	for name, body := range map[string]string{
		"contains itself":  "message A { A a = 1; }",
		"contains itself ": "message A { B b = 1; } message B { repeated A a = 1; }",
		"oneof":            "message A { oneof x { string a = 1; } }",
		"type double":      "message A { double a = 1; }",
		"repeated int32":   "message A { repeated int32 a = 1; }",
		"only map<string":  "message A { map<string, bytes> a = 1; }",
		"nested":           "message A { message B {} B b = 1; }",
	} {
		dir := t.TempDir()
		if err := os.WriteFile(filepath.Join(dir, "x.proto"), []byte("syntax = \"proto3\";\npackage x;\n"+body+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := generate(dir); err == nil || !strings.Contains(err.Error(), strings.TrimSpace(name)) {
			t.Errorf("%s: got %v", body, err)
		}
	}
	if _, err := generate(t.TempDir()); err == nil {
		t.Error("an empty folder was accepted")
	}
}
