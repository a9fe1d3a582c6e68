package snapshot_test

import (
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"dsec/internal/snapshot"

	"golang.org/x/sys/unix"
)

// benchPack packs the upper that fill makes, again and again, into the same two files.
func benchPack(b *testing.B, fill func(dir string)) {
	dir := b.TempDir()
	upper := filepath.Join(dir, "upper")
	if err := os.Mkdir(upper, 0o755); err != nil {
		b.Fatal(err)
	}
	fill(upper)
	fd, err := unix.Open(upper, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		b.Fatal(err)
	}
	defer unix.Close(fd)
	var n int64
	for b.Loop() {
		data, err := os.Create(filepath.Join(dir, "data"))
		if err != nil {
			b.Fatal(err)
		}
		meta, err := os.Create(filepath.Join(dir, "meta"))
		if err != nil {
			b.Fatal(err)
		}
		res, _, err := snapshot.Pack(b.Context(), snapshot.Options{Upper: fd, Blob: data, Meta: meta})
		if err != nil {
			b.Fatal(err)
		}
		n = res.Bytes
		data.Close()
		meta.Close()
	}
	b.SetBytes(n)
}

// randomFiles writes mib MiB in files of the given size that do not compress.
func randomFiles(b *testing.B, mib, fileKiB int) func(string) {
	return func(dir string) {
		r := rand.NewChaCha8([32]byte{1})
		buf := make([]byte, fileKiB<<10)
		for i := range mib << 10 / fileKiB {
			if _, err := io.ReadFull(r, buf); err != nil {
				b.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, fmt.Sprint(i)), buf, 0o644); err != nil {
				b.Fatal(err)
			}
		}
	}
}

func BenchmarkPack(b *testing.B) {
	for _, mib := range []int{10, 100, 1000} {
		b.Run(fmt.Sprintf("%dMiB", mib), func(b *testing.B) { benchPack(b, randomFiles(b, mib, 1024)) })
	}
	// As a package manager leaves them: 100 files of 1 to 8 KiB in each directory.
	b.Run("100000files", func(b *testing.B) {
		benchPack(b, func(dir string) {
			buf := make([]byte, 8<<10)
			for i := range buf {
				buf[i] = byte(i)
			}
			for i := range 100_000 {
				d := filepath.Join(dir, fmt.Sprint(i/100))
				if i%100 == 0 {
					if err := os.Mkdir(d, 0o755); err != nil {
						b.Fatal(err)
					}
				}
				if err := os.WriteFile(filepath.Join(d, fmt.Sprint(i)), buf[:1<<10+i%7<<10], 0o644); err != nil {
					b.Fatal(err)
				}
			}
		})
	})
}
