package tarball

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"maps"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

type entry struct {
	h    Header
	data []byte
}

func genEntry(t *rapid.T) entry {
	name := rapid.OneOf(rapid.StringMatching(`[a-z]{1,20}(/[a-z]{1,40}){0,6}`), rapid.StringMatching(`[äöü☃a]{1,150}`)).Draw(t, "name")
	e := entry{h: Header{
		Name: name, Kind: rapid.SampledFrom([]byte{Regular, HardLink, Symlink, Directory, FIFO}).Draw(t, "kind"),
		Mode: rapid.Uint32Range(0, 0o7777).Draw(t, "mode"),
		UID:  rapid.Int64Range(0, 1<<32).Draw(t, "uid"), GID: rapid.Int64Range(0, 1<<32).Draw(t, "gid"),
		MTimeSec: rapid.Int64Range(-1<<34, 1<<36).Draw(t, "sec"), MTimeNS: rapid.Int32Range(0, 999999999).Draw(t, "ns"),
	}}
	switch e.h.Kind {
	case HardLink, Symlink:
		e.h.Link = rapid.StringMatching(`[a-zé/]{1,200}`).Draw(t, "link")
	case Directory:
		e.h.Name += "/"
	case Regular:
		e.data = rapid.SliceOfN(rapid.Byte(), 0, 2000).Draw(t, "data")
		e.h.Size = int64(len(e.data))
		if rapid.Bool().Draw(t, "has xattrs") {
			e.h.Xattrs = rapid.MapOfN(rapid.StringMatching(`user\.[a-z]{1,10}`), rapid.String(), 1, 4).Draw(t, "xattrs")
		}
	}
	return e
}

func equal(a, b *Header) bool {
	x, y := *a, *b
	x.Xattrs, y.Xattrs = nil, nil
	return same(x, y) && maps.Equal(a.Xattrs, b.Xattrs)
}

func same(a, b Header) bool {
	return a.Name == b.Name && a.Link == b.Link && a.Kind == b.Kind && a.Mode == b.Mode && a.UID == b.UID &&
		a.GID == b.GID && a.Size == b.Size && a.MTimeSec == b.MTimeSec && a.MTimeNS == b.MTimeNS
}

// What is written is read back, by this package and by the standard library's.
func TestRoundTrip(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		entries := rapid.SliceOfN(rapid.Custom(genEntry), 0, 8).Draw(t, "entries")
		var buf bytes.Buffer
		w := NewWriter(&buf)
		for i := range entries {
			if err := w.WriteHeader(&entries[i].h); err != nil {
				t.Fatal(err)
			}
			if _, err := w.Write(entries[i].data); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		ours, std := NewReader(bytes.NewReader(buf.Bytes())), tar.NewReader(bytes.NewReader(buf.Bytes()))
		for _, e := range entries {
			h, err := ours.Next()
			if err != nil {
				t.Fatal(err)
			}
			if !equal(h, &e.h) {
				t.Fatalf("read %+v, want %+v", h, e.h)
			}
			if b, err := io.ReadAll(ours); err != nil || !bytes.Equal(b, e.data) {
				t.Fatal(err)
			}
			s, err := std.Next()
			if err != nil {
				t.Fatalf("archive/tar: %v", err)
			}
			if s.Name != e.h.Name || s.Linkname != e.h.Link || s.Mode != int64(e.h.Mode) || s.Size != e.h.Size || s.Uid != int(e.h.UID) ||
				!s.ModTime.Equal(time.Unix(e.h.MTimeSec, int64(e.h.MTimeNS))) {
				t.Fatalf("archive/tar reads %+v, want %+v", s, e.h)
			}
			for k, v := range e.h.Xattrs {
				if s.PAXRecords[xattrKey+k] != v {
					t.Fatalf("archive/tar reads xattr %s = %q, want %q", k, s.PAXRecords[xattrKey+k], v)
				}
			}
		}
		if _, err := ours.Next(); err != io.EOF {
			t.Fatal(err)
		}
	})
}

