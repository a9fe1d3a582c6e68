package container

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

// What a process may write to through its memory is found in its maps, and nothing else.
func TestMappedFiles(t *testing.T) {
	t.Parallel()
	const text = `00400000-00401000 r-xp 00000000 00:2a 17                         /bin/private
7f0000000000-7f0000001000 rw-s 00000000 00:2a 18                 /srv/a b
7f0000001000-7f0000002000 r--s 00000000 00:2a 19                 /srv/line\012end
7f0000002000-7f0000003000 rw-s 00000000 00:01 20                 /dev/zero (deleted)
7f0000003000-7f0000004000 rw-s 00000000 00:01 21                 /memfd:x (deleted)
7f0000004000-7f0000005000 rw-s 00000000 00:1b 22                 /dev/shm/x
7f0000005000-7f0000006000 rw-s 00000000 00:2a 23                 /srv/gone (deleted)
7f0000006000-7f0000007000 rw-s 00000000 00:2a 24                 /srv/another (deleted)
7ffc00000000-7ffc00021000 rw-p 00000000 00:00 0                  [stack]
`
	for _, named := range []string{"", "7f0000006000-7f0000007000"} {
		want := []string{"/srv/a b", "/srv/line\nend"}
		if named != "" {
			want = slices.Insert(want, 0, "")
		}
		files := map[string]bool{}
		if err := addMapped(files, strings.NewReader(text), func(address string) bool { return address == named }); err != nil {
			t.Fatal(err)
		}
		if got := slices.Sorted(maps.Keys(files)); !slices.Equal(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}
