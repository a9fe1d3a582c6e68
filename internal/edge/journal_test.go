package edge

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

func recordOf(id string, generation uint64) record {
	return record{Sandbox: v1.Sandbox{ID: id, Generation: generation, State: v1.StateRunning}, Handle: []byte(`{"pid":7}`)}
}

// endingOf makes the endings of a test differ.
func endingOf(id string) v1.Ending {
	return []v1.Ending{
		{At: 1764540000, Reason: v1.EndRequest}, {At: 1764540001, Reason: v1.EndTTL, OOMKills: 3},
		{At: 1764540002, Reason: v1.EndLease, Failed: errs.SandboxLimit}, {},
	}[int(id[len(id)-1])%4]
}

// What is read back is what a map would hold, whatever was written, wherever the file was cut.
func TestJournalSurvivesTornWrites(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		path := filepath.Join(dir, fmt.Sprint(n))
		j, recs, err := openJournal(path)
		if err != nil || len(recs) != 0 {
			rt.Fatalf("%v, %v", recs, err)
		}
		type step struct {
			id      string
			removed bool
		}
		var sizes []int64 // of the file after each step
		var steps []step
		for i := range rapid.IntRange(1, 30).Draw(rt, "steps") {
			s := step{fmt.Sprintf("s%d", rapid.IntRange(0, 4).Draw(rt, "id")), rapid.Bool().Draw(rt, "removed")}
			rec := recordOf(s.id, uint64(i))
			if s.removed {
				rec = removal(s.id, endingOf(s.id))
			}
			if err := j.put(rec); err != nil {
				rt.Fatal(err)
			}
			steps, sizes = append(steps, s), append(sizes, j.bytes)
		}
		if err := j.close(); err != nil {
			rt.Fatal(err)
		}
		cut := rapid.Int64Range(int64(len(journalHead)), sizes[len(sizes)-1]).Draw(rt, "cut")
		if err := os.Truncate(path, cut); err != nil {
			rt.Fatal(err)
		}
		want, gone := map[string]uint64{}, map[string]bool{}
		for i, s := range steps {
			if sizes[i] > cut {
				break
			}
			if s.removed {
				if _, ok := want[s.id]; ok {
					gone[s.id] = true
				}
				delete(want, s.id)
			} else {
				want[s.id] = uint64(i)
			}
		}
		for range 2 { // reading it compacts it, which changes nothing
			j, recs, err = openJournal(path)
			if err != nil {
				rt.Fatal(err)
			}
			j.close()
			got := map[string]uint64{}
			for _, r := range recs {
				got[r.Sandbox.ID] = r.Sandbox.Generation
			}
			if fmt.Sprint(got) != fmt.Sprint(want) {
				rt.Fatalf("cut at %d of %v: got %v, want %v", cut, sizes, got, want)
			}
			for id := range gone {
				if how, ok := j.removed(id); !ok || how != endingOf(id) {
					rt.Fatalf("cut at %d of %v: of the removal of %s is known %+v", cut, sizes, id, how)
				}
			}
		}
	})
}

func TestJournalRefusesDamage(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "journal")
	j, _, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if err := j.put(recordOf(fmt.Sprintf("s%d", i), 1)); err != nil {
			t.Fatal(err)
		}
	}
	j.close()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	data[20] ^= 1
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := openJournal(path); !errors.Is(err, errs.DataCorrupt) || !strings.Contains(err.Error(), path) {
		t.Errorf("a damaged line in the middle: %v", err)
	}
}

// Whatever byte of a journal is damaged, or range of bytes up to its end, it is found: only
// a file that is cut short reads as what was written before.
func TestJournalFindsAnyDamage(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "journal")
	j, _, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		if err := j.put(recordOf(fmt.Sprintf("s%d", i), 1)); err != nil {
			t.Fatal(err)
		}
	}
	j.close()
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	damaged := func(what string, at int, data []byte) {
		t.Helper()
		if _, err := eachLine(data, func([]byte, record) {}); err == nil {
			t.Errorf("%s from byte %d of %d on reads as a journal", what, at, len(good))
		}
	}
	for i := range len(journalHead) {
		damaged("nothing", i, good[:i])
	}
	for i := range good {
		for _, bit := range []byte{1, 0x20, 0x80} {
			data := slices.Clone(good)
			data[i] ^= bit
			damaged("a bit", i, data)
		}
		for _, fill := range []byte{0, ' ', 'x', '0', 0xff} {
			data := slices.Clone(good[:i])
			damaged(fmt.Sprintf("%q", fill), i, append(data, bytes.Repeat([]byte{fill}, len(good)-i)...))
		}
		for _, hole := range []int{1, 20, 100} { // bytes that are missing before the end
			if i > 0 && i+hole < len(good) {
				damaged(fmt.Sprintf("a hole of %d", hole), i, slices.Concat(good[:i], good[i+hole:]))
			}
		}
	}
}

func TestJournalOfTheOldFormatIsNamed(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "journal")
	body := []byte(`{"sandbox":{"id":"s1"}}`)
	if err := os.WriteFile(path, fmt.Appendf(nil, "%08x %s\n", crc32.ChecksumIEEE(body), body), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := openJournal(path); !errors.Is(err, errs.DataCorrupt) || !strings.Contains(err.Error(), "older version") {
		t.Error(err)
	}
	if b, err := os.ReadFile(path); err != nil || len(b) == 0 {
		t.Errorf("it was touched: %q, %v", b, err)
	}
}

