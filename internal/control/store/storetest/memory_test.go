package storetest

import (
	"testing"

	"dsec/internal/control/store"
)

func TestMemoryConforms(t *testing.T) {
	t.Parallel()
	Run(t, func(*testing.T) store.Store { return NewMemory("seed") })
}
