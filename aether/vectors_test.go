package aether

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"testing"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

var update = flag.Bool("update", false, "write the vectors of testdata instead of checking them")

// frameVector is one entry of testdata/frames.json. Other implementations read it too.
type frameVector struct {
	Name     string `json:"name"`
	Hex      string `json:"hex"`
	Type     string `json:"type,omitempty"`
	Flags    uint8  `json:"flags"`
	Stream   uint64 `json:"stream"`
	Sequence uint32 `json:"sequence"`
	Payload  string `json:"payload_hex"`
	CRC      uint32 `json:"crc"`
	Error    bool   `json:"error,omitempty"` // a receiver must close the connection
	Why      string `json:"why,omitempty"`
}

// exchangeVector is a conversation of testdata/exchanges.json.
type exchangeVector struct {
	Name   string         `json:"name"`
	Frames []exchangeStep `json:"frames"`
}

type exchangeStep struct {
	From string `json:"from"` // client or server
	Note string `json:"note"`
	Hex  string `json:"hex"`
}

func frameVectors() []frameVector {
	good := func(name string, typ frameType, flags uint8, stream uint64, seq uint32, payload []byte) frameVector {
		b := rawFrame(typ, flags, stream, seq, payload)
		h, err := decodeHeader(b, MaxPayload)
		if err != nil {
			panic(err)
		}
		return frameVector{Name: name, Hex: hex.EncodeToString(b), Type: typ.String(), Flags: flags, Stream: stream, Sequence: seq,
			Payload: hex.EncodeToString(payload), CRC: h.crc}
	}
	bad := func(name, why string, b []byte) frameVector {
		return frameVector{Name: name, Hex: hex.EncodeToString(b), Error: true, Why: why}
	}
	change := func(i int, v byte) []byte {
		b := rawFrame(typeData, uint8(KindStdout), 1, 1, []byte("hello"))
		b[i] = v
		return b
	}
	hello := (&msg.Hello{MinVersion: 1, MaxVersion: 1, Token: "token", Capabilities: []string{"batch"}, Agent: "test/1", InitialCredit: 262144, KeepaliveMs: 30000}).AppendWire(nil)
	welcome := (&msg.Welcome{Version: 1, Node: "n1", Generation: 7, InitialCredit: 262144, MaxStreams: 4096, MaxPayload: MaxPayload}).AppendWire(nil)
	return []frameVector{
		good("hello", typeHello, 0, 0, 0, hello),
		good("welcome", typeWelcome, 0, 0, 0, welcome),
		good("open without input", typeOpen, flagFin, 1, 0, (&msg.Open{Method: "file.stat", Target: "sb1", TimeoutUs: 1500000, Body: []byte{0x0a, 1, '/'}}).AppendWire(nil)),
		good("stdin", typeData, uint8(KindInput), 3, 1, []byte("input\n")),
		good("stdout", typeData, uint8(KindStdout), 3, 0, []byte{0, 0xff, 0xfe, '\n'}),
		good("stderr", typeData, uint8(KindStderr), 3, 1, []byte("error\n")),
		good("pty", typeData, uint8(KindPTY), 3, 2, []byte("\x1b[0m")),
		good("bare FIN", typeData, flagFin, 3, 2, nil),
		good("data with FIN", typeData, flagFin|uint8(KindInput), 3, 2, []byte("last")),
		good("message", typeMessage, 0, 5, 1, (&msg.ProcessControl{Signal: 15}).AppendWire(nil)),
		good("empty message", typeMessage, 0, 5, 2, nil),
		good("end", typeEnd, flagFin, 5, 3, (&msg.End{Body: []byte("body")}).AppendWire(nil)),
		good("end with error", typeEnd, flagFin, 5, 3, (&msg.End{Error: &msg.Status{Code: "path_not_found", Message: "no", Details: map[string]string{"path": "/x", "b": ""}}}).AppendWire(nil)),
		good("credit", typeCredit, 0, 5, 4, creditBytes(131072)),
		good("cancel", typeCancel, 0, 7, 1, nil),
		good("ping", typePing, 0, 0, 0, []byte("\x00\x01\x02\x03\x04\x05\x06\x07")),
		good("pong", typePong, 0, 0, 0, []byte("\x00\x01\x02\x03\x04\x05\x06\x07")),
		good("goaway, drain", typeGoAway, 0, 0, 0, nil),
		good("goaway, fatal", typeGoAway, 0, 0, 0, (&msg.GoAway{Error: &msg.Status{Code: "protocol_error", Phase: "aether", Message: "bad magic"}}).AppendWire(nil)),
		good("largest stream and sequence", typeData, uint8(KindStdout), 1<<64-1, 1<<32-1, []byte("x")),
		bad("bad magic", "the first two bytes are not ae7e", change(0, 0xaf)),
		bad("bad version", "the layout's version is not 1", change(2, 2)),
		bad("bad type", "no such type", change(3, 99)),
		bad("bad checksum", "one bit of the payload flipped", change(HeaderSize, 'H')),
		bad("header flipped", "one bit of the stream id flipped", change(12, 3)),
		bad("unknown flag", "bit 6 is not defined", rawFrame(typeData, 0x41, 1, 1, []byte("x"))),
		bad("empty data", "DATA without payload must carry FIN", rawFrame(typeData, 1, 1, 1, nil)),
		bad("end without FIN", "END is the last frame", rawFrame(typeEnd, 0, 1, 1, nil)),
		bad("credit size", "CREDIT carries four bytes", rawFrame(typeCredit, 0, 1, 1, []byte{1})),
		bad("cancel with payload", "CANCEL is empty", rawFrame(typeCancel, 0, 1, 1, []byte{1})),
		bad("ping on a stream", "PING belongs to the connection", rawFrame(typePing, 0, 1, 0, make([]byte, 8))),
		bad("data on stream 0", "stream 0 is the connection", rawFrame(typeData, 1, 0, 0, []byte("x"))),
		bad("too long", "length 1048577", func() []byte { b := change(18, 0x10); b[19], b[20] = 0, 1; return b }()),
	}
}

