package main

import (
	"bytes"
	"testing"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"
	"pgregory.net/rapid"

	"dsec/aether/msg"
)

// constructors holds every message of the protocol; the test fails when one is missing.
var constructors = map[string]func() msg.Message{
	"BootConfig":         func() msg.Message { return new(msg.BootConfig) },
	"Hello":              func() msg.Message { return new(msg.Hello) },
	"Welcome":            func() msg.Message { return new(msg.Welcome) },
	"Open":               func() msg.Message { return new(msg.Open) },
	"Status":             func() msg.Message { return new(msg.Status) },
	"End":                func() msg.Message { return new(msg.End) },
	"GoAway":             func() msg.Message { return new(msg.GoAway) },
	"Batch":              func() msg.Message { return new(msg.Batch) },
	"BatchOp":            func() msg.Message { return new(msg.BatchOp) },
	"BatchResult":        func() msg.Message { return new(msg.BatchResult) },
	"Document":           func() msg.Message { return new(msg.Document) },
	"SandboxRequest":     func() msg.Message { return new(msg.SandboxRequest) },
	"EdgeWatchRequest":   func() msg.Message { return new(msg.EdgeWatchRequest) },
	"ImageImportRequest": func() msg.Message { return new(msg.ImageImportRequest) },
	"ImageProgress":      func() msg.Message { return new(msg.ImageProgress) },
	"ImageRequest":       func() msg.Message { return new(msg.ImageRequest) },
	"PtySize":            func() msg.Message { return new(msg.PtySize) },
	"StartRequest":       func() msg.Message { return new(msg.StartRequest) },
	"ProcessStarted":     func() msg.Message { return new(msg.ProcessStarted) },
	"ProcessControl":     func() msg.Message { return new(msg.ProcessControl) },
	"Gap":                func() msg.Message { return new(msg.Gap) },
	"Exit":               func() msg.Message { return new(msg.Exit) },
	"ExecRequest":        func() msg.Message { return new(msg.ExecRequest) },
	"ExecResult":         func() msg.Message { return new(msg.ExecResult) },
	"Selector":           func() msg.Message { return new(msg.Selector) },
	"AttachRequest":      func() msg.Message { return new(msg.AttachRequest) },
	"ProcessInfo":        func() msg.Message { return new(msg.ProcessInfo) },
	"ProcessListRequest": func() msg.Message { return new(msg.ProcessListRequest) },
	"ProcessList":        func() msg.Message { return new(msg.ProcessList) },
	"InputRequest":       func() msg.Message { return new(msg.InputRequest) },
	"SignalRequest":      func() msg.Message { return new(msg.SignalRequest) },
	"ResizeRequest":      func() msg.Message { return new(msg.ResizeRequest) },
	"SelectRequest":      func() msg.Message { return new(msg.SelectRequest) },
	"SessionOpenRequest": func() msg.Message { return new(msg.SessionOpenRequest) },
	"SessionInfo":        func() msg.Message { return new(msg.SessionInfo) },
	"SessionRunRequest":  func() msg.Message { return new(msg.SessionRunRequest) },
	"SessionResult":      func() msg.Message { return new(msg.SessionResult) },
	"SessionSelect":      func() msg.Message { return new(msg.SessionSelect) },
	"SessionList":        func() msg.Message { return new(msg.SessionList) },
	"EntryInfo":          func() msg.Message { return new(msg.EntryInfo) },
	"PathRequest":        func() msg.Message { return new(msg.PathRequest) },
	"ListRequest":        func() msg.Message { return new(msg.ListRequest) },
	"EntryList":          func() msg.Message { return new(msg.EntryList) },
	"MkdirRequest":       func() msg.Message { return new(msg.MkdirRequest) },
	"MoveRequest":        func() msg.Message { return new(msg.MoveRequest) },
	"ChmodRequest":       func() msg.Message { return new(msg.ChmodRequest) },
	"ChownRequest":       func() msg.Message { return new(msg.ChownRequest) },
	"ReadRequest":        func() msg.Message { return new(msg.ReadRequest) },
	"FileContent":        func() msg.Message { return new(msg.FileContent) },
	"WriteRequest":       func() msg.Message { return new(msg.WriteRequest) },
	"WriteResult":        func() msg.Message { return new(msg.WriteResult) },
	"PackRequest":        func() msg.Message { return new(msg.PackRequest) },
	"UnpackRequest":      func() msg.Message { return new(msg.UnpackRequest) },
	"TreeResult":         func() msg.Message { return new(msg.TreeResult) },
	"WatchRequest":       func() msg.Message { return new(msg.WatchRequest) },
	"WatchStarted":       func() msg.Message { return new(msg.WatchStarted) },
	"FileEvent":          func() msg.Message { return new(msg.FileEvent) },
	"DialRequest":        func() msg.Message { return new(msg.DialRequest) },
	"PortInfo":           func() msg.Message { return new(msg.PortInfo) },
	"PortList":           func() msg.Message { return new(msg.PortList) },
	"ResumedRequest":     func() msg.Message { return new(msg.ResumedRequest) },
	"Activity":           func() msg.Message { return new(msg.Activity) },
	"GuestInfo":          func() msg.Message { return new(msg.GuestInfo) },
	"Empty":              func() msg.Message { return new(msg.Empty) },
}

