// Command s3server serves S3 from a directory, for tests: versitygw with its POSIX
// backend, which checks SigV4 and streaming signatures as the real thing does. It is
// a module of its own, so that its dependencies are not DSec's.
//
//	s3server DIR BUCKET
//
// It reads the credentials from S3_ACCESS_KEY and S3_SECRET_KEY, prints its URL when
// it answers, and ends when its standard input does.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/versity/versitygw/backend/meta"
	"github.com/versity/versitygw/backend/posix"
	"github.com/versity/versitygw/embedgw"
)

func main() {
	if err := run(os.Args[1], os.Args[2]); err != nil {
		log.Fatal(err)
	}
}

func run(dir, bucket string) error {
	data, side := filepath.Join(dir, "data"), filepath.Join(dir, "attributes")
	for _, d := range []string{filepath.Join(data, bucket), filepath.Join(side, bucket)} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	attrs, err := meta.NewSideCar(side)
	if err != nil {
		return err
	}
	be, err := posix.New(data, attrs, posix.PosixOpts{NewDirPerm: 0o755, Concurrency: 256, SideCarDir: side})
	if err != nil {
		return err
	}
	addr, err := freeAddress()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		cancel()
	}()
	go announce(ctx, "http://"+addr)
	return embedgw.RunVersityGW(ctx, be, &embedgw.Config{
		RootUserAccess: os.Getenv("S3_ACCESS_KEY"),
		RootUserSecret: os.Getenv("S3_SECRET_KEY"),
		Ports:          []string{addr},
		MaxConnections: 4096, MaxRequests: 2048,
		AdminMaxConnections: 64, AdminMaxRequests: 64,
		MultipartMaxParts: 10000,
		KeepAlive:         true,
		Quiet:             true,
		HealthPath:        "/health",
	})
}

func freeAddress() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	return l.Addr().String(), nil
}

func announce(ctx context.Context, url string) {
	for ctx.Err() == nil {
		if resp, err := http.Get(url + "/health"); err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				fmt.Println("ready", url)
				return
			}
		}
		time.Sleep(20 * time.Millisecond)
	}
}