func exchangeVectors() []exchangeVector {
	step := func(from, note string, b []byte) exchangeStep {
		return exchangeStep{From: from, Note: note, Hex: hex.EncodeToString(b)}
	}
	hello := step("client", "HELLO", helloFrame(nil))
	welcome := step("server", "WELCOME", welcomeFrame(func(w *msg.Welcome) { w.MaxStreams = DefaultMaxStreams }))
	in := (&msg.InputRequest{Data: []byte("hi")}).AppendWire(nil)
	return []exchangeVector{
		{"unary call", []exchangeStep{hello, welcome,
			step("client", "OPEN of echo, FIN", openFrame(1, flagFin, "echo", in)),
			step("server", "END with the response", endFrame(1, 0, &msg.End{Body: in}))}},
		{"stream both ways", []exchangeStep{hello, welcome,
			step("client", "OPEN of pipe", openFrame(1, 0, "pipe", nil)),
			step("client", "DATA abc", rawFrame(typeData, 0, 1, 1, []byte("abc"))),
			step("server", "DATA abc as stdout", rawFrame(typeData, 1, 1, 0, []byte("abc"))),
			step("client", "bare FIN", rawFrame(typeData, flagFin, 1, 2, nil)),
			step("server", "END", endFrame(1, 1, &msg.End{Body: (&msg.WriteResult{Bytes: 3}).AppendWire(nil)}))}},
		{"error, then another stream", []exchangeStep{hello, welcome,
			step("client", "OPEN of fail", openFrame(1, flagFin, "fail", nil)),
			step("server", "END with the error", endFrame(1, 0, &msg.End{Error: &msg.Status{Code: "path_not_found", Phase: "test.fail", Message: "nothing there",
				Cause: "ENOENT", RetryAfterMs: 1500, Details: map[string]string{"path": "/x"}}})),
			step("client", "OPEN of echo", openFrame(3, flagFin, "echo", in)),
			step("server", "END with the response", endFrame(3, 0, &msg.End{Body: in}))}},
	}
}

// checkGolden writes or compares a file of testdata.
func checkGolden(t *testing.T, name string, v any) {
	t.Helper()
	b, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	b = append(b, '\n')
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, b) {
		t.Fatalf("%s differs from what this code makes; if that is meant, run with -update", path)
	}
}

func TestFrameVectors(t *testing.T) {
	t.Parallel()
	checkGolden(t, "frames.json", frameVectors())
	b, err := os.ReadFile("testdata/frames.json")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []frameVector
	if err := json.Unmarshal(b, &vectors); err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		in, err := hex.DecodeString(v.Hex)
		if err != nil {
			t.Fatal(err)
		}
		r := frameReader{conn: &bytesConn{in: in, step: 1 << 20}, maxPayload: MaxPayload, beforeWait: func() {}}
		h, payload, err := r.next()
		switch {
		case v.Error && !errors.Is(err, errs.ProtocolError):
			t.Errorf("%s: got %v, want a protocol error", v.Name, err)
		case v.Error:
		case err != nil:
			t.Errorf("%s: %v", v.Name, err)
		case h.typ.String() != v.Type || h.flags != v.Flags || h.stream != v.Stream || h.seq != v.Sequence || hex.EncodeToString(payload) != v.Payload || h.crc != v.CRC:
			t.Errorf("%s: decoded as %+v", v.Name, h)
		}
	}
}

// The exchanges are what a real server answers, byte for byte.
func TestExchangeVectors(t *testing.T) {
	t.Parallel()
	checkGolden(t, "exchanges.json", exchangeVectors())
	for _, x := range exchangeVectors() {
		p, _ := rawUnwelcomed(t, ServerConfig{})
		for _, s := range x.Frames {
			b, err := hex.DecodeString(s.Hex)
			if err != nil {
				t.Fatal(err)
			}
			if s.From == "client" {
				p.write(b)
				continue
			}
			got := make([]byte, len(b))
			if _, err := io.ReadFull(p.conn, got); err != nil || !bytes.Equal(got, b) {
				t.Fatalf("%s: %s: got %x, want %x, %v", x.Name, s.Note, got, b, err)
			}
		}
	}
}
