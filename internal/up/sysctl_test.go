package up

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"dsec/internal/doctor"
)

func TestSettingsAreOnlyRaised(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	const absent, refused, higher = "vm.max_map_count", "kernel.pid_max", "kernel.pty.max"
	for _, s := range doctor.Settings() {
		if err := os.MkdirAll(filepath.Dir(s.Path(dir)), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		switch s.Name {
		case absent:
		case refused:
			err = os.Symlink("/proc/sys/kernel/ngroups_max", s.Path(dir)) // nobody may write it
		case higher:
			err = os.WriteFile(s.Path(dir), []byte(strconv.FormatInt(s.Want+1, 10)+"\n"), 0o600)
		default:
			err = os.WriteFile(s.Path(dir), []byte("17\n"), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	var out bytes.Buffer
	raiseSettings(dir, 1_000_000, slog.New(slog.NewTextHandler(&out, nil)))
	for _, s := range doctor.Settings() {
		want := s.Want
		if s.Name == higher {
			want++
		}
		if s.Name == absent || s.Name == refused {
			continue
		}
		if got, err := s.Value(dir); err != nil || got != want {
			t.Errorf("%s: %d, %v; want %d", s.Name, got, err, want)
		}
	}
	if _, err := os.Stat(filepath.Join(dir, "vm/max_map_count")); err == nil {
		t.Error("made a setting that the kernel does not have")
	}
	log := out.String()
	if n := strings.Count(log, "raised a setting"); n != len(doctor.Settings())-3 {
		t.Errorf("%d said to be raised:\n%s", n, log)
	}
	if !strings.Contains(log, "level=WARN") || !strings.Contains(log, "setting="+refused) || strings.Contains(log, higher) || strings.Contains(log, absent) {
		t.Errorf("log:\n%s", log)
	}
	out.Reset()
	raiseSettings(dir, 1000, slog.New(slog.NewTextHandler(&out, nil)))
	if out.Len() > 0 {
		t.Errorf("all that 1000 sandboxes need was there:\n%s", out.String())
	}
}
