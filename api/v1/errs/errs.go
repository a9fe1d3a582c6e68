// Package errs is the platform's one table of errors.
//
// Every failure that leaves a component carries a [Code] of this table: a stable
// string, its [Class], the HTTP status it maps to, whether repeating the request
// can help, and whether the platform (not the user's program) is to blame, so that
// a trainer can mask the result instead of scoring it. The same Error travels over
// HTTP and Aether and is rebuilt at the client, so errors.Is(err, errs.NodeFull)
// and errors.Is(err, errs.NotFound) hold on both sides of the wire.
//
// The package imports nothing but the standard library's small packages: the guest
// links it.
package errs

import (
	"context"
	"errors"
	"maps"
	"strings"
	"time"
)

// Class groups codes; it is an error so that errors.Is can match on it.
type Class string

// Classes.
const (
	Invalid         Class = "invalid"
	Unauthenticated Class = "unauthenticated"
	Forbidden       Class = "forbidden"
	NotFound        Class = "not_found"
	Gone            Class = "gone"
	Lost            Class = "lost"
	Conflict        Class = "conflict"
	TooLarge        Class = "too_large"
	Capacity        Class = "capacity"
	NoSpace         Class = "no_space"
	Unavailable     Class = "unavailable"
	Deadline        Class = "deadline"
	Canceled        Class = "canceled"
	Unsupported     Class = "unsupported"
	Corrupt         Class = "corrupt"
	Internal        Class = "internal"
)

func (c Class) Error() string { return string(c) }

// Code names one kind of failure. It is an error so that errors.Is can match on it.
type Code string

func (c Code) Error() string { return string(c) }

// Codes. Their properties are in [Table].
const (
	BadRequest        Code = "bad_request"
	BadSpec           Code = "bad_spec"
	SpecTooLarge      Code = "spec_too_large"
	UnknownBackend    Code = "unknown_backend"
	UserNotFound      Code = "user_not_found"
	CwdNotFound       Code = "cwd_not_found"
	BadPath           Code = "bad_path"
	NotDirectory      Code = "not_directory"
	IsDirectory       Code = "is_directory"
	LocalFile         Code = "local_file"
	BadToken          Code = "bad_token"
	MissingRight      Code = "missing_right"
	PermissionDenied  Code = "permission_denied"
	SandboxNotFound   Code = "sandbox_not_found"
	SandboxGone       Code = "sandbox_gone"
	SandboxLost       Code = "sandbox_lost"
	SandboxNotRunning Code = "sandbox_not_running"
	ImageNotFound     Code = "image_not_found"
	ImageInUse        Code = "image_in_use"
	ImageCorrupt      Code = "image_corrupt"
	ImageUnsupported  Code = "image_unsupported"
	BuildFailed       Code = "build_failed"
	ObjectNotFound    Code = "object_not_found"
	StoreUnavailable  Code = "store_unavailable"
	StoreDenied       Code = "store_denied"
	StoreCorrupt      Code = "store_corrupt"
	LeaseLost         Code = "lease_lost"
	RegistryDenied    Code = "registry_denied"
	RegistryNotFound  Code = "registry_not_found"
	RegistryBusy      Code = "registry_busy"
	RegistryDown      Code = "registry_unavailable"
	NodeNotFound      Code = "node_not_found"
	TokenNotFound     Code = "token_not_found"
	ProcessNotFound   Code = "process_not_found"
	ProcessExited     Code = "process_exited"
	SessionNotFound   Code = "session_not_found"
	SessionBusy       Code = "session_busy"
	SessionEnded      Code = "session_ended"
	PathNotFound      Code = "path_not_found"
	PathExists        Code = "path_exists"
	TagInUse          Code = "tag_in_use"
	NameInUse         Code = "name_in_use"
	CommandNotFound   Code = "command_not_found"
	CommandNotExec    Code = "command_not_executable"
	SandboxLimit      Code = "sandbox_limit"
	TokenLimit        Code = "token_limit"
	PortClosed        Code = "port_closed"
	IdempotencyReuse  Code = "idempotency_key_reused"
	RevisionCompacted Code = "revision_compacted"
	StateConflict     Code = "state_conflict"
	NodeRunning       Code = "node_running"
	AddressInUse      Code = "address_in_use"
	DataUnsuitable    Code = "data_unsuitable"
	DataCorrupt       Code = "data_corrupt"
	BodyTooLarge      Code = "body_too_large"
	NodeFull          Code = "node_full"
	NoNode            Code = "no_node"
	DiskFull          Code = "disk_full"
	SwapFull          Code = "swap_full"
	BackendUnusable   Code = "backend_unusable"
	EdgeUnreachable   Code = "edge_unreachable"
	GuestUnreachable  Code = "guest_unreachable"
	ShuttingDown      Code = "shutting_down"
	DeadlineExceeded  Code = "deadline_exceeded"
	RequestCanceled   Code = "request_canceled"
	ConnectionLost    Code = "connection_lost"
	ServerUnreachable Code = "server_unreachable"
	ProtocolError     Code = "protocol_error"
	RouteNotFound     Code = "route_not_found"
	MethodNotAllowed  Code = "method_not_allowed"
	UnknownMethod     Code = "unknown_method"
	NotSupported      Code = "not_supported"
	InternalError     Code = "internal_error"
)

