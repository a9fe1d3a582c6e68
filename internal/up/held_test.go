package up

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"dsec/api/v1/errs"
)

func TestWhatIsHeldIsWaitedFor(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	path := filepath.Join(dir, "sub", "file")
	if err := errors.Join(os.Mkdir(filepath.Dir(path), 0o700), os.WriteFile(path, []byte("x"), 0o600)); err != nil {
		t.Fatal(err)
	}
	if err := letGo(t.Context(), filepath.Join(dir, "none"), dir); err != nil {
		t.Error(err)
	}
	for _, flags := range []int{os.O_RDONLY, os.O_WRONLY, os.O_RDWR} {
		f, err := os.OpenFile(path, flags, 0)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		if err := letGo(ctx, dir); !errors.Is(err, errs.StateConflict) || !strings.Contains(err.Error(), path) {
			t.Errorf("open as %d: %v", flags, err)
		}
		cancel()
		closed := make(chan time.Time, 1)
		time.AfterFunc(50*time.Millisecond, func() { closed <- time.Now(); f.Close() })
		if err := letGo(t.Context(), dir); err != nil {
			t.Error(err)
		}
		select {
		case <-closed:
		default:
			t.Errorf("open as %d: it was not waited for", flags)
		}
	}
}
