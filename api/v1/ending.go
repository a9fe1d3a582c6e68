package v1

import (
	"strconv"
	"time"

	"dsec/api/v1/errs"
)

// Ending says how a sandbox that is gone ended, for those who come for it later. It is
// small: very many are remembered.
type Ending struct {
	At       int64     // when it was removed, Unix seconds; 0: not known
	Reason   EndReason // empty: not known, or its create did not finish
	Failed   errs.Code // why it had failed before it was removed, if it had
	OOMKills int64     // processes that its memory limit had killed
}

// EndingOf is the ending of a sandbox as it was last, removed at this time.
func EndingOf(sb *Sandbox, at time.Time) Ending {
	e := Ending{At: at.Unix(), Reason: sb.EndReason, OOMKills: sb.OOMKills}
	if sb.Error != nil {
		e.Failed = errs.Code(sb.Error.Code)
	}
	return e
}

var endings = map[EndReason]string{
	EndRequest: "somebody asked for it",
	EndTTL:     "it reached its time to live",
	EndLease:   "nobody renewed its lease",
	EndIdle:    "nobody used it for its idle time",
	EndEvicted: "its node was short of memory",
}

// Blame says of the error for a sandbox that was removed whether that was the platform's doing: one
// that was evicted is not to be scored, and the same may go well in another.
func Blame(x *errs.Error, why EndReason) {
	if why == EndEvicted {
		x.Infra = true
		x.Advise("create a new one; on a node that is short of memory those of qos ls and of a higher priority stay longer")
	}
}

// Words says why in words; empty for a reason that this version does not know.
func (r EndReason) Words() string { return endings[r] }

// Err is what a request for the sandbox is answered: when it was removed, and why. The
// details have the same for programs.
func (e Ending) Err(phase, id string) *errs.Error {
	x := errs.New(errs.SandboxGone, phase, "")
	x.Sandbox = id
	x.Message = "sandbox " + id + " was removed"
	if e.At != 0 {
		at := time.Unix(e.At, 0).UTC().Format(time.RFC3339)
		x.Message += " at " + at
		x.With("removed_at", at)
	}
	if e.Reason != "" {
		x.With("end_reason", string(e.Reason))
		Blame(x, e.Reason)
		if why := e.Reason.Words(); why != "" {
			x.Message += ": " + why
		}
	}
	if e.Failed != "" {
		x.Message += "; it had failed before (" + string(e.Failed) + ")"
		x.With("failed", string(e.Failed))
	}
	if e.OOMKills > 0 {
		n := strconv.FormatInt(e.OOMKills, 10)
		x.Message += "; processes that its memory limit had killed: " + n
		x.With("oom_kills", n)
	}
	return x
}
