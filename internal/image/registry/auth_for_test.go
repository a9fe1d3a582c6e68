package registry_test

import (
	"os"
	"path/filepath"
	"testing"

	"dsec/internal/image/registry"
)

// What a file has for a registry can be used elsewhere, and is nothing for another registry.
func TestAuthForAnotherMachine(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(file, []byte(`{"auths":{"r.example":{"auth":"bWU6c2VjcmV0"},"t.example":{"identitytoken":"refresh"}}}`), 0o600); err != nil {
		t.Fatal(err)
	}
	for ref, want := range map[string]registry.Auth{
		"r.example/a/b:1": {Username: "me", Password: "secret"}, "t.example/x": {IdentityToken: "refresh"}, "other.example/a": {},
	} {
		if got, err := (registry.Auth{ConfigFile: file}).For(ref); err != nil || got != want {
			t.Errorf("%s: %v, %v", ref, got, err)
		}
	}
	if _, err := (registry.Auth{}).For("not a reference"); err == nil {
		t.Error("a malformed reference was taken")
	}
}