// What others write in each format is read.
func TestReadsOtherWriters(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("directory/", 30) + "file"
	for _, f := range []tar.Format{tar.FormatUSTAR, tar.FormatPAX, tar.FormatGNU} {
		name, uid := long, 1<<30
		if f == tar.FormatUSTAR {
			name, uid = strings.Repeat("d/", 60)+"file", 1000
		}
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		in := tar.Header{Typeflag: tar.TypeReg, Name: name, Size: 3, Mode: 0o4755, Uid: uid, ModTime: time.Unix(1700000000, 0), Format: f}
		if err := w.WriteHeader(&in); err != nil {
			t.Fatal(err)
		}
		w.Write([]byte("abc"))
		if f != tar.FormatUSTAR {
			w.WriteHeader(&tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: long, Format: f})
		}
		w.Close()
		r := NewReader(&buf)
		h, err := r.Next()
		if err != nil || h.Name != name || h.Mode != 0o4755 || h.UID != int64(uid) || h.MTimeSec != 1700000000 {
			t.Fatalf("%v: %+v %v", f, h, err)
		}
		if b, _ := io.ReadAll(r); string(b) != "abc" {
			t.Fatalf("%v: %q", f, b)
		}
		if f != tar.FormatUSTAR {
			if h, err = r.Next(); err != nil || h.Link != long || h.Kind != Symlink {
				t.Fatalf("%v: %+v %v", f, h, err)
			}
		}
		if _, err := r.Next(); err != io.EOF {
			t.Fatal(err)
		}
	}
}

func sample() []byte {
	var buf bytes.Buffer
	w := NewWriter(&buf)
	w.WriteHeader(&Header{Name: strings.Repeat("n", 120), Kind: Regular, Size: 600, MTimeNS: 5, Xattrs: map[string]string{"user.a": "b"}})
	w.Write(make([]byte, 600))
	w.WriteHeader(&Header{Name: "d/", Kind: Directory})
	w.Close()
	return buf.Bytes()
}

// Every cut and every flipped byte gives entries or one clear error.
func TestBroken(t *testing.T) {
	t.Parallel()
	read := func(b []byte) error {
		r := NewReader(bytes.NewReader(b))
		for {
			if _, err := r.Next(); err == io.EOF {
				return nil
			} else if err != nil {
				return err
			}
			if _, err := io.Copy(io.Discard, r); err != nil {
				return err
			}
		}
	}
	whole := sample()
	for n := range len(whole) - 512 { // the last end block is not needed by readers
		if err := read(whole[:n]); !errors.Is(err, ErrFormat) {
			t.Fatalf("cut at %d: %v", n, err)
		}
	}
	for i := range whole[:512] {
		if i == 155 { // stands after the checksum's end
			continue
		}
		b := bytes.Clone(whole)
		b[i] ^= 0xff
		if err := read(b); !errors.Is(err, ErrFormat) {
			t.Fatalf("flipped %d: %v", i, err)
		}
	}
}

func FuzzReader(f *testing.F) {
	f.Add(sample())
	f.Add([]byte{})
	f.Add(make([]byte, 1024))
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: strings.Repeat("x", 300), Format: tar.FormatGNU, Uid: 1 << 40})
	w.Close()
	f.Add(buf.Bytes())
	f.Fuzz(func(t *testing.T, b []byte) {
		r := NewReader(bytes.NewReader(b))
		for {
			h, err := r.Next()
			if err != nil {
				if err != io.EOF && !errors.Is(err, ErrFormat) {
					t.Fatal(err)
				}
				return
			}
			if h.Size < 0 || len(h.Name) > maxName || strings.IndexByte(h.Name, 0) >= 0 {
				t.Fatalf("%+v", h)
			}
			n, err := io.Copy(io.Discard, r)
			if err == nil && n != h.Size || n > int64(len(b)) {
				t.Fatal(n, h.Size, err)
			}
		}
	})
}
