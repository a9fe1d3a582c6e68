package snapshot_test

import (
	"encoding/binary"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// tree lists the agent's root: directories (with the root) and all the rest.
func tree() (dirs, others []string) {
	_ = filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
		case d.IsDir():
			dirs = append(dirs, p)
		default:
			others = append(others, p)
		}
		return nil
	})
	return dirs, others
}

// run does the op in the agent's root, which is its working directory.
func (o op) run() error {
	if o.Repeat > 0 { // Path and Name with a number
		for i := range o.Repeat {
			c := o
			c.Repeat = 0
			c.Path = append(append([]byte(nil), o.Path...), strconv.Itoa(o.RepeatBase+i)...)
			if err := c.run(); err != nil {
				return err
			}
		}
		return nil
	}
	path, to := string(o.Path), string(o.To)
	if len(o.Path) == 0 {
		dirs, others := tree()
		all := append(append([]string(nil), dirs...), others...)
		pick := func(list []string, i int) string {
			if len(list) == 0 {
				return ""
			}
			return list[i%len(list)]
		}
		fresh := filepath.Join(pick(dirs, o.B), string(o.Name))
		switch o.Do {
		case "create", "mkdir", "mkfifo", "mksock", "mknod", "symlink": // a new name
			path = fresh
		case "write", "truncate", "punch", "cap":
			path = pick(others, o.A)
		case "rmdir":
			path = pick(dirs, o.A)
		case "link":
			path, to = pick(others, o.A), fresh
		case "rename", "exchange":
			path, to = pick(all, o.A), fresh
			if o.N%2 == 1 {
				to = pick(all, o.B)
			}
		default:
			path = pick(all, o.A)
		}
		if path == "" {
			return nil
		}
	}
	return o.on(path, to)
}

func (o op) on(path, to string) error {
	regular := func(flags int) (*os.File, error) {
		if st, err := os.Lstat(path); err == nil && !st.Mode().IsRegular() {
			return nil, unix.EINVAL
		}
		return os.OpenFile(path, flags, fs.FileMode(o.Mode))
	}
	switch o.Do {
	case "create":
		f, err := regular(os.O_CREATE | os.O_TRUNC | os.O_WRONLY)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = f.Write(pattern(o.N, byte(o.Off)))
		return err
	case "write":
		f, err := regular(os.O_WRONLY)
		if err != nil {
			return err
		}
		defer f.Close()
		_, err = f.WriteAt(pattern(o.N, byte(o.N>>3)), o.Off)
		return err
	case "truncate":
		f, err := regular(os.O_WRONLY)
		if err != nil {
			return err
		}
		defer f.Close()
		return f.Truncate(o.Off)
	case "punch":
		f, err := regular(os.O_RDWR)
		if err != nil {
			return err
		}
		defer f.Close()
		return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, o.Off, max(o.N, 1))
	case "mkdir":
		return unix.Mkdir(path, o.Mode)
	case "mkfifo":
		return unix.Mkfifo(path, o.Mode)
	case "mksock":
		return unix.Mknod(path, unix.S_IFSOCK|o.Mode, 0)
	case "mknod":
		return unix.Mknod(path, unix.S_IFCHR|o.Mode, int(o.N))
	case "symlink":
		return os.Symlink(string(o.Value), path)
	case "link":
		return os.Link(path, to)
	case "rename":
		return os.Rename(path, to)
	case "exchange":
		return unix.Renameat2(unix.AT_FDCWD, path, unix.AT_FDCWD, to, unix.RENAME_EXCHANGE)
	case "remove":
		if path == "." {
			return nil
		}
		return os.RemoveAll(path)
	case "unlink":
		return unix.Unlink(path)
	case "rmdir":
		return unix.Rmdir(path)
	case "chmod":
		return unix.Fchmodat(unix.AT_FDCWD, path, o.Mode, unix.AT_SYMLINK_NOFOLLOW)
	case "chown":
		return os.Lchown(path, o.UID, o.GID)
	case "setxattr":
		return unix.Lsetxattr(path, o.Key, o.Value, 0)
	case "delxattr":
		return unix.Lremovexattr(path, o.Key)
	case "cap":
		return unix.Lsetxattr(path, "security.capability", []byte("\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"), 0)
	case "acl", "defacl":
		key := "system.posix_acl_access"
		if o.Do == "defacl" {
			key = "system.posix_acl_default"
		}
		return unix.Lsetxattr(path, key, acl(uint32(o.UID), uint32(o.GID)), 0)
	case "times":
		ts := unix.Timespec{Sec: o.Sec, Nsec: o.Nsec}
		return unix.UtimesNanoAt(unix.AT_FDCWD, path, []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
	case "deep": // N directories in each other, beyond any path's length
		for range o.N {
			if err := unix.Mkdir(path, 0o755); err != nil {
				return err
			}
			if err := unix.Chdir(path); err != nil {
				return err
			}
		}
		if err := os.WriteFile("bottom", []byte("here"), 0o600); err != nil {
			return err
		}
		return unix.Chdir("/")
	case "read":
		b, err := os.ReadFile(path)
		if err == nil && string(b) != string(o.Value) {
			err = fmt.Errorf("it is %.100q", b)
		}
		return err
	case "getxattr":
		b := make([]byte, 4096)
		n, err := unix.Lgetxattr(path, o.Key, b)
		if err == nil && string(b[:n]) != string(o.Value) {
			err = fmt.Errorf("it is %x", b[:n])
		}
		return err
	case "absent":
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			return fmt.Errorf("it is there (%v)", err)
		}
		return nil
	}
	return fmt.Errorf("no such op %q", o.Do)
}

// acl gives a user and a group rights of their own.
func acl(uid, gid uint32) []byte {
	out := binary.LittleEndian.AppendUint32(nil, 2)
	for _, e := range []struct {
		tag, perm uint16
		id        uint32
	}{{1, 7, ^uint32(0)}, {2, 5, uid}, {4, 5, ^uint32(0)}, {8, 4, gid}, {0x10, 5, ^uint32(0)}, {0x20, 0, ^uint32(0)}} {
		out = binary.LittleEndian.AppendUint16(out, e.tag)
		out = binary.LittleEndian.AppendUint16(out, e.perm)
		out = binary.LittleEndian.AppendUint32(out, e.id)
	}
	return out
}

// pattern is n bytes that tell seeds apart, with zeros now and then.
func pattern(n int64, seed byte) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7) + byte(i>>8)*seed + seed + 1
	}
	if n > 140_000 {
		clear(p[65536 : 65536*2])
	}
	return p
}

var longName = strings.Repeat("n", 255)
