package tarball

import (
	"errors"
	"strconv"
	"strings"
)

// Kinds of entries: the type flag of the format.
const (
	Regular   = '0'
	HardLink  = '1'
	Symlink   = '2'
	Char      = '3'
	Block     = '4'
	Directory = '5'
	FIFO      = '6'
)

const (
	block     = 512
	maxName   = 4096    // of a name or link target; a path cannot be longer
	maxRecord = 1 << 20 // of one entry's extended header
	xattrKey  = "SCHILY.xattr."
)

// ErrFormat is wrapped by every error about the archive itself.
var ErrFormat = errors.New("not a valid tar archive")

// Header is one entry.
type Header struct {
	Name     string
	Link     string // target of a link
	Kind     byte
	Mode     uint32 // permission bits
	UID, GID int64
	Size     int64
	MTimeSec int64
	MTimeNS  int32
	Major    int64
	Minor    int64
	Xattrs   map[string]string
}

func bad(why string) error { return &formatError{why} }

type formatError struct{ why string }

func (e *formatError) Error() string { return ErrFormat.Error() + ": " + e.why }
func (e *formatError) Unwrap() error { return ErrFormat }

// field is a place in the header block.
type field struct{ at, n int }

// Fields of a header block.
func (b *hblock) get(f field) []byte { return b[f.at : f.at+f.n] }

type hblock [block]byte

func fName() field     { return field{0, 100} }
func fMode() field     { return field{100, 8} }
func fUID() field      { return field{108, 8} }
func fGID() field      { return field{116, 8} }
func fSize() field     { return field{124, 12} }
func fMTime() field    { return field{136, 12} }
func fChecksum() field { return field{148, 8} }
func fLink() field     { return field{157, 100} }
func fMagic() field    { return field{257, 8} }
func fMajor() field    { return field{329, 8} }
func fMinor() field    { return field{337, 8} }
func fPrefix() field   { return field{345, 155} }

const kindAt = 156

// str reads a string field.
func str(b []byte) string {
	for i, c := range b {
		if c == 0 {
			return string(b[:i])
		}
	}
	return string(b)
}

// number reads a numeric field: octal text, or GNU's base 256.
func number(b []byte) (int64, bool) {
	if b[0]&0x80 != 0 {
		v := int64(b[0] & 0x7f)
		if b[0]&0x40 != 0 { // negative: two's complement
			v = int64(int8(b[0]))
		}
		for _, c := range b[1:] {
			if v > 1<<54 || v < -1<<54 {
				return 0, false
			}
			v = v<<8 | int64(c)
		}
		return v, true
	}
	s := strings.Trim(str(b), " ")
	if s == "" {
		return 0, true
	}
	v, err := strconv.ParseInt(s, 8, 64)
	return v, err == nil && s[0] != '+'
}

// sums returns both checksums that writers of headers have used.
func (b *hblock) sums() (unsigned, signed int64) {
	for i, c := range b {
		if i >= 148 && i < 156 {
			c = ' '
		}
		unsigned += int64(c)
		signed += int64(int8(c))
	}
	return
}
