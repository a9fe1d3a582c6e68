package aether

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// bytesConn is a connection that delivers given bytes in portions and swallows the rest.
type bytesConn struct {
	net.Conn
	in   []byte
	step int
}

func (c *bytesConn) Read(p []byte) (int, error) {
	if len(c.in) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), c.step)], c.in)
	c.in = c.in[n:]
	return n, nil
}

// FuzzFrames cuts any bytes into frames: the cut must not depend on the portions in which
// the bytes come, and what decodes must encode to the same bytes.
func FuzzFrames(f *testing.F) {
	f.Add(openFrame(1, flagFin, "echo", []byte("body")), 1)
	f.Add(append(rawFrame(typeData, 2, 3, 4, make([]byte, 70)), rawFrame(typePing, 0, 0, 0, make([]byte, 8))...), 7)
	f.Add([]byte{0xae, 0x7e, 1, 4}, 2)
	f.Fuzz(func(t *testing.T, in []byte, step int) {
		cut := func(step int) (frames []byte, last error) {
			r := frameReader{conn: &bytesConn{in: in, step: step}, maxPayload: MaxPayload, beforeWait: func() {}}
			defer r.release()
			for {
				h, payload, err := r.next()
				if err != nil {
					return frames, err
				}
				if len(payload) != int(h.length) {
					t.Fatalf("%d bytes of payload, header says %d", len(payload), h.length)
				}
				frames = append(frames, rawFrame(h.typ, h.flags, h.stream, h.seq, payload)...)
			}
		}
		all, err := cut(1 << 20)
		if !bytes.HasPrefix(in, all) {
			t.Fatalf("decoded frames encode differently")
		}
		if errors.Is(err, io.EOF) != (len(all) == len(in)) {
			t.Fatalf("ended with %v after %d of %d bytes", err, len(all), len(in))
		}
		again, err2 := cut(max(1, step&0xffff))
		if !bytes.Equal(all, again) || err.Error() != err2.Error() {
			t.Fatalf("in portions of %d: %d bytes, %v; at once: %d bytes, %v", step&0xffff, len(again), err2, len(all), err)
		}
	})
}

// FuzzServer feeds a server frames that are well formed but arbitrary: each three bytes of
// input make one. The server must neither panic nor hang, and end with a known error.
func FuzzServer(f *testing.F) {
	f.Add([]byte{byte(typeOpen), 1, 4, byte(typeData), 1, 9, byte(typeCancel), 1, 0})
	f.Add([]byte{byte(typeOpen), 1, 0x80, byte(typeOpen), 3, 0x81, byte(typeCredit), 3, 1, byte(typePing), 0, 8})
	f.Add([]byte{byte(typeGoAway), 0, 0, byte(typeHello), 0, 0})
	f.Fuzz(func(t *testing.T, in []byte) {
		out := append([]byte(nil), helloFrame(nil)...)
		seqs := map[uint64]uint32{}
		methods := []string{"echo", "pipe", "sink", "fail", "hang", "batch", "nope", "source"}
		for ; len(in) >= 3; in = in[3:] {
			typ, stream, arg := frameType(in[0]), uint64(in[1]), in[2]
			switch typ {
			case typeOpen:
				out = append(out, openFrame(stream, arg&flagFin, methods[arg%8], in[:min(len(in), int(arg))])...)
				seqs[stream] = 1
				continue
			case typePing, typePong:
				out = append(out, rawFrame(typ, 0, 0, 0, make([]byte, 8))...)
				continue
			case typeCredit:
				out = append(out, rawFrame(typ, 0, stream, seqs[stream], creditBytes(uint32(arg)<<(arg%24)))...)
			case typeCancel:
				out = append(out, rawFrame(typ, 0, stream, seqs[stream], nil)...)
			default:
				out = append(out, rawFrame(typ, arg, stream, seqs[stream], make([]byte, int(arg)*300))...)
			}
			seqs[stream]++
		}
		out = append(out, in...) // and a torn end
		cs, ss := net.Pipe()
		srv := NewServer(ServerConfig{Handlers: testHandlers(), MaxStreams: 16})
		served := make(chan error, 1)
		go func() { served <- srv.ServeConn(context.Background(), ss) }()
		go io.Copy(io.Discard, cs)
		cs.SetWriteDeadline(time.Now().Add(10 * time.Second))
		cs.Write(out) // fails where the server has closed
		cs.Close()
		select {
		case err := <-served:
			var e *errs.Error
			if err != nil && !errors.As(err, &e) {
				t.Fatalf("error outside the table: %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Fatal("the server hangs")
		}
	})
}

// FuzzClient feeds a client with one open stream.
func FuzzClient(f *testing.F) {
	f.Add(endFrame(1, 0, &msg.End{Body: []byte("x")}))
	f.Add(append(rawFrame(typeData, 1, 1, 0, []byte("out")), endFrame(1, 1, &msg.End{Error: &msg.Status{Code: "path_not_found"}})...))
	f.Add(rawFrame(typeGoAway, 0, 0, 0, (&msg.GoAway{Error: &msg.Status{Code: "shutting_down"}}).AppendWire(nil)))
	f.Add(rawFrame(typeEnd, flagFin, 1, 0, []byte{0xff}))
	f.Fuzz(func(t *testing.T, in []byte) {
		cs, ss := net.Pipe()
		go func() {
			defer ss.Close()
			p := newRawPeer(t, ss)
			p.read()
			go io.Copy(io.Discard, ss)
			ss.Write(welcomeFrame(nil))
			ss.Write(in)
		}()
		c, err := NewClient(context.Background(), cs, ClientConfig{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
		defer cancel()
		var e *errs.Error
		if err := c.Call(ctx, "", "x", nil, nil); err != nil && !errors.As(err, &e) || errors.Is(err, errs.DeadlineExceeded) && ctx.Err() != nil {
			t.Fatalf("got %v", err)
		}
	})
}
