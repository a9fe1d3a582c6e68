package v1

import (
	"errors"
	"strings"
)

// Sandbox ids are "s" + node (6) + epoch (5) + unique part (10), all of [a-z2-7]
// (base 32), so that any apiserver can route a request, and tell a lost sandbox
// from an unknown one, without a lookup.
const (
	NodeIDLen    = 6
	epochLen     = 5
	uniqueLen    = 10
	SandboxIDLen = 1 + NodeIDLen + epochLen + uniqueLen
	// MaxEpoch is the largest registration epoch that an id can carry.
	MaxEpoch = 1<<(5*epochLen) - 1
	alphabet = "abcdefghijklmnopqrstuvwxyz234567"
)

var errBadID = errors.New("not a sandbox id")

// SandboxID composes an id. node has NodeIDLen characters; unique is reduced to 50 bits.
func SandboxID(node string, epoch, unique uint64) string {
	b := make([]byte, 0, SandboxIDLen)
	b = append(b, 's')
	b = append(b, node...)
	b = appendBase32(b, epoch, epochLen)
	return string(appendBase32(b, unique, uniqueLen))
}

// ParseSandboxID splits an id into its node and epoch.
func ParseSandboxID(id string) (node string, epoch uint64, err error) {
	if len(id) != SandboxIDLen || id[0] != 's' {
		return "", 0, errBadID
	}
	for i := 1; i < len(id); i++ {
		if strings.IndexByte(alphabet, id[i]) < 0 {
			return "", 0, errBadID
		}
	}
	for _, c := range []byte(id[1+NodeIDLen : 1+NodeIDLen+epochLen]) {
		epoch = epoch<<5 | uint64(strings.IndexByte(alphabet, c))
	}
	return id[1 : 1+NodeIDLen], epoch, nil
}

// NodeID makes a node's id of 30 random bits.
func NodeID(random uint64) string { return string(appendBase32(nil, random, NodeIDLen)) }

func appendBase32(b []byte, v uint64, n int) []byte {
	for i := n - 1; i >= 0; i-- {
		b = append(b, alphabet[v>>(5*i)&31])
	}
	return b
}

// InSandboxID says whether s, which is not empty, may be a part of an id.
func InSandboxID(s string) bool {
	return s != "" && len(s) <= SandboxIDLen && strings.Trim(s, alphabet) == ""
}

// UniquePart returns what tells an id from others of its node and epoch; of what is no id, "".
func UniquePart(id string) string {
	if len(id) != SandboxIDLen {
		return ""
	}
	return id[SandboxIDLen-uniqueLen:]
}
