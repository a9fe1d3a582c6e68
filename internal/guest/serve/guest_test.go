package serve

import (
	"testing"

	"dsec/aether"
)

// What the relays on the way do not know as a guest's cannot be called.
func TestAllMethodsAreRelayed(t *testing.T) {
	t.Parallel()
	for method := range (&Guest{}).Handlers() {
		if aether.GuestGroup(method) == "" {
			t.Errorf("%s is of no group that is relayed", method)
		}
	}
}