// Both ways through the reference implementation, with random messages.
func TestAgreesWithReferenceImplementation(t *testing.T) {
	t.Parallel()
	files, err := compile("../proto")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		for i := range f.Messages().Len() {
			d := f.Messages().Get(i)
			t.Run(string(d.Name()), func(t *testing.T) {
				t.Parallel()
				make := constructors[string(d.Name())]
				if make == nil {
					t.Fatal("not in constructors")
				}
				rapid.Check(t, func(t *rapid.T) { crossCheck(t, d, make()) })
			})
		}
	}
}

func crossCheck(t *rapid.T, d protoreflect.MessageDescriptor, m msg.Message) {
	want := random(t, d, 0)
	theirs, err := proto.MarshalOptions{Deterministic: true}.Marshal(want)
	if err != nil {
		t.Fatal(err)
	}
	if err := m.ParseWire(theirs); err != nil {
		t.Fatalf("parse %x: %v", theirs, err)
	}
	ours := m.AppendWire([]byte("head"))[4:]
	if !bytes.Equal(ours, theirs) {
		t.Fatalf("%v\nours   %x\ntheirs %x", want, ours, theirs)
	}
	got := dynamicpb.NewMessage(d)
	if err := proto.Unmarshal(ours, got); err != nil || !proto.Equal(got, want) {
		t.Fatalf("%v came back as %v, %v", want, got, err)
	}
	// Cut short anywhere, it is an error or a shorter message, never a panic.
	if len(theirs) > 0 {
		m.ParseWire(theirs[:rapid.IntRange(0, len(theirs)-1).Draw(t, "cut")])
	}
	// A field that this version does not know is passed over.
	unknown := append(bytes.Clone(theirs), 0xfa, 0xff, 0x03, 2, 'h', 'i') // field 8191
	if err := m.ParseWire(unknown); err != nil || !bytes.Equal(m.AppendWire(nil), theirs) {
		t.Fatalf("with an unknown field: %v", err)
	}
}

// random draws a message; each field is absent half of the time.
func random(t *rapid.T, d protoreflect.MessageDescriptor, depth int) *dynamicpb.Message {
	m := dynamicpb.NewMessage(d)
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		name := string(f.Name())
		if !rapid.Bool().Draw(t, "has "+name) {
			continue
		}
		switch {
		case f.IsMap():
			mp := m.Mutable(f).Map()
			for k, v := range rapid.MapOfN(rapid.String(), rapid.String(), 0, 4).Draw(t, name) {
				mp.Set(protoreflect.ValueOfString(k).MapKey(), protoreflect.ValueOfString(v))
			}
		case f.IsList():
			l := m.Mutable(f).List()
			for range rapid.IntRange(0, 3).Draw(t, "len "+name) {
				l.Append(value(t, f, depth))
			}
		default:
			m.Set(f, value(t, f, depth))
		}
	}
	return m
}

func value(t *rapid.T, f protoreflect.FieldDescriptor, depth int) protoreflect.Value {
	name := string(f.Name())
	switch f.Kind() {
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(rapid.Bool().Draw(t, name))
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(rapid.Int32().Draw(t, name))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(rapid.Int64().Draw(t, name))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(rapid.Uint32().Draw(t, name))
	case protoreflect.Uint64Kind:
		return protoreflect.ValueOfUint64(rapid.Uint64().Draw(t, name))
	case protoreflect.StringKind:
		return protoreflect.ValueOfString(rapid.StringN(0, 40, 200).Draw(t, name))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes(rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, name))
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(protoreflect.EnumNumber(rapid.Int32Range(-2, 9).Draw(t, name)))
	case protoreflect.MessageKind:
		return protoreflect.ValueOfMessage(random(t, f.Message(), depth+1))
	}
	t.Fatalf("kind %s", f.Kind())
	return protoreflect.Value{}
}
