// Package compat runs the programs that agents run, in real sandboxes, and so checks
// that /proc, /dev, /sys, ids, signals and the seccomp profile are as they expect: compilers, interpreters,
// a database server, and package managers with local sources (there is no network inside).
package compat

import (
	"os"
	"testing"
	"time"

	"dsec/client"
	"dsec/test/bed"
)

var node *bed.Bed

func TestMain(m *testing.M) {
	os.Exit(bed.Main(m, bed.Options{}, func(b *bed.Bed) { node = b }))
}

// programs are bash scripts that must succeed, each in a sandbox of its own.
var programs = map[string]string{
	"python multiprocessing": `cat >mp.py <<'X'
import multiprocessing as mp
from multiprocessing import shared_memory
def f(x): return x * x
if __name__ == '__main__':
    with mp.Pool(4) as p: assert sum(p.map(f, range(100))) == 328350
    s = shared_memory.SharedMemory(create=True, size=1 << 20); s.buf[0] = 7; s.close(); s.unlink()
    q = mp.Queue(); p = mp.Process(target=q.put, args=(1,)); p.start(); assert q.get() == 1; p.join()
    assert mp.Lock().acquire()
X
python3 mp.py`,
	"gcc": `printf '#include <stdio.h>\n#include <pthread.h>\nstatic void *f(void *x) { return x; }\nint main(void) { pthread_t t; pthread_create(&t, 0, f, 0); pthread_join(t, 0); puts("c works"); }' >a.c
gcc -O2 -pthread a.c -o a && ./a | grep -q 'c works'`,
	"go build": `printf 'module g\n\ngo 1.19\n' >go.mod
printf 'package main\n\nimport "fmt"\n\nfunc main() { fmt.Println("go works") }\n' >main.go
printf 'package main\n\nimport "testing"\n\nfunc TestX(t *testing.T) {}\n' >m_test.go
go build -o gg . && ./gg | grep -q 'go works' && go test ./...`,
	"ssh-keygen": `ssh-keygen -q -t ed25519 -N '' -f k && ssh-keygen -l -f k`,
	"git": `git init -q r && cd r && git config user.email a@b && git config user.name a && echo x >x && git add x && git commit -qm x
git clone -q . ../r2 && git worktree add -q ../r3 && git gc -q && git fsck && cd ../r2 && git log --oneline | grep -q x`,
	"sqlite": `sqlite3 d.db 'pragma journal_mode=wal; create table t(x); insert into t values(42);'
sqlite3 d.db 'select x from t' | grep -q 42`,
	"postgres server": `install -d -o postgres /pg /var/run/postgresql
su postgres -c 'cd /pg && /usr/lib/postgresql/15/bin/initdb -D /pg/d >/dev/null 2>&1 && /usr/lib/postgresql/15/bin/pg_ctl -D /pg/d -w -l /pg/log start' || { cat /pg/log; exit 1; }
su postgres -c "cd /pg && psql -h 127.0.0.1 -c 'create table t as select generate_series(1,1000) x' && psql -tc 'select sum(x) from t'" | grep -q 500500
su postgres -c '/usr/lib/postgresql/15/bin/pg_ctl -D /pg/d -m fast stop'`,
	"apt-get install": `mkdir -p deb/DEBIAN deb/usr/bin repo
printf 'Package: hello-local\nVersion: 1\nArchitecture: all\nMaintainer: a <a@b>\nDescription: x\n' >deb/DEBIAN/control
printf '#!/bin/sh\necho from-deb\n' >deb/usr/bin/hello-local && chmod 755 deb/usr/bin/hello-local
dpkg-deb -b deb repo/hello.deb && (cd repo && dpkg-scanpackages . >Packages)
rm -rf /etc/apt/sources.list* && echo "deb [trusted=yes] file:$PWD/repo ./" >/etc/apt/sources.list
apt-get update && apt-get install -y hello-local && hello-local | grep -q from-deb && apt-get remove -y hello-local && ! command -v hello-local`,
	"pip install": `python3 -m venv v && mkdir -p p/pk && echo 'x = 1' >p/pk/__init__.py
printf 'from setuptools import setup\nsetup(name="pk", version="1", packages=["pk"])\n' >p/setup.py
v/bin/pip install --no-index --no-build-isolation ./p && v/bin/python -c 'import pk; assert pk.x == 1'`,
	"npm install": `mkdir -p lib app && cd lib
printf '{"name":"mylib","version":"1.0.0","main":"i.js"}' >package.json && echo 'module.exports = 42' >i.js && npm pack --silent
cd ../app && echo '{"name":"app","version":"1.0.0"}' >package.json && npm install --offline ../lib/mylib-1.0.0.tgz
node -e 'if (require("mylib") !== 42) process.exit(1)'`,
	"another user":                      `su nobody -s /bin/sh -c 'test "$(id -u)" = 65534 && ! touch /etc/x 2>/dev/null && ! cat /etc/shadow 2>/dev/null'`,
	"setuid bits":                       `tar cf t.tar -C / usr/bin/passwd && tar xpf t.tar && test "$(stat -c %a usr/bin/passwd)" = 4755 && test "$(stat -c %a /usr/bin/su)" = 4755`,
	"a terminal":                        `script -qec tty /dev/null | grep -q /dev/pts/`,
	"renaming a directory of the image": `mv /usr/share/doc /usr/share/papers && test -d /usr/share/papers && ! test -e /usr/share/doc && mv /usr/share/papers /usr/share/doc`,
	"a chroot is no way out": `cat >e.py <<'X'
import ctypes, os
os.mkdir('/cage'); os.chroot('/cage')
for _ in range(200): os.chdir('..')
os.chroot('.')
assert os.path.isdir('/cage') and os.path.exists('/w/e.py'), os.listdir('/')
assert len([p for p in os.listdir('/proc') if p.isdigit()]) < 10
assert ctypes.CDLL(None).umount2(b'/', 2) != 0
X
python3 e.py`,
	"locks and fsync": `python3 -c 'import fcntl, os; f = open("l", "w"); fcntl.flock(f, fcntl.LOCK_EX); fcntl.lockf(f, fcntl.LOCK_EX); f.write("x"); f.flush(); os.fsync(f.fileno()); os.sync()'`,
	"unix and tcp sockets": `python3 - <<'X'
import os, socket, threading
for fam, addr in ((socket.AF_UNIX, "/tmp/s"), (socket.AF_INET, ("127.0.0.1", 0)), (socket.AF_INET6, ("::1", 0))):
    l = socket.socket(fam); l.bind(addr); l.listen()
    t = threading.Thread(target=lambda: l.accept()[0].sendall(b"hi")); t.start()
    c = socket.create_connection(l.getsockname()[:2]) if fam != socket.AF_UNIX else socket.socket(fam)
    if fam == socket.AF_UNIX: c.connect(addr)
    assert c.recv(2) == b"hi"; t.join()
assert socket.gethostbyname(socket.gethostname())
X`,
}

func TestProgramsThatAgentsRun(t *testing.T) {
	path, err := bed.Archive(t.Context(), "recipe.yaml")
	if err != nil {
		t.Fatalf("build the image (needs the Debian mirror): %v", err)
	}
	c := node.Client(t)
	if _, err := c.ImportPath(t.Context(), "compat", path, client.ImportOptions{}); err != nil {
		t.Fatal(err)
	}
	for name, script := range programs {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			sb := node.Sandbox(t, c, client.Spec{Image: "compat", MemoryBytes: 2 << 30, CPUMillis: 2000})
			r, err := sb.Exec(t.Context(), client.Cmd{Path: "bash", Args: []string{"-euo", "pipefail", "-c", "mkdir /w && cd /w\n" + script}, Timeout: 3 * time.Minute})
			if err != nil {
				t.Fatal(err)
			}
			if r.Code != 0 || r.Err != nil {
				t.Errorf("exit %d, %v\n%s%s", r.Code, r.Err, r.Stdout, r.Stderr)
			}
		})
	}
}
