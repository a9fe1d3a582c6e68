package control

import (
	"context"
	"errors"
	"strings"
	"testing"

	"dsec/api/v1/errs"
	"dsec/internal/control/store/storetest"
	"dsec/internal/image/object"
)

func TestAnObjectStoreBelongsToOneCluster(t *testing.T) {
	t.Parallel()
	open := func() object.Store {
		s, err := object.OpenDir(t.Context(), t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	use := func(s object.Store) {
		if err := s.Put(t.Context(), "meta/x", 1, strings.NewReader("x")); err != nil {
			t.Fatal(err)
		}
	}
	a, b := storetest.NewMemory("a"), storetest.NewMemory("b")
	one, two, empty := open(), open(), open()
	step := func(name string, cluster binder, s object.Store, mine bool, fresh, refused string) {
		t.Helper()
		err := bind(context.Background(), cluster, s, "S", mine, fresh)
		if refused == "" && err != nil || refused != "" && (!errors.Is(err, errs.DataUnsuitable) || !strings.Contains(err.Error(), refused)) {
			t.Errorf("%s: %v, want %q", name, err, refused)
		}
	}
	step("the first start", a, one, false, "1", "")
	step("the next start", a, one, false, "2", "")
	step("a mount is missing", a, empty, false, "3", "it is empty")
	step("marked, and then the start failed", b, one, false, "4", "")
	b = storetest.NewMemory("b")
	use(one)
	step("another cluster's", b, one, false, "5", "another cluster")
	step("the first start of another", b, two, false, "6", "")
	step("two clusters changed places", b, one, false, "7", "not the one")
	step("etcd was lost", storetest.NewMemory("c"), one, true, "8", "")
}
