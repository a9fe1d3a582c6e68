package v1

import (
	"fmt"
	"slices"
	"strings"

	"dsec/api/v1/errs"
)

// Defaults and limits of a Spec.
const (
	DefaultCPUMillis   = 1000
	DefaultMemoryBytes = 512 << 20
	DefaultPIDs        = 1024
	// MinMemoryBytes is what a guest and a small command need to start; below it a
	// sandbox would only die of OOM.
	MinMemoryBytes = 16 << 20
	MinPIDs        = 16
	MaxPIDs        = 4 << 20 // the most that Linux can have
	MaxPriority    = 1000
	MinIdle        = 1                // second: below it a sandbox would be idle between two commands
	MinLease       = 1                // second: below it a client that is only slow would lose its sandbox
	MaxTime        = 10 * 365 * 86400 // seconds of a lease or time to live, far from what overflows
	maxEnvBytes    = 256 << 10
	maxLabels      = 64
	maxToolkits    = 32
)

// SetDefaults fills what is zero.
func (s *Spec) SetDefaults() {
	if s.Backend == "" {
		s.Backend = BackendContainer
	}
	if s.CPUMillis == 0 {
		s.CPUMillis = DefaultCPUMillis
	}
	if s.MemoryBytes == 0 {
		s.MemoryBytes = DefaultMemoryBytes
	}
	if s.PIDs == 0 {
		s.PIDs = DefaultPIDs
	}
	if s.QoS == "" {
		s.QoS = QoSLatency
	}
	if s.OnIdle == "" && s.IdleTTL > 0 {
		s.OnIdle = OnIdleStop
	}
}

// MaxIdempotencyKey is the length of the longest key.
const MaxIdempotencyKey = 255

// CheckIdempotencyKey checks a key that was given: 1 to 255 visible ASCII characters,
// without quotation mark and backslash.
func CheckIdempotencyKey(key string) error {
	bad := func(why string) error {
		return errs.New(errs.BadRequest, "idempotency_key", "Idempotency-Key: "+why+"; a key has 1 to 255 visible ASCII characters, without quotation mark and backslash").
			With("field", "Idempotency-Key")
	}
	switch {
	case key == "":
		return bad("it is empty")
	case len(key) > MaxIdempotencyKey:
		return bad(fmt.Sprintf("it has %d characters", len(key)))
	}
	for i, c := range []byte(key) {
		if c <= ' ' || c >= 0x7f || c == '"' || c == '\\' {
			return bad(fmt.Sprintf("byte %d is %#02x", i, c))
		}
	}
	return nil
}

