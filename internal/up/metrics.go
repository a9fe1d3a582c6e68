package up

import (
	"github.com/prometheus/client_golang/prometheus"

	v1 "dsec/api/v1"
	"dsec/internal/edge"
	"dsec/internal/image/lazy"
)

// cacheMetrics tells of this node's cache of image data when it is scraped.
type cacheMetrics struct {
	cache                                                       *lazy.Cache
	of                                                          *edge.Reads
	readBy, fetchedBy, sandboxRead, sandboxFetched, sandboxWait *prometheus.Desc
	used, limit, read, fetched, ahead, evicted, fetches, reads  *prometheus.Desc
}

// toldApart is of how many sandboxes there are series of their own: those that fetched most.
const toldApart = 1000

func newCacheMetrics(c *lazy.Cache, of *edge.Reads) *cacheMetrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("dsec_image_cache_"+name, help, labels, nil)
	}
	return &cacheMetrics{
		cache: c, of: of,
		readBy:         prometheus.NewDesc("dsec_image_read_bytes_total", "Image data read while not all of it was here, by whom: sandbox or node.", []string{"by"}, nil),
		fetchedBy:      prometheus.NewDesc("dsec_image_fetched_bytes_total", "Image data fetched because of these reads.", []string{"by"}, nil),
		sandboxRead:    prometheus.NewDesc("dsec_sandbox_image_read_bytes", "Image data that a sandbox read while not all of it was here; the 1000 sandboxes for which most was fetched.", []string{"sandbox"}, nil),
		sandboxFetched: prometheus.NewDesc("dsec_sandbox_image_fetched_bytes", "Image data that was fetched because of these reads.", []string{"sandbox"}, nil),
		sandboxWait:    prometheus.NewDesc("dsec_sandbox_image_wait_seconds", "What the sandbox's programs waited for it.", []string{"sandbox"}, nil),
		used:           desc("bytes", "Image data on this node."),
		limit:          desc("limit_bytes", "What --image-cache allows; 0 is no limit."),
		read:           desc("read_bytes_total", "Image data that readers asked for."),
		fetched:        desc("fetched_bytes_total", "Image data fetched from the object store."),
		ahead:          desc("ahead_bytes_total", "Of it, what was fetched ahead of a reader."),
		evicted:        desc("evicted_bytes_total", "Image data evicted."),
		fetches:        desc("fetches_total", "Fetches from the object store."),
		reads:          desc("reads_total", "Reads of image data that is not all here, by result: hit, wait or error.", "result"),
	}
}

// Describe implements prometheus.Collector.
func (m *cacheMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.used, m.limit, m.read, m.fetched, m.ahead, m.evicted, m.fetches, m.reads, m.readBy, m.fetchedBy, m.sandboxRead, m.sandboxFetched, m.sandboxWait} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *cacheMetrics) Collect(ch chan<- prometheus.Metric) {
	t := m.cache.Totals()
	send := func(d *prometheus.Desc, kind prometheus.ValueType, v int64, labels ...string) {
		ch <- prometheus.MustNewConstMetric(d, kind, float64(v), labels...)
	}
	send(m.used, prometheus.GaugeValue, m.cache.Used())
	send(m.limit, prometheus.GaugeValue, m.cache.Limit())
	send(m.read, prometheus.CounterValue, t.Read)
	send(m.fetched, prometheus.CounterValue, t.Fetched)
	send(m.ahead, prometheus.CounterValue, t.Ahead)
	send(m.evicted, prometheus.CounterValue, t.Evicted)
	send(m.fetches, prometheus.CounterValue, t.Fetches)
	send(m.reads, prometheus.CounterValue, t.Hits, "hit")
	send(m.reads, prometheus.CounterValue, t.Reads-t.Hits-t.Failed, "wait")
	send(m.reads, prometheus.CounterValue, t.Failed, "error")
	most, sandboxes, others := m.of.Most(toldApart)
	for by, sum := range map[string]v1.ImageReads{"sandbox": sandboxes, "node": others} {
		send(m.readBy, prometheus.CounterValue, sum.ReadBytes, by)
		send(m.fetchedBy, prometheus.CounterValue, sum.FetchedBytes, by)
	}
	for _, x := range most {
		send(m.sandboxRead, prometheus.GaugeValue, x.ReadBytes, x.Sandbox)
		send(m.sandboxFetched, prometheus.GaugeValue, x.FetchedBytes, x.Sandbox)
		ch <- prometheus.MustNewConstMetric(m.sandboxWait, prometheus.GaugeValue, x.WaitSeconds, x.Sandbox)
	}
}
