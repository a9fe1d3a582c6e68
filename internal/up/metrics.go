package up

import (
	"github.com/prometheus/client_golang/prometheus"

	"dsec/internal/edge"
	"dsec/internal/image/account"
	"dsec/internal/image/lazy"
)

// cacheMetrics tells of this node's cache of image data when it is scraped.
type cacheMetrics struct {
	cache                                                      *lazy.Cache
	readers                                                    *account.Book
	used, limit, read, fetched, ahead, evicted, fetches, reads *prometheus.Desc
	forBytes, forWait, oneBytes, oneWait                       *prometheus.Desc
}

// toldApart is how many sandboxes have series of their own.
const toldApart = 1000

func newCacheMetrics(c *lazy.Cache, readers *account.Book) *cacheMetrics {
	desc := func(name, help string, labels ...string) *prometheus.Desc {
		return prometheus.NewDesc("dsec_image_cache_"+name, help, labels, nil)
	}
	return &cacheMetrics{
		cache: c, readers: readers,
		used:     desc("bytes", "Image data on this node."),
		limit:    desc("limit_bytes", "What --image-cache allows; 0 is no limit."),
		read:     desc("read_bytes_total", "Image data that readers asked for."),
		fetched:  desc("fetched_bytes_total", "Image data fetched from the object store."),
		ahead:    desc("ahead_bytes_total", "Of it, what was fetched ahead of a reader."),
		evicted:  desc("evicted_bytes_total", "Image data evicted."),
		fetches:  desc("fetches_total", "Fetches from the object store."),
		reads:    desc("reads_total", "Reads of image data that is not all here, by result: hit, wait or error.", "result"),
		forBytes: desc("use_bytes_total", "Image data by who used it, sandboxes or others (warm-ups, say), and kind: read, waited (of it, what was not here), fetched. Each sandbox's own are in its usage.", "by", "kind"),
		oneBytes: prometheus.NewDesc("dsec_sandbox_image_bytes", "The same of each sandbox, of the 1000 for which most was fetched.", []string{"sandbox", "kind"}, nil),
		oneWait:  prometheus.NewDesc("dsec_sandbox_image_wait_seconds", "Time that the sandbox's programs waited for image data.", []string{"sandbox"}, nil),
		forWait:  desc("use_wait_seconds_total", "Time that readers waited for image data, by who they are: sandboxes or others.", "by"),
	}
}

// Describe implements prometheus.Collector.
func (m *cacheMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.used, m.limit, m.read, m.fetched, m.ahead, m.evicted, m.fetches, m.reads, m.forBytes, m.forWait, m.oneBytes, m.oneWait} {
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
	owned, others := m.readers.Totals()
	for by, u := range map[string]lazy.Use{"sandboxes": owned, "others": others} {
		send(m.forBytes, prometheus.CounterValue, u.Read, by, "read")
		send(m.forBytes, prometheus.CounterValue, u.Waited, by, "waited")
		send(m.forBytes, prometheus.CounterValue, u.Fetched, by, "fetched")
		ch <- prometheus.MustNewConstMetric(m.forWait, prometheus.CounterValue, u.Wait.Seconds(), by)
	}
	for _, u := range m.readers.Most(toldApart) {
		send(m.oneBytes, prometheus.CounterValue, u.Read, u.Owner, "read")
		send(m.oneBytes, prometheus.CounterValue, u.Waited, u.Owner, "waited")
		send(m.oneBytes, prometheus.CounterValue, u.Fetched, u.Owner, "fetched")
		ch <- prometheus.MustNewConstMetric(m.oneWait, prometheus.CounterValue, u.Wait.Seconds(), u.Owner)
	}
}

// usageMetrics sum up what the sandboxes of this node use, when it is scraped. Each sandbox's own is in its usage:
// thousands of series that end with their sandboxes are of no use to whoever collects them.
type usageMetrics struct {
	edge                                *edge.Edge
	memory, memorySeconds, paused, sent *prometheus.Desc
}

func newUsageMetrics(e *edge.Edge) *usageMetrics {
	desc := func(name, help string) *prometheus.Desc {
		return prometheus.NewDesc("dsec_sandboxes_"+name, help, nil, nil)
	}
	return &usageMetrics{
		edge:          e,
		memory:        desc("memory_bytes", "Memory of all sandboxes, each as last read, ten seconds ago at most if there are fewer than 16,000."),
		memorySeconds: desc("memory_gib_seconds_total", "Integral of sandboxes' memory over time, GiB·s."),
		paused:        desc("paused_seconds_total", "Time that sandboxes were paused, without the pauses that go on."),
		sent:          desc("sent_bytes_total", "Bytes that sandboxes sent."),
	}
}

// Describe implements prometheus.Collector.
func (m *usageMetrics) Describe(ch chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{m.memory, m.memorySeconds, m.paused, m.sent} {
		ch <- d
	}
}

// Collect implements prometheus.Collector.
func (m *usageMetrics) Collect(ch chan<- prometheus.Metric) {
	t := m.edge.Totals()
	ch <- prometheus.MustNewConstMetric(m.memory, prometheus.GaugeValue, float64(t.MemoryBytes))
	ch <- prometheus.MustNewConstMetric(m.memorySeconds, prometheus.CounterValue, t.GiBSeconds)
	ch <- prometheus.MustNewConstMetric(m.paused, prometheus.CounterValue, t.PausedSeconds)
	ch <- prometheus.MustNewConstMetric(m.sent, prometheus.CounterValue, float64(t.SentBytes))
}