// Row is one line of the table.
type Row struct {
	Code      Code
	Class     Class
	HTTP      int
	Retryable bool   // the same request may succeed later or elsewhere
	Infra     bool   // the platform's fault: never score it
	Hint      string // what the user can do
}

// Table holds every code; see [Lookup].
var Table = []Row{
	{BadRequest, Invalid, 400, false, false, "correct the request; the message names the field"},
	{BadSpec, Invalid, 400, false, false, "correct the sandbox spec; the message names the field"},
	{SpecTooLarge, Invalid, 400, false, false, "ask for no more than the message says; 'dsec node ls' shows what nodes have"},
	{UnknownBackend, Invalid, 400, false, false, "use a backend that 'dsec doctor' lists as usable"},
	{UserNotFound, Invalid, 400, false, false, "name a user of the image's /etc/passwd, or a numeric uid"},
	{CwdNotFound, Invalid, 400, false, false, "create the directory first or choose another --cwd"},
	{BadPath, Invalid, 400, false, false, "use an absolute path inside the sandbox"},
	{NotDirectory, Invalid, 400, false, false, "the path names a file; name a directory"},
	{IsDirectory, Invalid, 400, false, false, "the path names a directory; name a file, or copy it as a tree"},
	{LocalFile, Invalid, 400, false, false, "it is a path of this machine, not of the sandbox: look whether it exists and who may use it"},
	{BadToken, Unauthenticated, 401, false, false, "set DSEC_TOKEN or use the context file that 'dsec up' wrote"},
	{MissingRight, Forbidden, 403, false, false, "use a token that has the right named in the message"},
	{PermissionDenied, Forbidden, 403, false, false, "the file's mode or owner forbids it; change it or act as another user"},
	{SandboxNotFound, NotFound, 404, false, false, "check the id with 'dsec ls'"},
	{SandboxGone, Gone, 410, false, false, "the sandbox was removed; create a new one"},
	{SandboxLost, Lost, 410, true, true, "the node restarted and its sandboxes are lost; create a new one"},
	{SandboxNotRunning, Conflict, 409, false, false, "look at its state with 'dsec inspect'"},
	{ImageNotFound, NotFound, 404, false, false, "list images with 'dsec image ls'; 'dsec image import' or 'dsec image build' makes one"},
	{ImageInUse, Conflict, 409, false, false, "remove what needs it first; the message lists it"},
	{ImageCorrupt, Corrupt, 422, false, false, "the source, or what is stored of it, is damaged; make or fetch it again, and import it"},
	{ImageUnsupported, Unsupported, 422, false, false, "import a directory, tar, docker-archive or OCI layout"},
	{BuildFailed, Invalid, 422, false, false, "its output says why; correct the recipe or what it needs"},
	{ObjectNotFound, NotFound, 404, false, true, "the blob store no longer has it; make or import the image again"},
	{StoreUnavailable, Unavailable, 503, true, true, "the blob store does not answer or is too busy; retry, or look at it"},
	{StoreDenied, Unavailable, 503, false, true, "the blob store refuses the node's credentials; correct them or its access rules"},
	{StoreCorrupt, Corrupt, 502, false, true, "the blob store returned damaged data; nothing of it was used; make or import the image again"},
	{LeaseLost, Conflict, 409, true, true, "writing took longer than the store could wait for; do it again"},
	{RegistryDenied, Forbidden, 403, false, false, "give the registry's user name and password or token; they need the right that the message names"},
	{RegistryNotFound, NotFound, 404, false, false, "check the image's name and tag; a private one needs credentials"},
	{RegistryBusy, Unavailable, 503, true, true, "the registry limits requests: wait for the retry-after time, or give credentials with a higher limit"},
	{RegistryDown, Unavailable, 502, true, true, "the registry does not answer or breaks off; check its address and the network, then retry"},
	{NodeNotFound, NotFound, 404, false, false, "list nodes with 'dsec node ls'; 'dsec up' starts one"},
	{TokenNotFound, NotFound, 404, false, false, "list tokens with 'dsec token ls'"},
	{ProcessNotFound, NotFound, 404, false, false, "list processes with 'dsec ps ID'"},
	{ProcessExited, Conflict, 409, false, false, "the process has ended; attach to read its output"},
	{SessionNotFound, NotFound, 404, false, false, "open the session first"},
	{SessionBusy, Conflict, 409, true, false, "a session runs one command at a time; wait or open another"},
	{SessionEnded, Gone, 410, false, false, "the session's shell has ended; open a new one"},
	{PathNotFound, NotFound, 404, false, false, "check the path; it is resolved inside the sandbox"},
	{PathExists, Conflict, 409, false, false, "remove it first or choose another path"},
	{TagInUse, Conflict, 409, false, false, "choose another tag, or attach to the process that has it"},
	{NameInUse, Conflict, 409, false, false, "choose another name, or remove what has it"},
	{CommandNotFound, Invalid, 422, false, false, "check the command and PATH; the image may not have it"},
	{CommandNotExec, Invalid, 422, false, false, "the file lacks the x bit or its format is foreign"},
	{SandboxLimit, Conflict, 409, true, false, "the sandbox is at its limit of processes or memory; end some, or create it with more"},
	{TokenLimit, Capacity, 429, true, false, "the token has as much open as one token may have: end some of it, wait, or use a token of its own for each job"},
	{PortClosed, Unavailable, 502, true, false, "nothing listens on the port yet"},
	{IdempotencyReuse, Conflict, 409, false, false, "the key was used with another request; use a new key"},
	{RevisionCompacted, Gone, 410, true, false, "list again and watch from the revision it returns"},
	{StateConflict, Conflict, 409, true, false, "another operation changed the state; read it and retry"},
	{NodeRunning, Conflict, 409, false, false, "use it; or stop it with 'dsec down', or use another --data"},
	{AddressInUse, Conflict, 409, false, false, "another program listens there: stop it, or choose another address"},
	{DataUnsuitable, Unsupported, 501, false, false, "choose a --data on a disk, such as ext4 or xfs"},
	{DataCorrupt, Corrupt, 500, false, true, "the message says what is lost, and the command that starts anew without it"},
	{BodyTooLarge, TooLarge, 413, false, false, "send it as a stream, or in parts below the limit"},
	{NodeFull, Capacity, 503, true, true, "wait for the retry-after time or remove sandboxes"},
	{NoNode, Unavailable, 503, true, true, "no node is ready, or none has the backend; see 'dsec node ls' and 'dsec doctor'"},
	{DiskFull, NoSpace, 507, true, true, "free disk space in the data directory"},
	{SwapFull, NoSpace, 507, true, true, "resume or remove paused sandboxes, or start the server with more --swap"},
	{BackendUnusable, Unavailable, 503, true, true, "the server's log and 'dsec doctor' say why the backend does not work; mend it and restart the server with 'dsec down --keep' and 'dsec up'"},
	{EdgeUnreachable, Unavailable, 502, true, true, "the node does not answer; retry or look at it"},
	{GuestUnreachable, Unavailable, 502, true, true, "the sandbox's guest does not answer; inspect the sandbox"},
	{ShuttingDown, Unavailable, 503, true, true, "the server is stopping; retry"},
	{DeadlineExceeded, Deadline, 504, true, false, "allow more time"},
	{RequestCanceled, Canceled, 499, true, false, "the caller went away"},
	{ConnectionLost, Unavailable, 502, true, true, "the connection broke; retry, or re-attach from an offset"},
	{ServerUnreachable, Unavailable, 502, true, true, "start a server with 'dsec up --detach', or name a running one with DSEC_URL or --url"},
	{ProtocolError, Invalid, 400, false, false, "the peer broke the protocol; check versions"},
	{RouteNotFound, NotFound, 404, false, false, "check the path against /openapi.json"},
	{MethodNotAllowed, Invalid, 405, false, false, "use a method that the Allow header names"},
	{UnknownMethod, Unsupported, 501, false, false, "the server does not have this operation; check versions"},
	{NotSupported, Unsupported, 501, false, false, "this backend or kernel cannot do it; see 'dsec doctor'"},
	{InternalError, Internal, 500, true, true, "retry; if it stays, the server's log has the cause"},
}

