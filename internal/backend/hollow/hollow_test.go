package hollow

import (
	"testing"

	v1 "dsec/api/v1"
	"dsec/internal/backend"
	"dsec/internal/backend/backendtest"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	backendtest.Run(t, func(t *testing.T) backendtest.Subject {
		dir := t.TempDir()
		return backendtest.Subject{
			Open: func(t *testing.T) backend.Backend {
				b, err := New(dir)
				if err != nil {
					t.Fatal(err)
				}
				return b
			},
			Spec: func(id string) backend.Spec {
				s := v1.Spec{Backend: v1.BackendHollow}
				s.SetDefaults()
				return backend.Spec{ID: id, Generation: 1, Sandbox: s}
			},
		}
	})
}
