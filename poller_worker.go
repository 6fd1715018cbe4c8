package taskbox

import (
	"context"
	"errors"
	"runtime/debug"
	"time"
)

// A slot is what the poller knows of one type: what runs and what is ready to.
// All of it belongs to the poller's mu.
type slot struct {
	typ     *taskType
	ready   []*held
	running int
	held    int // running, ready, suspected, or ended and not yet settled
	ended   int // of these, ended and not yet settled
	quick   int // settled in the last turn after a short run
}

// slotOf returns the slot of a type. The caller holds mu.
func (p *poller) slotOf(typ *taskType) *slot {
	s, ok := p.slots[typ.name]
	if !ok {
		s = &slot{typ: typ}
		p.slots[typ.name] = s
		p.order = append(p.order, s)
	}
	return s
}

// launch starts workers for ready tasks while there is room. The caller holds mu.
func (p *poller) launch() {
	for p.running < p.q.opts.Workers {
		h := p.take()
		if h == nil {
			return
		}
		p.wg.Go(func() { p.work(h) })
	}
}

// take moves a ready task to the running ones, the types taking turns; nil if none
// may run. The caller holds mu.
func (p *poller) take() *held {
	for range p.order {
		s := p.order[p.next%len(p.order)]
		p.next++
		if len(s.ready) == 0 || s.running >= s.typ.opts.Concurrency {
			continue
		}
		h := s.ready[0]
		s.ready = s.ready[1:]
		s.running++
		p.running++
		return h
	}
	return nil
}

// work runs a task, and then the next that is ready: a worker is a goroutine only
// while there is work.
func (p *poller) work(h *held) {
	defer func() {
		// A handler that ends its goroutine (runtime.Goexit, t.FailNow) ends up here.
		if h != nil {
			if next := p.finish(p.gone(h)); next != nil {
				p.wg.Go(func() { p.work(next) })
			}
		}
	}()
	for h != nil {
		o := p.attempt(h)
		h = p.finish(o)
	}
}

// gone is the outcome of a task whose handler, or whose decoding, ended the goroutine.
func (p *poller) gone(h *held) outcome {
	now := p.q.now()
	switch {
	case h.started == 0:
		return p.q.undecodable(h, &DecodeError{Type: h.typ.name, Err: errGoexit}, now)
	case errors.Is(context.Cause(p.ctx), ErrStopping):
		return givenBack(h, true, "shutdown", now)
	}
	return p.q.outcomeOf(h, errGoexit, now)
}

var errGoexit = errors.New("the handler ended its goroutine (runtime.Goexit) instead of returning")

// attempt runs the task's handler once.
func (p *poller) attempt(h *held) outcome {
	call, err := h.decode()
	if err != nil {
		return p.q.undecodable(h, err, p.q.now())
	}
	ctx, cancel := context.WithCancelCause(context.WithValue(p.ctx, heldKey{}, h))
	defer cancel(nil)
	p.mu.Lock()
	h.began = time.Now()
	if h.started == 0 { // a suspect's start is recorded before
		h.started = p.q.now()
	}
	h.p, h.steps = p, map[string]bool{}
	h.cancel = cancel
	if h.gone {
		cancel(ErrLeaseLost)
	}
	p.mu.Unlock()
	if d := h.typ.opts.Timeout; d > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeout(ctx, d)
		defer stop()
	}
	err = protect(ctx, call)
	if stopped(ctx, err) {
		return givenBack(h, true, "shutdown", p.q.now())
	}
	return p.q.outcomeOf(h, err, p.q.now())
}

// protect makes an error of a panic.
func protect(ctx context.Context, call func(context.Context) error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &PanicError{Value: v, Stack: debug.Stack()}
		}
	}()
	return call(ctx)
}

// finish hands an outcome to the loop and returns the worker's next task, or nil.
func (p *poller) finish(o outcome) *held {
	p.mu.Lock()
	s := p.slotOf(o.h.typ)
	p.lastFinish = time.Now()
	o.worked, o.h.ended, o.completed = true, true, o.h.completed
	s.running--
	s.ended++
	p.running--
	var next *held
	if !p.closed {
		p.outcomes = append(p.outcomes, o)
		next = p.take()
	}
	p.mu.Unlock()
	p.waker.wake()
	return next
}

// quickRun is the longest run after which a type's tasks are claimed ahead of its
// workers: with longer ones nothing would be won, and they'd wait here while another
// process could run them.
const quickRun = 10 * time.Millisecond

// forget drops a task from those held, unless it has been claimed again since. The
// caller holds mu.
func (p *poller) forget(h *held) {
	if p.held[h.id] == h {
		delete(p.held, h.id)
	}
}

// settled forgets the tasks whose outcomes are in the file.
func (p *poller) settled(os []outcome) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.order {
		s.quick = 0
	}
	for i := range os {
		o := &os[i]
		s := p.slotOf(o.h.typ)
		p.forget(o.h)
		s.held--
		if o.worked {
			s.ended--
		}
		if o.worked && o.quick() {
			s.quick++
		}
	}
}

// room is how many more tasks the workers can take at once, when those of os are
// settled. What is claimed ahead of them is at most twice what they ended in the
// last turn.
func (p *poller) room(os ...outcome) int {
	if p.cautious() {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	room := p.q.opts.Workers
	for _, s := range p.order {
		room += s.ahead(os) - s.held + s.ended
	}
	return min(room, maxBatch)
}

// roomFor is the same for one type.
func (p *poller) roomFor(typ *taskType, os ...outcome) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.slotOf(typ)
	return typ.opts.Concurrency + s.ahead(os) - s.held + s.ended
}

// ahead is how many tasks of the type may wait here for a worker, and how many that
// have been settled without one are still counted.
func (s *slot) ahead(os []outcome) int {
	quick, unworked := 0, 0
	for i := range os {
		o := &os[i]
		switch {
		case o.h.typ != s.typ:
		case !o.worked:
			unworked++
		case o.quick():
			quick++
		}
	}
	if len(os) == 0 {
		quick = s.quick
	}
	return 2*quick + unworked
}

func (o *outcome) quick() bool { return o.at-o.h.started < quickRun.Milliseconds() }
