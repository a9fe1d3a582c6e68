package main

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"flag"
	"os"
	"testing"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/dynamicpb"

	"dsec/aether/msg"
)

var update = flag.Bool("update", false, "write testdata/messages.json instead of checking it")

// messageVector is one entry of aether/testdata/messages.json: value is the message in
// protobuf's JSON with the field names of the .proto file.
type messageVector struct {
	Message string          `json:"message"`
	Hex     string          `json:"hex"`
	Value   json.RawMessage `json:"value"`
}

func samples() map[string][]msg.Message {
	start := &msg.StartRequest{Cmd: "/bin/sh", Args: []string{"-c", "true", ""}, Envs: map[string]string{"PATH": "/bin", "EMPTY": "", "A": "b"},
		Cwd: "/w", User: "1000:1000", Pty: &msg.PtySize{Cols: 80, Rows: 24}, Tag: "t", Stdin: true, TimeoutMs: 1 << 40, OutputLimit: 1}
	return map[string][]msg.Message{
		"Hello":         {&msg.Hello{MinVersion: 1, MaxVersion: 2, Token: "tok", Capabilities: []string{"a", ""}, Agent: "x/1", InitialCredit: 1 << 18, KeepaliveMs: 30000}},
		"Open":          {&msg.Open{Method: "process.start", Target: "sb", TimeoutUs: 1<<63 + 1, Body: []byte{0, 0xff}, RequestId: "r"}},
		"End":           {&msg.End{}, &msg.End{Body: bytes.Repeat([]byte{7}, 200)}, &msg.End{Error: &msg.Status{Code: "node_full", Retryable: true, Infra: true, RetryAfterMs: 250, Details: map[string]string{"z": "1", "a": "2"}}}},
		"Batch":         {&msg.Batch{Ops: []*msg.BatchOp{{Method: "file.stat", Target: "sb", Body: []byte("b")}, {}}, StopOnError: true, Parallel: 4}},
		"BatchResult":   {&msg.BatchResult{Items: []*msg.End{{}, {Body: []byte("x")}}}},
		"StartRequest":  {start},
		"ExecResult":    {&msg.ExecResult{Exit: &msg.Exit{ExitCode: -1, Signal: 9, DurationUs: 12345}, Stdout: []byte("\x00\xff"), Truncated: true, Pid: 7}},
		"ProcessList":   {&msg.ProcessList{Processes: []*msg.ProcessInfo{{Start: start, Pid: 3, Running: true}}}},
		"EntryInfo":     {&msg.EntryInfo{Name: "näme", Type: msg.FileTypeSymlink, Path: "/näme", Size: -5, Mode: 0o120777, ModifiedUnixNs: -1, SymlinkTarget: "t", Metadata: map[string]string{"k": "v"}}},
		"FileEvent":     {&msg.FileEvent{Name: "f", Type: msg.EventTypeRename}},
		"SignalRequest": {&msg.SignalRequest{Process: &msg.Selector{Pid: 1}, Signal: -2147483648}},
	}
}

func TestMessageVectors(t *testing.T) {
	t.Parallel()
	files, err := compile("../proto")
	if err != nil {
		t.Fatal(err)
	}
	var vectors []messageVector
	all := samples()
	for _, f := range files {
		for i := range f.Messages().Len() {
			d := f.Messages().Get(i)
			for _, m := range all[string(d.Name())] {
				wire := m.AppendWire(nil)
				dyn := dynamicpb.NewMessage(d)
				if err := proto.Unmarshal(wire, dyn); err != nil {
					t.Fatal(err)
				}
				value, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(dyn)
				if err != nil {
					t.Fatal(err)
				}
				var compact bytes.Buffer // protojson varies its white space on purpose
				if err := json.Compact(&compact, value); err != nil {
					t.Fatal(err)
				}
				vectors = append(vectors, messageVector{string(d.Name()), hex.EncodeToString(wire), compact.Bytes()})
			}
			delete(all, string(d.Name()))
		}
	}
	if len(all) > 0 {
		t.Errorf("samples of unknown messages: %v", all)
	}
	want, err := json.MarshalIndent(vectors, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	want = append(want, '\n')
	const path = "../testdata/messages.json"
	if *update {
		if err := os.WriteFile(path, want, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%s differs from what this code makes; if that is meant, run with -update", path)
	}
}
