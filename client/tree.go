package client

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
	"dsec/client/internal/treetar"
)

// streamBuffer is how much is read at a time where data only passes through.
const streamBuffer = 256 << 10

// PackTo writes the tree at path as a tar. With contents the names start inside the
// directory; without, at its own name.
func (f Files) PackTo(ctx context.Context, path string, contents bool, w io.Writer) error {
	st, err := f.sb.open(ctx, "file.pack", &msg.PackRequest{Path: path, User: f.user, Contents: contents})
	if err != nil {
		return about("pack", path, err)
	}
	for {
		fr, err := st.Recv(ctx)
		if err != nil {
			if err := finish(st, err, nil); err != nil {
				st.Cancel()
				return about("pack", path, err)
			}
			return nil
		}
		if fr.IsMessage {
			continue
		}
		if _, err := w.Write(fr.Payload); err != nil {
			st.Cancel()
			return about("pack", path, err)
		}
	}
}

// UnpackOptions change UnpackFrom.
type UnpackOptions struct {
	KeepOwner bool // owners as in the tar; without it all belongs to the user
	Parents   bool // make path if it does not exist
}

// UnpackFrom unpacks a tar below path and says how much it was.
func (f Files) UnpackFrom(ctx context.Context, path string, r io.Reader, o UnpackOptions) (entries, bytes uint64, err error) {
	st, err := f.sb.open(ctx, "file.unpack", &msg.UnpackRequest{Path: path, User: f.user, KeepOwner: o.KeepOwner, Parents: o.Parents})
	if err != nil {
		return 0, 0, about("unpack into", path, err)
	}
	var res msg.TreeResult
	if err := sendAll(ctx, st, r, &res); err != nil {
		return 0, 0, about("unpack into", path, err)
	}
	return res.Entries, res.Bytes, nil
}

// sendAll sends what r holds as the stream's data and waits for the result.
func sendAll(ctx context.Context, st *aether.Stream, r io.Reader, resp aether.Message) error {
	buf := make([]byte, streamBuffer)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if err := st.Send(ctx, aether.KindInput, buf[:n]); err != nil {
				// What the server said when it ended the stream explains more.
				if end := discard(ctx, st, nil); end != nil {
					err = end
				}
				st.Cancel()
				return err
			}
		}
		if err == io.EOF {
			break
		}
		if err != nil {
			st.Cancel()
			return err
		}
	}
	if err := st.CloseSend(); err != nil {
		st.Cancel()
		return err
	}
	if err := discard(ctx, st, resp); err != nil {
		st.Cancel()
		return err
	}
	return nil
}

// CopyOptions change CopyIn and CopyOut.
type CopyOptions struct {
	KeepOwner bool // owners, devices and extended attributes too
	// Progress is told of the bytes done so far.
	Progress func(bytes int64)
}

// CopyIn copies a local file or directory into the sandbox: into remote if that is a
// directory (or ends in a slash), else as remote. Modes, times and links are kept.
func (f Files) CopyIn(ctx context.Context, local, remote string, o CopyOptions) error {
	fi, err := os.Stat(local)
	if err != nil {
		return localFile("client.copy", "read "+local, err)
	}
	name, err := lastName(local)
	if err != nil {
		return err
	}
	target := remote
	e, err := f.Stat(ctx, remote)
	switch {
	case err == nil && IsDir(e) && !contentsOnly(local):
		target = path.Join(remote, name)
	case err != nil && !errors.Is(err, errs.PathNotFound):
		return err
	case err != nil && strings.HasSuffix(remote, "/") && !fi.IsDir():
		target = path.Join(remote, name)
	}
	if fi.IsDir() {
		return f.copyTreeIn(ctx, local, target, o)
	}
	src, err := os.Open(local)
	if err != nil {
		return localFile("client.copy", "read "+local, err)
	}
	defer src.Close()
	return f.WriteFrom(ctx, target, counted(src, o.Progress), WriteOptions{Mode: fi.Mode(), Parents: true})
}

// lastName is what a local path is called: "..", or the end of a path with dots, is no name.
func lastName(local string) (string, error) {
	abs, err := filepath.Abs(local)
	if err != nil {
		return "", localFile("client.copy", "read "+local, err)
	}
	return filepath.Base(abs), nil
}

// contentsOnly says whether a path means what the directory holds, not itself.
func contentsOnly(p string) bool { return p == "." || p == "/" || strings.HasSuffix(p, "/.") }

// WriteFrom writes a file from a reader.
func (f Files) WriteFrom(ctx context.Context, path string, r io.Reader, o WriteOptions) error {
	w, err := f.Create(ctx, path, o)
	if err != nil {
		return err
	}
	buf := make([]byte, streamBuffer)
	for {
		n, err := r.Read(buf)
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				w.Abort()
				return err
			}
		}
		if err == io.EOF {
			return w.Close()
		}
		if err != nil {
			w.Abort()
			return about("write", path, err)
		}
	}
}

