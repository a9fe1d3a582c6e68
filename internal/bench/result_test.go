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
