package iam

import (
	"crypto/sha256"
	"fmt"
	"slices"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// RootProject is the only project for now.
const RootProject = "root"

// Principal is an authenticated caller.
type Principal struct {
	TokenID string
	Name    string
	Project string
	rights  []v1.Right
	hash    [sha256.Size]byte // of the secret: a replaced secret makes another principal
}

// Has says whether p may do what right names. Admin implies all; sandbox and image
// imply read.
func (p *Principal) Has(right v1.Right) bool {
	for _, r := range p.rights {
		if r == right || r == v1.RightAdmin || right == v1.RightRead && (r == v1.RightSandbox || r == v1.RightImage) {
			return true
		}
	}
	return false
}

// Require fails with errs.MissingRight, naming the right.
func (p *Principal) Require(right v1.Right) error {
	if p.Has(right) {
		return nil
	}
	return errs.New(errs.MissingRight, "iam.authorize", fmt.Sprintf("token %q lacks the right %q", p.Name, right)).With("right", string(right))
}

// Rights returns what p was given.
func (p *Principal) Rights() []v1.Right { return slices.Clone(p.rights) }

func knownRight(r v1.Right) bool {
	switch r {
	case v1.RightRead, v1.RightSandbox, v1.RightImage, v1.RightAdmin:
		return true
	}
	return false
}
