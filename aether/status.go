package aether

import (
	"context"
	"errors"
	"time"

	"dsec/aether/msg"
	"dsec/api/v1/errs"
)

// ToStatus converts an error for the wire; nil stays nil.
func ToStatus(err error) *msg.Status {
	if err == nil {
		return nil
	}
	e := errs.Of(err)
	s := &msg.Status{
		Code: string(e.Code), Phase: e.Phase, Message: e.Message, Node: e.Node, Sandbox: e.Sandbox,
		Retryable: e.Retryable, Infra: e.Infra, Details: e.Details,
	}
	if e.RetryAfter > 0 {
		s.RetryAfterMs = uint64(max(1, e.RetryAfter.Milliseconds()))
	}
	if e.Cause != nil {
		s.Cause = e.Cause.Error()
	}
	return s
}

// FromStatus rebuilds the error that ToStatus converted; nil stays nil.
func FromStatus(s *msg.Status) error {
	if s == nil {
		return nil
	}
	return fromStatus(s)
}

func fromStatus(s *msg.Status) *errs.Error {
	e := &errs.Error{
		Code: errs.Code(s.Code), Phase: s.Phase, Message: s.Message, Node: s.Node, Sandbox: s.Sandbox,
		Retryable: s.Retryable, Infra: s.Infra, Details: s.Details,
		RetryAfter: time.Duration(min(s.RetryAfterMs, uint64(1)<<40)) * time.Millisecond,
	}
	if e.Code == "" {
		e.Code = errs.InternalError
	}
	if s.Cause != "" {
		e.Cause = errors.New(s.Cause)
	}
	return e
}

// ctxError names the end of ctx in the words of the error table.
func ctxError(ctx context.Context, phase string) *errs.Error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return errs.New(errs.DeadlineExceeded, phase, "the deadline has passed").Because(context.DeadlineExceeded)
	}
	return errs.New(errs.RequestCanceled, phase, "the request was canceled").Because(context.Canceled)
}
