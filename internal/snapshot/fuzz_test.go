package snapshot

import (
	"bytes"
	"strings"
	"testing"
)

func FuzzACL(f *testing.F) {
	f.Add([]byte("\x02\x00\x00\x00\x01\x00\x07\x00\xff\xff\xff\xff\x02\x00\x05\x00\x01\x5e\xd1\xb2\x20\x00\x00\x00\xff\xff\xff\xff"))
	f.Add([]byte("\x02\x00\x00\x00"))
	f.Add([]byte("\x01\x00"))
	ids := IDs{First: 0xb2d15e00, Count: 1 << 16}
	f.Fuzz(func(t *testing.T, p []byte) {
		was := bytes.Clone(p)
		out, lost, err := mapACL(p, ids)
		if !bytes.Equal(p, was) {
			t.Fatal("the input was changed")
		}
		if err == nil && len(out) != len(p)-8*lost {
			t.Fatalf("%d bytes became %d, %d entries lost", len(p), len(out), lost)
		}
		same, lost, err2 := mapACL(p, IDs{})
		if (err == nil) != (err2 == nil) || err2 == nil && (lost != 0 || !bytes.Equal(same, p)) {
			t.Fatalf("as it is: %x, %d, %v", same, lost, err2)
		}
	})
}

func FuzzCapability(f *testing.F) {
	f.Add([]byte("\x01\x00\x00\x03\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x5e\xd1\xb2"))
	f.Add([]byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, p []byte) {
		out, ok := mapCapability(p, IDs{First: 0xb2d15e00, Count: 1 << 16})
		if ok && (len(p) != 24 || len(out) != 20 && len(out) != 24 || p[0] != out[0] || !bytes.Equal(p[4:20], out[4:20])) {
			t.Fatalf("%x became %x", p, out)
		}
	})
}

func FuzzDirents(f *testing.F) {
	f.Add([]byte("\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x18\x00\x08name\x00"))
	f.Fuzz(func(t *testing.T, p []byte) {
		items, _ := parseDirents(nil, p)
		for _, it := range items {
			if strings.ContainsRune(it.name, 0) || it.name == "." || it.name == ".." {
				t.Fatalf("name %q", it.name)
			}
		}
	})
}

// A pattern is refused or matches in time, and what it matches is what a plain search says.
func FuzzLeaveOut(f *testing.F) {
	for _, s := range []string{"/a/*/c", "**/b", "*.pem", "a/**/c/", "[a-c]/?"} {
		f.Add(s, "/a/b/c")
	}
	f.Fuzz(func(t *testing.T, pattern, path string) {
		states, err := compileLeaveOut([]string{pattern})
		if err != nil || len(path) > 200 || len(pattern) > 60 {
			return
		}
		names := strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
		p := states[0].p
		for i, name := range names {
			var got bool
			states, got = match(states, name, i+1 < len(names))
			if want := search(p.segs, names[:i+1]) && (i+1 < len(names) || !p.dirOnly); got != want {
				t.Fatalf("%q on %q: %v", pattern, names[:i+1], got)
			}
		}
	})
}

// search is match by trying everything.
func search(segs []segment, names []string) bool {
	switch {
	case len(segs) == 0:
		return len(names) == 0
	case segs[0].any && len(segs) == 1:
		return len(names) > 0
	case segs[0].any:
		return search(segs[1:], names) || len(names) > 0 && search(segs, names[1:])
	}
	return len(names) > 0 && segs[0].matches(names[0]) && search(segs[1:], names[1:])
}

func FuzzRedirect(f *testing.F) {
	f.Add("/a/b")
	f.Add("../x")
	f.Fuzz(func(t *testing.T, to string) {
		if checkRedirect(to) == nil && (to == "" || strings.Contains("/"+to+"/", "/../") || strings.Contains(to, "//") || to[0] != '/' && strings.Contains(to, "/")) {
			t.Fatalf("%q", to)
		}
	})
}
