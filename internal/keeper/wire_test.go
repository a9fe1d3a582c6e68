package keeper

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func FuzzRequest(f *testing.F) {
	for _, s := range []string{"", "h\x01e", "h\x02e", "pname", "p", "t" + strings.Repeat("x", 300), "l", "s", "sx", "d\x00", "q", "x", "?"} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, p []byte) {
		r, err := parseRequest(p)
		if err != nil {
			return
		}
		if string(r.encode()) != string(p) {
			t.Errorf("%q became %q", p, r.encode())
		}
	})
}

func FuzzRights(f *testing.F) {
	f.Add([]byte{})
	f.Add(unix.UnixCredentials(&unix.Ucred{Pid: 1}))
	f.Fuzz(func(t *testing.T, p []byte) {
		parseRights(p) // descriptors of this process's are not touched
	})
}
