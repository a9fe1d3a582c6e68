package tarball

import (
	"io"
	"strconv"
	"strings"
)

// Reader reads the entries of an archive in order.
type Reader struct {
	r    io.Reader
	left int64 // content of the entry not yet read
	pad  int64 // after it
	blk  hblock
	skip []byte

	global map[string]string // PAX records for all that follows
}

// NewReader returns a reader of the archive in r.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Next goes to the next entry. It returns io.EOF at the end of the archive, and an error
// that wraps ErrFormat where it is broken or ends early.
func (t *Reader) Next() (*Header, error) {
	var long, longLink string
	var pax map[string]string
	for {
		if err := t.discard(t.left + t.pad); err != nil {
			return nil, err
		}
		t.left, t.pad = 0, 0
		h, err := t.block()
		if err != nil {
			if err == io.EOF && (long != "" || longLink != "" || pax != nil) {
				err = bad("it ends after an extended header")
			}
			return nil, err
		}
		switch h.Kind {
		case 'x', 'g':
			rec, err := t.records(h.Size)
			if err != nil {
				return nil, err
			}
			if h.Kind == 'x' {
				pax = rec
			} else {
				t.global = merge(t.global, rec)
			}
			continue
		case 'L', 'K':
			b, err := t.payload(h.Size, maxName)
			if err != nil {
				return nil, err
			}
			if h.Kind == 'L' {
				long = str(b)
			} else {
				longLink = str(b)
			}
			continue
		}
		if long != "" {
			h.Name = long
		}
		if longLink != "" {
			h.Link = longLink
		}
		if err := h.apply(t.global); err != nil {
			return nil, err
		}
		if err := h.apply(pax); err != nil {
			return nil, err
		}
		return h, t.enter(h)
	}
}

// enter prepares for the content of h.
func (t *Reader) enter(h *Header) error {
	switch h.Kind {
	case 0, '7':
		h.Kind = Regular
	case 'S':
		return bad("it holds a GNU sparse file, which is not supported: " + quote(h.Name))
	}
	if h.Kind == Regular && strings.HasSuffix(h.Name, "/") {
		h.Kind = Directory // as old writers mark one
	}
	if h.Size < 0 {
		return bad("negative size of " + quote(h.Name))
	}
	if len(h.Name) > maxName || len(h.Link) > maxName {
		return bad("a name is longer than a path can be")
	}
	if strings.IndexByte(h.Name, 0) >= 0 || strings.IndexByte(h.Link, 0) >= 0 {
		return bad("a name holds a NUL byte")
	}
	switch h.Kind {
	case Symlink, HardLink, Directory, Char, Block, FIFO:
		h.Size = 0 // some writers record the size of what is linked
	}
	t.left, t.pad = h.Size, -h.Size&(block-1)
	return nil
}

// block reads one header block; two empty ones, or the end of the stream, are the end.
func (t *Reader) block() (*Header, error) {
	empty := 0
	for {
		if _, err := io.ReadFull(t.r, t.blk[:]); err != nil {
			if err == io.EOF {
				if empty == 0 {
					return nil, bad("it ends without an end mark")
				}
				return nil, io.EOF
			}
			return nil, early(err)
		}
		if t.blk != (hblock{}) {
			break
		}
		if empty++; empty == 2 {
			return nil, io.EOF
		}
	}
	if empty > 0 {
		return nil, bad("an empty block stands between entries")
	}
	b := &t.blk
	want, ok := number(b.get(fChecksum()))
	unsigned, signed := b.sums()
	if !ok || want != unsigned && want != signed {
		return nil, bad("wrong header checksum")
	}
	h := &Header{Name: str(b.get(fName())), Link: str(b.get(fLink())), Kind: b[kindAt]}
	num := func(f field) int64 {
		v, valid := number(b.get(f))
		ok = ok && valid
		return v
	}
	h.Mode = uint32(num(fMode())) & 0o7777
	h.UID, h.GID = num(fUID()), num(fGID())
	h.Size, h.MTimeSec = num(fSize()), num(fMTime())
	magic := string(b.get(fMagic()))
	if strings.HasPrefix(magic, "ustar") {
		h.Major, h.Minor = num(fMajor()), num(fMinor())
		if magic[5] == 0 {
			if p := str(b.get(fPrefix())); p != "" {
				h.Name = p + "/" + h.Name
			}
		}
	}
	if !ok || h.Size < 0 {
		return nil, bad("a number in the header of " + quote(h.Name) + " cannot be read")
	}
	return h, nil
}

