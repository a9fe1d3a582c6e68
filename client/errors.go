package client

import (
	"errors"
	"fmt"
	"strconv"
	"strings"

	v1 "dsec/api/v1"
	"dsec/api/v1/errs"
)

// The types of api/v1 that callers meet most.
type (
	Spec  = v1.Spec
	Image = v1.Image
	Node  = v1.Node
	Token = v1.Token
	Event = v1.Event
	// Error is a failure as the platform reports it.
	Error = errs.Error
)

// Classes of errors, for errors.Is. Codes are in api/v1/errs.
const (
	ErrInvalid         = errs.Invalid
	ErrUnauthenticated = errs.Unauthenticated
	ErrForbidden       = errs.Forbidden
	ErrNotFound        = errs.NotFound
	ErrGone            = errs.Gone
	ErrLost            = errs.Lost
	ErrConflict        = errs.Conflict
	ErrCapacity        = errs.Capacity
	ErrUnavailable     = errs.Unavailable
	ErrDeadline        = errs.Deadline
)

// ErrorOf returns what the platform said about err; an error that is not the
// platform's reads as internal_error. ErrorOf(nil) is nil.
func ErrorOf(err error) *Error { return errs.Of(err) }

// about says what was tried on what, unless err does so itself.
func about(action, what string, err error) error {
	var e *errs.Error
	if what != "" && errors.As(err, &e) && (strings.Contains(e.Message, strconv.Quote(what)) || strings.Contains(e.Message+" ", " "+what+" ")) {
		return err
	}
	if what == "" { // the server was to choose the name
		return fmt.Errorf("%s: %w", action, err)
	}
	return fmt.Errorf("%s %s: %w", action, what, err)
}
