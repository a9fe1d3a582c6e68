package container

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sys/unix"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
	"dsec/internal/backend"
	"dsec/internal/snapshot"
)

// mountPoints are what the guest mounts on; it makes those that an image lacks.
var mountPoints = []string{"proc", "sys", "dev"}

// etcFiles are the files of /etc that tell the sandbox who it is. own are those that no
// snapshot may bring from another sandbox; of the others a snapshot's are kept, since they
// are there only if somebody changed them.
func etcFiles(spec *backend.Spec) (own, others map[string]string) {
	host := hostname(spec)
	id := sha256.Sum256([]byte("machine-id of " + spec.ID))
	own = map[string]string{"hostname": host + "\n", "machine-id": hex.EncodeToString(id[:16]) + "\n"}
	others = map[string]string{
		"hosts": "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\t" + host + "\n",
		// No network beyond loopback yet: names other than those of hosts do not resolve.
		"resolv.conf": "options timeout:1 attempts:1\n",
	}
	return own, others
}

func hostname(spec *backend.Spec) string {
	if h := spec.Sandbox.Hostname; h != "" {
		return h
	}
	return spec.ID
}

// platform says what of an upper is ours and not the sandbox's change.
func platform(spec *backend.Spec, layers []int) snapshot.Platform {
	p := snapshot.Platform{Files: map[string][]byte{}, Dirs: map[string]uint32{}}
	if mode, ok := etcMode(layers); ok {
		p.Dirs["/etc"] = mode
		own, others := etcFiles(spec)
		for _, files := range []map[string]string{own, others} {
			for name, content := range files {
				p.Files["/etc/"+name] = []byte(content)
			}
		}
	}
	for _, name := range mountPoints {
		p.MountPoints = append(p.MountPoints, "/"+name)
	}
	return p
}

// checkMountPoints refuses an image in which what the guest mounts on is not a directory.
func (c *creation) checkMountPoints() error {
	for _, name := range mountPoints {
		if st, ok := highest(c.layers, name); ok && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			return errs.New(errs.ImageUnsupported, "container.create", "the image's /"+name+" is not a directory").With("path", "/"+name)
		}
	}
	return nil
}

// highest is what the highest of the layers that has the name has there.
func highest(layers []int, name string) (st unix.Stat_t, found bool) {
	for _, layer := range layers {
		if unix.Fstatat(layer, name, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
			return st, !snapshotWhiteout(&st)
		}
	}
	return st, false
}

// snapshotWhiteout: a snapshot says so that the name was removed.
func snapshotWhiteout(st *unix.Stat_t) bool {
	return st.Mode&unix.S_IFMT == unix.S_IFCHR && st.Rdev == 0
}

// etcMode is the mode of /etc, unless the image has something else there.
func etcMode(layers []int) (mode uint32, ok bool) {
	switch st, found := highest(layers, "etc"); {
	case !found:
		return 0o755, true
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return st.Mode & 0o7777, true
	}
	return 0, false
}

// writeEtc puts the files of /etc into the writable layer before it is mounted: much
// cheaper than copies through the overlay, and real files, which package managers can
// replace, unlike bind mounts. An image whose /etc is not a directory keeps what it has.
func (c *creation) writeEtc(owner int) error {
	mode, ok := etcMode(c.layers)
	if !ok {
		return nil
	}
	if err := unix.Mkdirat(c.dir, "upper/etc", mode); err != nil && err != unix.EEXIST {
		return fmt.Errorf("make etc: %w", err)
	}
	if err := unix.Fchownat(c.dir, "upper/etc", owner, owner, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("own etc: %w", err)
	}
	files, others := etcFiles(&c.spec)
	for name, content := range others {
		if !c.changedBySnapshot("etc/" + name) {
			files[name] = content
		}
	}
	for _, name := range slices.Sorted(maps.Keys(files)) {
		fd, err := unix.Openat(c.dir, "upper/etc/"+name, unix.O_CREAT|unix.O_WRONLY|unix.O_TRUNC|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0o644)
		if err != nil {
			return fmt.Errorf("make /etc/%s: %w", name, err)
		}
		_, err = unix.Write(fd, []byte(files[name]))
		if err == nil {
			err = unix.Fchown(fd, owner, owner)
		}
		unix.Close(fd)
		if err != nil {
			return fmt.Errorf("write /etc/%s: %w", name, err)
		}
	}
	return nil
}

// changedBySnapshot tells whether a layer that a snapshot made has the path.
func (c *creation) changedBySnapshot(path string) bool {
	if c.spec.Image == nil || len(c.spec.Image.Layers) != len(c.layers) {
		return false
	}
	for i, l := range c.spec.Image.Layers { // lowest first; the mounts are the other way round
		var st unix.Stat_t
		if l.Kind == v1.KindDiff && unix.Fstatat(c.layers[len(c.layers)-1-i], path, &st, unix.AT_SYMLINK_NOFOLLOW) == nil {
			return true
		}
	}
	return false
}
