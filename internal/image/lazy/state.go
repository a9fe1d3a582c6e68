package lazy

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"sync"

	"dsec/api/v1/errs"

	"golang.org/x/sys/unix"
)

// Files of one blob. What is filled is said twice:
//
//	live  is updated with every chunk and never synced: the kernel keeps it when
//	      the process dies, and the boot id in it makes it worthless afterwards. Each
//	      byte of the map is followed by its complement: readers see zeros for every
//	      bit that is set and should not be, and a checksum of all could not be kept.
//	safe  is replaced now and then, after the data it speaks of has been synced,
//	      and before any of that data is punched out: it holds after a crash of
//	      the machine.
const (
	dataFile  = "data"
	tableFile = "chunks"
	liveFile  = "live"
	safeFile  = "safe"

	liveMagic  = "DSEClve2"
	safeMagic  = "DSECsafe"
	liveHeader = 8 + 40 + 4 + 4
	safeHeader = 8 + 4 + 4
)

// state keeps what is filled of one blob on disk.
type state struct {
	dir  string
	t    *table
	live *os.File

	mu      sync.Mutex // held while safe changes; taken before the blob's mutex
	safe    bitmap     // what safe claims
	settled bool       // the directory and the table are on disk
}

func diskError(action string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errs.Wrap(errs.DiskFull, phase, action, err)
	}
	return errs.Wrap(errs.InternalError, phase, action, err)
}

// writeFile puts a file in place, whole or not at all as far as a dying process can tell.
func writeFile(path string, p []byte, sync bool) error {
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err == nil {
		_, err = f.Write(p)
		if err == nil && sync {
			err = f.Sync()
		}
		err = errors.Join(err, f.Close())
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		os.Remove(path + ".new")
	}
	return diskError("write "+filepath.Base(path), err)
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	defer d.Close()
	return d.Sync()
}

// createState starts the state of a blob.
func createState(dir, boot string, t *table, filled bitmap) (*state, error) {
	if err := writeFile(filepath.Join(dir, tableFile), t.encode(), false); err != nil {
		return nil, err
	}
	s := &state{dir: dir, t: t, safe: newBitmap(t.n())}
	return s, s.startLive(boot, filled)
}

func (s *state) startLive(boot string, filled bitmap) error {
	p := append(make([]byte, 0, liveHeader+2*len(filled)), liveMagic...)
	p = append(p, bootField(boot)...)
	p = binary.LittleEndian.AppendUint32(p, s.t.sum)
	p = binary.LittleEndian.AppendUint32(p, uint32(s.t.n()))
	p = appendPairs(p, filled)
	path := filepath.Join(s.dir, liveFile)
	if err := writeFile(path, p, false); err != nil {
		return err
	}
	return s.openLive(path)
}

func (s *state) openLive(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	s.live = f
	return diskError("open live state", err)
}

func bootField(boot string) []byte {
	p := make([]byte, 40)
	copy(p, boot)
	return p
}

// loadState reads a blob's state: its table, what is filled, and whether that is
// still true of this boot (else only what was synced counts).
func loadState(dir, boot string) (s *state, filled bitmap, err error) {
	p, err := os.ReadFile(filepath.Join(dir, tableFile))
	if err != nil {
		return nil, nil, err
	}
	t, err := decodeTable(p)
	if err != nil {
		return nil, nil, err
	}
	s = &state{dir: dir, t: t, safe: newBitmap(t.n())}
	if p, err := os.ReadFile(filepath.Join(dir, safeFile)); err == nil {
		if m, err := decodeSafe(p, t); err == nil {
			s.safe, s.settled = m, true
		}
	}
	path := filepath.Join(dir, liveFile)
	if p, err := os.ReadFile(path); err == nil {
		if m, err := decodeLive(p, boot, t); err == nil {
			return s, m, s.openLive(path)
		}
	}
	filled = bytes.Clone(s.safe)
	return s, filled, s.startLive(boot, filled)
}

