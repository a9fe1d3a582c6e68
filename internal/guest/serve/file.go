package serve

import (
	"bufio"
	"context"
	"errors"
	"io"

	"dsec/aether"
	"dsec/aether/msg"
	"dsec/api/v1/errs"
	"dsec/internal/guest/file"
)

// readBuffer is what a file stream reads at once.
const readBuffer = 256 << 10

func entryMessage(e *file.Entry) *msg.EntryInfo {
	if e == nil {
		return nil
	}
	return &msg.EntryInfo{
		Name: e.Name, Type: msg.FileType(e.Type), Path: e.Path, Size: e.Size, Mode: e.Mode, Permissions: e.Permissions,
		Owner: e.Owner, Group: e.Group, ModifiedUnixNs: e.ModifiedNS, SymlinkTarget: e.Target, Metadata: e.Metadata,
		Uid: e.UID, Gid: e.GID,
	}
}

func entryResult(e *file.Entry, err error) (*msg.EntryInfo, error) {
	if err != nil {
		return nil, err
	}
	return entryMessage(e), nil
}

func (g *Guest) fileStat(_ context.Context, _ *aether.Stream, r *msg.PathRequest) (*msg.EntryInfo, error) {
	if r.Recursive {
		return nil, errs.New(errs.BadRequest, "guest.file", "recursive is for file.remove; list a tree with file.list")
	}
	e, err := g.Files.Stat(r.Path, r.User, r.NoFollow)
	if r.MissingOk && errors.Is(err, errs.PathNotFound) {
		return &msg.EntryInfo{}, nil
	}
	return entryResult(e, err)
}

func (g *Guest) fileList(_ context.Context, _ *aether.Stream, r *msg.ListRequest) (*msg.EntryList, error) {
	entries, cut, err := g.Files.List(r.Path, r.User, r.Depth, r.Limit)
	if err != nil {
		return nil, err
	}
	out := &msg.EntryList{Truncated: cut}
	size := 0
	for _, e := range entries {
		m := entryMessage(e)
		// The answer must fit in one frame, whatever the names are.
		if size += len(m.AppendWire(nil)) + 8; size > aether.MaxPayload-1024 {
			out.Truncated = true
			break
		}
		out.Entries = append(out.Entries, m)
	}
	return out, nil
}

func (g *Guest) fileMkdir(_ context.Context, _ *aether.Stream, r *msg.MkdirRequest) (*msg.EntryInfo, error) {
	return entryResult(g.Files.Mkdir(r.Path, r.User, r.Mode, r.Parents))
}

func (g *Guest) fileMove(_ context.Context, _ *aether.Stream, r *msg.MoveRequest) (*msg.EntryInfo, error) {
	return entryResult(g.Files.Move(r.Source, r.Destination, r.User, r.NoReplace))
}

func (g *Guest) fileRemove(_ context.Context, _ *aether.Stream, r *msg.PathRequest) (*msg.TreeResult, error) {
	n, err := g.Files.Remove(r.Path, r.User, r.Recursive, r.MissingOk)
	if err != nil {
		return nil, err
	}
	return &msg.TreeResult{Entries: n}, nil
}

func (g *Guest) fileChmod(_ context.Context, _ *aether.Stream, r *msg.ChmodRequest) (*msg.EntryInfo, error) {
	return entryResult(g.Files.Chmod(r.Path, r.User, r.Mode, r.Recursive))
}

func (g *Guest) fileChown(_ context.Context, _ *aether.Stream, r *msg.ChownRequest) (*msg.EntryInfo, error) {
	return entryResult(g.Files.Chown(r.Path, r.User, r.Owner, r.Recursive))
}

func (g *Guest) fileGet(_ context.Context, _ *aether.Stream, r *msg.ReadRequest) (*msg.FileContent, error) {
	e, data, eof, err := g.Files.Get(r.Path, r.User, r.Offset, r.Length)
	if err != nil {
		return nil, err
	}
	return &msg.FileContent{Entry: entryMessage(e), Data: data, Eof: eof}, nil
}

func writeOptions(r *msg.WriteRequest) file.WriteOptions {
	return file.WriteOptions{
		Mode: r.Mode, Parents: r.Parents, Offset: r.Offset, Keep: r.Keep, Append: r.Append, Atomic: r.Atomic, Metadata: r.Metadata,
	}
}

func (g *Guest) filePut(_ context.Context, _ *aether.Stream, r *msg.WriteRequest) (*msg.WriteResult, error) {
	e, n, err := g.Files.Put(r.Path, r.User, writeOptions(r), r.Data)
	if err != nil {
		return nil, err
	}
	return &msg.WriteResult{Entry: entryMessage(e), Bytes: uint64(n)}, nil
}

