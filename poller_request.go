package taskbox

import (
	"context"
)

// A request is something that a handler has the writer loop write: the loop stays the
// only writer, and the requests of all handlers share its transactions. done carries
// the answer once it is committed.
type request struct {
	h     *held
	write func(*write) error // an error of this one request, after which nothing was written for it
	err   error              // what write returned in the last try
	done  chan error         // capacity 1: the loop doesn't wait for who asked
}

// ask has the loop write something for h and waits for it to be committed. When the
// handler's context ends first, it may still be written.
func (p *poller) ask(ctx context.Context, h *held, write func(*write) error) error {
	r := &request{h: h, write: write, done: make(chan error, 1)}
	p.mu.Lock()
	if p.over {
		p.mu.Unlock()
		return ErrLeaseLost
	}
	p.requests = append(p.requests, r)
	p.mu.Unlock()
	p.waker.wake()
	select {
	case err := <-r.done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// constraintCode is SQLite's primary code for a value that a table doesn't take: the
// statement is undone, the transaction goes on.
const constraintCode = 19

func (p *poller) takeRequests() []*request {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := min(len(p.requests), maxBatch)
	rs := p.requests[:n:n]
	p.requests = p.requests[n:]
	return rs
}

// serve writes what handlers have asked for, each under the protection of its lease.
func (t *turn) serve() error {
	for _, r := range t.requests {
		s, err := t.standing(r.h.id)
		if err != nil {
			return err
		}
		if s.owner != t.p.owner || s.fence != r.h.fence {
			r.err = ErrLeaseLost
			continue
		}
		r.h.version = s.version
		r.err = r.write(t.write)
		if code := sqliteCode(r.err) & 0xff; code != 0 && code != constraintCode {
			return r.err // the transaction's, not the request's
		}
	}
	return nil
}

// refuse answers those who ask when nobody serves any more.
func (p *poller) refuse() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.over = true
	for _, r := range p.requests {
		r.done <- ErrLeaseLost
	}
	p.requests = nil
}

func (p *poller) answer(rs []*request) {
	for _, r := range rs {
		r.done <- r.err
	}
}
