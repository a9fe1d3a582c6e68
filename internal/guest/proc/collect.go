package proc

// Collector keeps the beginning and the end of one kind's output within a limit.
type Collector struct {
	limit int
	head  []byte
	tail  []byte // a ring once it is full
	at    int    // where the ring's oldest byte is
	total int64
	gap   bool
}

// NewCollector returns a collector of at most limit bytes.
func NewCollector(limit int) *Collector { return &Collector{limit: max(limit, 2)} }

// Gap notes bytes that cannot be had any more: what follows belongs to the end.
func (c *Collector) Gap(n int64) {
	c.total += n
	c.gap = true
}

// Write adds output.
func (c *Collector) Write(p []byte) {
	c.total += int64(len(p))
	if room := c.limit/2 - len(c.head); room > 0 && len(c.tail) == 0 && !c.gap {
		n := min(room, len(p))
		c.head = append(c.head, p[:n]...)
		p = p[n:]
	}
	size := c.limit - c.limit/2
	if len(p) >= size {
		c.tail = append(c.tail[:0], p[len(p)-size:]...)
		c.at = 0
		return
	}
	if n := min(size-len(c.tail), len(p)); n > 0 {
		c.tail = append(c.tail, p[:n]...)
		p = p[n:]
	}
	for len(p) > 0 {
		n := copy(c.tail[c.at:], p)
		p = p[n:]
		c.at = (c.at + n) % len(c.tail)
	}
}

// Bytes returns what was kept, and whether something between beginning and end is missing.
func (c *Collector) Bytes() (b []byte, truncated bool) {
	if len(c.tail) == 0 {
		return c.head, int64(len(c.head)) < c.total
	}
	b = append(c.head, c.tail[c.at:]...)
	b = append(b, c.tail[:c.at]...)
	return b, int64(len(b)) < c.total
}
