package objecttest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"sort"
	"strings"
	"sync"
	"testing"
	"testing/iotest"

	"dsec/api/v1/errs"
	"dsec/internal/image/object"
)

// Run checks that a store keeps the contract of [object.Store]. Each call of open
// gives an empty store.
func Run(t *testing.T, open func(t *testing.T) object.Store) {
	for name, test := range map[string]func(*testing.T, object.Store){
		"PutGetStat":   putGetStat,
		"Ranges":       ranges,
		"Absent":       absent,
		"WrongSize":    wrongSize,
		"BrokenReader": brokenReader,
		"HostileKeys":  hostileKeys,
		"PutAgain":     putAgain,
		"NestedKeys":   nestedKeys,
		"List":         list,
		"ManyObjects":  manyObjects,
		"Large":        large,
		"Concurrent":   concurrent,
		"Canceled":     canceled,
		"Modified":     modified,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, open(t))
		})
	}
}

func content(seed uint64, n int) []byte {
	b := make([]byte, n)
	rng := rand.New(rand.NewPCG(seed, 1))
	for i := range b {
		b[i] = byte(rng.Uint32())
	}
	return b
}

func put(t *testing.T, s object.Store, key string, b []byte) {
	t.Helper()
	if err := s.Put(t.Context(), key, int64(len(b)), bytes.NewReader(b)); err != nil {
		t.Fatalf("put %s: %v", key, err)
	}
}

func get(t *testing.T, s object.Store, key string, off, n int64) []byte {
	t.Helper()
	rc, err := s.Get(t.Context(), key, off, n)
	if err != nil {
		t.Fatalf("get %s %d+%d: %v", key, off, n, err)
	}
	b, err := io.ReadAll(rc)
	if err != nil {
		t.Fatalf("read %s %d+%d: %v", key, off, n, err)
	}
	if err := rc.Close(); err != nil {
		t.Fatalf("close %s: %v", key, err)
	}
	return b
}

func keys(t *testing.T, s object.Store, prefix string) []string {
	t.Helper()
	all := []string{}
	if err := s.List(t.Context(), prefix, func(i object.Info) error { all = append(all, i.Key); return nil }); err != nil {
		t.Fatalf("list %q: %v", prefix, err)
	}
	sort.Strings(all)
	return all
}

func wantKeys(t *testing.T, s object.Store, prefix string, want ...string) {
	t.Helper()
	if got := keys(t, s, prefix); fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("list %q: got %v, want %v", prefix, got, want)
	}
}

func want(t *testing.T, action string, err error, code errs.Code) {
	t.Helper()
	var e *errs.Error
	if !errors.As(err, &e) || e.Code != code {
		t.Errorf("%s: got error %v, want %s", action, err, code)
	}
}

func putGetStat(t *testing.T, s object.Store) {
	for _, n := range []int{0, 1, 4096, 1<<20 + 7} {
		key := fmt.Sprintf("class/object-%d", n)
		b := content(uint64(n), n)
		put(t, s, key, b)
		if got := get(t, s, key, 0, -1); !bytes.Equal(got, b) {
			t.Errorf("%s: other bytes came back (%d instead of %d)", key, len(got), n)
		}
		if st, err := s.Stat(t.Context(), key); err != nil || st.Size != int64(n) || st.Key != key || st.Modified.IsZero() {
			t.Errorf("stat %s: %+v, %v", key, st, err)
		}
	}
	// A reader that is no seeker and gives little at a time.
	b := content(3, 100_000)
	if err := s.Put(t.Context(), "class/dribble", int64(len(b)), iotest.HalfReader(struct{ io.Reader }{bytes.NewReader(b)})); err != nil {
		t.Fatal(err)
	}
	if got := get(t, s, "class/dribble", 0, -1); !bytes.Equal(got, b) {
		t.Error("dribble: other bytes came back")
	}
}

