package file

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"

	"dsec/api/v1/errs"
)

func TestWatch(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	must(t, os.Mkdir(d+"/old", 0o777))
	w, err := fs.Watch(d, "nobody", true)
	must(t, err)
	defer w.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	expect := func(want ...Event) {
		t.Helper()
		for _, x := range want {
			for {
				e, err := w.Next(ctx)
				if err != nil {
					t.Fatalf("waiting for %+v: %v", x, err)
				}
				if e == x {
					break
				}
			}
		}
	}
	must(t, os.WriteFile(d+"/f", []byte("x"), 0o644))
	expect(Event{Name: "f", Type: EventCreate}, Event{Name: "f", Type: EventWrite})
	must(t, os.Chmod(d+"/f", 0o600))
	expect(Event{Name: "f", Type: EventChmod})
	must(t, os.Rename(d+"/f", d+"/g"))
	expect(Event{Name: "f", Type: EventRename}, Event{Name: "g", Type: EventCreate})
	must(t, os.MkdirAll(d+"/n1/n2/n3", 0o777))
	must(t, os.WriteFile(d+"/n1/n2/n3/x", nil, 0o644))
	expect(Event{Name: "n1", Type: EventCreate}, Event{Name: "n1/n2", Type: EventCreate}, Event{Name: "n1/n2/n3", Type: EventCreate}, Event{Name: "n1/n2/n3/x", Type: EventCreate})
	must(t, os.WriteFile(d+"/old/y", nil, 0o644))
	expect(Event{Name: "old/y", Type: EventCreate})
	must(t, os.Rename(d+"/n1", d+"/old/n1"))
	expect(Event{Name: "n1", Type: EventRename}, Event{Name: "old/n1", Type: EventCreate})
	must(t, os.WriteFile(d+"/old/n1/n2/z", nil, 0o644))
	expect(Event{Name: "old/n1/n2/z", Type: EventCreate})
	must(t, os.Remove(d+"/g"))
	expect(Event{Name: "g", Type: EventRemove})
	if e := w.Entry(Event{Name: "old"}); e == nil || e.Type != TypeDirectory {
		t.Errorf("%+v", e)
	}
	must(t, os.RemoveAll(d))
	expect(Event{Name: ".", Type: EventRemove})
	_, err = w.Next(ctx)
	wantCode(t, err, errs.PathNotFound)
}

func TestWatchOverflowIsReported(t *testing.T) {
	t.Parallel()
	fs, d := newFS(t), dir(t)
	w, err := fs.Watch(d, "", false)
	must(t, err)
	defer w.Close()
	for range 20000 { // the kernel's queue holds 16384; two files, since equal neighbours are merged
		must(t, os.WriteFile(d+"/a", nil, 0o644))
		must(t, os.Remove(d+"/a"))
	}
	for {
		e, err := w.Next(t.Context())
		must(t, err)
		if e.Overflow {
			break
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	for {
		if _, err := w.Next(ctx); err != nil {
			if !errors.Is(err, context.Canceled) {
				t.Fatal(err)
			}
			return
		}
	}
}
