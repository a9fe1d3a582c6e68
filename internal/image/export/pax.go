package export

import (
	"fmt"
	"io"
	"path"
	"sort"
	"strconv"
	"strings"
	"time"

	"dsec/api/v1/errs"
	"dsec/internal/image/layer"
)

// A tar writer of its own, since the standard library's can write no sparse
// file. What the old header holds exactly is written there, the rest in PAX
// records, in a form that depends on nothing but the entry.

const (
	block = 512

	typeReg     = '0'
	typeLink    = '1'
	typeSymlink = '2'
	typeChar    = '3'
	typeBlock   = '4'
	typeDir     = '5'
	typeFifo    = '6'
	typePax     = 'x'

	maxOctal7  = 1<<21 - 1
	maxOctal11 = 1<<33 - 1
	// Readers refuse longer maps of sparse files.
	maxSparseMap = 1<<20 - 64<<10
	maxPax       = 1<<20 - block
)

// header is one entry of a tar.
type header struct {
	name, link   string
	typ          byte
	mode         uint32
	attr         layer.Attr
	major, minor uint32
	size         int64 // of what follows the header
	sparse       int64 // the file's real size, if what follows is a map and data
}

func (h *header) write(w io.Writer) error {
	rec := map[string]string{}
	need := func(key, v string) string {
		if len(v) <= 100 && isASCII(v) {
			return v
		}
		rec[key] = v
		return shorten(v)
	}
	name, link := h.name, need("linkpath", h.link)
	if h.sparse > 0 {
		rec["GNU.sparse.major"], rec["GNU.sparse.minor"] = "1", "0"
		rec["GNU.sparse.name"], rec["GNU.sparse.realsize"] = name, strconv.FormatInt(h.sparse, 10)
		name = "GNUSparseFile.0/" + shorten(path.Base(name))
	} else {
		name = need("path", name)
	}
	number := func(key string, v, limit int64) int64 {
		if v < 0 || v > limit {
			rec[key] = strconv.FormatInt(v, 10)
			return 0
		}
		return v
	}
	uid, gid := number("uid", int64(h.attr.UID), maxOctal7), number("gid", int64(h.attr.GID), maxOctal7)
	size := number("size", h.size, maxOctal11)
	sec := h.attr.Sec
	if sec < 0 || sec > maxOctal11 || h.attr.Nsec != 0 {
		rec["mtime"] = paxTime(sec, h.attr.Nsec)
		sec = max(0, min(sec, maxOctal11))
	}
	for _, x := range h.attr.Xattrs {
		rec["SCHILY.xattr."+x.Name] = string(x.Value)
	}
	if len(rec) > 0 {
		if err := writePax(w, h.name, rec); err != nil {
			return err
		}
	}
	return writeBlock(w, name, link, h.typ, h.mode, uid, gid, size, sec, h.major, h.minor)
}

func writePax(w io.Writer, name string, rec map[string]string) error {
	keys := make([]string, 0, len(rec))
	for k := range rec {
		keys = append(keys, k)
	}
	sort.Strings(keys)
	var b strings.Builder
	for _, k := range keys {
		b.WriteString(paxRecord(k, rec[k]))
	}
	if b.Len() > maxPax {
		return errs.New(errs.ImageUnsupported, phase, fmt.Sprintf("%.200q has more metadata than a tar can hold", name))
	}
	short := shorten(path.Base(name))
	if err := writeBlock(w, "PaxHeaders.0/"+short, "", typePax, 0o644, 0, 0, int64(b.Len()), 0, 0, 0); err != nil {
		return err
	}
	b.WriteString(strings.Repeat("\x00", -b.Len()&(block-1)))
	_, err := io.WriteString(w, b.String())
	return err
}

// paxRecord is "LENGTH KEY=VALUE\n", where the length counts itself.
func paxRecord(k, v string) string {
	const fixed = 3 // the space, "=" and the newline
	n := len(k) + len(v) + fixed
	n += len(strconv.Itoa(n))
	s := strconv.Itoa(n) + " " + k + "=" + v + "\n"
	if len(s) != n { // the length's own length changed it
		s = strconv.Itoa(len(s)) + " " + k + "=" + v + "\n"
	}
	return s
}

func paxTime(sec int64, nsec uint32) string {
	if nsec == 0 {
		return strconv.FormatInt(sec, 10)
	}
	sign, ns := "", int64(nsec)
	if sec < 0 {
		sign, sec, ns = "-", -(sec + 1), int64(time.Second)-ns
		if ns == int64(time.Second) {
			sec, ns = sec+1, 0
		}
	}
	return strings.TrimRight(fmt.Sprintf("%s%d.%09d", sign, sec, ns), "0")
}

func writeBlock(w io.Writer, name, link string, typ byte, mode uint32, uid, gid, size, sec int64, major, minor uint32) error {
	var b [block]byte
	copy(b[0:100], name)
	octal := func(at, width int, v int64) { copy(b[at:], fmt.Sprintf("%0*o\x00", width-1, v)) }
	octal(100, 8, int64(mode))
	octal(108, 8, uid)
	octal(116, 8, gid)
	octal(124, 12, size)
	octal(136, 12, sec)
	b[156] = typ
	copy(b[157:257], link)
	copy(b[257:], "ustar\x0000")
	octal(329, 8, int64(major))
	octal(337, 8, int64(minor))
	copy(b[148:156], "        ")
	var sum int64
	for _, c := range b {
		sum += int64(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	_, err := w.Write(b[:])
	return err
}

func isASCII(s string) bool {
	for i := range len(s) {
		if s[i] >= 0x80 || s[i] == 0 {
			return false
		}
	}
	return true
}

// shorten makes a name that readers without PAX can use.
func shorten(s string) string {
	b := []byte(s[:min(len(s), 80)])
	for i, c := range b {
		if c >= 0x80 || c == 0 {
			b[i] = '_'
		}
	}
	return strings.TrimRight(string(b), "/")
}
