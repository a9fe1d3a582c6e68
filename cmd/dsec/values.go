package main

import (
	"strconv"
	"strings"
	"time"

	"dsec/client"
	"dsec/internal/swap"
)

// bytesValue is a flag such as 512MiB, 1g or 1048576. Units are powers of 1024.
type bytesValue int64

func (v *bytesValue) String() string {
	if *v == 0 {
		return ""
	}
	return size(int64(*v))
}

func (v *bytesValue) Type() string { return "size" }

func (v *bytesValue) Set(s string) error {
	n, err := parseBytes(s)
	if err == nil {
		*v = bytesValue(n)
	}
	return err
}

func parseBytes(s string) (int64, error) {
	num := strings.TrimRight(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
	unit := strings.ToLower(strings.TrimSpace(s[len(num):]))
	f, err := strconv.ParseFloat(strings.TrimSpace(num), 64)
	if err != nil || f < 0 {
		return 0, usagef("%q is not a size; write it like 512MiB or 1g", s)
	}
	unit = strings.TrimSuffix(strings.TrimSuffix(unit, "b"), "i")
	shift, ok := map[string]uint{"": 0, "k": 10, "m": 20, "g": 30, "t": 40}[unit]
	f *= float64(uint64(1) << shift)
	if !ok || f >= 1<<63 {
		return 0, usagef("%q is not a size; write it like 512MiB or 1g", s)
	}
	return int64(f), nil
}

// swapValue is a kind of swap, with a size for those that have one: file:16GiB.
type swapValue swap.Option

func swapKinds() (names []string) {
	for _, k := range swap.Kinds() {
		names = append(names, string(k))
	}
	return names
}

func (v *swapValue) String() string {
	if v.Bytes == 0 {
		return string(v.Kind)
	}
	return string(v.Kind) + ":" + size(v.Bytes)
}

func (v *swapValue) Type() string { return "where" }

func (v *swapValue) Set(s string) error {
	kind, bytes, sized := strings.Cut(s, ":")
	o := swap.Option{Kind: swap.Kind(kind)}
	if sized {
		n, err := parseBytes(bytes)
		if err != nil {
			return err
		}
		if n == 0 {
			return usagef("%q: a size of 0 is none; write it like 16GiB", s)
		}
		o.Bytes = n
	}
	if err := o.Check(); err != nil {
		return usagef("%q: %v; write auto, none, host, file:SIZE or zram:SIZE", s, err)
	}
	*v = swapValue(o)
	return nil
}

// durationValue is a flag such as 90s or 1h30m. A number without a unit is refused: whether
// it would mean seconds or something else is anybody's guess.
type durationValue time.Duration

func newDuration(d *time.Duration) *durationValue { return (*durationValue)(d) }

func (v *durationValue) String() string {
	if *v == 0 {
		return ""
	}
	return time.Duration(*v).String()
}

func (v *durationValue) Type() string { return "duration" }

func (v *durationValue) Set(s string) error {
	d, err := time.ParseDuration(s)
	if err != nil {
		if _, nerr := strconv.ParseFloat(s, 64); nerr == nil {
			return usagef("%q has no unit; write %ss for seconds", s, s)
		}
		return usagef("%q is not a duration; write it like 30s, 5m or 1h30m", s)
	}
	if d < 0 {
		return usagef("it must not be negative")
	}
	*v = durationValue(d)
	return nil
}

// sinceValue is a flag that names a moment: so long ago, or a date.
type sinceValue struct {
	ago time.Duration
	at  time.Time
}

func (v *sinceValue) String() string {
	switch {
	case v.ago > 0:
		return v.ago.String()
	case !v.at.IsZero():
		return v.at.Format(time.RFC3339)
	}
	return ""
}

func (v *sinceValue) Type() string { return "time" }

func (v *sinceValue) Set(s string) error {
	*v = sinceValue{}
	for _, layout := range []string{time.RFC3339Nano, time.DateTime, time.DateOnly} {
		if at, err := time.Parse(layout, s); err == nil {
			v.at = at
			return nil
		}
	}
	if err := newDuration(&v.ago).Set(s); err != nil {
		return usagef("%q is neither a time before now, such as 10m, nor a date, such as 2026-01-02T15:04:05Z (UTC unless it says so)", s)
	}
	return nil
}

// before is the moment, seen from now.
func (v *sinceValue) before(now time.Time) time.Time {
	if v.ago > 0 {
		return now.Add(-v.ago)
	}
	return v.at
}

// cpuValue is a flag such as 2, 0.5 or 500m, in thousandths of a core.
type cpuValue int64

func (v *cpuValue) String() string {
	if *v == 0 {
		return ""
	}
	return strconv.FormatFloat(float64(*v)/1000, 'g', -1, 64)
}

func (v *cpuValue) Type() string { return "cores" }

func (v *cpuValue) Set(s string) error {
	num, milli := strings.CutSuffix(s, "m")
	f, err := strconv.ParseFloat(num, 64)
	if !milli {
		f *= 1000
	}
	if err != nil || f < 0 || f > 1e9 {
		return usagef("%q is not a number of cores; write it like 2, 0.5 or 500m", s)
	}
	*v = cpuValue(f)
	return nil
}

// keyValues parses repeated k=v flags. A value without "=" is an error.
func keyValues(flag string, in []string) (map[string]string, error) {
	if len(in) == 0 {
		return nil, nil
	}
	m := make(map[string]string, len(in))
	for _, s := range in {
		k, v, ok := strings.Cut(s, "=")
		if !ok || k == "" {
			return nil, usagef("--%s %q is not of the form key=value", flag, s)
		}
		m[k] = v
	}
	return m, nil
}

// selector reads a process argument: digits are a pid, all else a tag.
func selector(s string) client.Selector {
	if n, err := strconv.ParseUint(s, 10, 32); err == nil && n > 0 {
		return client.Selector{PID: uint32(n)}
	}
	return client.Selector{Tag: s}
}