var byCode = func() map[Code]*Row {
	m := make(map[Code]*Row, len(Table))
	for i := range Table {
		m[Table[i].Code] = &Table[i]
	}
	return m
}()

// Lookup returns the row of c; an unknown code (a newer server's) reads as internal_error.
func Lookup(c Code) Row {
	if r, ok := byCode[c]; ok {
		return *r
	}
	return *byCode[InternalError]
}

// Error is one failure with everything a caller may act on.
type Error struct {
	Code       Code
	Phase      string // the step that failed, such as "edge.admit"
	Message    string // for people
	Node       string
	Sandbox    string
	Retryable  bool
	Infra      bool
	RetryAfter time.Duration
	Details    map[string]string
	Cause      error // for the log; its text travels, its type does not
}

// New makes an Error with the code's defaults. Phase is the step, such as "edge.admit".
func New(code Code, phase, message string) *Error {
	r := Lookup(code)
	return &Error{Code: code, Phase: phase, Message: message, Retryable: r.Retryable, Infra: r.Infra}
}

// Wrap is New with a cause. It returns err unchanged if it already is an *Error, so
// the innermost (most precise) code wins; nil stays nil; context errors keep their meaning.
func Wrap(code Code, phase, message string, err error) error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return err
	}
	switch {
	case errors.Is(err, context.DeadlineExceeded):
		code = DeadlineExceeded
	case errors.Is(err, context.Canceled):
		code = RequestCanceled
	}
	e = New(code, phase, message)
	e.Cause = err
	return e
}

