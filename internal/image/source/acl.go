package source

import (
	"encoding/binary"
	"errors"
	"sort"
	"strconv"
	"strings"
)

// The kernel's form of an ACL: a version, then (tag, permissions, id) entries in
// the order of tags and ids.
const (
	aclVersion = 2
	aclNoID    = ^uint32(0)

	aclUserObj  = 0x01
	aclUser     = 0x02
	aclGroupObj = 0x04
	aclGroup    = 0x08
	aclMask     = 0x10
	aclOther    = 0x20
)

var (
	errACLName = errors.New("it names users")
	errACLForm = errors.New("malformed")
)

// parseACL turns the text form that GNU tar and star write into the kernel's.
// Entries for named users need a number: in the name's place, or after the
// permissions as star has it.
func parseACL(text string) ([]byte, error) {
	type entry struct {
		tag, perm uint16
		id        uint32
	}
	var list []entry
	for _, line := range strings.FieldsFunc(text, func(r rune) bool { return r == ',' || r == '\n' }) {
		line, _, _ = strings.Cut(line, "#")
		f := strings.Split(strings.TrimSpace(line), ":")
		if len(f) == 1 && f[0] == "" {
			continue
		}
		if len(f) < 3 || len(f) > 4 {
			return nil, errACLForm
		}
		e := entry{id: aclNoID}
		named := f[1] != ""
		switch kind := f[0]; {
		case (kind == "user" || kind == "u") && named:
			e.tag = aclUser
		case kind == "user" || kind == "u":
			e.tag = aclUserObj
		case (kind == "group" || kind == "g") && named:
			e.tag = aclGroup
		case kind == "group" || kind == "g":
			e.tag = aclGroupObj
		case (kind == "mask" || kind == "m") && !named:
			e.tag = aclMask
		case (kind == "other" || kind == "o") && !named:
			e.tag = aclOther
		default:
			return nil, errACLForm
		}
		if named {
			id, err := strconv.ParseUint(f[len(f)-1], 10, 32)
			if len(f) == 3 {
				id, err = strconv.ParseUint(f[1], 10, 32)
			}
			if err != nil {
				return nil, errACLName
			}
			e.id = uint32(id)
		}
		for _, c := range f[2] {
			switch c {
			case 'r':
				e.perm |= 4
			case 'w':
				e.perm |= 2
			case 'x':
				e.perm |= 1
			case '-':
			default:
				return nil, errACLForm
			}
		}
		list = append(list, e)
	}
	if len(list) == 0 {
		return nil, errACLForm
	}
	sort.SliceStable(list, func(i, j int) bool {
		a, b := list[i], list[j]
		return a.tag < b.tag || a.tag == b.tag && a.id < b.id
	})
	out := binary.LittleEndian.AppendUint32(nil, aclVersion)
	for _, e := range list {
		out = binary.LittleEndian.AppendUint16(out, e.tag)
		out = binary.LittleEndian.AppendUint16(out, e.perm)
		out = binary.LittleEndian.AppendUint32(out, e.id)
	}
	return out, nil
}
