package edge

import (
	"testing"

	"dsec/aether"
)

// Apiservers relay clients' streams by the method's name alone.
func TestControlMethodsAreNotRelayed(t *testing.T) {
	t.Parallel()
	for method := range (&Edge{}).handlers() {
		if g := aether.GuestGroup(method); g != "" || method == aether.MethodBatch {
			t.Errorf("%s would be relayed for clients, as of group %q", method, g)
		}
	}
}
