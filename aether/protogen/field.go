package main

import (
	"fmt"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// field is one field and how its Go code looks.
type field struct {
	d      protoreflect.FieldDescriptor
	name   string
	goType string // of the struct's field
	elem   string // of one element
}

func newField(d protoreflect.FieldDescriptor) (field, error) {
	f := field{d: d, name: camel(string(d.Name()))}
	if d.IsMap() {
		if d.MapKey().Kind() != protoreflect.StringKind || d.MapValue().Kind() != protoreflect.StringKind {
			return f, fmt.Errorf("field %s: only map<string, string> is supported", d.Name())
		}
		f.goType = "map[string]string"
		return f, nil
	}
	switch d.Kind() {
	case protoreflect.BoolKind, protoreflect.Int32Kind, protoreflect.Int64Kind, protoreflect.Uint32Kind,
		protoreflect.Uint64Kind, protoreflect.StringKind:
		f.elem = d.Kind().String()
	case protoreflect.BytesKind:
		f.elem = "[]byte"
	case protoreflect.EnumKind:
		f.elem = string(d.Enum().Name())
	case protoreflect.MessageKind:
		f.elem = "*" + string(d.Message().Name())
	default:
		return f, fmt.Errorf("field %s: type %s is not supported", d.Name(), d.Kind())
	}
	f.goType = f.elem
	if d.IsList() {
		switch d.Kind() {
		case protoreflect.StringKind, protoreflect.BytesKind, protoreflect.MessageKind:
		default:
			return f, fmt.Errorf("field %s: repeated %s is not supported", d.Name(), d.Kind())
		}
		f.goType = "[]" + f.elem
	}
	return f, nil
}

func (f field) appendCode() string {
	n := f.d.Number()
	switch {
	case f.d.IsMap():
		return fmt.Sprintf("for _, k := range slices.Sorted(maps.Keys(m.%s)) {\nb = appendEntry(b, %d, k, m.%s[k])\n}", f.name, n, f.name)
	case f.d.IsList() && f.d.Kind() == protoreflect.MessageKind:
		return fmt.Sprintf("for _, v := range m.%s {\nb = appendMessage(b, %d, v)\n}", f.name, n)
	case f.d.IsList():
		return fmt.Sprintf("for _, v := range m.%s {\nb = appendElement(b, %d, v)\n}", f.name, n)
	case f.d.Kind() == protoreflect.MessageKind:
		return fmt.Sprintf("if m.%s != nil {\nb = appendMessage(b, %d, m.%s)\n}", f.name, n, f.name)
	}
	switch f.d.Kind() {
	case protoreflect.BoolKind:
		return fmt.Sprintf("b = appendBool(b, %d, m.%s)", n, f.name)
	case protoreflect.StringKind, protoreflect.BytesKind:
		return fmt.Sprintf("b = appendBytes(b, %d, m.%s)", n, f.name)
	default: // negative int32 and enums take ten bytes, as the encoding wants
		return fmt.Sprintf("b = appendUint(b, %d, uint64(m.%s))", n, f.name)
	}
}

func (f field) parseCode() string {
	value := ""
	switch f.d.Kind() {
	case protoreflect.BoolKind:
		value = "r.uint() != 0"
	case protoreflect.StringKind:
		value = "r.string()"
	case protoreflect.BytesKind:
		value = "r.bytes()"
	case protoreflect.MessageKind:
	default:
		value = f.elem + "(r.uint())"
	}
	switch {
	case f.d.IsMap():
		return fmt.Sprintf("if k, v := r.entry(); r.err == nil && r.room(len(m.%[1]s)) {\nif m.%[1]s == nil {\nm.%[1]s = map[string]string{}\n}\nm.%[1]s[k] = v\n}", f.name)
	case f.d.IsList() && f.d.Kind() == protoreflect.MessageKind:
		return fmt.Sprintf("if r.room(len(m.%[1]s)) {\nv := new(%[2]s)\nr.message(v.merge)\nm.%[1]s = append(m.%[1]s, v)\n}", f.name, f.elem[1:])
	case f.d.IsList():
		return fmt.Sprintf("if r.room(len(m.%[1]s)) {\nm.%[1]s = append(m.%[1]s, %[2]s)\n}", f.name, value)
	case f.d.Kind() == protoreflect.MessageKind:
		return fmt.Sprintf("if m.%[1]s == nil {\nm.%[1]s = new(%[2]s)\n}\nr.message(m.%[1]s.merge)", f.name, f.elem[1:])
	}
	return fmt.Sprintf("m.%s = %s", f.name, value)
}