func TestJournalCompacts(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "journal")
	j, _, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	rec := recordOf("s1", 1)
	rec.Sandbox.Spec.Env = map[string]string{"BIG": string(make([]byte, 1<<16))}
	for range 40 {
		if err := j.put(rec); err != nil {
			t.Fatal(err)
		}
	}
	if st, err := os.Stat(path); err != nil || st.Size() > compactAt+1<<19 {
		t.Errorf("%d bytes for one record, %v", st.Size(), err)
	}
	if err := j.put(recordOf("s2", 9)); err != nil {
		t.Fatal(err)
	}
	j.close()
	_, recs, err := openJournal(path)
	if err != nil || len(recs) != 2 {
		t.Errorf("%d records, %v", len(recs), err)
	}
}

// The journal remembers removed ids, the last so many of them, in a file that stays small.
func TestJournalRemembersRemovals(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "journal")
	j, _, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	const n = goneSize + 10_000
	id := func(i int) string { return v1.SandboxID("abcdef", 1, uint64(i)) }
	if err := j.put(recordOf(id(n), 1)); err != nil { // one that lives through it all
		t.Fatal(err)
	}
	largest := int64(0)
	for i := range n {
		if err := j.put(recordOf(id(i), 1)); err != nil {
			t.Fatal(err)
		}
		if err := j.note(removal(id(i), endingOf(id(i)))); err != nil {
			t.Fatal(err)
		}
		largest = max(largest, j.bytes)
	}
	if largest > 24<<20 {
		t.Errorf("the file grew to %d bytes", largest)
	}
	for range 2 {
		j.close()
		var recs []record
		if j, recs, err = openJournal(path); err != nil || len(recs) != 1 {
			t.Fatalf("%d records, %v", len(recs), err)
		}
		if j.bytes > 6<<20 {
			t.Errorf("%d bytes once rewritten", j.bytes)
		}
		for i := range n {
			if how, got := j.removed(id(i)); got != (i >= n-goneSize) || got && how != endingOf(id(i)) {
				t.Fatalf("removal %d of %d: %v, %+v", i, n, got, how)
			}
		}
		for _, none := range []string{id(n), ""} {
			if _, ok := j.removed(none); ok {
				t.Error("what lives, or nothing, counts as removed")
			}
		}
	}
	j.close()
}

func FuzzJournal(f *testing.F) {
	line, err := formatLine(recordOf("s1", 3))
	if err != nil {
		f.Fatal(err)
	}
	head := []byte(journalHead)
	two := slices.Concat(head, line, line)
	f.Add(two)
	f.Add(two[:len(two)-5])                                  // cut short
	f.Add(append(slices.Clone(two[:len(head)+40]), 0, 0, 0)) // zeros to the end
	f.Add(slices.Concat(head, line[:30], line))              // a hole
	f.Add([]byte("00000000 {}\n"))
	f.Add([]byte(""))
	f.Fuzz(func(t *testing.T, data []byte) {
		path := filepath.Join(t.TempDir(), "journal")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		j, recs, err := openJournal(path)
		if err != nil {
			if !errors.Is(err, errs.DataCorrupt) {
				t.Fatal(err)
			}
			return
		}
		j.close()
		// Only a last line that is cut short may have been dropped.
		whole, err := eachLine(data, func([]byte, record) {})
		if err != nil || bytes.IndexByte(data[whole:], '\n') >= 0 {
			t.Fatalf("dropped %q, %v", data[whole:], err)
		}
		_, again, err := openJournal(path)
		if err != nil || len(again) != len(recs) {
			t.Fatalf("%d records, then %d, %v", len(recs), len(again), err)
		}
	})
}

// A removal on a full disk counts, and is written as soon as there is room again.
func TestJournalKeepsWhatHappenedOnAFullDisk(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "journal")
	j, _, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"a", "b"} {
		if err := j.put(recordOf(id, 1)); err != nil {
			t.Fatal(err)
		}
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	j.file.Close()
	j.file = full
	blocked := path + ".new" // no compaction while this is in its way
	if err := os.Mkdir(blocked, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := j.put(recordOf("c", 1)); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a new record: %v", err)
	}
	if err := j.note(record{Sandbox: v1.Sandbox{ID: "a"}, Removed: true}); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a removal: %v", err)
	}
	if err := os.Remove(blocked); err != nil {
		t.Fatal(err)
	}
	if err := j.note(recordOf("b", 2)); err != nil {
		t.Errorf("with room again: %v", err)
	}
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	_, recs, err := openJournal(path)
	if err != nil || len(recs) != 1 || recs[0].Sandbox.ID != "b" || recs[0].Sandbox.Generation != 2 {
		t.Errorf("read back: %v, %v", recs, err)
	}
}

func TestJournalOpensOnAFullDisk(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "journal")
	j, _, err := openJournal(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(j.put(recordOf("a", 1)), j.close()); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString("0000") // a line cut short
		f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	blocked := path + ".new" // as good as no room for a second file
	if err := os.Mkdir(blocked, 0o700); err != nil {
		t.Fatal(err)
	}
	j, recs, err := openJournal(path)
	if err != nil || len(recs) != 1 {
		t.Fatalf("%v, %v", recs, err)
	}
	_ = j.note(recordOf("b", 1)) // its compaction fails still
	if err := j.close(); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(blocked); err != nil {
		t.Fatal(err)
	}
	j, recs, err = openJournal(path)
	if err != nil || len(recs) != 2 {
		t.Errorf("read back: %v, %v", recs, err)
	}
	j.close()
}
