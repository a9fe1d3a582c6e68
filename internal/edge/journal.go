package edge

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
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
	Handle  json.RawMessage `json:"handle,omitempty"`   // the backend's, once it runs
	Stood   time.Duration   `json:"stood_ns,omitempty"` // that it was paused, added up, without the pause that goes on
	Removed bool            `json:"removed,omitempty"`
	Gone    []string        `json:"gone,omitempty"` // what was removed, as goneText writes it: this one, or many in a line of their own
}

// journal is the file of records: after a head one line for each change, its length and
// checksums and then JSON; the last line of an id counts. The last ids that were removed stay in it, for
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
	for _, r := range []v1.EndReason{v1.EndRequest, v1.EndTTL, v1.EndLease, v1.EndIdle, v1.EndEvicted} {
		if f[2] == string(r) {
			how.Reason = r
		}
	}
	if f[3] != "-" {
		how.Failed = errs.Lookup(errs.Code(f[3])).Code
	}
	return strings.Clone(f[0]), how
}

// openJournal reads path, or starts it, and returns the records that count. A last line
// that is cut short (the edge died in it) is dropped; any other damage is an error.
func openJournal(path string) (*journal, []record, error) {
	j := &journal{path: path, live: map[string][]byte{}, gone: newRecent(goneSize)}
	records := map[string]record{}
	data, err := os.ReadFile(path)
	missing := errors.Is(err, fs.ErrNotExist)
	if err != nil && !missing {
		return nil, nil, err
	}
	if missing {
		data = []byte(journalHead)
	}
	whole, err := eachLine(data, func(line []byte, rec record) {
		for _, text := range rec.Gone {
			j.gone.add(parseGone(text))
		}
		if rec.Removed {
			delete(records, rec.Sandbox.ID)
			delete(j.live, rec.Sandbox.ID)
			if rec.Sandbox.ID != "" {
				j.gone.add(rec.Sandbox.ID, v1.Ending{})
			}
			return
		}
		records[rec.Sandbox.ID] = rec
		j.live[rec.Sandbox.ID] = line
	})
	if errors.Is(err, errOldJournal) {
		return nil, nil, errs.New(errs.DataCorrupt, "edge.journal", path+" was written by an older version of DSec, which this one cannot read")
	}
	if err != nil {
		return nil, nil, errs.New(errs.DataCorrupt, "edge.journal", fmt.Sprintf("%s is damaged at byte %d", path, whole)).Because(err)
	}
	if err := j.compact(); err != nil {
		// A full disk must not keep us from what runs: the old file goes on.
		if missing || j.reuse(int64(whole)) != nil {
			return nil, nil, err
		}
	}
	out := make([]record, 0, len(records))
	for _, r := range records {
		out = append(out, r)
	}
	return j, out, nil
}

// journalHead is the first line of the file, which is never without it: it gets its name
// when it is whole.
const journalHead = "dsec journal 2\n"

// lineHead is what stands before a line's JSON: its length, the CRC-32 of the length, and
// that of the JSON, each in eight hex digits and a space. So damage cannot pass for a
// line that is cut short: that has a length that holds and ends with the file.
const lineHead = 3 * 9

var (
	errOldJournal = errors.New("it has the first format, without lengths")
	oldLine       = regexp.MustCompile(`^[0-9a-f]{8} \{`)
	wholeHead     = regexp.MustCompile(`^([0-9a-f]{8} ){3}$`)
	cutHead       = regexp.MustCompile(`^([0-9a-f]{8} ){0,2}[0-9a-f]{0,8}$`)
)

// eachLine calls take with the whole lines of a journal, and returns how many bytes they
// are, the head included. Its error is of the first that is damaged.
func eachLine(data []byte, take func(line []byte, rec record)) (whole int, err error) {
	rest, ok := bytes.CutPrefix(data, []byte(journalHead))
	switch {
	case ok:
	case oldLine.Match(data):
		return 0, errOldJournal
	default:
		return 0, errors.New("it does not begin as a journal does")
	}
	for whole = len(journalHead); len(rest) > 0; {
		if len(rest) < lineHead {
			if !cutHead.Match(rest) {
				return whole, errors.New("no length of a line")
			}
			return whole, nil
		}
		size, sum, err := parseHead(rest[:lineHead])
		if err != nil {
			return whole, err
		}
		if len(rest) < lineHead+size+1 { // the file ends in it
			if bytes.IndexByte(rest, '\n') >= 0 {
				return whole, errors.New("a line is longer than the file, but another follows")
			}
			return whole, nil
		}
		line := rest[:lineHead+size+1]
		rec, err := parseBody(line[lineHead:], sum)
		if err != nil {
			return whole, err
		}
		take(line, rec)
		whole += len(line)
		rest = rest[len(line):]
	}
	return whole, nil
}

func parseHead(head []byte) (size int, sum uint32, err error) {
	if !wholeHead.Match(head) {
		return 0, 0, errors.New("no length of a line")
	}
	var f [3]uint32
	for i := range f {
		n, _ := strconv.ParseUint(string(head[i*9:i*9+8]), 16, 32) // the match says that it can be read
		f[i] = uint32(n)
	}
	if crc32.ChecksumIEEE(head[:8]) != f[1] {
		return 0, 0, errors.New("wrong checksum of a line's length")
	}
	return int(f[0]), f[2], nil
}

func parseBody(body []byte, sum uint32) (rec record, err error) {
	end := len(body) - 1
	if body[end] != '\n' || crc32.ChecksumIEEE(body[:end]) != sum {
		return rec, errors.New("wrong checksum of a line")
	}
	return rec, json.Unmarshal(body[:end], &rec)
}

func formatLine(rec record) ([]byte, error) {
	body, err := json.Marshal(rec)
	if err != nil {
		return nil, err
	}
	line := fmt.Appendf(make([]byte, 0, lineHead+len(body)+1), "%08x ", len(body))
	line = fmt.Appendf(line, "%08x %08x ", crc32.ChecksumIEEE(line[:8]), crc32.ChecksumIEEE(body))
	return append(append(line, body...), '\n'), nil
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
	w.WriteString(journalHead) // an error stays in w until Flush
	size, kept := int64(len(journalHead)), int64(0)
	gone := make([]string, 0, len(j.gone.ring))
	for id, how := range j.gone.all() {
		gone = append(gone, goneText(id, how))
	}
	for ids := range slices.Chunk(gone, goneLine) {
		line, err := formatLine(record{Removed: true, Gone: ids})
		if err != nil {
			panic(err) // strings
		}
		n, _ := w.Write(line)
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

// recorded returns how many sandboxes a journal has records of, without touching it.
func recorded(path string) (int, error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	live := map[string]bool{}
	_, err = eachLine(data, func(_ []byte, rec record) {
		if live[rec.Sandbox.ID] = true; rec.Removed {
			delete(live, rec.Sandbox.ID)
		}
	})
	return len(live), err
}

// Emptied notes in an edge's directory, whose edge does not run, that none of its
// sandboxes is left but those named. A journal, or an identity of a node without
// sandboxes, that cannot be read has nothing more to say and is removed.
func Emptied(dir string, now time.Time, left ...string) error {
	path := filepath.Join(dir, "journal")
	if _, err := readIdentity(filepath.Join(dir, "identity.json")); errors.Is(err, errs.DataCorrupt) && len(left) == 0 {
		if err := os.Remove(filepath.Join(dir, "identity.json")); err != nil {
			return err
		}
	}
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

// ids are those that have a record.
func (j *journal) ids() []string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Collect(maps.Keys(j.live))
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
