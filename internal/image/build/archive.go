package build

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"hash"
	"io"
	"os"
	"time"

	"dsec/internal/image/layer"
)

// Archive builds the recipe and writes it to out as a docker-archive of one layer: a
// plain tar could not carry the environment, user and command that the recipe names.
func Archive(ctx context.Context, r *Recipe, out io.Writer, opts Options) error {
	spool, err := os.CreateTemp(opts.TempDir, "dsec-layer-")
	if err != nil {
		return layer.DiskError("make layer file", err)
	}
	defer spool.Close()
	if err := os.Remove(spool.Name()); err != nil { // the open file is enough
		return layer.DiskError("make layer file", err)
	}
	sum := sha256.New()
	if err := Build(ctx, r, io.MultiWriter(spool, sum), opts); err != nil {
		return err
	}
	size, err := spool.Seek(0, io.SeekCurrent)
	if err != nil {
		return err
	}
	if _, err := spool.Seek(0, io.SeekStart); err != nil {
		return err
	}
	return writeArchive(r, sum, spool, size, out)
}

// writeArchive frames a layer as 'docker save' does.
func writeArchive(r *Recipe, sum hash.Hash, layerTar io.Reader, size int64, out io.Writer) error {
	c := r.Config()
	digest := hex.EncodeToString(sum.Sum(nil))
	config, err := json.Marshal(map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{"Env": c.Env, "User": c.User, "WorkingDir": c.WorkDir, "Cmd": c.Cmd, "Labels": c.Labels},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{"sha256:" + digest}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "RepoTags": nil, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	w := tar.NewWriter(out)
	entry := func(name string, size int64) error {
		return w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: size, ModTime: time.Unix(0, 0), Typeflag: tar.TypeReg})
	}
	for name, data := range map[string][]byte{"manifest.json": manifest, "config.json": config} {
		if err := entry(name, int64(len(data))); err != nil {
			return err
		}
		if _, err := w.Write(data); err != nil {
			return err
		}
	}
	if err := entry("layer.tar", size); err != nil {
		return err
	}
	if _, err := io.Copy(w, layerTar); err != nil {
		return err
	}
	return w.Close()
}
