package v1

import (
	"errors"
	"testing"
	"time"

	"dsec/api/v1/errs"
)

func TestEndingSaysWhenAndWhy(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	failed := ProblemOf(errs.New(errs.SandboxLimit, "guest", "out of memory"))
	for want, sb := range map[string]Sandbox{
		"sandbox s1 was removed at 2026-01-02T03:04:05Z: it reached its time to live":                                             {EndReason: EndTTL},
		"sandbox s1 was removed at 2026-01-02T03:04:05Z: somebody asked for it; it had failed before (sandbox_limit)":             {EndReason: EndRequest, Error: failed},
		"sandbox s1 was removed at 2026-01-02T03:04:05Z: nobody renewed its lease; processes that its memory limit had killed: 2": {EndReason: EndLease, OOMKills: 2},
	} {
		err := EndingOf(&sb, at).Err("edge.find", "s1")
		if err.Message != want || err.Sandbox != "s1" || !errors.Is(err, errs.Gone) || err.Details["end_reason"] != string(sb.EndReason) || err.Details["removed_at"] == "" {
			t.Errorf("%+v, want %q", err, want)
		}
	}
	if err := (Ending{}).Err("x", "s1"); err.Message != "sandbox s1 was removed" || len(err.Details) != 0 {
		t.Errorf("of what is not known: %+v", err)
	}
}
