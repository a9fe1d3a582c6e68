package up

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dsec/api/v1/errs"
)

func certificate(t *testing.T, names ...string) *tls.Config {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: names, IPAddresses: []net.IP{net.IPv4(192, 0, 2, 7)}}
	der, err := x509.CreateCertificate(rand.Reader, c, c, &key.PublicKey, key)
	if err != nil {
		t.Fatal(err)
	}
	return &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
}

// What is printed and written to the context file can be connected to.
func TestURL(t *testing.T) {
	t.Parallel()
	for _, x := range []struct {
		address net.Addr
		secure  *tls.Config
		want    string
	}{
		{&net.UnixAddr{Net: "unix", Name: "/run/api.sock"}, nil, "unix:///run/api.sock"},
		{&net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 7070}, nil, "http://127.0.0.1:7070"},
		{&net.TCPAddr{IP: net.IPv6unspecified, Port: 7070}, nil, "http://127.0.0.1:7070"},
		{&net.TCPAddr{IP: net.IPv4zero, Port: 7070}, nil, "http://127.0.0.1:7070"},
		{&net.TCPAddr{IP: net.IPv6unspecified, Port: 7070}, certificate(t, "*.example.org", "box.example.org"), "https://box.example.org:7070"},
		{&net.TCPAddr{IP: net.IPv6unspecified, Port: 7070}, certificate(t), "https://192.0.2.7:7070"},
		{&net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 7070}, certificate(t, "box.example.org"), "https://192.0.2.1:7070"},
	} {
		if got := url(x.address, x.secure); got != x.want {
			t.Errorf("%s, want %s", got, x.want)
		}
	}
}

// Whoever waits for the lock of a directory that is removed meanwhile does not hold one
// that nobody else sees.
func TestLockOfARemovedFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "lock")
	first, err := acquire(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := acquire(path); err == nil {
		t.Error("two hold one lock")
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	second, err := acquire(path)
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	first.Close()
	if _, err := acquire(path); err == nil {
		t.Error("two hold one lock")
	}
}

// What a node has used is never cleaned away.
func TestOnlyANewDirectoryIsRestored(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	for _, name := range []string{"lock", "mine"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f, err := untouched(dir, true)
	if err != nil || f == nil {
		t.Fatal(f, err)
	}
	if err := os.Mkdir(filepath.Join(dir, "etcd"), 0o700); err != nil {
		t.Fatal(err)
	}
	if used, err := untouched(dir, true); used != nil || err != nil {
		t.Errorf("%+v, %v", used, err)
	}
	if err := f.restore(); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 || left[0].Name() != "mine" {
		t.Errorf("%v, %v", left, err)
	}
}

// A root token that is damaged is not used, and not replaced behind its owner's back.
func TestDamagedRootToken(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "root.token")
	token, err := loadToken(path)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := loadToken(path); err != nil || again != token {
		t.Errorf("%q, then %q, %v", token, again, err)
	}
	for _, bad := range []string{"", "\n", token[:20], token + "\n" + token, strings.Repeat("\x00", len(token)), "x" + token[1:] + "\n", token[:52] + "X\n"} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := loadToken(path); !errors.Is(err, errs.DataCorrupt) || !strings.Contains(err.Error(), path) {
			t.Errorf("%q gives %v", bad, err)
		}
		if left, err := os.ReadFile(path); err != nil || string(left) != bad {
			t.Errorf("%q became %q, %v", bad, left, err)
		}
	}
}

// A server that was killed has its id until its parent has asked for it, and its lock may be held a
// moment longer by what it had forked, or by another that only looks.
func TestNodeThatIsAZombieHasDied(t *testing.T) {
	data := t.TempDir()
	lock, err := acquire(filepath.Join(data, "lock"))
	if err != nil {
		t.Fatal(err)
	}
	server := exec.Command("sleep", "60")
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	info := fmt.Appendf(nil, `{"pid":%d}`, server.Process.Pid)
	if err := os.WriteFile(filepath.Join(data, "run.json"), info, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Find(data); err != nil {
		t.Errorf("while it runs: %v", err)
	}
	if err := server.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	defer server.Wait()
	stat := fmt.Sprintf("/proc/%d/stat", server.Process.Pid)
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		if b, err := os.ReadFile(stat); err == nil && bytes.Contains(b, []byte(") Z ")) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("it does not die")
		}
	}
	if _, err := Find(data); !errors.Is(err, errs.NodeNotFound) {
		t.Errorf("a killed node is found: %v", err)
	}
	time.AfterFunc(50*time.Millisecond, func() { lock.Close() })
	taken, err := takeOver(t.Context(), data)
	if err != nil {
		t.Fatalf("take over from a killed node: %v", err)
	}
	taken.Close()
}