// Of returns the *Error inside err, or wraps err as internal_error (context errors
// as theirs). Of(nil) is nil.
func Of(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	errors.As(Wrap(InternalError, "", "unexpected failure", err), &e)
	return e
}

// With adds one detail and returns e.
func (e *Error) With(key, value string) *Error {
	if e.Details == nil {
		e.Details = map[string]string{}
	}
	e.Details[key] = value
	return e
}

// After sets the time after which a retry makes sense and returns e.
func (e *Error) After(d time.Duration) *Error { e.RetryAfter = d; return e }

// Because sets the cause and returns e.
func (e *Error) Because(err error) *Error { e.Cause = err; return e }

// Class returns the class of e's code.
func (e *Error) Class() Class { return Lookup(e.Code).Class }

// Advise sets a hint that fits better than the one of e's code, and returns e.
func (e *Error) Advise(hint string) *Error { return e.With(hintKey, hint) }

// hintKey is the detail that holds a hint of its own, so that it travels.
const hintKey = "hint"

// Facts are the details without the hint.
func (e *Error) Facts() map[string]string {
	if e.Details[hintKey] == "" {
		return e.Details
	}
	facts := maps.Clone(e.Details)
	if delete(facts, hintKey); len(facts) == 0 {
		return nil
	}
	return facts
}

// Hint returns what the user can do.
func (e *Error) Hint() string {
	if h := e.Details[hintKey]; h != "" {
		return h
	}
	return Lookup(e.Code).Hint
}

// Error renders "phase: message: cause (code)".
func (e *Error) Error() string {
	var b strings.Builder
	if e.Phase != "" {
		b.WriteString(e.Phase)
		b.WriteString(": ")
	}
	b.WriteString(e.Message)
	if e.Cause != nil {
		b.WriteString(": ")
		b.WriteString(e.Cause.Error())
	}
	b.WriteString(" (")
	b.WriteString(string(e.Code))
	b.WriteString(")")
	return b.String()
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Is matches a Code or a Class.
func (e *Error) Is(target error) bool {
	switch t := target.(type) {
	case Code:
		return e.Code == t
	case Class:
		return e.Class() == t
	}
	return false
}
