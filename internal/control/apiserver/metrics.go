package apiserver

import (
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"dsec/api/v1/errs"
)

// metrics of one server, on its own registry.
type metrics struct {
	inFlight  prometheus.Gauge
	requests  *prometheus.CounterVec
	latency   *prometheus.HistogramVec
	creates   *prometheus.CounterVec
	createSec prometheus.Histogram
	frozen    prometheus.Histogram
	relays    prometheus.Gauge
	streams   *prometheus.CounterVec
	reaps     *prometheus.CounterVec
}

func newMetrics(s *Server, reg *prometheus.Registry) *metrics {
	buckets := prometheus.ExponentialBuckets(0.0005, 2, 18) // 0.5 ms to 65 s
	m := &metrics{
		inFlight: prometheus.NewGauge(prometheus.GaugeOpts{Name: "dsec_http_requests_in_flight", Help: "Requests being answered."}),
		requests: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_http_requests_total", Help: "Requests by route and status."}, []string{"route", "status"}),
		latency: prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "dsec_http_request_seconds", Help: "Time to the end of the answer, by route.", Buckets: buckets},
			[]string{"route"}),
		creates: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_creates_total", Help: "Creates by result; the reason of a failure is its code."},
			[]string{"result", "reason"}),
		createSec: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "dsec_create_seconds", Help: "Time of successful creates in the control plane and the edge.", Buckets: buckets}),
		frozen:    prometheus.NewHistogram(prometheus.HistogramOpts{Name: "dsec_snapshot_frozen_seconds", Help: "The longest time that a sandbox stood still for a snapshot.", Buckets: buckets}),
		relays:    prometheus.NewGauge(prometheus.GaugeOpts{Name: "dsec_aether_connections", Help: "Aether connections of clients."}),
		streams:   prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_aether_streams_total", Help: "Aether streams of clients by group of methods and result of the routing."}, []string{"group", "result"}),
		reaps:     prometheus.NewCounterVec(prometheus.CounterOpts{Name: "dsec_reaps_total", Help: "Removals of sandboxes whose create was given up, by result."}, []string{"result"}),
	}
	reg.MustRegister(m.inFlight, m.requests, m.latency, m.creates, m.createSec, m.frozen, m.relays, m.streams, m.reaps,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
		&stateCollector{s: s,
			sandboxes: prometheus.NewDesc("dsec_sandboxes", "Sandboxes by state.", []string{"state"}, nil),
			edges:     prometheus.NewDesc("dsec_edges", "Registered edges by readiness.", []string{"ready"}, nil),
			upstream:  prometheus.NewDesc("dsec_edge_streams", "Open Aether streams to edges.", nil, nil),
			revision:  prometheus.NewDesc("dsec_registry_revision", "Newest revision of the registry.", nil, nil),
		})
	return m
}

func (m *metrics) request(route string, status int, took time.Duration) {
	if route == "" || route == "/" {
		route = "none" // never the client's own text
	}
	m.requests.WithLabelValues(route, strconv.Itoa(status)).Inc()
	m.latency.WithLabelValues(route).Observe(took.Seconds())
}

func (m *metrics) create(err error, took time.Duration) {
	if err != nil {
		m.creates.WithLabelValues("error", string(errs.Of(err).Code)).Inc()
		return
	}
	m.creates.WithLabelValues("ok", "").Inc()
	m.createSec.Observe(took.Seconds())
}

// stateCollector reads the registry when it is scraped.
type stateCollector struct {
	s                                    *Server
	sandboxes, edges, upstream, revision *prometheus.Desc
}

// Describe implements prometheus.Collector.
func (c *stateCollector) Describe(ch chan<- *prometheus.Desc) {
	ch <- c.sandboxes
	ch <- c.edges
	ch <- c.upstream
	ch <- c.revision
}

// Collect implements prometheus.Collector.
func (c *stateCollector) Collect(ch chan<- prometheus.Metric) {
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	for state, n := range c.s.cfg.Registry.States() {
		gauge(c.sandboxes, float64(n), string(state))
	}
	ready := map[bool]int{true: 0, false: 0}
	for _, n := range c.s.cfg.Registry.Nodes() {
		ready[n.Ready]++
	}
	for is, n := range ready {
		gauge(c.edges, float64(n), strconv.FormatBool(is))
	}
	gauge(c.upstream, float64(c.s.cfg.Edges.Streams()))
	gauge(c.revision, float64(c.s.cfg.Registry.Revision()))
}
