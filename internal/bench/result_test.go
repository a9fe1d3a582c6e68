package bench

import (
	"testing"
	"time"
)

func TestLatenciesByNearestRank(t *testing.T) {
	t.Parallel()
	var all []time.Duration
	for i := 100; i >= 1; i-- {
		all = append(all, time.Duration(i)*time.Millisecond)
	}
	if got, want := latencies(all), (Latency{50, 90, 99, 100}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got, want := latencies([]time.Duration{time.Millisecond}), (Latency{1, 1, 1, 1}); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := latencies(nil); got != (Latency{}) {
		t.Errorf("of nothing: %+v", got)
	}
}

func TestParseMetric(t *testing.T) {
	t.Parallel()
	text := []byte("# HELP x y\nxx 1\nx{a=\"b\"} 2\nx 3.5e6 1700000000\n")
	if v, err := parseMetric(text, "x"); err != nil || v != 3.5e6 {
		t.Errorf("%g, %v", v, err)
	}
	if _, err := parseMetric(text, "y"); err == nil {
		t.Error("a metric that is not there was found")
	}
}

func TestSlope(t *testing.T) {
	t.Parallel()
	of := func(s ServerSample) float64 { return s.Heap }
	var rising, level []ServerSample
	for i := range 5 {
		rising = append(rising, ServerSample{Cycles: 100 * i, Heap: 50 + float64(300*i)})
		level = append(level, ServerSample{Cycles: 100 * i, Heap: 50})
	}
	if got := slope(rising, of); got < 2.999 || got > 3.001 {
		t.Errorf("%g for each cycle, want 3", got)
	}
	for _, s := range [][]ServerSample{level, level[:1], nil} {
		if got := slope(s, of); got != 0 {
			t.Errorf("%g of %v", got, s)
		}
	}
}

// A machine that becomes slower from round to round does not make a ratio.
func TestRatioOfRounds(t *testing.T) {
	t.Parallel()
	round := func(ms ...int) (out []time.Duration) {
		for _, n := range ms {
			out = append(out, time.Duration(n)*time.Millisecond)
		}
		return out
	}
	empty := [][]time.Duration{round(10, 10, 99), round(20, 20, 20), round(40, 40, 40)}
	hogs := [][]time.Duration{round(11, 11, 11), round(22, 22, 22), round(60, 60, 60)}
	if got := ratioOfRounds(hogs, empty); got < 1.0999 || got > 1.1001 {
		t.Errorf("%g, want 1.1", got)
	}
	if got := ratioOfRounds(hogs[:2], [][]time.Duration{round(10), round(20, 20, 20)}); got < 1.0999 || got > 1.1001 {
		t.Errorf("%g", got)
	}
	if got := ratioOfRounds(hogs, [][]time.Duration{nil, {}}); got != 0 {
		t.Errorf("of nothing: %g", got)
	}
}
