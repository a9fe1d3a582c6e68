package tarball

import (
	"errors"
	"io"
	"slices"
	"strconv"
	"strings"
)

// Writer writes an archive.
type Writer struct {
	w    io.Writer
	left int64
	pad  int64
}

// NewWriter returns a writer of an archive to w.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// WriteHeader starts an entry, whose Size bytes of content must follow by Write.
func (t *Writer) WriteHeader(h *Header) error {
	if err := t.finish(); err != nil {
		return err
	}
	var rec []string
	add := func(k, v string) { rec = append(rec, record(k, v)) }
	var b hblock
	if !putString(b.get(fName()), h.Name) {
		add("path", h.Name)
	}
	if !putString(b.get(fLink()), h.Link) {
		add("linkpath", h.Link)
	}
	for _, n := range []struct {
		f   field
		key string
		v   int64
	}{{fUID(), "uid", h.UID}, {fGID(), "gid", h.GID}, {fSize(), "size", h.Size}} {
		if !putOctal(b.get(n.f), n.v) {
			add(n.key, strconv.FormatInt(n.v, 10))
			putOctal(b.get(n.f), 0)
		}
	}
	if ok := putOctal(b.get(fMTime()), h.MTimeSec); !ok || h.MTimeNS != 0 {
		add("mtime", formatSeconds(h.MTimeSec, h.MTimeNS))
	}
	putOctal(b.get(fMode()), int64(h.Mode&0o7777))
	putOctal(b.get(fMajor()), h.Major)
	putOctal(b.get(fMinor()), h.Minor)
	b[kindAt] = h.Kind
	names := make([]string, 0, len(h.Xattrs))
	for name := range h.Xattrs {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if strings.IndexByte(name, '=') < 0 { // such a name cannot be written
			add(xattrKey+name, h.Xattrs[name])
		}
	}
	if len(rec) > 0 {
		if err := t.extended(strings.Join(rec, "")); err != nil {
			return err
		}
	}
	t.left, t.pad = h.Size, -h.Size&(block-1)
	return t.header(&b)
}

// extended writes a PAX header for the entry that follows.
func (t *Writer) extended(body string) error {
	var b hblock
	putString(b.get(fName()), "PaxHeaders/entry")
	putOctal(b.get(fMode()), 0o644)
	putOctal(b.get(fSize()), int64(len(body)))
	b[kindAt] = 'x'
	if err := t.header(&b); err != nil {
		return err
	}
	padded := make([]byte, (len(body)+block-1)/block*block)
	copy(padded, body)
	_, err := t.w.Write(padded)
	return err
}

func (t *Writer) header(b *hblock) error {
	copy(b.get(fMagic()), "ustar\x0000")
	for _, f := range []field{fUID(), fGID(), fMTime(), fMajor(), fMinor()} {
		if b[f.at] == 0 {
			putOctal(b.get(f), 0)
		}
	}
	sum, _ := b.sums()
	c := b.get(fChecksum())
	putOctal(c[:7], sum)
	c[7] = ' '
	_, err := t.w.Write(b[:])
	return err
}

// Write writes content of the current entry.
func (t *Writer) Write(p []byte) (int, error) {
	if int64(len(p)) > t.left {
		return 0, errors.New("more content than the entry's size")
	}
	n, err := t.w.Write(p)
	t.left -= int64(n)
	return n, err
}

// finish pads the current entry.
func (t *Writer) finish() error {
	if t.left > 0 {
		return errors.New("less content than the entry's size")
	}
	if t.pad > 0 {
		var zero [block]byte
		if _, err := t.w.Write(zero[:t.pad]); err != nil {
			return err
		}
		t.pad = 0
	}
	return nil
}

// Close writes the end of the archive. It does not close the underlying writer.
func (t *Writer) Close() error {
	if err := t.finish(); err != nil {
		return err
	}
	var end [2 * block]byte
	_, err := t.w.Write(end[:])
	return err
}

// putString reports whether s fits and means the same to every reader.
func putString(b []byte, s string) bool {
	n := copy(b, s)
	if n < len(s) {
		// Readers without PAX see as much as there is.
		return false
	}
	for i := range len(s) {
		if s[i] >= 0x80 {
			return false
		}
	}
	return true
}

// putOctal writes v, ended by NUL, if it fits.
func putOctal(b []byte, v int64) bool {
	s := strconv.FormatInt(v, 8)
	if v < 0 || len(s) > len(b)-1 {
		return false
	}
	for i := range len(b) - 1 - len(s) {
		b[i] = '0'
	}
	copy(b[len(b)-1-len(s):], s)
	b[len(b)-1] = 0
	return true
}

// record renders one PAX record, whose length counts itself.
func record(k, v string) string {
	n := len(k) + len(v) + 3
	n += len(strconv.Itoa(n))
	if s := strconv.Itoa(n); len(s)+len(k)+len(v)+3 != n {
		n++
	}
	return strconv.Itoa(n) + " " + k + "=" + v + "\n"
}

func formatSeconds(sec int64, ns int32) string {
	sign := ""
	if sec < 0 {
		sign = "-"
		if ns > 0 {
			sec, ns = sec+1, 1e9-ns
		}
		sec = -sec
	}
	s := sign + strconv.FormatInt(sec, 10)
	if ns != 0 {
		f := strconv.Itoa(int(ns))
		s += "." + strings.TrimRight(strings.Repeat("0", 9-len(f))+f, "0")
	}
	return s
}
