package capability

import (
	"errors"
	"reflect"
	"strings"
	"testing"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

var epoch = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)

func signer(t testing.TB, key string, now func() time.Time) *Signer {
	t.Helper()
	s, err := NewSigner([]byte(key), now)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func claims() Claims {
	return Claims{Subject: "token:ci", Sandbox: "sabc", Rights: []v1.Right{v1.RightSandbox}, Expires: epoch.Add(time.Minute)}
}

func TestSignVerify(t *testing.T) {
	t.Parallel()
	now := epoch
	s := signer(t, "0123456789abcdef", func() time.Time { return now })
	token, err := s.Sign(claims())
	if err != nil {
		t.Fatal(err)
	}
	if !IsCapability(token) || IsCapability("dsec_0123") {
		t.Error("IsCapability is wrong")
	}
	if got, err := s.Verify(token); err != nil || !reflect.DeepEqual(got, claims()) {
		t.Fatal(got, err)
	}
	if _, err := signer(t, "another-key-0123456789", func() time.Time { return now }).Verify(token); !errors.Is(err, errs.BadToken) {
		t.Errorf("another key gives %v", err)
	}
	for i := range token {
		mutated := []byte(token)
		mutated[i] ^= 1
		if _, err := s.Verify(string(mutated)); !errors.Is(err, errs.BadToken) {
			t.Fatalf("a change of byte %d gives %v", i, err)
		}
	}
	now = epoch.Add(time.Minute - time.Nanosecond)
	if _, err := s.Verify(token); err != nil {
		t.Errorf("refused before its expiry: %v", err)
	}
	now = epoch.Add(time.Minute)
	if _, err := s.Verify(token); !errors.Is(err, errs.BadToken) || !strings.Contains(err.Error(), "expired") {
		t.Errorf("at its expiry: %v", err)
	}
}

func TestAllows(t *testing.T) {
	t.Parallel()
	c := claims()
	if err := c.Allows("sabc", v1.RightSandbox); err != nil {
		t.Error(err)
	}
	if err := c.Allows("sxyz", v1.RightSandbox); !errors.Is(err, errs.BadToken) {
		t.Errorf("another sandbox gives %v", err)
	}
	if err := c.Allows("sabc", v1.RightImage); !errors.Is(err, errs.MissingRight) {
		t.Errorf("another right gives %v", err)
	}
	all := Claims{Sandbox: AnySandbox, Rights: []v1.Right{v1.RightAdmin}}
	if err := all.Allows("sxyz", v1.RightImage); err != nil {
		t.Error(err)
	}
}

func TestIncompleteClaimsAreNotSigned(t *testing.T) {
	t.Parallel()
	s := signer(t, "0123456789abcdef", nil)
	for name, edit := range map[string]func(*Claims){
		"subject": func(c *Claims) { c.Subject = "" },
		"sandbox": func(c *Claims) { c.Sandbox = "" },
		"expiry":  func(c *Claims) { c.Expires = time.Time{} },
		"length":  func(c *Claims) { c.Subject = strings.Repeat("x", maxToken) },
	} {
		c := claims()
		edit(&c)
		if token, err := s.Sign(c); err == nil {
			t.Errorf("signed without a good %s: %s", name, token)
		}
	}
	if _, err := NewSigner([]byte("short"), nil); err == nil {
		t.Error("a short key was accepted")
	}
}

func FuzzVerify(f *testing.F) {
	now := func() time.Time { return epoch }
	s := signer(f, "0123456789abcdef", now)
	token, err := s.Sign(claims())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(token)
	f.Add(token + "A")
	f.Add(prefix)
	f.Add("dcap1..")
	f.Add("dcap1.e30.AAAA")
	f.Fuzz(func(t *testing.T, in string) {
		got, err := s.Verify(in)
		if err != nil {
			if !errors.Is(err, errs.BadToken) {
				t.Fatalf("%q gives %v", in, err)
			}
			return
		}
		if in != token {
			t.Fatalf("accepted a token that was not signed: %q → %+v", in, got)
		}
	})
}

func BenchmarkVerify(b *testing.B) {
	s := signer(b, "0123456789abcdef", func() time.Time { return epoch })
	token, err := s.Sign(claims())
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if _, err := s.Verify(token); err != nil {
			b.Fatal(err)
		}
	}
}
