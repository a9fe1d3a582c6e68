package cgroup

import (
	"os"
	"testing"
)

func TestMember(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ lines, name string }{
		{"5:memory:/a/dsec-12/sb-1\n4:cpu,cpuacct:/a/dsec-12/sb-1\n", "sb-1"},
		{"0::/dsec-12/sb-2/inner\n", "sb-2"},
		{"3:pids:/other\n2:memory:/b/dsec-12/sb-3\n", "sb-3"},
		{"0::/dsec-12\n", ""},
		{"0::/dsec-123/sb-4\n", ""},
		{"0::/\n", ""},
		{"nonsense\n", ""},
		{"", ""},
	} {
		if name, ok := member(c.lines, "dsec-12"); name != c.name || ok != (c.name != "") {
			t.Errorf("%q: %q, %v", c.lines, name, ok)
		}
	}
	if name, ok := Member(os.Getpid(), "dsec-12"); ok {
		t.Errorf("this test is in %q", name)
	}
	if _, ok := Member(1<<30, "dsec-12"); ok {
		t.Error("there is a thread of that number")
	}
}
