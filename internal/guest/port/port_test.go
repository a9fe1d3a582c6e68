package port

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"dsec/api/v1/errs"
)

func TestHalfClose(t *testing.T) {
	t.Parallel()
	for _, addr := range []string{"127.0.0.1:0", "[::1]:0"} {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		go func() {
			c, err := l.Accept()
			if err != nil {
				return
			}
			b, _ := io.ReadAll(c) // our end of sending
			c.Write(append([]byte("got "), b...))
			c.Close()
		}()
		c, err := Dial(t.Context(), "", uint32(l.Addr().(*net.TCPAddr).Port))
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		if _, err := c.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if err := c.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(reader{c}); err != nil || string(b) != "got hello" {
			t.Fatalf("%q %v", b, err)
		}
	}
}

type reader struct{ c *Conn }

func (r reader) Read(b []byte) (int, error) { return r.c.Read(b) }

func TestAbstractSocket(t *testing.T) {
	t.Parallel()
	name := "@dsec-test-" + strings.ReplaceAll(t.TempDir(), "/", "-")
	l, err := net.Listen("unix", name)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := DialUnix(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	c.Close()
}

func TestCloseEndsARead(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := Dial(t.Context(), "127.0.0.1", uint32(l.Addr().(*net.TCPAddr).Port))
	if err != nil {
		t.Fatal(err)
	}
	time.AfterFunc(20*time.Millisecond, c.Close)
	if _, err := c.Read(make([]byte, 1)); err == nil {
		t.Fatal("a read of a closed connection gave data")
	}
}

func TestRefused(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	port := uint32(l.Addr().(*net.TCPAddr).Port)
	l.Close()
	if _, err := Dial(t.Context(), "", port); !errors.Is(err, errs.PortClosed) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Dial(ctx, "", port); !errors.Is(err, errs.RequestCanceled) {
		t.Error(err)
	}
}

func TestParse(t *testing.T) {
	t.Parallel()
	const table = "  sl  local_address rem_address   st tx_queue\n" +
		"   0: 0100007F:1F90 00000000:0000 0A 00000000:00000000\n" +
		"   1: 0100007F:1F91 0100007F:1F90 01 00000000:00000000\n" +
		"   2: 00000000000000000000000001000000:0050 0:0 0A\n" +
		"   3: 0000000000000000FFFF00000100007F:0051 0:0 0A\n" +
		"   4: XYZ:0051 0:0 0A\n   5: 0100007F:ZZ 0:0 0A\nshort\n\n"
	got, err := parse(strings.NewReader(table))
	want := []Listening{{8080, "127.0.0.1"}, {80, "::1"}, {81, "127.0.0.1"}}
	if err != nil || len(got) != len(want) {
		t.Fatal(got, err)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("%+v, want %+v", got[i], want[i])
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("0: 0100007F:1F90 00000000:0000 0A\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, _ := parse(bytes.NewReader(b))
		for _, p := range l {
			if p.Port == 0 || net.ParseIP(p.Address) == nil {
				t.Fatalf("%+v", p)
			}
		}
	})
}