func (g *Guest) fileRead(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var r msg.ReadRequest
	if err := s.Parse(&r); err != nil {
		return nil, err
	}
	f, err := g.Files.OpenRead(r.Path, r.User, r.Offset, r.Length)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	buf := make([]byte, min(readBuffer, max(f.Entry.Size+1, 4096)))
	for {
		n, err := f.Read(buf)
		if err == io.EOF {
			return entryMessage(f.Entry), nil
		}
		if err != nil {
			return nil, err
		}
		if err := s.Send(ctx, aether.KindInput, buf[:n]); err != nil {
			return nil, err
		}
	}
}

func (g *Guest) fileWrite(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var r msg.WriteRequest
	if err := s.Parse(&r); err != nil {
		return nil, err
	}
	if len(r.Data) > 0 {
		return nil, errs.New(errs.BadRequest, "guest.file", "data is for file.put; send it as DATA here")
	}
	w, err := g.Files.OpenWrite(r.Path, r.User, writeOptions(&r))
	if err != nil {
		return nil, err
	}
	in := &incoming{ctx: ctx, s: s}
	for {
		b, err := in.next()
		if err == io.EOF {
			break
		}
		if err == nil {
			_, err = w.Write(b)
		}
		if err != nil {
			w.Abort()
			return nil, err
		}
	}
	e, n, err := w.Commit()
	if err != nil {
		return nil, err
	}
	return &msg.WriteResult{Entry: entryMessage(e), Bytes: uint64(n)}, nil
}

// incoming reads the client's DATA.
type incoming struct {
	ctx  context.Context
	s    *aether.Stream
	rest []byte
}

// next returns the payload of the next frame, valid until the one after.
func (r *incoming) next() ([]byte, error) {
	f, err := r.s.Recv(r.ctx)
	if err != nil {
		return nil, err
	}
	if f.IsMessage {
		return nil, errs.New(errs.ProtocolError, "guest.file", "a message where data was expected")
	}
	return f.Payload, nil
}

// Read makes incoming an io.Reader.
func (r *incoming) Read(b []byte) (int, error) {
	for len(r.rest) == 0 {
		var err error
		if r.rest, err = r.next(); err != nil {
			return 0, err
		}
	}
	n := copy(b, r.rest)
	r.rest = r.rest[n:]
	return n, nil
}

// outgoing sends what is written as DATA.
type outgoing struct {
	ctx context.Context
	s   *aether.Stream
}

func (w outgoing) Write(b []byte) (int, error) {
	if err := w.s.Send(w.ctx, aether.KindInput, b); err != nil {
		return 0, err
	}
	return len(b), nil
}

func (g *Guest) filePack(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var r msg.PackRequest
	if err := s.Parse(&r); err != nil {
		return nil, err
	}
	w := bufio.NewWriterSize(outgoing{ctx, s}, 64<<10)
	entries, n, err := g.Files.Pack(w, r.Path, r.User, r.Contents)
	if err == nil {
		err = w.Flush()
	}
	if err != nil {
		return nil, err
	}
	return &msg.TreeResult{Entries: entries, Bytes: n}, nil
}

func (g *Guest) fileUnpack(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var r msg.UnpackRequest
	if err := s.Parse(&r); err != nil {
		return nil, err
	}
	in := &incoming{ctx: ctx, s: s}
	entries, n, err := g.Files.Unpack(in, r.Path, r.User, file.UnpackOptions{KeepOwner: r.KeepOwner, Parents: r.Parents})
	if err != nil {
		return nil, err
	}
	// Writers pad an archive: what follows its end is read and dropped.
	for err == nil {
		_, err = in.next()
	}
	if err != io.EOF {
		return nil, err
	}
	return &msg.TreeResult{Entries: entries, Bytes: n}, nil
}

func (g *Guest) fileWatch(ctx context.Context, s *aether.Stream) (aether.Message, error) {
	var r msg.WatchRequest
	if err := s.Parse(&r); err != nil {
		return nil, err
	}
	w, err := g.Files.Watch(r.Path, r.User, r.Recursive)
	if err != nil {
		return nil, err
	}
	defer w.Close()
	if err := s.SendMessage(ctx, &msg.WatchStarted{Path: w.Path}); err != nil {
		return nil, err
	}
	for {
		e, err := w.Next(ctx)
		if err != nil {
			return nil, err
		}
		m := &msg.FileEvent{Name: e.Name, Type: msg.EventType(e.Type), Overflow: e.Overflow}
		if r.Entry && !e.Overflow {
			m.Entry = entryMessage(w.Entry(e))
		}
		if err := s.SendMessage(ctx, m); err != nil {
			return nil, err
		}
	}
}
