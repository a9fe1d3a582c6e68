package serve

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"testing"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

func TestFiles(t *testing.T) {
	t.Parallel()
	g := start(t)
	d := filepath.Dir(g.socket) + "/files"
	call[msg.EntryInfo](t, g.Conn, "file.mkdir", &msg.MkdirRequest{Path: d, Parents: true})
	data := make([]byte, 5<<20)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	s, err := g.Open(t.Context(), "", "file.write", &msg.WriteRequest{Path: d + "/big", Mode: 0o640, Metadata: map[string]string{"k": "v"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Send(t.Context(), aether.KindInput, data); err != nil {
		t.Fatal(err)
	}
	s.CloseSend()
	if _, err := s.Recv(t.Context()); err != io.EOF {
		t.Fatal(err)
	}
	var w msg.WriteResult
	if err := s.Result(&w); err != nil || w.Bytes != uint64(len(data)) || w.Entry.Size != int64(len(data)) {
		t.Fatalf("%+v %v", &w, err)
	}
	if s, err = g.Open(t.Context(), "", "file.read", &msg.ReadRequest{Path: d + "/big", Offset: 100, Length: 3 << 20}); err != nil {
		t.Fatal(err)
	}
	var got []byte
	for {
		f, err := s.Recv(t.Context())
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, f.Payload...)
	}
	var e msg.EntryInfo
	if err := s.Result(&e); err != nil || !bytes.Equal(got, data[100:100+3<<20]) || e.Metadata["k"] != "v" || e.Permissions != "-rw-r-----" {
		t.Fatalf("%d bytes, %+v, %v", len(got), &e, err)
	}
	call[msg.WriteResult](t, g.Conn, "file.put", &msg.WriteRequest{Path: d + "/small", Data: []byte("hello"), Atomic: true})
	c := call[msg.FileContent](t, g.Conn, "file.get", &msg.ReadRequest{Path: d + "/small"})
	if string(c.Data) != "hello" || !c.Eof || c.Entry.Name != "small" {
		t.Fatalf("%+v", c)
	}
	callErr(t, g.Conn, "file.get", &msg.ReadRequest{Path: d + "/big"}, errs.BodyTooLarge)
	callErr(t, g.Conn, "file.get", &msg.ReadRequest{Path: d + "/none"}, errs.PathNotFound)
	call[msg.EntryInfo](t, g.Conn, "file.chmod", &msg.ChmodRequest{Path: d + "/small", Mode: 0o600})
	call[msg.EntryInfo](t, g.Conn, "file.chown", &msg.ChownRequest{Path: d + "/small", Owner: "nobody"})
	if e := call[msg.EntryInfo](t, g.Conn, "file.stat", &msg.PathRequest{Path: d + "/small"}); e.Owner != "nobody" || e.Mode&0o777 != 0o600 {
		t.Fatalf("%+v", e)
	}
	if e := call[msg.EntryInfo](t, g.Conn, "file.stat", &msg.PathRequest{Path: d + "/none", MissingOk: true}); e.Type != 0 {
		t.Fatalf("%+v", e)
	}
	call[msg.EntryInfo](t, g.Conn, "file.move", &msg.MoveRequest{Source: d + "/small", Destination: d + "/moved"})
	if l := call[msg.EntryList](t, g.Conn, "file.list", &msg.ListRequest{Path: d}); len(l.Entries) != 2 || l.Entries[1].Name != "moved" {
		t.Fatalf("%+v", l)
	}
	// A tree out and in again.
	if s, err = g.Open(t.Context(), "", "file.pack", &msg.PackRequest{Path: d, Contents: true}); err != nil {
		t.Fatal(err)
	}
	var tarball []byte
	for {
		f, err := s.Recv(t.Context())
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		tarball = append(tarball, f.Payload...)
	}
	var tree msg.TreeResult
	if err := s.Result(&tree); err != nil || tree.Entries != 2 || tree.Bytes != uint64(len(data))+5 {
		t.Fatalf("%+v %v", &tree, err)
	}
	unpack := func(b []byte, to string) error {
		s, err := g.Open(t.Context(), "", "file.unpack", &msg.UnpackRequest{Path: to, Parents: true})
		if err != nil {
			t.Fatal(err)
		}
		if err := s.Send(t.Context(), aether.KindInput, b); err == nil {
			s.CloseSend()
		}
		if _, err := s.Recv(t.Context()); err != io.EOF {
			return err
		}
		return s.Result(&msg.TreeResult{})
	}
	if err := unpack(append(tarball, make([]byte, 100000)...), d+"/copy"); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(d + "/copy/big"); err != nil || !bytes.Equal(b, data) {
		t.Fatal(len(b), err)
	}
	if err := unpack(tarball[:1000], d+"/cut"); !errors.Is(err, errs.BadRequest) {
		t.Error(err)
	}
	if n := call[msg.TreeResult](t, g.Conn, "file.remove", &msg.PathRequest{Path: d, Recursive: true}); n.Entries != 7 {
		t.Errorf("%+v", n)
	}
}

func TestWatch(t *testing.T) {
	t.Parallel()
	g := start(t)
	d := t.TempDir()
	s, err := g.Open(t.Context(), "", "file.watch", &msg.WatchRequest{Path: d, Entry: true})
	if err != nil {
		t.Fatal(err)
	}
	f, err := s.Recv(t.Context())
	var started msg.WatchStarted
	if err != nil || started.ParseWire(f.Payload) != nil || started.Path != d {
		t.Fatalf("%+v %v", &started, err)
	}
	os.WriteFile(d+"/x", []byte("abc"), 0o644)
	if f, err = s.Recv(t.Context()); err != nil {
		t.Fatal(err)
	}
	var e msg.FileEvent
	if err := e.ParseWire(f.Payload); err != nil || e.Name != "x" || e.Type != msg.EventTypeCreate || e.Entry == nil || e.Entry.Path != d+"/x" {
		t.Fatalf("%+v %v", &e, err)
	}
	s.Cancel()
}

func TestPorts(t *testing.T) {
	t.Parallel()
	g := start(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	u, err := net.Listen("unix", t.TempDir()+"/u")
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	for _, l := range []net.Listener{l, u} {
		go func() { // answers only after the other side's end
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				b, _ := io.ReadAll(c)
				c.Write(bytes.ToUpper(b))
				c.Close()
			}
		}()
	}
	port := uint32(l.Addr().(*net.TCPAddr).Port)
	for _, r := range []*msg.DialRequest{{Port: port}, {Port: port, Host: "127.0.0.1"}, {UnixPath: u.Addr().String()}} {
		s, err := g.Open(t.Context(), "", "port.dial", r)
		if err != nil {
			t.Fatal(err)
		}
		if f, err := s.Recv(t.Context()); err != nil || !f.IsMessage {
			t.Fatal("not connected:", err)
		}
		big := bytes.Repeat([]byte("abc"), 1<<20)
		if err := s.Send(t.Context(), aether.KindInput, big); err != nil {
			t.Fatal(err)
		}
		s.CloseSend()
		var got []byte
		for {
			f, err := s.Recv(t.Context())
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if !f.IsMessage {
				got = append(got, f.Payload...)
			}
		}
		if !bytes.Equal(got, bytes.ToUpper(big)) {
			t.Fatalf("%d bytes", len(got))
		}
	}
	found := false
	for _, p := range call[msg.PortList](t, g.Conn, "port.list", &msg.Empty{}).Ports {
		found = found || p.Port == port && p.Address == "127.0.0.1"
	}
	if !found {
		t.Error("port is not listed")
	}
	l.Close()
	for r, want := range map[*msg.DialRequest]errs.Code{
		{Port: port}: errs.PortClosed, {Port: 0}: errs.BadRequest, {Port: 70000}: errs.BadRequest,
		{Port: port, Host: "10.0.0.1"}: errs.BadRequest, {UnixPath: "/none"}: errs.PortClosed, {UnixPath: "rel"}: errs.BadRequest,
	} {
		callErr(t, g.Conn, "port.dial", r, want)
	}
}
