package clienttest

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

func (g *guest) local(p string) string { return filepath.Join(g.root, filepath.Join("/", p)) }

// failed names a file error as a guest does.
func failed(phase string, err error) error {
	code := errs.InternalError
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		code = errs.PathNotFound
	case errors.Is(err, fs.ErrExist):
		code = errs.PathExists
	case errors.Is(err, syscall.EISDIR):
		code = errs.IsDirectory
	case errors.Is(err, syscall.ENOTDIR):
		code = errs.NotDirectory
	}
	return errs.Wrap(code, phase, "the file operation failed", err)
}

func (g *guest) entry(file string, follow bool) (*msg.EntryInfo, error) {
	fi, err := os.Lstat(file)
	if err == nil && follow {
		fi, err = os.Stat(file)
	}
	if err != nil {
		return nil, failed("file.stat", err)
	}
	st := fi.Sys().(*syscall.Stat_t)
	e := &msg.EntryInfo{
		Name: filepath.Base(file), Path: "/" + strings.TrimPrefix(strings.TrimPrefix(file, g.root), "/"), Size: fi.Size(), Mode: st.Mode,
		Permissions: fi.Mode().String(), Uid: st.Uid, Gid: st.Gid, ModifiedUnixNs: fi.ModTime().UnixNano(), Type: msg.FileTypeOther,
	}
	switch {
	case fi.IsDir():
		e.Type = msg.FileTypeDirectory
	case fi.Mode().IsRegular():
		e.Type = msg.FileTypeFile
	case fi.Mode()&fs.ModeSymlink != 0:
		e.Type = msg.FileTypeSymlink
		e.SymlinkTarget, _ = os.Readlink(file)
	}
	return e, nil
}

func (g *guest) stat(_ context.Context, _ *aether.Stream, req *msg.PathRequest) (*msg.EntryInfo, error) {
	return g.entry(g.local(req.Path), !req.NoFollow)
}

func (g *guest) readDir(_ context.Context, _ *aether.Stream, req *msg.ListRequest) (*msg.EntryList, error) {
	l := &msg.EntryList{}
	root := g.local(req.Path)
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		rel, _ := filepath.Rel(root, file)
		if err != nil || rel == "." {
			return err
		}
		e, err := g.entry(file, false)
		if err != nil {
			return err
		}
		l.Entries = append(l.Entries, e)
		if d.IsDir() && strings.Count(rel, "/")+1 >= int(req.Depth) {
			return fs.SkipDir
		}
		return nil
	})
	return l, failed("file.list", err)
}

func (g *guest) mkdir(_ context.Context, _ *aether.Stream, req *msg.MkdirRequest) (*msg.EntryInfo, error) {
	mk := os.Mkdir
	if req.Parents {
		mk = os.MkdirAll
	}
	if err := mk(g.local(req.Path), fs.FileMode(req.Mode)); err != nil {
		return nil, failed("file.mkdir", err)
	}
	return g.entry(g.local(req.Path), false)
}

func (g *guest) move(_ context.Context, _ *aether.Stream, req *msg.MoveRequest) (*msg.EntryInfo, error) {
	if err := os.Rename(g.local(req.Source), g.local(req.Destination)); err != nil {
		return nil, failed("file.move", err)
	}
	return g.entry(g.local(req.Destination), false)
}

func (g *guest) remove(_ context.Context, _ *aether.Stream, req *msg.PathRequest) (*msg.Empty, error) {
	if req.Recursive {
		return &msg.Empty{}, failed("file.remove", os.RemoveAll(g.local(req.Path)))
	}
	return &msg.Empty{}, failed("file.remove", os.Remove(g.local(req.Path)))
}

func (g *guest) chmod(_ context.Context, _ *aether.Stream, req *msg.ChmodRequest) (*msg.Empty, error) {
	return &msg.Empty{}, failed("file.chmod", syscall.Chmod(g.local(req.Path), req.Mode))
}

func (g *guest) chown(_ context.Context, _ *aether.Stream, req *msg.ChownRequest) (*msg.Empty, error) {
	uid, err := strconv.Atoi(req.Owner)
	if err != nil {
		return nil, errs.New(errs.UserNotFound, "file.chown", "there is no user "+req.Owner)
	}
	return &msg.Empty{}, failed("file.chown", os.Chown(g.local(req.Path), uid, -1))
}

func (g *guest) get(_ context.Context, _ *aether.Stream, req *msg.ReadRequest) (*msg.FileContent, error) {
	b, err := os.ReadFile(g.local(req.Path))
	if err != nil {
		return nil, failed("file.get", err)
	}
	const most = 1<<20 - 4<<10
	return &msg.FileContent{Data: b[:min(len(b), most)], Eof: len(b) <= most}, nil
}

func (g *guest) openFor(req *msg.WriteRequest) (*os.File, error) {
	if req.Parents {
		if err := os.MkdirAll(filepath.Dir(g.local(req.Path)), 0o755); err != nil {
			return nil, failed("file.write", err)
		}
	}
	mode, flags := fs.FileMode(0o644), os.O_CREATE|os.O_WRONLY
	if req.Mode != 0 {
		mode = fs.FileMode(req.Mode)
	}
	if !req.Keep && !req.Append {
		flags |= os.O_TRUNC
	}
	if req.Append {
		flags |= os.O_APPEND
	}
	f, err := os.OpenFile(g.local(req.Path), flags, mode)
	if err == nil && req.Offset > 0 {
		_, err = f.Seek(int64(req.Offset), io.SeekStart)
	}
	if err == nil && req.Mode != 0 {
		err = f.Chmod(mode)
	}
	return f, failed("file.write", err)
}

