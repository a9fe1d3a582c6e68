package imagetest

import (
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// RandomTree fills the empty directory root with what t draws: every type of
// file, hard links, xattrs, odd names, owners, times and sizes. It needs root.
func RandomTree(t *rapid.T, root string) {
	g := &treeGen{t: t, dirs: []string{root}, used: map[string]bool{}}
	for range rapid.IntRange(0, 40).Draw(t, "entries") {
		g.add()
	}
	// Times last: adding entries changed those of directories.
	for _, p := range append(g.others, g.dirs...) {
		g.times(p)
	}
}

type treeGen struct {
	t      *rapid.T
	dirs   []string
	files  []string // whatever can have another name
	others []string
	used   map[string]bool
}

func (g *treeGen) name() string {
	chars := []rune("ab.-+ \n\x01é😀:~=\"\\%$")
	n := rapid.SampledFrom([]int{1, 2, 3, 8, 60, 255}).Draw(g.t, "length")
	var s string
	for len(s) < n {
		c := string(rapid.SampledFrom(chars).Draw(g.t, "char"))
		if len(s)+len(c) > n {
			c = "x"
		}
		s += c
	}
	if s == "." || s == ".." {
		return "dots"
	}
	return s
}

func (g *treeGen) add() {
	dir := rapid.SampledFrom(g.dirs).Draw(g.t, "dir")
	p := filepath.Join(dir, g.name())
	if len(p) > 3000 || g.used[p] {
		return
	}
	g.used[p] = true
	switch rapid.SampledFrom([]string{"file", "file", "file", "dir", "dir", "symlink", "link", "dev", "fifo", "sock", "whiteout"}).Draw(g.t, "type") {
	case "file":
		g.must(os.WriteFile(p, g.content(), 0o600))
		g.files = append(g.files, p)
	case "dir":
		g.must(os.Mkdir(p, 0o700))
		g.dirs = append(g.dirs, p)
		g.attrs(p, false)
		return
	case "symlink":
		n := rapid.SampledFrom([]int{1, 20, 1000, 2100, 4000, 4095}).Draw(g.t, "target length")
		target := fmt.Sprintf("%0*d", n, n)
		g.must(os.Symlink(target[:n], p))
		g.files = append(g.files, p)
		g.others = append(g.others, p)
		g.must(os.Lchown(p, g.id(), g.id()))
		return
	case "link":
		if len(g.files) == 0 {
			return
		}
		g.must(os.Link(rapid.SampledFrom(g.files).Draw(g.t, "target"), p))
		return
	case "dev":
		dev := unix.Mkdev(uint32(rapid.IntRange(0, 4095).Draw(g.t, "major")), uint32(rapid.IntRange(0, 1<<20-1).Draw(g.t, "minor")))
		typ := rapid.SampledFrom([]uint32{unix.S_IFCHR, unix.S_IFBLK}).Draw(g.t, "kind")
		g.must(unix.Mknod(p, typ|0o600, int(dev)))
		g.files = append(g.files, p)
	case "whiteout":
		g.must(unix.Mknod(p, unix.S_IFCHR|0o600, 0))
	case "fifo":
		g.must(unix.Mkfifo(p, 0o600))
	case "sock":
		g.must(unix.Mknod(p, unix.S_IFSOCK|0o600, 0))
	}
	g.others = append(g.others, p)
	g.attrs(p, true)
}

// content draws sizes around every boundary of the format, with runs of zeros.
func (g *treeGen) content() []byte {
	size := rapid.SampledFrom([]int{0, 1, 100, 1023, 1024, 1025, 4095, 4096, 4097, 65535, 65536, 65537, 200_000, 1 << 18}).Draw(g.t, "size")
	p := make([]byte, size)
	seed := rapid.Byte().Draw(g.t, "seed")
	for i := range p {
		p[i] = byte(i*7)*seed + byte(i>>8) + seed
	}
	for range rapid.IntRange(0, 3).Draw(g.t, "zero runs") {
		if size == 0 {
			break
		}
		from := rapid.IntRange(0, size-1).Draw(g.t, "from")
		n := rapid.SampledFrom([]int{1, 4096, 65536, 1 << 17}).Draw(g.t, "zeros")
		clear(p[from:min(size, from+n)])
	}
	return p
}

func (g *treeGen) id() int {
	return rapid.SampledFrom([]int{0, 1, 1000, 65534, 65535, 65536, 197609, 1<<32 - 2}).Draw(g.t, "id")
}

func (g *treeGen) attrs(p string, leaf bool) {
	g.must(os.Lchown(p, g.id(), g.id()))
	g.must(unix.Chmod(p, uint32(rapid.IntRange(0, 0o7777).Draw(g.t, "mode"))))
	for range rapid.IntRange(0, 2).Draw(g.t, "xattrs") {
		name := rapid.SampledFrom([]string{"trusted.overlay.opaque", "trusted.overlay.redirect", "security.capability", "user.a", "user.comment"}).Draw(g.t, "xattr")
		value := make([]byte, rapid.SampledFrom([]int{0, 1, 3, 24, 500}).Draw(g.t, "value length"))
		switch name {
		case "security.capability":
			value = []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00")
		case "user.a", "user.comment":
			if st, err := os.Lstat(p); err != nil || !st.Mode().IsRegular() && !st.IsDir() {
				continue // not allowed on devices and the like
			}
		}
		if err := unix.Lsetxattr(p, name, value, 0); err != nil {
			if leaf && name == "security.capability" {
				continue // only regular files
			}
			g.must(err)
		}
	}
}

func (g *treeGen) times(p string) {
	// What the test's own file system can hold: from 1901 to 2446.
	sec := rapid.SampledFrom([]int64{0, 1, -1, -86400 * 365 * 10, 1 << 31, 1<<31 + 5, 5_000_000_000, 1_700_000_000}).Draw(g.t, "time")
	ts := unix.Timespec{Sec: sec, Nsec: int64(rapid.IntRange(0, 999_999_999).Draw(g.t, "nsec"))}
	g.must(unix.UtimesNanoAt(unix.AT_FDCWD, p, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW))
}

func (g *treeGen) must(err error) {
	if err != nil {
		g.t.Fatalf("make random tree: %v", err)
	}
}