func (f Files) copyTreeIn(ctx context.Context, local, target string, o CopyOptions) error {
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := treetar.Pack(ctx, pw, local, treetar.PackOptions{})
		pw.CloseWithError(err)
		done <- err
	}()
	_, _, err := f.UnpackFrom(ctx, target, counted(pr, o.Progress), UnpackOptions{KeepOwner: o.KeepOwner, Parents: true})
	pr.CloseWithError(errCopyEnded)
	if packErr := <-done; packErr != nil && !errors.Is(packErr, errCopyEnded) && err != nil {
		return localFile("client.copy", "read "+local, packErr)
	}
	return err
}

var errCopyEnded = errors.New("copy ended")

// localFile says that a failure is of this machine's disk. One that came from the
// sandbox while data passed through stays what it is.
func localFile(phase, action string, err error) error {
	return errs.Wrap(errs.LocalFile, phase, action+" on this machine", withoutTemp(err))
}

// withoutTemp drops the temporary name that an operation failed on: the action names
// what the caller knows.
func withoutTemp(err error) error {
	var pe *fs.PathError
	if errors.As(err, &pe) && strings.Contains(pe.Path, tempName) {
		return pe.Err
	}
	return err
}

const tempName = ".dsec-"

// CopyOut copies a file or directory of the sandbox to the local disk: into local if
// that is a directory, else as local.
func (f Files) CopyOut(ctx context.Context, remote, local string, o CopyOptions) error {
	e, err := f.Stat(ctx, remote)
	if err != nil {
		return err
	}
	target := local
	if fi, err := os.Stat(local); err == nil && fi.IsDir() && !(IsDir(e) && contentsOnly(remote)) {
		target = filepath.Join(local, path.Base(e.Path))
	} else if err != nil && strings.HasSuffix(local, "/") && !IsDir(e) {
		return localFile("client.copy", "copy to "+local, errors.New("there is no such directory"))
	}
	if IsDir(e) {
		return f.copyTreeOut(ctx, remote, target, o)
	}
	return f.copyFileOut(ctx, remote, target, e, o)
}

func (f Files) copyTreeOut(ctx context.Context, remote, target string, o CopyOptions) error {
	if err := os.MkdirAll(target, 0o755); err != nil {
		return localFile("client.copy", "copy to "+target, err)
	}
	root, err := os.OpenRoot(target)
	if err != nil {
		return localFile("client.copy", "copy to "+target, err)
	}
	defer root.Close()
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := f.PackTo(ctx, remote, true, pw)
		pw.CloseWithError(err)
		done <- err
	}()
	_, err = treetar.Unpack(ctx, counted(pr, o.Progress), root, treetar.UnpackOptions{KeepOwner: o.KeepOwner})
	pr.CloseWithError(errCopyEnded)
	if packErr := <-done; packErr != nil && !errors.Is(packErr, errCopyEnded) {
		return packErr
	}
	if err != nil {
		return localFile("client.copy", "copy to "+target, err)
	}
	return nil
}

// copyFileOut writes beside the target and renames, so that a broken copy is not taken
// for the file.
func (f Files) copyFileOut(ctx context.Context, remote, target string, e *Entry, o CopyOptions) error {
	r, err := f.Open(ctx, remote, 0, 0)
	if err != nil {
		return err
	}
	defer r.Close()
	if fi, err := os.Stat(target); err == nil && !fi.Mode().IsRegular() {
		return f.copyInto(r, target, o) // a device or pipe cannot be replaced by a file
	}
	tmp, err := os.CreateTemp(filepath.Dir(target), tempName+"*")
	if err != nil {
		return localFile("client.copy", "copy to "+target, err)
	}
	defer os.Remove(tmp.Name())
	_, err = io.Copy(progressWriter(tmp, o.Progress), r)
	if err == nil {
		err = tmp.Chmod(fs.FileMode(e.Mode & 0o777))
	}
	if err == nil && o.KeepOwner {
		err = tmp.Chown(int(e.Uid), int(e.Gid))
	}
	if err := errors.Join(err, tmp.Close()); err != nil {
		return localFile("client.copy", "copy to "+target, err)
	}
	if err := os.Chtimes(tmp.Name(), ModTime(e), ModTime(e)); err != nil {
		return localFile("client.copy", "copy to "+target, err)
	}
	if err := os.Rename(tmp.Name(), target); err != nil {
		return localFile("client.copy", "copy to "+target, err)
	}
	return nil
}

func (f Files) copyInto(r io.Reader, target string, o CopyOptions) error {
	w, err := os.OpenFile(target, os.O_WRONLY, 0)
	if err != nil {
		return localFile("client.copy", "copy to "+target, err)
	}
	_, err = io.Copy(progressWriter(w, o.Progress), r)
	if err := errors.Join(err, w.Close()); err != nil {
		return localFile("client.copy", "copy to "+target, err)
	}
	return nil
}

type countedIO struct {
	r    io.Reader
	w    io.Writer
	n    int64
	tell func(int64)
}

func counted(r io.Reader, tell func(int64)) io.Reader {
	if tell == nil {
		return r
	}
	return &countedIO{r: r, tell: tell}
}

func progressWriter(w io.Writer, tell func(int64)) io.Writer {
	if tell == nil {
		return w
	}
	return &countedIO{w: w, tell: tell}
}

func (c *countedIO) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	c.tell(c.n)
	return n, err
}

func (c *countedIO) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	c.tell(c.n)
	return n, err
}