// Validate checks a spec after SetDefaults. Errors are of class Invalid and name the field.
func (s *Spec) Validate() error {
	bad := badSpec
	switch s.Backend {
	case BackendContainer, BackendHollow:
	default:
		return UnknownBackend("spec.validate", string(s.Backend))
	}
	if s.Image == "" && s.Backend != BackendHollow {
		return bad("image", "is required")
	}
	if s.Image == "" && (s.Workspace != "" || len(s.Toolkits) > 0) {
		return bad("image", "a workspace and toolkits lie over a base image")
	}
	if len(s.Toolkits) > maxToolkits {
		return bad("toolkits", "%d; at most %d", len(s.Toolkits), maxToolkits)
	}
	if slices.Contains(s.Toolkits, "") {
		return bad("toolkits", "holds an empty name")
	}
	if s.QoS != QoSLatency && s.QoS != QoSBest {
		return bad("qos", "%q is neither %s nor %s", s.QoS, QoSLatency, QoSBest)
	}
	if s.Priority < -MaxPriority || s.Priority > MaxPriority {
		return bad("priority", "%d is not between %d and %d", s.Priority, -MaxPriority, MaxPriority)
	}
	if s.IdleTTL != 0 && !(s.IdleTTL >= MinIdle && s.IdleTTL <= MaxTime) {
		return bad("idle_ttl_s", "%v is neither 0 nor between %d and %d", float64(s.IdleTTL), MinIdle, MaxTime)
	}
	switch {
	case s.OnIdle == "" || s.OnIdle == OnIdleStop || s.OnIdle == OnIdlePause:
	default:
		return bad("on_idle", "%q is neither %s nor %s", s.OnIdle, OnIdleStop, OnIdlePause)
	}
	if s.OnIdle != "" && s.IdleTTL == 0 {
		return bad("on_idle", "needs idle_ttl_s, after which it happens")
	}
	if s.MemoryBytes < MinMemoryBytes {
		return bad("memory_bytes", "%d is below the %d (%d MiB) that a sandbox needs to start", s.MemoryBytes, int64(MinMemoryBytes), MinMemoryBytes>>20)
	}
	if s.CPUMillis < 10 {
		return bad("cpu_millis", "%d is below the minimum of 10", s.CPUMillis)
	}
	if s.PIDs < MinPIDs {
		return bad("pids", "%d is below the %d that a sandbox needs to start", s.PIDs, int64(MinPIDs))
	}
	if s.PIDs > MaxPIDs {
		return bad("pids", "%d is above the %d that Linux can have", s.PIDs, int64(MaxPIDs))
	}
	if strings.Contains(s.User, "\x00") {
		return bad("user", "%q has a zero byte", s.User)
	}
	if strings.Contains(s.WorkDir, "\x00") {
		return bad("work_dir", "%q has a zero byte", s.WorkDir)
	}
	if s.WorkDir != "" && !strings.HasPrefix(s.WorkDir, "/") {
		return bad("work_dir", "%q is not absolute", s.WorkDir)
	}
	if !(s.MaxTTL >= 0 && s.MaxTTL <= MaxTime) { // a NaN is neither
		return bad("max_ttl_s", "%g is not between 0 and %d s (10 years)", float64(s.MaxTTL), int64(MaxTime))
	}
	if !(s.Lease <= MaxTime) {
		return bad("lease_s", "%g is above the maximum of %d s (10 years)", float64(s.Lease), int64(MaxTime))
	}
	if s.Lease < 0 || s.Lease > 0 && s.Lease < MinLease {
		return bad("lease_s", "%g is below the minimum of %d s", float64(s.Lease), MinLease)
	}
	if !validHostname(s.Hostname) {
		return bad("hostname", "%q is not a host name (letters, digits, '-', at most 63)", s.Hostname)
	}
	if err := CheckEnv("env", s.Env); err != nil {
		return err
	}
	if len(s.Labels) > maxLabels {
		return bad("labels", "%d; at most %d", len(s.Labels), maxLabels)
	}
	for k, v := range s.Labels {
		if k == "" || len(k) > 63 || len(v) > 255 || strings.ContainsAny(k, "=,") {
			return bad("labels", "%q=%q: keys have 1-63 characters without '=' and ',', values at most 255", k, v)
		}
	}
	return nil
}

// UnknownBackend is the error for a backend that this version does not have.
func UnknownBackend(phase, name string) *errs.Error {
	what := "there is no backend %.100q"
	switch Backend(name) {
	case BackendMicroVM, BackendFullVM, BackendFnCall:
		what = "the backend %q is not in this version"
	}
	return errs.New(errs.UnknownBackend, phase, fmt.Sprintf(what+"; use container or hollow", name)).With("field", "backend")
}

func validHostname(h string) bool {
	if len(h) > 63 || strings.HasPrefix(h, "-") || strings.HasSuffix(h, "-") {
		return false
	}
	for _, c := range h {
		if (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && (c < '0' || c > '9') && c != '-' {
			return false
		}
	}
	return true
}

// CheckEnv refuses variables that no process can have. The error has no values.
func CheckEnv(field string, env map[string]string) error {
	total := 0
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.Contains(v, "\x00") {
			return badSpec(field, "%q is not a usable variable", k)
		}
		total += len(k) + len(v)
	}
	if total > maxEnvBytes {
		return badSpec(field, "%d bytes; at most %d", total, maxEnvBytes)
	}
	return nil
}

func badSpec(field, format string, args ...any) error {
	return errs.New(errs.BadSpec, "spec.validate", field+": "+fmt.Sprintf(format, args...)).With("field", field)
}
