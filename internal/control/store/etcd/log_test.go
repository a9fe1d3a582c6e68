package etcd

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"

	"go.uber.org/zap"
)

// What etcd says of every fresh directory is no warning; the same message for another
// reason is.
func TestFreshDirectoryIsNoWarning(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	log := zap.New(newSlogCore(slog.New(slog.NewTextHandler(&out, nil)), new(atomic.Bool)))
	const line = "failed to update storage version"
	log.Error(line, zap.Error(errors.New("cannot detect storage schema version: missing term information")))
	if out.Len() > 0 {
		t.Errorf("logged: %s", out.String())
	}
	log.Error(line, zap.Error(errors.New("disk I/O error")))
	log.Error("something else", zap.Error(errors.New("missing term information")))
	if got := out.String(); strings.Count(got, "level=WARN") != 2 || !strings.Contains(got, "disk I/O error") {
		t.Errorf("logged: %s", got)
	}
}
