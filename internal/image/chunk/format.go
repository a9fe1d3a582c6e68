package chunk

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"strings"

	"dsec/api/v1/errs"
)

const phase = "image.chunk"

// Classes of objects.
const (
	packClass      = "pack/"
	mapClass       = "map/"
	metaClass      = "meta/"
	movedClass     = "moved/"
	leaseClass     = "lease/"
	condemnedClass = "condemned/"
)

// id names a pack, a lease or a condemnation. Ids are random and never come again, so
// that whoever deletes an object can only ever mean that one.
type id [16]byte

func newID(rand io.Reader) (id, error) {
	var i id
	if _, err := io.ReadFull(rand, i[:]); err != nil {
		return i, errs.Wrap(errs.InternalError, phase, "make an id", err)
	}
	return i, nil
}

func (i id) String() string { return hex.EncodeToString(i[:]) }

func (i id) packKey() string { return packClass + i.String() }

func parseID(s string) (i id, ok bool) {
	if len(s) != 2*len(i) || strings.ToLower(s) != s {
		return i, false
	}
	_, err := hex.Decode(i[:], []byte(s))
	return i, err == nil
}

type digest = [sha256.Size]byte

// contentKey names an object by the digest of its content and a nonce: the same
// content may be stored twice, which only costs space, but a name that was deleted
// never comes again.
func contentKey(class string, d digest, nonce id) string {
	return class + hex.EncodeToString(d[:]) + "." + hex.EncodeToString(nonce[:8])
}

func contentPrefix(class string, d digest) string {
	return class + hex.EncodeToString(d[:]) + "."
}

// parseContentKey is the digest in a name that contentKey made.
func parseContentKey(class, key string) (d digest, err error) {
	rest, ok := strings.CutPrefix(key, class)
	sum, nonce, dot := strings.Cut(rest, ".")
	var n [8]byte
	if ok && dot && len(sum) == 2*len(d) && len(nonce) == 2*len(n) && strings.ToLower(rest) == rest {
		_, err1 := hex.Decode(d[:], []byte(sum))
		_, err2 := hex.Decode(n[:], []byte(nonce))
		if err1 == nil && err2 == nil {
			return d, nil
		}
	}
	return d, errs.New(errs.BadRequest, phase, fmt.Sprintf("%.120q names no %s object", key, strings.TrimSuffix(class, "/")))
}

// corrupt is the error for stored bytes that are not what was stored.
func corrupt(key, what string, cause error) *errs.Error {
	return errs.New(errs.StoreCorrupt, phase, "object "+key+": "+what).Because(cause)
}
