package edge

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// record is what the edge must know of a sandbox after its own death.
type record struct {
	Sandbox v1.Sandbox      `json:"sandbox"`
	Image   *v1.Image       `json:"image,omitempty"`
	Handle  json.RawMessage `json:"handle,omitempty"` // the backend's, once it runs
	Removed bool            `json:"removed,omitempty"`
	Gone    []string        `json:"gone,omitempty"` // what was removed, as goneText writes it: this one, or many in a line of their own
}

// journal is the file of records: one line for each change, CRC-32 in hex, a space and
// JSON; the last line of an id counts. The last ids that were removed stay in it, for
// requests that come for them later. Writes reach the page cache before an operation
// goes on, which is enough: a sandbox outlives its edge, but never the kernel that
// would lose the page.
type journal struct {
	mu    sync.Mutex
	path  string
	file  *os.File
	live  map[string][]byte // last line of each sandbox that is not removed
	gone  *recent           // ids of those that are
	bytes int64             // of the file
	kept  int64             // of live
	stale bool              // the file lacks something of live: rewrite it when that works
}

// compactAt is the size from which a journal of mostly old lines is rewritten.
const compactAt = 4 << 20

const (
	// goneSize is how many removed ids are remembered: 5 MB of the file, and 12 MB of memory.
	goneSize = 100_000
	goneLine = 4096                               // of them in one line
	goneCost = v1.SandboxIDLen + len(`"", `) + 22 // bytes of one in the file, about
)

// removal is the record of a sandbox that is gone.
func removal(id string, how v1.Ending) record {
	return record{Sandbox: v1.Sandbox{ID: id}, Removed: true, Gone: []string{goneText(id, how)}}
}

// goneText is an id and how it ended, in words; an id alone is of a version that did not
// say more.
func goneText(id string, how v1.Ending) string {
	word := func(s string) string { return cmp.Or(s, "-") }
	return fmt.Sprintf("%s %d %s %s %d", id, how.At, word(string(how.Reason)), word(string(how.Failed)), how.OOMKills)
}

func parseGone(text string) (id string, how v1.Ending) {
	f := strings.Fields(text)
	if len(f) < 5 {
		id, _, _ = strings.Cut(text, " ")
		return id, v1.Ending{}
	}
	how.At, _ = strconv.ParseInt(f[1], 10, 64)
	how.OOMKills, _ = strconv.ParseInt(f[4], 10, 64)
	// Constants, not parts of the line, which would be kept for them.
	for _, r := range []v1.EndReason{v1.EndRequest, v1.EndTTL, v1.EndLease} {
		if f[2] == string(r) {
			how.Reason = r
		}
	}
	if f[3] != "-" {
		how.Failed = errs.Lookup(errs.Code(f[3])).Code
	}
	return strings.Clone(f[0]), how
}

// openJournal reads path, or starts it, and returns the records that count. A torn
// last line (the edge died in it) is dropped; damage before that is an error.
func openJournal(path string) (*journal, []record, error) {
	j := &journal{path: path, live: map[string][]byte{}, gone: newRecent(goneSize)}
	records := map[string]record{}
	var whole int64 // bytes of the file that are whole lines
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	for r, n := bufio.NewReader(bytes.NewReader(data)), 1; ; n++ {
		line, err := r.ReadBytes('\n')
		if err == io.EOF {
			break // nothing, or a line without its end
		}
		rec, perr := parseLine(line)
		if perr != nil {
			if _, err := r.Peek(1); err == io.EOF {
				break
			}
			return nil, nil, errs.New(errs.DataCorrupt, "edge.journal", fmt.Sprintf("line %d of %s is damaged", n, path)).Because(perr)
		}
		whole += int64(len(line))
		for _, text := range rec.Gone {
			j.gone.add(parseGone(text))
		}
		if rec.Removed {
			delete(records, rec.Sandbox.ID)
			delete(j.live, rec.Sandbox.ID)
			if rec.Sandbox.ID != "" {
				j.gone.add(rec.Sandbox.ID, v1.Ending{})
			}
			continue
		}
		records[rec.Sandbox.ID] = rec
		j.live[rec.Sandbox.ID] = line
	}
	if err := j.compact(); err != nil {
		// A full disk must not keep us from what runs: the old file goes on.
		if len(data) == 0 || j.reuse(whole) != nil {
			return nil, nil, err
		}
	}
	out := make([]record, 0, len(records))
	for _, r := range records {
		out = append(out, r)
	}
	return j, out, nil
}

func parseLine(line []byte) (record, error) {
	var rec record
	sum, body, ok := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
	if !ok {
		return rec, errors.New("no checksum")
	}
	want, err := strconv.ParseUint(string(sum), 16, 32)
	if err != nil || crc32.ChecksumIEEE(body) != uint32(want) {
		return rec, errors.New("wrong checksum")
	}
	return rec, json.Unmarshal(body, &rec)
}

