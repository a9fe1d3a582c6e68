package bed

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"dsec/client"
)

// Image is the name of the busybox image that every bed has.
const Image = "bb"

// Bed is one server's surroundings.
type Bed struct {
	Dir  string // everything of the bed is below it
	Data string // the server's data directory
	Bin  string // the program
	Sock string // the API's socket

	env    []string
	flags  []string // of up
	server *server
}

// Options of a Bed; the zero value works.
type Options struct {
	Flags []string // of up
	Env   []string // of all commands, besides the test's own
	// Prepare is called with the data directory, which is empty, before the server starts;
	// what it returns is called after the server's end and the audit.
	Prepare func(data string) (undo func() error, err error)
	// NoImage leaves the image out.
	NoImage bool
}

// Open starts a server. close stops it with 'dsec down' and fails if anything of it is left.
func Open(ctx context.Context, o Options) (b *Bed, close func() error, err error) {
	if os.Geteuid() != 0 {
		return nil, nil, errors.New("these tests need root: they run real sandboxes")
	}
	bin, err := Binary()
	if err != nil {
		return nil, nil, err
	}
	// Not t.TempDir: a socket's name has room for 107 bytes.
	dir, err := os.MkdirTemp("", "dsec-bed-")
	if err != nil {
		return nil, nil, err
	}
	b = &Bed{Dir: dir, Data: filepath.Join(dir, "data"), Bin: bin, Sock: filepath.Join(dir, "api.sock"), flags: o.Flags}
	for _, kv := range os.Environ() {
		if name, _, _ := strings.Cut(kv, "="); !strings.HasPrefix(name, "DSEC_") && name != "XDG_CONFIG_HOME" {
			b.env = append(b.env, kv)
		}
	}
	b.env = append(append(b.env, "XDG_CONFIG_HOME="+filepath.Join(dir, "config")), o.Env...)
	undo := func() error { return nil }
	if err := os.Mkdir(b.Data, 0o700); err != nil {
		return nil, nil, err
	}
	if o.Prepare != nil {
		if undo, err = o.Prepare(b.Data); err != nil {
			return nil, nil, errors.Join(err, os.RemoveAll(dir))
		}
	}
	close = func() error {
		err := b.end()
		if err != nil {
			err = fmt.Errorf("%w\nserver log:\n%s", err, b.Log())
		}
		return errors.Join(err, undo(), os.RemoveAll(dir))
	}
	if err := b.Up(ctx); err != nil {
		return nil, nil, errors.Join(err, close())
	}
	if !o.NoImage {
		recipe := filepath.Join(root(), "images", "busybox", "recipe.yaml")
		if r := b.Run(ctx, nil, "image", "build", Image, "-f", recipe); r.Code != 0 {
			return nil, nil, errors.Join(fmt.Errorf("build the image: %s", r.Stderr), close())
		}
	}
	return b, close, nil
}

// New is Open for one test.
func New(t testing.TB, o Options) *Bed {
	t.Helper()
	b, close, err := Open(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("server log:\n%s", b.Log())
		}
		if err := close(); err != nil {
			t.Error(err)
		}
	})
	return b
}

// Main runs a package's tests with one server that they share.
func Main(m *testing.M, o Options, use func(*Bed)) int {
	b, close, err := Open(context.Background(), o)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	use(b)
	before, err := b.Held()
	code := m.Run()
	if code != 0 {
		fmt.Fprintf(os.Stderr, "server log:\n%s", b.Log())
	} else if after, aerr := b.Held(); err != nil || aerr != nil || !maps.Equal(before, after) {
		list, _ := b.list(func(path string) bool { return strings.HasPrefix(path, b.Data) })
		fmt.Fprintf(os.Stderr, "the node holds %v after the tests, %v before: %v\n%s\n", after, before, errors.Join(err, aerr), strings.Join(list, "\n"))
		code = 1
	}
	if err := close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

// Client is an SDK client, closed with the test.
func (b *Bed) Client(t testing.TB) *client.Client {
	t.Helper()
	return b.ClientAs(t, b.Token(t))
}

// ClientAs is a client with another token.
func (b *Bed) ClientAs(t testing.TB, token string) *client.Client {
	t.Helper()
	c, err := client.New(client.Options{URL: "unix://" + b.Sock, Token: token})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// Token is the root token.
func (b *Bed) Token(t testing.TB) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(b.Data, "root.token"))
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(data))
}

// Sandbox makes a sandbox that is removed with the test, unless it is gone by then.
func (b *Bed) Sandbox(t testing.TB, c *client.Client, spec client.Spec) *client.Sandbox {
	t.Helper()
	if spec.Image == "" {
		spec.Image = Image
	}
	sb, err := c.Create(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { Remove(t, sb) })
	return sb
}

// Remove removes a sandbox, also after the test's end; one that is gone is fine.
func Remove(t testing.TB, sb *client.Sandbox) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), Patience)
	defer cancel()
	if err := sb.Delete(ctx); err != nil && !errors.Is(err, client.ErrGone) {
		t.Error(err)
	}
}

// Patience bounds every wait: far more than any of them needs on a busy machine.
const Patience = 60 * time.Second

// Eventually waits until what holds; it returns nil.
func Eventually(t testing.TB, what string, holds func() error) {
	t.Helper()
	deadline := time.Now().Add(Patience)
	for wait := time.Millisecond; ; wait = min(2*wait, 50*time.Millisecond) {
		err := holds()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %v: %v", what, Patience, err)
		}
		time.Sleep(wait) // between two looks
	}
}

// Random is a source of randomness whose seed the test prints; $DSEC_SEED repeats one.
func Random(t testing.TB) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("DSEC_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("DSEC_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// root is the module's directory.
func root() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

// BuildVersion builds the program of this tree with another version into dir.
func BuildVersion(ctx context.Context, dir, version string) (path string, err error) {
	if _, err := Binary(); err != nil { // the guest that it has in it
		return "", err
	}
	path = filepath.Join(dir, "dsec-"+version)
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", "-s -w -X main.version="+version, "-o", path, "./cmd/dsec")
	cmd.Dir = root()
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build dsec %s: %w\n%s", version, err, out)
	}
	return path, nil
}

// Binary is $DSEC_BIN, or the program built from this tree.
var Binary = sync.OnceValues(func() (string, error) {
	if bin := os.Getenv("DSEC_BIN"); bin != "" {
		return filepath.Abs(bin)
	}
	// Test packages run side by side; make does not know of its other runs.
	lock, err := os.OpenFile(filepath.Join(root(), "Makefile"), os.O_RDONLY, 0)
	if err != nil {
		return "", err
	}
	defer lock.Close()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	out, err := exec.Command("make", "-s", "-C", root(), "build").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("build dsec: %w\n%s", err, out)
	}
	return filepath.Join(root(), "bin", "dsec"), nil
})
