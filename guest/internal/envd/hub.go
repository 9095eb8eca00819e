package envd

import (
	"errors"
	"sync"
	"time"

	pb "agentenv/guest/gen/process"
)

const (
	// A subscriber may lag by this much before the process waits for it.
	queueLimit = 1 << 20
	// A subscriber that takes nothing for this long is cut off, so that it cannot hold the process up for ever.
	stallLimit = 20 * time.Second
)

var errTooSlow = errors.New("the subscriber stopped reading and was cut off; the process goes on")

// subscriber is one follower of a process: a queue bounded in bytes.
type subscriber struct {
	mu     sync.Mutex
	queue  []*pb.ProcessEvent
	bytes  int
	closed bool
	failed error
	// Both hold at most one token: something was queued; something was taken.
	ready, space chan struct{}
}

func newSubscriber() *subscriber {
	return &subscriber{ready: make(chan struct{}, 1), space: make(chan struct{}, 1)}
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

func sizeOf(e *pb.ProcessEvent) int {
	if d := e.GetData(); d != nil {
		return len(d.GetStdout()) + len(d.GetStderr()) + len(d.GetPty())
	}
	return 0
}

// push queues the event. It waits while the queue is full, at most stallLimit without any progress.
func (s *subscriber) push(e *pb.ProcessEvent) {
	for {
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			return
		}
		size := sizeOf(e)
		if s.bytes == 0 || s.bytes+size <= queueLimit || size == 0 {
			s.queue = append(s.queue, e)
			s.bytes += size
			s.mu.Unlock()
			poke(s.ready)
			return
		}
		s.mu.Unlock()
		timer := time.NewTimer(stallLimit)
		select {
		case <-s.space:
			timer.Stop()
		case <-timer.C:
			s.close(errTooSlow)
		}
	}
}

// pop takes the oldest event; nil when there is none now.
func (s *subscriber) pop() (*pb.ProcessEvent, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.failed != nil {
		return nil, s.failed
	}
	if len(s.queue) == 0 {
		return nil, nil
	}
	e := s.queue[0]
	s.queue[0] = nil
	s.queue = s.queue[1:]
	s.bytes -= sizeOf(e)
	poke(s.space)
	return e, nil
}

func (s *subscriber) close(why error) {
	s.mu.Lock()
	s.closed = true
	s.failed = why
	s.queue, s.bytes = nil, 0
	s.mu.Unlock()
	poke(s.space)
	poke(s.ready)
}

// hub sends every event of a process to whoever follows it now; with nobody there it is dropped.
type hub struct {
	mu   sync.Mutex
	subs map[*subscriber]struct{}
	end  *pb.ProcessEvent
}

// subscribe gives a follower; after the end it gets the end at once.
func (h *hub) subscribe() *subscriber {
	s := newSubscriber()
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.end != nil {
		s.push(h.end)
		return s
	}
	if h.subs == nil {
		h.subs = map[*subscriber]struct{}{}
	}
	h.subs[s] = struct{}{}
	return s
}

func (h *hub) unsubscribe(s *subscriber) {
	h.mu.Lock()
	delete(h.subs, s)
	h.mu.Unlock()
	s.close(nil)
}

func (h *hub) followers() []*subscriber {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.subs) == 0 {
		return nil
	}
	out := make([]*subscriber, 0, len(h.subs))
	for s := range h.subs {
		out = append(out, s)
	}
	return out
}

// publish copies nothing: the event must not change afterwards.
func (h *hub) publish(e *pb.ProcessEvent) {
	for _, s := range h.followers() {
		s.push(e)
	}
}

func (h *hub) finish(end *pb.ProcessEvent) {
	h.mu.Lock()
	h.end = end
	subs := h.subs
	h.subs = nil
	h.mu.Unlock()
	for s := range subs {
		s.push(end)
	}
}
