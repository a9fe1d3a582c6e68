package user

import (
	"errors"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"testing"

	"dsec/api/v1/errs"
)

// root makes a sandbox root with these databases.
func root(t testing.TB, passwd, group string) string {
	t.Helper()
	d := t.TempDir()
	os.Mkdir(d+"/etc", 0o755)
	for name, text := range map[string]string{"passwd": passwd, "group": group} {
		if err := os.WriteFile(d+"/etc/"+name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

const (
	passwd = "root:x:0:0:root:/root:/bin/bash\n# comment\nbroken:line\nann:x:1000:1001::/home/ann:/bin/sh\n" +
		"twin:x:1000:1002::/home/twin:\n77:x:5000:5000::/n:\nnohome:x:6000:6000:::\nbad:x:zz:1::/:\n"
	group = "root:x:0:\nwheel:x:10:root,ann\nvideo:x:44:ann,twin\nbroken:x:q:ann\n"
)

func TestLookup(t *testing.T) {
	t.Parallel()
	d := NewDatabase(root(t, passwd, group))
	for spec, want := range map[string]User{
		"":           {Name: "root", Home: "/root", Shell: "/bin/bash", Groups: []uint32{10}},
		"root":       {Name: "root", Home: "/root", Shell: "/bin/bash", Groups: []uint32{10}},
		"ann":        {Name: "ann", UID: 1000, GID: 1001, Home: "/home/ann", Shell: "/bin/sh", Groups: []uint32{10, 44}},
		"1000":       {Name: "ann", UID: 1000, GID: 1001, Home: "/home/ann", Shell: "/bin/sh", Groups: []uint32{10, 44}},
		"77":         {Name: "77", UID: 5000, GID: 5000, Home: "/n"}, // a name before a number
		"5000":       {Name: "77", UID: 5000, GID: 5000, Home: "/n"},
		"4321":       {Name: "4321", UID: 4321, GID: 4321, Home: "/"},
		"nohome":     {Name: "nohome", UID: 6000, GID: 6000, Home: "/"},
		"ann:video":  {Name: "ann", UID: 1000, GID: 44, Home: "/home/ann", Shell: "/bin/sh"},
		"4321:99":    {Name: "4321", UID: 4321, GID: 99, Home: "/"},
		"twin:wheel": {Name: "twin", UID: 1000, GID: 10, Home: "/home/twin"},
	} {
		u, err := d.Lookup(spec)
		if err != nil {
			t.Errorf("%q: %v", spec, err)
			continue
		}
		if u.Name != want.Name || u.UID != want.UID || u.GID != want.GID || u.Home != want.Home || u.Shell != want.Shell || !slices.Equal(u.Groups, want.Groups) {
			t.Errorf("%q: %+v, want %+v", spec, *u, want)
		}
	}
	for _, spec := range []string{"nobody", "ann:none", "bad", "-1", "4294967295", "99999999999", "broken"} {
		if u, err := d.Lookup(spec); !errors.Is(err, errs.UserNotFound) {
			t.Errorf("%q: %+v %v", spec, u, err)
		}
	}
	if o, g := d.Names(1000, 44); o != "ann" || g != "video" {
		t.Error(o, g)
	}
	if o, g := d.Names(1, 2); o != "1" || g != "2" {
		t.Error(o, g)
	}
}

func TestChangesAreSeen(t *testing.T) {
	t.Parallel()
	r := root(t, passwd, group)
	d := NewDatabase(r)
	if _, err := d.Lookup("eve"); err == nil {
		t.Fatal("eve is there")
	}
	if err := os.WriteFile(r+"/etc/passwd", []byte(passwd+"eve:x:7:7::/eve:\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if u, err := d.Lookup("eve"); err != nil || u.UID != 7 {
		t.Fatal(u, err)
	}
}

// An image from scratch, or hostile files, cannot hang or confuse the guest.
func TestOddDatabases(t *testing.T) {
	t.Parallel()
	d := NewDatabase(t.TempDir())
	if u, err := d.Lookup(""); err != nil || u.UID != 0 || u.Home != "/root" {
		t.Fatal(u, err)
	}
	if u, err := d.Lookup("1000"); err != nil || u.UID != 1000 {
		t.Fatal(u, err)
	}
	r := t.TempDir()
	os.Mkdir(r+"/etc", 0o755)
	if err := syscall.Mkfifo(r+"/etc/passwd", 0o666); err != nil {
		t.Fatal(err)
	}
	os.Symlink("/dev/zero", r+"/etc/group")
	if _, err := NewDatabase(r).Lookup("ann"); !errors.Is(err, errs.UserNotFound) {
		t.Fatal(err)
	}
}

// Each operation has its user's permissions, whatever others do at the same time. Needs root.
func TestDo(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		t.Fatal("this test needs root")
	}
	dir := t.TempDir()
	for p := dir; p != "/tmp" && p != "/"; p = p[:max(1, len(p)-len("/")-len(lastPart(p)))] {
		os.Chmod(p, 0o777)
	}
	secret := dir + "/secret"
	if err := os.WriteFile(secret, nil, 0o640); err != nil {
		t.Fatal(err)
	}
	if err := os.Chown(secret, 0, 4242); err != nil {
		t.Fatal(err)
	}
	open := func(path string, flags int) error {
		fd, err := syscall.Open(path, flags, 0o600)
		if err == nil {
			syscall.Close(fd)
		}
		return err
	}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			outsider := &User{Name: "o", UID: uint32(2000 + i), GID: 2000}
			member := &User{Name: "m", UID: uint32(3000 + i), GID: 3000, Groups: []uint32{1, 4242}}
			for n := range 50 {
				if err := outsider.Do(func() error { return open(secret, syscall.O_RDONLY) }); err != syscall.EACCES {
					t.Errorf("outsider: %v", err)
				}
				if err := member.Do(func() error { return open(secret, syscall.O_RDONLY) }); err != nil {
					t.Errorf("member: %v", err)
				}
				if err := open(secret, syscall.O_RDWR); err != nil {
					t.Errorf("root afterwards: %v", err)
				}
				own := dir + "/f" + strconv.Itoa(i) + "." + strconv.Itoa(n)
				if err := member.Do(func() error { return open(own, syscall.O_CREAT|syscall.O_RDWR) }); err != nil {
					t.Errorf("create: %v", err)
				}
				var st syscall.Stat_t
				if syscall.Stat(own, &st) != nil || st.Uid != member.UID || st.Gid != 3000 {
					t.Errorf("owner %d:%d", st.Uid, st.Gid)
				}
			}
		})
	}
	wg.Wait()
}

func lastPart(p string) string {
	for i := len(p) - 1; i >= 0; i-- {
		if p[i] == '/' {
			return p[i+1:]
		}
	}
	return p
}

func FuzzLookup(f *testing.F) {
	f.Add(passwd, group, "ann:video")
	f.Add("a:b:c", "", "a")
	f.Fuzz(func(t *testing.T, p, g, spec string) {
		u, err := NewDatabase(root(t, p, g)).Lookup(spec)
		if err == nil && (u.Home == "" || u.UID == 1<<32-1) || err != nil && !errors.Is(err, errs.UserNotFound) {
			t.Fatalf("%+v %v", u, err)
		}
	})
}
