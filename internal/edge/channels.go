package edge

import (
	"container/list"
	"sync"
	"time"

	v1 "dsec/api/v1"
)

// channelIdle is how long nothing went over a connection to a guest before it may be closed: whoever was
// given it a moment ago must find it open.
const channelIdle = 10 * time.Second

// channelTries is how many connections are looked at for one that can be closed, so that the cost of
// each use is bounded.
const channelTries = 4

// channels bounds the connections to guests that are open without use: each takes a descriptor, of which a
// process may have few. Who needs a closed one dials anew.
type channels struct {
	most int // open at once; 0: any number
	now  func() time.Time

	mu   sync.Mutex
	open list.List // of *channel, the one used last first
	of   map[*sandbox]*list.Element
}

type channel struct {
	s    *sandbox
	used time.Time
}

func newChannels(most int, now func() time.Time) *channels {
	return &channels{most: most, now: now, of: map[*sandbox]*list.Element{}}
}

// use notes that a sandbox's connection is about to be used, before it is looked up or dialled, and
// closes those of others if there are too many.
func (c *channels) use(s *sandbox) {
	if c.most == 0 {
		return
	}
	now := c.now()
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.of[s]; e != nil {
		e.Value.(*channel).used = now
		c.open.MoveToFront(e)
	} else {
		c.of[s] = c.open.PushFront(&channel{s, now})
	}
	for range channelTries {
		last := c.open.Back()
		if c.open.Len() <= c.most || now.Sub(last.Value.(*channel).used) < channelIdle {
			return
		}
		if last.Value.(*channel).s.closeIdle() {
			c.remove(last)
		} else { // it has streams; the next are tried before it comes again
			c.open.MoveToFront(last)
		}
	}
}

// drop forgets a sandbox that is gone.
func (c *channels) drop(s *sandbox) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.of[s]; e != nil {
		c.remove(e)
	}
}

func (c *channels) remove(e *list.Element) {
	delete(c.of, e.Value.(*channel).s)
	c.open.Remove(e)
}

// closeIdle closes the connection to the guest unless something goes on in it, or it does not run: what it is
// told first when it does again waits in its connection.
func (s *sandbox) closeIdle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.guest == nil {
		return true
	}
	if s.guest.Streams() > 0 || s.view.State != v1.StateRunning {
		return false
	}
	s.guest.Close()
	s.guest = nil
	return true
}