// Read reads the content of the current entry.
func (t *Reader) Read(b []byte) (int, error) {
	if t.left == 0 {
		return 0, io.EOF
	}
	if int64(len(b)) > t.left {
		b = b[:t.left]
	}
	n, err := t.r.Read(b)
	t.left -= int64(n)
	if err == io.EOF && t.left > 0 {
		err = early(err)
	}
	return n, err
}

func (t *Reader) discard(n int64) error {
	if n > 0 && t.skip == nil {
		t.skip = make([]byte, 4096)
	}
	for n > 0 {
		b := t.skip[:min(n, int64(len(t.skip)))]
		m, err := io.ReadFull(t.r, b)
		n -= int64(m)
		if err != nil {
			return early(err)
		}
	}
	return nil
}

// early turns the end of the stream in the middle of something into a format error.
func early(err error) error {
	if err == io.EOF || err == io.ErrUnexpectedEOF {
		return bad("it ends in the middle of an entry")
	}
	return err
}

// payload reads the content of an extension entry.
func (t *Reader) payload(size int64, limit int64) ([]byte, error) {
	if size > limit {
		return nil, bad("an extended header is too long")
	}
	b := make([]byte, size)
	if _, err := io.ReadFull(t.r, b); err != nil {
		return nil, early(err)
	}
	return b, t.discard(-size & (block - 1))
}

// records reads PAX records: "length key=value\n".
func (t *Reader) records(size int64) (map[string]string, error) {
	b, err := t.payload(size, maxRecord)
	if err != nil {
		return nil, err
	}
	m := map[string]string{}
	for s := string(b); s != ""; {
		digits, _, ok := strings.Cut(s, " ")
		n, err := strconv.Atoi(digits)
		if !ok || err != nil || n <= len(digits)+1 || n > len(s) || s[n-1] != '\n' {
			return nil, bad("an extended header has a broken record")
		}
		key, value, ok := strings.Cut(s[len(digits)+1:n-1], "=")
		if !ok || key == "" {
			return nil, bad("an extended header has a record without a key")
		}
		m[key] = value
		s = s[n:]
	}
	return m, nil
}

func merge(to, from map[string]string) map[string]string {
	if to == nil {
		return from
	}
	for k, v := range from {
		to[k] = v
	}
	return to
}

// apply overrides the header's fields by PAX records.
func (h *Header) apply(rec map[string]string) error {
	for k, v := range rec {
		ok := true
		switch k {
		case "path":
			h.Name = v
		case "linkpath":
			h.Link = v
		case "size":
			h.Size, ok = decimal(v)
		case "uid":
			h.UID, ok = decimal(v)
		case "gid":
			h.GID, ok = decimal(v)
		case "mtime":
			h.MTimeSec, h.MTimeNS, ok = seconds(v)
		case "GNU.sparse.major", "GNU.sparse.map", "GNU.sparse.size":
			return bad("it holds a GNU sparse file, which is not supported")
		default:
			if name, is := strings.CutPrefix(k, xattrKey); is && name != "" {
				if h.Xattrs == nil {
					h.Xattrs = map[string]string{}
				}
				h.Xattrs[name] = v
			}
		}
		if !ok {
			return bad("record " + k + " of " + quote(h.Name) + " cannot be read")
		}
	}
	return nil
}

func decimal(s string) (int64, bool) {
	v, err := strconv.ParseInt(s, 10, 64)
	return v, err == nil
}

// seconds reads a decimal number of seconds with a fraction.
func seconds(s string) (int64, int32, bool) {
	whole, frac, _ := strings.Cut(s, ".")
	sec, err := strconv.ParseInt(whole, 10, 64)
	if err != nil || sec > 1<<40 || sec < -1<<40 {
		return 0, 0, false
	}
	var ns int64
	for i := range 9 {
		d := byte('0')
		if i < len(frac) {
			d = frac[i]
		}
		if d < '0' || d > '9' {
			return 0, 0, false
		}
		ns = ns*10 + int64(d-'0')
	}
	if strings.HasPrefix(whole, "-") && ns > 0 { // -1.5 is one half after -2
		sec, ns = sec-1, 1e9-ns
	}
	return sec, int32(ns), true
}

func quote(s string) string {
	if len(s) > 100 {
		s = s[:100] + "..."
	}
	return strconv.Quote(s)
}
