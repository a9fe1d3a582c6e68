package swap

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"dsec/api/v1/errs"
)

// noteName is the file that says which zram device is the node's.
const noteName = "zram.json"

// note of a zram device. Its sequence number is another's as soon as the device was removed and one with the same
// number was added, and the numbers begin anew with the machine's start.
type note struct {
	Number   int    `json:"number"`
	Sequence string `json:"sequence"`
	Boot     string `json:"boot"`
}

func (n note) path() string { return "/dev/zram" + strconv.Itoa(n.Number) }
func (n note) sys() string  { return "/sys/block/zram" + strconv.Itoa(n.Number) }

const zramControl = "/sys/class/zram-control"

// noted returns the node's device, if it has one and that is still the one it made.
func (s *Space) noted() (n note, ok bool) {
	b, err := os.ReadFile(s.path(noteName))
	if err != nil || json.Unmarshal(b, &n) != nil {
		return n, false
	}
	return n, n.Boot == text("/proc/sys/kernel/random/boot_id") && n.Sequence != "" && n.Sequence == text(n.sys()+"/diskseq")
}

// makeZram sees that the node's device is in use.
func (s *Space) makeZram(bytes int64) error {
	n, ok := s.noted()
	if ok && s.active()[n.path()] {
		return nil
	}
	if err := s.removeZram(context.Background()); err != nil { // half-made; nothing is on it
		return errs.Wrap(errs.InternalError, phase, "remove an unfinished zram device", err)
	}
	if err := os.MkdirAll(s.cfg.Dir, 0o700); err != nil {
		return errs.Wrap(errs.InternalError, phase, "make the directory of the zram device's note", err)
	}
	// Reading adds a device and tells its number.
	b, err := os.ReadFile(filepath.Join(zramControl, "hot_add"))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
		return errs.New(errs.NotSupported, phase, "this machine has no zram").Because(err).
			Advise("load it with 'modprobe zram', or start the server with --swap file or host")
	}
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "add a zram device", err)
	}
	if n.Number, err = strconv.Atoi(strings.TrimSpace(string(b))); err != nil {
		return errs.Wrap(errs.InternalError, phase, "add a zram device", err)
	}
	n.Sequence, n.Boot = text(n.sys()+"/diskseq"), text("/proc/sys/kernel/random/boot_id")
	if n.Sequence == "" {
		return errs.New(errs.NotSupported, phase, "this kernel does not number its disks (Linux 5.15), so that a zram device could not be told from another's").Because(n.remove()).
			Advise("start the server with --swap file or host")
	}
	if b, err = json.Marshal(n); err == nil {
		err = os.WriteFile(s.path(noteName), b, 0o600)
	}
	if err == nil {
		err = os.WriteFile(n.sys()+"/disksize", []byte(strconv.FormatInt(bytes/int64(page)*int64(page), 10)), 0)
	}
	if err == nil {
		err = writeHeader(n.path(), bytes)
	}
	if err == nil {
		err = s.cfg.kernel.on(n.path())
	}
	if err != nil {
		return errs.Wrap(errs.InternalError, phase, "make a zram device", errors.Join(err, n.remove(), remove(s.path(noteName))))
	}
	return nil
}

func writeHeader(path string, bytes int64) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteAt(header(page, bytes), 0); err != nil {
		return err
	}
	return f.Sync()
}

func (s *Space) removeZram(ctx context.Context) error {
	n, ok := s.noted()
	if !ok { // none, or it went with the machine's last start
		return remove(s.path(noteName))
	}
	if s.active()[n.path()] {
		if err := s.cfg.kernel.off(ctx, n.path()); err != nil {
			return err
		}
	}
	if err := n.remove(); err != nil {
		return err
	}
	return remove(s.path(noteName))
}

func (n note) remove() error {
	if err := os.WriteFile(filepath.Join(zramControl, "hot_remove"), []byte(strconv.Itoa(n.Number)), 0); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove %s: %w", n.path(), err)
	}
	return nil
}

func text(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(b))
}
