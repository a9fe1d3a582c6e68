package msg

import (
	"bytes"
	"errors"
	"reflect"
	"strings"
	"testing"
)

func TestNilAndEmpty(t *testing.T) {
	t.Parallel()
	var m *StartRequest
	if b := m.AppendWire([]byte("x")); string(b) != "x" {
		t.Errorf("nil message: %q", b)
	}
	if b := (&StartRequest{}).AppendWire(nil); len(b) != 0 {
		t.Errorf("empty message: %x", b)
	}
	full := &StartRequest{Cmd: "ls", Args: []string{""}, Envs: map[string]string{"": ""}, Pty: &PtySize{}}
	got := &StartRequest{Cwd: "left over"}
	if err := got.ParseWire(full.AppendWire(nil)); err != nil || !reflect.DeepEqual(got, full) {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestPathsNeedNotBeUTF8(t *testing.T) {
	t.Parallel()
	want := PathRequest{Path: "/a\xff\xfe\x00b"}
	var got PathRequest
	if err := got.ParseWire(want.AppendWire(nil)); err != nil || got.Path != want.Path {
		t.Fatalf("%q, %v", got.Path, err)
	}
}

func TestParseCopies(t *testing.T) {
	t.Parallel()
	b := (&InputRequest{Data: []byte("data")}).AppendWire(nil)
	var m InputRequest
	if err := m.ParseWire(b); err != nil {
		t.Fatal(err)
	}
	clear(b)
	if string(m.Data) != "data" {
		t.Fatalf("%q", m.Data)
	}
}

func TestLongLengths(t *testing.T) {
	t.Parallel()
	for _, n := range []int{0, 126, 127, 128, 129, 16383, 16384, 1 << 20} {
		want := &ExecRequest{Start: &StartRequest{Cmd: strings.Repeat("c", n), Tag: "after"}, Stdin: []byte("s")}
		var got ExecRequest
		if err := got.ParseWire(want.AppendWire(nil)); err != nil || !reflect.DeepEqual(&got, want) {
			t.Errorf("%d: %v", n, err)
		}
	}
}

func TestBadInput(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		in   []byte
		want error
	}{
		"tag only":            {[]byte{0x0a}, ErrTruncated},
		"length beyond":       {[]byte{0x0a, 5, 'a'}, ErrTruncated},
		"huge length":         {[]byte{0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}, ErrTruncated},
		"long varint":         {bytes.Repeat([]byte{0xff}, 11), ErrVarint},
		"field 0":             {[]byte{0x02, 0}, ErrField},
		"wrong wire type":     {[]byte{0x08, 1}, ErrWireType},
		"group":               {[]byte{0xfb, 0x7f}, ErrWireType},
		"bad submessage":      {[]byte{0x32, 1, 0x08}, ErrTruncated},
		"bad map entry":       {[]byte{0x1a, 1, 0x0a}, ErrTruncated},
		"short fixed32":       {[]byte{0xfd, 0x7f, 1, 2, 3}, ErrTruncated},
		"too many elements":   {bytes.Repeat([]byte{0x12, 0}, maxElements+1), ErrTooMany},
		"error, then garbage": {[]byte{0x08, 1, 0x0a, 1, 'x'}, ErrWireType},
	} {
		var m StartRequest
		if err := m.ParseWire(c.in); !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, want %v", name, err, c.want)
		}
	}
}

func TestRepeatedSubmessageMerges(t *testing.T) {
	t.Parallel()
	a := (&ResizeRequest{Size: &PtySize{Cols: 1}}).AppendWire(nil)
	b := (&ResizeRequest{Size: &PtySize{Rows: 2}}).AppendWire(nil)
	var m ResizeRequest
	if err := m.ParseWire(append(a, b...)); err != nil || *m.Size != (PtySize{Cols: 1, Rows: 2}) {
		t.Fatalf("%+v, %v", m.Size, err)
	}
}

func TestEnumNames(t *testing.T) {
	t.Parallel()
	if s := FileTypeDirectory.String() + " " + EventType(99).String(); s != "directory EventType(99)" {
		t.Fatal(s)
	}
}

func TestEnvelopesAgreeWithGeneratedCode(t *testing.T) {
	t.Parallel()
	o := &Open{Method: "m", Target: "t", TimeoutUs: 9, Body: []byte("b"), RequestId: "r"}
	if got, err := ParseOpen(o.AppendWire(nil)); err != nil || !reflect.DeepEqual(got, o) {
		t.Errorf("%+v, %v", got, err)
	}
	e := &End{Error: &Status{Code: "c", Details: map[string]string{"k": "v"}}, Body: []byte("b")}
	status, body, err := ParseEnd(e.AppendWire(nil))
	if err != nil || !reflect.DeepEqual(status, e.Error) || string(body) != "b" {
		t.Errorf("%+v, %q, %v", status, body, err)
	}
}

// FuzzParseWire feeds one input to messages of every shape: what parses must encode to a
// fixed point.
func FuzzParseWire(f *testing.F) {
	f.Add((&Hello{Capabilities: []string{"a", ""}, Token: "t", InitialCredit: 1 << 20}).AppendWire(nil))
	f.Add((&StartRequest{Cmd: "c", Envs: map[string]string{"A": "B"}, Pty: &PtySize{Cols: 80}}).AppendWire(nil))
	f.Add((&EntryList{Entries: []*EntryInfo{{Name: "n", Type: FileTypeOther, Size: -1}}}).AppendWire(nil))
	f.Add((&BatchResult{Items: []*End{{Error: &Status{Code: "x", Details: map[string]string{"": "v"}}}}}).AppendWire(nil))
	f.Add([]byte{0x0a, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, make := range []func() Message{
			func() Message { return new(Hello) }, func() Message { return new(Open) }, func() Message { return new(Status) },
			func() Message { return new(StartRequest) }, func() Message { return new(ProcessList) }, func() Message { return new(EntryList) },
			func() Message { return new(Batch) }, func() Message { return new(BatchResult) }, func() Message { return new(FileEvent) },
		} {
			m, again := make(), make()
			if m.ParseWire(b) != nil {
				continue
			}
			enc := m.AppendWire(nil)
			if err := again.ParseWire(enc); err != nil {
				t.Fatalf("%T: own encoding %x: %v", m, enc, err)
			}
			if enc2 := again.AppendWire(nil); !bytes.Equal(enc, enc2) {
				t.Fatalf("%T: %x, then %x", m, enc, enc2)
			}
		}
	})
}

func BenchmarkStartRequest(b *testing.B) {
	m := &StartRequest{Cmd: "/bin/sh", Args: []string{"-c", "true"}, Envs: map[string]string{"PATH": "/bin", "HOME": "/root"}, Cwd: "/w"}
	b.Run("append", func(b *testing.B) {
		b.ReportAllocs()
		var buf []byte
		for b.Loop() {
			buf = m.AppendWire(buf[:0])
		}
	})
	b.Run("parse", func(b *testing.B) {
		b.ReportAllocs()
		buf := m.AppendWire(nil)
		for b.Loop() {
			var got StartRequest
			if err := got.ParseWire(buf); err != nil {
				b.Fatal(err)
			}
		}
	})
}
