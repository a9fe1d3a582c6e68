package apiserver_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"

	v1 "dsec/api/v1"
)

func follow(t *testing.T, w *world, path string, headers ...header) (*bufio.Reader, *http.Response) {
	t.Helper()
	res, err := w.client.Do(w.request(t.Context(), "GET", path, nil, headers...))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { res.Body.Close() })
	if res.StatusCode != 200 {
		t.Fatal(res.Status)
	}
	return bufio.NewReader(res.Body), res
}

func nextEvent(t *testing.T, r *bufio.Reader) v1.Event {
	t.Helper()
	line, err := r.ReadString('\n')
	if err != nil {
		t.Fatal(err)
	}
	var e v1.Event
	if err := json.Unmarshal([]byte(line), &e); err != nil {
		t.Fatalf("%q: %v", line, err)
	}
	return e
}

func TestFollowFromAListMissesAndRepeatsNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rev := want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes", nil).Revision
	before := w.create(hollow)
	r, res := follow(t, w, fmt.Sprintf("/v1/events?follow=true&from=%d", rev))
	if res.Header.Get("Content-Type") != "application/x-ndjson" {
		t.Error(res.Header)
	}
	seen := []string{}
	expect := []string{before.ID}
	for range 20 {
		expect = append(expect, w.create(hollow).ID)
	}
	for i := range expect {
		e := nextEvent(t, r)
		if e.Revision != rev+uint64(i)+1 {
			t.Fatalf("revision %d, want %d", e.Revision, rev+uint64(i)+1)
		}
		seen = append(seen, e.Sandbox.ID)
	}
	if strings.Join(seen, " ") != strings.Join(expect, " ") {
		t.Errorf("saw %v, want %v", seen, expect)
	}
}

func TestFollowByLabel(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	r, _ := follow(t, w, "/v1/events?follow=true&label=job%3Da")
	w.create(map[string]any{"backend": "hollow", "labels": map[string]string{"job": "b"}})
	a := w.create(map[string]any{"backend": "hollow", "labels": map[string]string{"job": "a"}})
	if e := nextEvent(t, r); e.Sandbox == nil || e.Sandbox.ID != a.ID {
		t.Errorf("got %+v", e)
	}
}

func TestServerSentEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	rev := want[v1.SandboxList](w, 200, "GET", "/v1/sandboxes", nil).Revision
	sb := w.create(hollow)
	r, res := follow(t, w, "/v1/events?follow=true", header{"Accept", "text/event-stream"}, header{"Last-Event-ID", fmt.Sprint(rev)})
	if res.Header.Get("Content-Type") != "text/event-stream" {
		t.Error(res.Header)
	}
	var got []string
	for range 4 {
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, strings.TrimSuffix(line, "\n"))
	}
	if got[0] != fmt.Sprintf("id: %d", rev+1) || got[1] != "event: state" || !strings.HasPrefix(got[2], "data: {") || !strings.Contains(got[2], sb.ID) || got[3] != "" {
		t.Errorf("got %q", got)
	}
	w.problem("bad_request", "GET", "/v1/events", nil, header{"Last-Event-ID", "x"})
}

func TestRevokedTokenEndsItsFollower(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	tok := want[v1.Token](w, 201, "POST", "/v1/tokens", v1.TokenRequest{Name: "ci", Rights: []v1.Right{v1.RightRead}})
	r, _ := follow(t, w, "/v1/events?follow=true", as(tok.Secret))
	nextEvent(t, r) // the node came
	want[struct{}](w, 204, "DELETE", "/v1/tokens/"+tok.ID, nil)
	w.problem("bad_token", "GET", "/v1/sandboxes", nil, as(tok.Secret))
	for {
		if e := nextEvent(t, r); e.Error != nil {
			if e.Error.Code != "bad_token" {
				t.Errorf("%+v", e.Error)
			}
			return
		}
	}
}