func (g *guest) put(_ context.Context, _ *aether.Stream, req *msg.WriteRequest) (*msg.WriteResult, error) {
	f, err := g.openFor(req)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if _, err := f.Write(req.Data); err != nil {
		return nil, failed("file.put", err)
	}
	return g.written(req, uint64(len(req.Data)))
}

func (g *guest) written(req *msg.WriteRequest, n uint64) (*msg.WriteResult, error) {
	e, err := g.entry(g.local(req.Path), true)
	return &msg.WriteResult{Entry: e, Bytes: n}, err
}

func (g *guest) write(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	req := new(msg.WriteRequest)
	if err := st.Parse(req); err != nil {
		return nil, err
	}
	f, err := g.openFor(req)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	in := streamReader(ctx, st)
	defer in.Close()
	n, err := io.Copy(f, in)
	if err != nil {
		return nil, failed("file.write", err)
	}
	return g.written(req, uint64(n))
}

func (g *guest) read(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	var req msg.ReadRequest
	if err := st.Parse(&req); err != nil {
		return nil, err
	}
	f, err := os.Open(g.local(req.Path))
	if err != nil {
		return nil, failed("file.read", err)
	}
	defer f.Close()
	if _, err := f.Seek(int64(req.Offset), io.SeekStart); err != nil {
		return nil, failed("file.read", err)
	}
	var r io.Reader = f
	if req.Length > 0 {
		r = io.LimitReader(f, int64(req.Length))
	}
	if _, err := io.Copy(streamWriter{ctx, st}, r); err != nil {
		return nil, failed("file.read", err)
	}
	return g.entry(g.local(req.Path), true)
}

func (g *guest) pack(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	var req msg.PackRequest
	if err := st.Parse(&req); err != nil {
		return nil, err
	}
	dir, name := g.local(req.Path), "."
	if !req.Contents {
		dir, name = filepath.Split(dir)
	}
	cmd := exec.CommandContext(ctx, "tar", "--format=posix", "-C", dir, "-cf", "-", name)
	cmd.Stdout = streamWriter{ctx, st}
	if err := cmd.Run(); err != nil {
		return nil, failed("file.pack", err)
	}
	return &msg.TreeResult{}, nil
}

func (g *guest) unpack(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	var req msg.UnpackRequest
	if err := st.Parse(&req); err != nil {
		return nil, err
	}
	if req.Parents {
		if err := os.MkdirAll(g.local(req.Path), 0o755); err != nil {
			return nil, failed("file.unpack", err)
		}
	}
	cmd := exec.CommandContext(ctx, "tar", "-C", g.local(req.Path), "-xpf", "-")
	in := streamReader(ctx, st)
	defer in.Close()
	cmd.Stdin = in
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, errs.New(errs.BadRequest, "file.unpack", string(out)).Because(err)
	}
	return &msg.TreeResult{Entries: 1}, nil
}

// watch polls one directory: enough to carry events.
func (g *guest) watch(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	var req msg.WatchRequest
	if err := st.Parse(&req); err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	look := func(tell bool) error {
		list, err := os.ReadDir(g.local(req.Path))
		for _, e := range list {
			if !seen[e.Name()] && tell {
				if err := st.SendMessage(ctx, &msg.FileEvent{Name: e.Name(), Type: msg.EventTypeCreate}); err != nil {
					return err
				}
			}
			seen[e.Name()] = true
		}
		return failed("file.watch", err)
	}
	if err := look(false); err != nil {
		return nil, err
	}
	if err := st.SendMessage(ctx, &msg.WatchStarted{Path: req.Path}); err != nil {
		return nil, err
	}
	for {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(5 * time.Millisecond):
		}
		if err := look(true); err != nil {
			return nil, err
		}
	}
}

// dial connects to the host's own loopback.
func (g *guest) dial(ctx context.Context, st *aether.Stream) (aether.Message, error) {
	var req msg.DialRequest
	if err := st.Parse(&req); err != nil {
		return nil, err
	}
	c, err := net.Dial("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(int(req.Port))))
	if err != nil {
		return nil, errs.New(errs.PortClosed, "port.dial", "nothing listens").Because(err)
	}
	defer c.Close()
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	// A message tells that the connection is made, another one that the service has ended
	// its side.
	if err := st.SendMessage(ctx, &msg.Empty{}); err != nil {
		return nil, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			f, err := st.Recv(ctx)
			if err == io.EOF {
				c.(*net.TCPConn).CloseWrite()
			}
			if err != nil {
				return
			}
			c.Write(f.Payload)
		}
	}()
	io.Copy(streamWriter{ctx, st}, c)
	err = st.SendMessage(ctx, &msg.Empty{})
	if err != nil {
		stop() // what is written to the service is the stream's memory, which is not ours after this
	}
	<-done
	return &msg.Empty{}, err
}

type streamWriter struct {
	ctx context.Context
	st  *aether.Stream
}

func (w streamWriter) Write(p []byte) (int, error) {
	return len(p), w.st.Send(w.ctx, aether.KindInput, p)
}

// streamReader reads a stream's data until the client's FIN.
func streamReader(ctx context.Context, st *aether.Stream) *io.PipeReader {
	r, w := io.Pipe()
	go func() {
		for {
			f, err := st.Recv(ctx)
			if err == nil {
				_, err = w.Write(f.Payload)
			}
			if err != nil {
				w.CloseWithError(err) // io.EOF ends the reader cleanly
				return
			}
		}
	}()
	return r
}