func decodeLive(p []byte, boot string, t *table) (bitmap, error) {
	if len(p) < liveHeader || string(p[:8]) != liveMagic {
		return nil, badState("no live map")
	}
	if !bytes.Equal(p[8:48], bootField(boot)) {
		return nil, badState("live map of another boot")
	}
	pairs := p[liveHeader:]
	bits := append(make([]byte, 0, 8+len(pairs)/2), p[48:liveHeader]...)
	for ; len(pairs) >= 2; pairs = pairs[2:] {
		if pairs[0] != ^pairs[1] {
			return nil, badState("live map damaged")
		}
		bits = append(bits, pairs[0])
	}
	if len(pairs) > 0 {
		return nil, badState("live map cut short")
	}
	return decodeBits(bits, t)
}

// appendPairs appends each byte of m and its complement.
func appendPairs(p []byte, m bitmap) []byte {
	for _, b := range m {
		p = append(p, b, ^b)
	}
	return p
}

func decodeSafe(p []byte, t *table) (bitmap, error) {
	if len(p) < safeHeader+4 || string(p[:8]) != safeMagic {
		return nil, badState("no safe map")
	}
	body := p[:len(p)-4]
	if crc32.Checksum(body, castagnoli) != binary.LittleEndian.Uint32(p[len(body):]) {
		return nil, badState("safe map damaged")
	}
	return decodeBits(body[8:], t)
}

func decodeBits(p []byte, t *table) (bitmap, error) {
	m := bitmap(p[8:])
	if binary.LittleEndian.Uint32(p) != t.sum || binary.LittleEndian.Uint32(p[4:]) != uint32(t.n()) || len(m) != (t.n()+7)/8 {
		return nil, badState("map of another blob")
	}
	for i := t.n(); i < 8*len(m); i++ {
		if m.has(i) {
			return nil, badState("map claims chunks that are not there")
		}
	}
	return m, nil
}

// note writes the bytes of live that hold the chunks [i, j).
func (s *state) note(filled bitmap, i, j int) error {
	a, b := i/8, (j+7)/8
	_, err := s.live.WriteAt(appendPairs(nil, filled[a:b]), int64(liveHeader+2*a))
	return diskError("write live state", err)
}

// writeSafe replaces safe by m. The caller holds s.mu and has seen to the data.
func (s *state) writeSafe(m bitmap) error {
	if !s.settled { // nothing was synced when the blob was made
		t, err := os.Open(filepath.Join(s.dir, tableFile))
		if err == nil {
			err = errors.Join(t.Sync(), t.Close())
		}
		if err == nil {
			err = syncDir(filepath.Dir(s.dir))
		}
		if err != nil {
			return diskError("sync chunk table", err)
		}
	}
	p := append(make([]byte, 0, safeHeader+len(m)+4), safeMagic...)
	p = binary.LittleEndian.AppendUint32(p, s.t.sum)
	p = binary.LittleEndian.AppendUint32(p, uint32(s.t.n()))
	p = append(p, m...)
	p = binary.LittleEndian.AppendUint32(p, crc32.Checksum(p, castagnoli))
	if err := writeFile(filepath.Join(s.dir, safeFile), p, true); err != nil {
		return err
	}
	if err := syncDir(s.dir); err != nil {
		return diskError("sync blob directory", err)
	}
	s.safe, s.settled = bytes.Clone(m), true
	return nil
}

// save makes what snapshot returns durable: the data first, then the claim.
func (s *state) save(data *os.File, snapshot func() bitmap) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := snapshot() // before the sync: a chunk filled meanwhile is not claimed
	if bytes.Equal(m, s.safe) {
		return nil
	}
	if err := unix.Fdatasync(int(data.Fd())); err != nil {
		return diskError("sync blob", err)
	}
	return s.writeSafe(m)
}

// bootID names this boot of the machine.
func bootID() (string, error) {
	f, err := os.Open("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", errs.Wrap(errs.InternalError, phase, "read boot id", err)
	}
	defer f.Close()
	p, err := io.ReadAll(io.LimitReader(f, 40))
	return string(bytes.TrimSpace(p)), diskError("read boot id", err)
}