func ranges(t *testing.T, s object.Store) {
	b := content(1, 10_000)
	put(t, s, "r/object", b)
	put(t, s, "r/empty", nil)
	for _, r := range [][2]int64{
		{0, -1}, {0, 0}, {0, 1}, {0, 10_000}, {0, 10_001}, {1, -1}, {9_999, 1}, {9_999, 2}, {9_999, -1}, {5_000, 0},
		{10_000, 0}, {10_000, 1}, {10_000, -1}, {10_001, 5}, {10_001, -1}, {1 << 40, 1 << 40}, {1 << 62, 1 << 62}, {100, 1<<63 - 1}, {4_000, 100},
	} {
		off := min(r[0], 10_000)
		end := int64(10_000)
		if r[1] >= 0 && r[1] < end-off {
			end = off + r[1]
		}
		if got := get(t, s, "r/object", r[0], r[1]); !bytes.Equal(got, b[off:end]) {
			t.Errorf("range %v: got %d bytes, want %d", r, len(got), end-off)
		}
	}
	for _, r := range [][2]int64{{0, -1}, {0, 0}, {0, 1}, {1, 1}} {
		if got := get(t, s, "r/empty", r[0], r[1]); len(got) != 0 {
			t.Errorf("range %v of an empty object: %d bytes", r, len(got))
		}
	}
	_, err := s.Get(t.Context(), "r/object", -1, 1)
	want(t, "negative offset", err, errs.BadRequest)
	// A body that is not read to its end is closed without harm.
	rc, err := s.Get(t.Context(), "r/object", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(rc, make([]byte, 10)); err != nil {
		t.Error(err)
	}
	if err := rc.Close(); err != nil {
		t.Error(err)
	}
}

func absent(t *testing.T, s object.Store) {
	for _, key := range []string{"no/object", "plain"} {
		for _, n := range []int64{-1, 0, 5} {
			_, err := s.Get(t.Context(), key, 0, n)
			want(t, "get", err, errs.ObjectNotFound)
			if errs.Of(err).Retryable {
				t.Error("an absent object is no reason to retry")
			}
		}
		_, err := s.Stat(t.Context(), key)
		want(t, "stat", err, errs.ObjectNotFound)
		if err := s.Delete(t.Context(), key); err != nil {
			t.Errorf("delete an absent object: %v", err)
		}
	}
	put(t, s, "no/object", []byte("x"))
	for range 2 {
		if err := s.Delete(t.Context(), "no/object"); err != nil {
			t.Fatal(err)
		}
	}
	_, err := s.Get(t.Context(), "no/object", 0, -1)
	want(t, "get after delete", err, errs.ObjectNotFound)
	wantKeys(t, s, "")
}

func wrongSize(t *testing.T, s object.Store) {
	b := content(1, 5000)
	for _, size := range []int64{0, 4999, 5001, 70 << 10} {
		want(t, "put a size that is not the reader's", s.Put(t.Context(), "w/object", size, struct{ io.Reader }{bytes.NewReader(b)}), errs.BadRequest)
		want(t, "put a size that is not the seeker's", s.Put(t.Context(), "w/object", size, bytes.NewReader(b)), errs.BadRequest)
	}
	want(t, "put a negative size", s.Put(t.Context(), "w/object", -1, bytes.NewReader(b)), errs.BadRequest)
	wantKeys(t, s, "")
	put(t, s, "w/object", b)
	want(t, "put over", s.Put(t.Context(), "w/object", 6000, bytes.NewReader(b)), errs.BadRequest)
	if !bytes.Equal(get(t, s, "w/object", 0, -1), b) {
		t.Error("a failed put changed the object")
	}
}

func brokenReader(t *testing.T, s object.Store) {
	broken := errors.New("the source broke")
	r := io.MultiReader(bytes.NewReader(content(1, 3000)), iotest.ErrReader(broken))
	if err := s.Put(t.Context(), "b/object", 5000, r); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	wantKeys(t, s, "")
}

func hostileKeys(t *testing.T, s object.Store) {
	for _, key := range []string{
		"", "/", "a/", "/a", "a//b", ".", "..", "a/../b", "../a", "a/..", "a/./b", ".a", "a/.b", "-a", "_a", "_tmp/a", "a/_", "a b", "a\x00b", "a\nb",
		"A", "é", "a\xffb", "a%2fb", "a%b", "a\\b", "a?b", "a#b", "a*b", "a:b", strings.Repeat("a", 241), strings.Repeat("a/", 200) + "a",
	} {
		_, err := s.Get(t.Context(), key, 0, -1)
		want(t, fmt.Sprintf("get %q", key), err, errs.BadRequest)
		_, err = s.Stat(t.Context(), key)
		want(t, fmt.Sprintf("stat %q", key), err, errs.BadRequest)
		want(t, fmt.Sprintf("put %q", key), s.Put(t.Context(), key, 1, strings.NewReader("x")), errs.BadRequest)
		want(t, fmt.Sprintf("delete %q", key), s.Delete(t.Context(), key), errs.BadRequest)
	}
	for _, prefix := range []string{"..", "a/../", "/", "A", "a\x00"} {
		want(t, fmt.Sprintf("list %q", prefix), s.List(t.Context(), prefix, func(object.Info) error { return nil }), errs.BadRequest)
	}
	wantKeys(t, s, "")
	for _, key := range []string{"a", "0", "a.b-c_d", "x/y/z", strings.Repeat("a", 240), "p/" + strings.Repeat("b", 238), strings.Repeat("a/", 119) + "ab"} {
		put(t, s, key, []byte(key))
		if got := get(t, s, key, 0, -1); string(got) != key {
			t.Errorf("%q: got %q", key, got)
		}
		wantKeys(t, s, key, key)
		if err := s.Delete(t.Context(), key); err != nil {
			t.Error(err)
		}
	}
	wantKeys(t, s, "")
}

func putAgain(t *testing.T, s object.Store) {
	b := content(1, 1<<20)
	put(t, s, "again/object", b)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 5 {
				if err := s.Put(t.Context(), "again/object", int64(len(b)), bytes.NewReader(b)); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Go(func() {
			for range 10 {
				rc, err := s.Get(t.Context(), "again/object", 0, -1)
				if err != nil {
					t.Errorf("get while it is put again: %v", err)
					return
				}
				got, err := io.ReadAll(rc)
				rc.Close()
				if err != nil || !bytes.Equal(got, b) {
					t.Errorf("read while it is put again: %d bytes, %v", len(got), err)
				}
			}
		})
	}
	wg.Wait()
	wantKeys(t, s, "", "again/object")
}

func nestedKeys(t *testing.T, s object.Store) {
	// The space is flat: one key may begin as another does.
	all := []string{"a.b/c", "a/b", "a/b.c"}
	for _, k := range all {
		put(t, s, k, []byte(k))
	}
	for _, k := range all {
		if got := get(t, s, k, 0, -1); string(got) != k {
			t.Errorf("%s: got %q", k, got)
		}
	}
	wantKeys(t, s, "", all...)
	wantKeys(t, s, "a/b", "a/b", "a/b.c")
}

func list(t *testing.T, s object.Store) {
	all := []string{"map/aa.1", "map/aa.2", "map/ab.1", "mapx/aa", "meta/aa.1", "plain"}
	for _, k := range all {
		put(t, s, k, []byte(k))
	}
	wantKeys(t, s, "", all...)
	wantKeys(t, s, "m", all[:5]...)
	wantKeys(t, s, "map", all[:4]...)
	wantKeys(t, s, "map/", all[:3]...)
	wantKeys(t, s, "map/aa.", all[:2]...)
	wantKeys(t, s, "map/aa.2", "map/aa.2")
	wantKeys(t, s, "map/aa.3")
	wantKeys(t, s, "map/zz.1")
	wantKeys(t, s, "map/zz")
	wantKeys(t, s, "zz/")
	wantKeys(t, s, "plain", "plain")
	stop := errors.New("stop")
	n := 0
	if err := s.List(t.Context(), "", func(object.Info) error { n++; return stop }); !errors.Is(err, stop) || n != 1 {
		t.Errorf("a list that is stopped at the first: %d calls, %v", n, err)
	}
	err := s.List(t.Context(), "", func(i object.Info) error {
		if i.Size != int64(len(i.Key)) || i.Modified.IsZero() {
			t.Errorf("listed as %+v", i)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func manyObjects(t *testing.T, s object.Store) {
	const n = 2300 // more than two pages of S3
	var wg sync.WaitGroup
	work := make(chan int)
	for range 8 {
		wg.Go(func() {
			for i := range work {
				key := fmt.Sprintf("many/%05d", i)
				if err := s.Put(t.Context(), key, 3, strings.NewReader("abc")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range n {
		work <- i
	}
	close(work)
	wg.Wait()
	got := keys(t, s, "many/")
	if len(got) != n || got[0] != "many/00000" || got[n-1] != fmt.Sprintf("many/%05d", n-1) {
		t.Errorf("%d of %d objects are listed", len(got), n)
	}
	for i := 1; i < len(got); i++ {
		if got[i] == got[i-1] {
			t.Errorf("%s is listed twice", got[i])
		}
	}
}

func large(t *testing.T, s object.Store) {
	const size = 64<<20 + 5 // more than one part of S3
	b := content(9, 1<<20)
	r := func() io.Reader { return io.LimitReader(&repeat{b: b}, size) }
	if err := s.Put(t.Context(), "large/object", size, r()); err != nil {
		t.Fatal(err)
	}
	if st, err := s.Stat(t.Context(), "large/object"); err != nil || st.Size != size {
		t.Fatalf("stat: %+v, %v", st, err)
	}
	if got := get(t, s, "large/object", size-10, -1); !bytes.Equal(got, append(bytes.Clone(b[1<<20-5:]), b[:5]...)) {
		t.Errorf("the end: %x", got)
	}
	if got := get(t, s, "large/object", 48<<20-3, 1<<20); !bytes.Equal(got, append(bytes.Clone(b[1<<20-3:]), b[:1<<20-3]...)) {
		t.Error("the middle has other bytes")
	}
	want(t, "a large put with too little", s.Put(t.Context(), "large/other", size+1, r()), errs.BadRequest)
	want(t, "a large put with too much", s.Put(t.Context(), "large/other", size-1, r()), errs.BadRequest)
	wantKeys(t, s, "", "large/object")
}

type repeat struct {
	b   []byte
	off int
}

func (r *repeat) Read(p []byte) (int, error) {
	n := copy(p, r.b[r.off:])
	r.off = (r.off + n) % len(r.b)
	return n, nil
}

func concurrent(t *testing.T, s object.Store) {
	var wg sync.WaitGroup
	for w := range 6 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), 0))
			for i := range 25 {
				key := fmt.Sprintf("c%d/object-%d", w%2, rng.IntN(40))
				b := []byte(strings.Repeat(key, 1000))
				var err error
				switch i % 4 {
				case 0, 1:
					err = s.Put(t.Context(), key, int64(len(b)), bytes.NewReader(b))
				case 2:
					var rc io.ReadCloser
					if rc, err = s.Get(t.Context(), key, 0, -1); err == nil {
						var got []byte
						got, err = io.ReadAll(rc)
						rc.Close()
						if err == nil && !bytes.Equal(got, b) {
							t.Errorf("%s has other bytes (%d)", key, len(got))
						}
					}
				case 3:
					err = s.Delete(t.Context(), key)
				}
				if err != nil && !errors.Is(err, errs.ObjectNotFound) {
					t.Errorf("%s: %v", key, err)
				}
			}
		})
	}
	wg.Go(func() {
		for range 10 {
			if err := s.List(t.Context(), "c", func(object.Info) error { return nil }); err != nil {
				t.Errorf("list: %v", err)
			}
		}
	})
	wg.Wait()
}

func canceled(t *testing.T, s object.Store) {
	put(t, s, "x/object", content(1, 1<<20))
	ctx, cancel := context.WithCancel(t.Context())
	rc, err := s.Get(ctx, "x/object", 0, -1)
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	_, err = io.ReadAll(rc)
	if err != nil { // it may all have been there
		want(t, "read on", err, errs.RequestCanceled)
	}
	rc.Close()
	_, err = s.Get(ctx, "x/object", 0, -1)
	want(t, "get", err, errs.RequestCanceled)
	_, err = s.Stat(ctx, "x/object")
	want(t, "stat", err, errs.RequestCanceled)
	want(t, "put", s.Put(ctx, "x/other", 1, strings.NewReader("x")), errs.RequestCanceled)
	want(t, "delete", s.Delete(ctx, "x/object"), errs.RequestCanceled)
	want(t, "list", s.List(ctx, "x/", func(object.Info) error { return nil }), errs.RequestCanceled)
	wantKeys(t, s, "", "x/object")
	expired, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	_, err = s.Stat(expired, "x/object")
	want(t, "stat after the deadline", err, errs.DeadlineExceeded)
}

func modified(t *testing.T, s object.Store) {
	put(t, s, "m/first", []byte("1"))
	put(t, s, "m/second", []byte("2"))
	a, err := s.Stat(t.Context(), "m/first")
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.Stat(t.Context(), "m/second")
	if err != nil {
		t.Fatal(err)
	}
	if b.Modified.Before(a.Modified) {
		t.Errorf("the second (%v) is older than the first (%v)", b.Modified, a.Modified)
	}
	err = s.List(t.Context(), "m/first", func(i object.Info) error {
		if d := i.Modified.Sub(a.Modified).Abs(); d.Seconds() >= 1 {
			t.Errorf("listed as of %v instead of %v", i.Modified, a.Modified)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
