package objecttest

import (
	"bufio"
	"os"
	"os/exec"
	"strings"
	"testing"

	"dsec/internal/image/object"
)

// S3 runs a real S3 server (versitygw, s3server/main.go) as a child process until
// the test ends, and says how to reach its empty bucket. The server is built from
// source the first time, which takes a minute or two.
func S3(t testing.TB) object.S3Config {
	t.Helper()
	dir, err := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.Dir}}/s3server", "dsec/internal/image/object/objecttest").Output()
	if err != nil {
		t.Fatalf("find the S3 server: %v", err)
	}
	cfg := object.S3Config{Bucket: "dsec", AccessKey: "test-access", SecretKey: "test-secret-key"}
	cmd := exec.Command("go", "run", "-C", strings.TrimSpace(string(dir)), ".", t.TempDir(), cfg.Bucket)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOFLAGS=", "GOWORK=off", "S3_ACCESS_KEY="+cfg.AccessKey, "S3_SECRET_KEY="+cfg.SecretKey)
	var log strings.Builder
	cmd.Stderr = &log
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("start the S3 server: %v", err)
	}
	lines := bufio.NewScanner(out)
	for lines.Scan() {
		if url, ok := strings.CutPrefix(lines.Text(), "ready "); ok {
			cfg.Endpoint = url
			break
		}
	}
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		for lines.Scan() {
		}
	}()
	t.Cleanup(func() {
		in.Close() // it ends when its input does
		<-drained
		if err := cmd.Wait(); err != nil && cfg.Endpoint != "" {
			t.Errorf("the S3 server ended with %v:\n%s", err, log.String())
		}
	})
	if cfg.Endpoint == "" {
		t.Fatalf("the S3 server did not start:\n%s", log.String())
	}
	return cfg
}
