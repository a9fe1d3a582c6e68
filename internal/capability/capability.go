package capability

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"slices"
	"strings"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// AnySandbox makes a capability good for all sandboxes.
const AnySandbox = "*"

const (
	prefix   = "dcap1." // version of the form; signed with the rest
	minKey   = 16
	maxToken = 4096
)

// Claims is what a capability says.
type Claims struct {
	Subject string     `json:"sub"`          // who asked for it, for logs
	Sandbox string     `json:"sbx"`          // a sandbox id, or AnySandbox
	Rights  []v1.Right `json:"rts"`          // as of the token it was made from
	Expires time.Time  `json:"exp,omitzero"` // never empty in a signed token
}

// Allows says whether c lets its holder use right on a sandbox.
func (c Claims) Allows(sandbox string, right v1.Right) error {
	if c.Sandbox != AnySandbox && c.Sandbox != sandbox {
		return errs.New(errs.BadToken, "capability.check", "the capability is for another sandbox")
	}
	if !slices.Contains(c.Rights, right) && !slices.Contains(c.Rights, v1.RightAdmin) {
		return errs.New(errs.MissingRight, "capability.check", "the capability lacks the right "+string(right)).With("right", string(right))
	}
	return nil
}

// Signer signs and verifies with one key.
type Signer struct {
	key []byte
	now func() time.Time
}

// NewSigner returns a Signer. now is the clock that expiry is judged by; nil: time.Now.
func NewSigner(key []byte, now func() time.Time) (*Signer, error) {
	if len(key) < minKey {
		return nil, errs.New(errs.InternalError, "capability.key", "the signing key is too short")
	}
	if now == nil {
		now = time.Now
	}
	return &Signer{key: slices.Clone(key), now: now}, nil
}

// Sign makes a token of claims.
func (s *Signer) Sign(c Claims) (string, error) {
	if c.Subject == "" || c.Sandbox == "" || c.Expires.IsZero() {
		return "", errs.New(errs.InternalError, "capability.sign", "a capability needs a subject, a sandbox and an expiry")
	}
	raw, err := json.Marshal(c)
	if err != nil {
		return "", errs.Wrap(errs.InternalError, "capability.sign", "encode", err)
	}
	body := prefix + base64.RawURLEncoding.EncodeToString(raw)
	token := body + "." + base64.RawURLEncoding.EncodeToString(s.mac(body))
	if len(token) > maxToken {
		return "", errs.New(errs.InternalError, "capability.sign", "the claims are too long")
	}
	return token, nil
}

// Verify returns the claims of a token that this key signed and that has not expired.
// Errors: errs.BadToken.
func (s *Signer) Verify(token string) (Claims, error) {
	bad := func(why string) (Claims, error) {
		return Claims{}, errs.New(errs.BadToken, "capability.verify", why)
	}
	if len(token) > maxToken || !strings.HasPrefix(token, prefix) {
		return bad("not a capability")
	}
	dot := strings.LastIndexByte(token, '.')
	body, sig := token[:dot], token[dot+1:]
	mac, err := base64.RawURLEncoding.Strict().DecodeString(sig)
	if err != nil || !hmac.Equal(mac, s.mac(body)) {
		return bad("the capability's signature is wrong")
	}
	// Only what we signed gets here.
	raw, err := base64.RawURLEncoding.Strict().DecodeString(strings.TrimPrefix(body, prefix))
	if err != nil {
		return bad("the capability is malformed")
	}
	var c Claims
	if err := json.Unmarshal(raw, &c); err != nil || c.Subject == "" || c.Sandbox == "" {
		return bad("the capability is malformed")
	}
	if !s.now().Before(c.Expires) {
		return bad("the capability expired at " + c.Expires.UTC().Format(time.RFC3339))
	}
	return c, nil
}

// IsCapability tells a capability from another bearer token by its form.
func IsCapability(token string) bool { return strings.HasPrefix(token, prefix) }

func (s *Signer) mac(body string) []byte {
	h := hmac.New(sha256.New, s.key)
	h.Write([]byte(body))
	return h.Sum(nil)
}
