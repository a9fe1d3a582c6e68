package client

import (
	"context"
	"io"
	"io/fs"
	"iter"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// Entry describes one file, directory or symlink of a sandbox.
type Entry = msg.EntryInfo

// FileEvent is one change that Watch reports.
type FileEvent = msg.FileEvent

// maxInline is the largest content that travels in one message (file.get, file.put).
const maxInline = 1<<20 - 4<<10

// Files are a sandbox's files as one user sees them. Paths are resolved inside the
// sandbox; relative ones and ~ start at the user's home.
type Files struct {
	sb   *Sandbox
	user string
}

// Files returns the files as the sandbox's default user.
func (s *Sandbox) Files() Files { return Files{sb: s} }

// As returns the files as another user.
func (f Files) As(user string) Files { return Files{sb: f.sb, user: user} }

// ReadFile returns a whole file.
func (s *Sandbox) ReadFile(ctx context.Context, path string) ([]byte, error) {
	return s.Files().ReadFile(ctx, path)
}

// WriteFile creates or replaces a file.
func (s *Sandbox) WriteFile(ctx context.Context, path string, data []byte, mode fs.FileMode) error {
	return s.Files().WriteFile(ctx, path, data, WriteOptions{Mode: mode})
}

// ReadFile returns a whole file: small ones in one round trip.
func (f Files) ReadFile(ctx context.Context, path string) ([]byte, error) {
	var m msg.FileContent
	if err := f.sb.read(ctx, "file.get", &msg.ReadRequest{Path: path, User: f.user}, &m); err != nil {
		return nil, about("read", path, err)
	}
	if m.Eof {
		return m.Data, nil
	}
	r, err := f.Open(ctx, path, int64(len(m.Data)), 0)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	rest, err := io.ReadAll(r)
	return append(m.Data, rest...), err
}

// WriteOptions change a write.
type WriteOptions struct {
	Mode    fs.FileMode // 0: 0644
	Parents bool        // make missing directories
	Offset  int64
	Keep    bool // do not truncate: write a range at Offset
	Append  bool
	Atomic  bool // write beside it and rename: a reader sees the old content or the new
}

func (f Files) write(path string, o WriteOptions) *msg.WriteRequest {
	return &msg.WriteRequest{
		Path: path, User: f.user, Mode: unixMode(o.Mode), Parents: o.Parents,
		Offset: uint64(max(o.Offset, 0)), Keep: o.Keep, Append: o.Append, Atomic: o.Atomic,
	}
}

// WriteFile writes data: small ones in one round trip.
func (f Files) WriteFile(ctx context.Context, path string, data []byte, o WriteOptions) error {
	if len(data) <= maxInline {
		req := f.write(path, o)
		req.Data = data
		if err := f.sb.call(ctx, "file.put", req, &msg.WriteResult{}); err != nil {
			return about("write", path, err)
		}
		return nil
	}
	w, err := f.Create(ctx, path, o)
	if err != nil {
		return err
	}
	if _, err := w.Write(data); err != nil {
		w.Abort()
		return err
	}
	return w.Close()
}

// Open reads length bytes of a file from offset on; length 0: to its end.
func (f Files) Open(ctx context.Context, path string, offset, length int64) (*FileReader, error) {
	st, err := f.sb.open(ctx, "file.read", &msg.ReadRequest{Path: path, User: f.user, Offset: uint64(max(offset, 0)), Length: uint64(max(length, 0))})
	if err != nil {
		return nil, about("read", path, err)
	}
	return &FileReader{ctx: ctx, st: st, path: path}, nil
}

// FileReader reads a file as a stream.
type FileReader struct {
	ctx  context.Context // of the Open: an io.Reader has no other way to get it
	st   *aether.Stream
	path string
	rest []byte
	err  error
}

func (r *FileReader) next() error {
	if r.err != nil {
		return r.err
	}
	f, err := r.st.Recv(r.ctx)
	switch {
	case isEOF(err):
		if r.err = r.st.Result(nil); r.err == nil {
			r.err = io.EOF
		}
	case err != nil:
		r.err = err
	case !f.IsMessage:
		r.rest = f.Payload
	}
	if r.err != nil && r.err != io.EOF {
		r.err = about("read", r.path, r.err)
	}
	return r.err
}

// Read implements io.Reader.
func (r *FileReader) Read(p []byte) (int, error) {
	for len(r.rest) == 0 {
		if err := r.next(); err != nil {
			return 0, err
		}
	}
	n := copy(p, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// WriteTo implements io.WriterTo without another copy.
func (r *FileReader) WriteTo(w io.Writer) (int64, error) {
	var total int64
	for {
		if len(r.rest) > 0 {
			n, err := w.Write(r.rest)
			total += int64(n)
			r.rest = r.rest[n:]
			if err != nil {
				return total, err
			}
		}
		if err := r.next(); err == io.EOF {
			return total, nil
		} else if err != nil {
			return total, err
		}
	}
}

// Close ends the reading, at whatever point.
func (r *FileReader) Close() error {
	if r.err == nil {
		r.st.Cancel()
		r.err = fs.ErrClosed
	}
	return nil
}

// Create writes a file as a stream; its Close says whether all of it arrived.
func (f Files) Create(ctx context.Context, path string, o WriteOptions) (*FileWriter, error) {
	st, err := f.sb.open(ctx, "file.write", f.write(path, o))
	if err != nil {
		return nil, about("write", path, err)
	}
	return &FileWriter{ctx: ctx, st: st, path: path}, nil
}

// FileWriter writes a file as a stream.
type FileWriter struct {
	ctx   context.Context // of the Create
	st    *aether.Stream
	path  string
	entry *Entry
	ended bool
}

// Write implements io.Writer.
func (w *FileWriter) Write(p []byte) (int, error) {
	if err := w.st.Send(w.ctx, aether.KindInput, p); err != nil {
		return 0, about("write", w.path, w.cause(err))
	}
	return len(p), nil
}

// cause prefers what the server said when it ended the stream.
func (w *FileWriter) cause(err error) error {
	if end := discard(w.ctx, w.st, nil); end != nil {
		return end
	}
	return err
}

// Close ends the file and returns once it is written.
func (w *FileWriter) Close() error {
	if w.ended {
		return fs.ErrClosed
	}
	w.ended = true
	var m msg.WriteResult
	err := w.st.CloseSend()
	if err == nil {
		err = discard(w.ctx, w.st, &m)
	}
	if err != nil {
		w.st.Cancel()
		return about("write", w.path, err)
	}
	w.entry = m.Entry
	return nil
}

// Entry describes the file after Close.
func (w *FileWriter) Entry() *Entry { return w.entry }

// Abort ends the writing; the file is left as it is by then.
func (w *FileWriter) Abort() {
	w.ended = true
	w.st.Cancel()
}

// Watch yields changes below path until ctx ends or the loop is left. An event with
// Overflow says that some were lost: list again. The watch runs when ready is called.
func (f Files) Watch(ctx context.Context, path string, recursive bool, ready func()) iter.Seq2[*FileEvent, error] {
	return func(yield func(*FileEvent, error) bool) {
		st, err := f.sb.open(ctx, "file.watch", &msg.WatchRequest{Path: path, User: f.user, Recursive: recursive, Entry: true})
		if err != nil {
			yield(nil, about("watch", path, err))
			return
		}
		defer st.Cancel()
		for first := true; ; first = false {
			fr, err := st.Recv(ctx)
			if err != nil {
				if ctx.Err() != nil {
					return
				}
				if err = finish(st, err, nil); err != nil {
					yield(nil, about("watch", path, err))
				}
				return
			}
			if first { // WatchStarted
				if ready != nil {
					ready()
				}
				continue
			}
			e := new(FileEvent)
			if err := e.ParseWire(fr.Payload); err != nil {
				yield(nil, errs.Wrap(errs.ProtocolError, "file.watch", "an event cannot be read", err))
				return
			}
			if !yield(e, nil) {
				return
			}
		}
	}
}