func formatLine(rec record) ([]byte, error) {
	body, err := json.Marshal(rec)
	if err != nil {
		return nil, err
	}
	return fmt.Appendf(make([]byte, 0, len(body)+16), "%08x %s\n", crc32.ChecksumIEEE(body), body), nil
}

// put writes the newest record of a sandbox, or leaves all as it is.
func (j *journal) put(rec record) error { return j.write(rec, false) }

// note is put for what has happened whether it can be written or not (the disk may be
// full): it is kept and written later.
func (j *journal) note(rec record) error { return j.write(rec, true) }

func (j *journal) write(rec record, anyway bool) error {
	line, err := formatLine(rec)
	if err != nil {
		return err
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	id := rec.Sandbox.ID
	if rec.Removed {
		for _, text := range rec.Gone {
			j.gone.add(parseGone(text))
		}
		j.gone.add(id, v1.Ending{})
		if j.live[id] == nil {
			return nil // nothing tells of it
		}
	}
	err = j.append(line)
	if err != nil && !anyway {
		return err
	}
	j.kept -= int64(len(j.live[id]))
	if rec.Removed {
		delete(j.live, id)
	} else {
		j.live[id] = line
		j.kept += int64(len(line))
	}
	j.stale = j.stale || err != nil
	if j.stale || j.bytes > compactAt && j.bytes > 4*(j.kept+int64(len(j.gone.ring)*goneCost)) {
		// All is written already, or err says what is not: the next write tries again.
		if cerr := j.compact(); cerr == nil {
			err = nil
		}
	}
	return err
}

func (j *journal) append(line []byte) error {
	if n, err := j.file.Write(line); err != nil {
		if n > 0 { // a torn line in the middle would read as damage
			if terr := j.file.Truncate(j.bytes); terr != nil {
				err = errors.Join(err, terr)
			}
		}
		return fmt.Errorf("write journal: %w", err)
	}
	j.bytes += int64(len(line))
	return nil
}

// compact rewrites the file with what counts and opens it for appending.
func (j *journal) compact() error {
	tmp := j.path + ".new"
	f, err := os.OpenFile(tmp, os.O_CREATE|os.O_TRUNC|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("compact journal: %w", err)
	}
	w := bufio.NewWriterSize(f, 1<<16)
	size, kept := int64(0), int64(0)
	gone := make([]string, 0, len(j.gone.ring))
	for id, how := range j.gone.all() {
		gone = append(gone, goneText(id, how))
	}
	for ids := range slices.Chunk(gone, goneLine) {
		line, err := formatLine(record{Removed: true, Gone: ids})
		if err != nil {
			panic(err) // strings
		}
		n, _ := w.Write(line) // the error stays in w until Flush
		size += int64(n)
	}
	for _, line := range j.live {
		n, _ := w.Write(line)
		kept += int64(n)
	}
	err = w.Flush()
	if err == nil {
		err = os.Rename(tmp, j.path)
	}
	if err != nil {
		f.Close()
		os.Remove(tmp)
		return fmt.Errorf("compact journal: %w", err)
	}
	if j.file != nil {
		j.file.Close()
	}
	j.file, j.bytes, j.kept, j.stale = f, size+kept, kept, false
	return nil
}

// reuse appends to the file as it is, after its last whole line, and has a later write
// try to compact it.
func (j *journal) reuse(whole int64) error {
	f, err := os.OpenFile(j.path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		return err
	}
	if err := f.Truncate(whole); err != nil {
		f.Close()
		return err
	}
	j.file, j.bytes, j.kept, j.stale = f, whole, 0, true
	for _, line := range j.live {
		j.kept += int64(len(line))
	}
	return nil
}

// Emptied notes in the journal of an edge's directory, whose edge does not run, that none
// of its sandboxes is left but those named. A journal that cannot be read has nothing more to say.
func Emptied(dir string, now time.Time, left ...string) error {
	path := filepath.Join(dir, "journal")
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	j, records, err := openJournal(path)
	if err != nil {
		return os.Remove(path)
	}
	for _, rec := range records {
		if slices.Contains(left, rec.Sandbox.ID) {
			continue
		}
		rec.Sandbox.EndReason = cmp.Or(rec.Sandbox.EndReason, v1.EndRequest)
		if nerr := j.note(removal(rec.Sandbox.ID, v1.EndingOf(&rec.Sandbox, now))); nerr != nil {
			err = nerr
		}
	}
	return errors.Join(err, j.close())
}

// removed tells whether id is one of the last that were removed, and how it ended.
func (j *journal) removed(id string) (v1.Ending, bool) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.gone.get(id)
}

func (j *journal) close() error {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.file.Close()
}
