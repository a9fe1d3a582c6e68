package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	v1 "dsec/api/v1"
)

// The same thing has the same flags in run, create and exec, and reads the same.
func TestFlagsAreAlike(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	file := filepath.Join(t.TempDir(), "env")
	if err := os.WriteFile(file, []byte("# a comment\nFROM_FILE=a b \"c\"\n  BOTH=file\n\nDSEC_NOT_SET_ANYWHERE\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	env := []string{"--env-file", file, "-e", "BOTH=flag"}
	print := []string{"--", "sh", "-c", `echo "$FROM_FILE $BOTH ${DSEC_NOT_SET_ANYWHERE-unset}"; pwd`}
	id := c.ok(append(append([]string{"create", "-u", "1000:1000", "-w", "/tmp", "-m", "512MiB", "--cpu", "2", "--pids", "64", "-l", "job=a"}, env...), "busybox")...)
	spec := into[v1.Sandbox](t, c.ok("inspect", "--json", id)).Spec
	if spec.User != "1000:1000" || spec.WorkDir != "/tmp" || spec.MemoryBytes != 512<<20 || spec.CPUMillis != 2000 || spec.PIDs != 64 ||
		spec.Env["FROM_FILE"] != `a b "c"` || spec.Env["BOTH"] != "flag" || len(spec.Env) != 2 {
		t.Errorf("%+v", spec)
	}
	out := c.ok(append(append([]string{"exec", "-u", "root", "--workdir", "/tmp"}, append(env, id)...), print...)...)
	if !strings.HasPrefix(out, "a b \"c\" flag unset\n") || !strings.HasSuffix(out, "/tmp") {
		t.Errorf("exec: %q", out)
	}
	c.ok("run", "-i", "-u", "root", "-w", "/tmp", "-m", "1g", "--idle-timeout", "1m", "busybox", "--", "true")
	if a, b := c.ok("create", "-m", "512m", "busybox"), c.ok("create", "-m", "536870912", "busybox"); into[v1.Sandbox](t, c.ok("inspect", "--json", a)).Spec.MemoryBytes !=
		into[v1.Sandbox](t, c.ok("inspect", "--json", b)).Spec.MemoryBytes {
		t.Error("512m is not 512 MiB")
	}
	for _, args := range [][]string{
		{"exec", "--timeout", "30", id, "--", "true"}, {"run", "--timeout", "30", "busybox", "--", "true"}, {"create", "--ttl", "30", "busybox"},
		{"run", "--lease", "30", "busybox", "--", "true"}, {"token", "create", "--right", "read", "--ttl", "30", "x"}, {"stats", "--interval", "30"},
	} {
		c.fails(2, `"30" has no unit; write 30s for seconds`, args...)
	}
	c.fails(2, "write it like 30s, 5m or 1h30m", "exec", "--timeout", "soon", id, "--", "true")
	c.fails(2, "cannot be used with -i", "run", "--no-stdin", "-i", "busybox", "--", "true")
	c.fails(1, "local_file", "exec", "--env-file", "/none", id, "--", "true")
	if err := os.WriteFile(file, []byte("A=b\nexport C=d\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := c.run("create", "--env-file", file, "busybox"); r.code != 1 || !strings.Contains(r.err, "line 2 of "+file) {
		t.Errorf("%+v", r)
	}
}

// A path that ends in dots is called as what it names: into a directory goes that name.
func TestCpOfADirectoryWithoutAName(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	id := c.ok("create", "busybox")
	dir := filepath.Join(t.TempDir(), "project")
	if err := os.MkdirAll(filepath.Join(dir, "sub"), 0o755); err != nil {
		t.Fatal(err)
	}
	c.ok("cp", filepath.Join(dir, "sub")+"/..", id+":/tmp")
	if _, err := os.Stat(filepath.Join(c.s.Root(id), "tmp/project/sub")); err != nil {
		t.Error(err)
	}
	// A tar goes into a directory that exists, without a slash too.
	tar := c.ok("cp", id+":/tmp/project", "-")
	if r := c.with(t.Context(), tar+"\n", "cp", "-", id+":/tmp/project"); r.code != 0 {
		t.Errorf("%+v", r)
	}
	if _, err := os.Stat(filepath.Join(c.s.Root(id), "tmp/project/project/sub")); err != nil {
		t.Error(err)
	}
}

func TestNamesThatCannotBeMade(t *testing.T) {
	t.Parallel()
	for name, says := range map[string]string{"build-base:x": "what builds keep", "build-step:x": "what builds keep", "snap:x": "dsec snapshot ID NAME"} {
		if err := madeName(name); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := madeName("debian"); err != nil {
		t.Error(err)
	}
	var once onceValue
	if err := once.Set("one"); err != nil || once.String() != "one" {
		t.Errorf("%v, %q", err, once)
	}
	if err := once.Set("two"); err == nil || once.String() != "one" {
		t.Errorf("%v, %q", err, once)
	}
}

func TestQuietIsNotJSON(t *testing.T) {
	t.Parallel()
	c := newCLI(t)
	for _, verb := range [][]string{{"ls"}, {"image", "ls"}, {"snapshot", "ls"}} {
		c.fails(2, "", append(verb, "-q", "--json")...)
	}
}

// A server that is started in the background gets every flag that its starter was given.
func TestDetachedServerGetsAllFlags(t *testing.T) {
	t.Parallel()
	a := &app{contextFile: "/c"}
	var f upFlags
	cmd := a.upInto(&f)
	given := map[string]string{
		"slots": "7", "cpu-overcommit": "1.5", "memory-overcommit": "2.5", "swap": "file:3GiB", "store": "/s", "store-endpoint": "http://e", "store-region": "r", "store-latency": "3s",
		"store-rate": "5", "image-cache": "6", "image-loading": "fuse", "image-read-ahead": "8", "build-cache": "9", "build-cache-age": "10h0m0s",
		"collapse-below": "11", "reserve-memory": "12", "reserve-disk": "13", "tls-cert": "/cert", "tls-key": "/key", "insecure": "true", "log-level": "debug",
		"listen": "127.0.0.1:1", "data": "/d",
	}
	for name, value := range given {
		if err := cmd.Flags().Set(name, value); err != nil {
			t.Fatal(name, err)
		}
	}
	args, err := f.serverArgs("/d", a.contextFile)
	if err != nil {
		t.Fatal(err)
	}
	var got upFlags
	again := a.upInto(&got)
	again.Flags().String("context", "", "")
	if err := again.ParseFlags(args[1:]); err != nil {
		t.Fatal(err)
	}
	cmd.Flags().VisitAll(func(flag *pflag.Flag) {
		switch flag.Name {
		case "detach", "json", "help": // of the starter
			return
		}
		if _, set := given[flag.Name]; !set {
			t.Errorf("--%s is not tried here", flag.Name)
		}
		if has := again.Flags().Lookup(flag.Name); !has.Changed || has.Value.String() != flag.Value.String() {
			t.Errorf("--%s %s: the server gets %s", flag.Name, flag.Value, has.Value)
		}
	})
}
