package taskbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"log/slog"
	"runtime"
	"slices"
	"time"
)

// sight is what a look found.
type sight struct {
	types []string // that have due tasks, handled here or not
	next  int64    // when the next task becomes due, Unix ms; 0: none
	fresh bool     // nothing has happened since that the look couldn't see
}

// lookAround asks the file what is due, without a write.
func (p *poller) lookAround() error {
	var s sight
	if err := s.scan(p.look.QueryRowContext(context.Background(), p.q.now())); err != nil {
		return err
	}
	p.sight = s
	p.claimable = s.next != 0 && s.next <= p.q.now() || p.canClaim(s.types)
	return nil
}

func (s *sight) scan(row *sql.Row) error {
	var scheduled, retry sql.NullInt64
	var types string
	if err := row.Scan(&scheduled, &retry, &types); err != nil {
		return err
	}
	for _, t := range []sql.NullInt64{scheduled, retry} {
		if t.Valid && (s.next == 0 || t.Int64 < s.next) {
			s.next = max(1, t.Int64)
		}
	}
	s.fresh = true
	if types == "[]" {
		return nil
	}
	return json.Unmarshal([]byte(types), &s.types)
}

// canClaim tells whether there is room for a task of one of the types.
func (p *poller) canClaim(types []string) bool {
	for _, name := range types {
		if typ := p.q.typeOf(name); typ != nil && p.roomFor(typ) > 0 {
			return true
		}
	}
	return false
}

func (q *Queue) typeOf(name string) *taskType {
	q.mu.RLock()
	defer q.mu.RUnlock()
	return q.types[name]
}

// A turn is one transaction of the loop: it settles outcomes, renews the leases,
// marks what takes long, and claims what there is room for.
type turn struct {
	*write
	p          *poller
	outcomes   []outcome
	requests   []*request
	gone       []*held // leases that were lost
	marks      []*held
	claimed    []*held
	suspects   []*held // start when the turn is committed
	beat       bool
	unfinished bool          // the heartbeat has more to do
	registered bool          // our entry went in
	rebased    bool          // no retry is left to be moved
	waited     time.Duration // for the write lock
	sight      sight
	more       bool // there was more to claim, and room
}

func (p *poller) turn() error {
	defer func() { p.wrote.Store(time.Now().UnixNano()) }()
	t := turn{p: p, outcomes: p.takeOutcomes(), requests: p.takeRequests(), beat: passed(p.beatAt, time.Now())}
	start, markAt := time.Now(), p.markAt
	w, err := p.q.begin(context.Background(), p.source())
	t.waited = time.Since(start)
	if err != nil {
		p.keepOutcomes(t.outcomes, t.requests)
		return err
	}
	t.write = w
	if err := t.fill(); err != nil {
		w.abort()
		p.keepOutcomes(t.outcomes, t.requests)
		// A commit in doubt may have left claims that nobody knows of.
		p.beatAt, p.doubt, p.markAt = time.Now(), true, markAt
		return err
	}
	p.tide.own++
	t.committed()
	return p.prepare(w.missing)
}

// takeOutcomes takes what the workers have ended, as much as one turn may write.
func (p *poller) takeOutcomes() []outcome {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := min(len(p.outcomes), p.batch())
	os := p.outcomes[:n:n]
	p.outcomes = p.outcomes[n:]
	return os
}

// keepOutcomes puts them back after a turn that failed.
func (p *poller) keepOutcomes(os []outcome, rs []*request) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.requests = append(rs, p.requests...)
	p.outcomes = append(os, p.outcomes...)
}

func (t *turn) fill() (err error) {
	// What a handler asked for was before its outcome.
	if err := t.serve(); err != nil {
		return err
	}
	if t.gone, err = t.settle(t.outcomes, t.p.owner); err != nil {
		return err
	}
	for _, step := range []func() error{t.keepAlive, t.markLong, t.startSuspects, t.claimAll} {
		if err := step(); err != nil {
			return err
		}
	}
	return t.commit()
}

// markLong records as processing what has been running for a while, and gives back
// what waits here for a worker that doesn't come free.
func (t *turn) markLong() error {
	if !passed(t.p.markAt, time.Now()) {
		return nil
	}
	t.marks = t.p.unmarked(time.Now().Add(-markAfter))
	return t.mark(t.marks, t.p.owner)
}

// unmarked returns the running tasks that have started before a time, and plans the
// next look at the others.
func (p *poller) unmarked(before time.Time) (hs []*held) {
	p.mu.Lock()
	defer p.mu.Unlock()
	rest := false
	for _, h := range p.held {
		switch {
		case h.marked || h.cancel == nil || h.ended:
		case !h.began.After(before):
			hs = append(hs, h)
		default:
			rest = true
		}
	}
	p.markAt = time.Time{}
	if rest || p.giveBackReady(before) {
		p.markAt = time.Now().Add(markAfter)
	}
	return hs
}

// giveBack ends a task's stay here at no cost to it. The caller holds mu.
func (p *poller) giveBack(h *held, begun bool, cause string) {
	h.ended = true
	p.outcomes = append(p.outcomes, givenBack(h, begun, cause, p.q.now()))
}

// giveBackReady lets others run what was claimed before a time and still waits for
// one of our workers; it tells whether anything waits on. The caller holds mu.
func (p *poller) giveBackReady(before time.Time) (waiting bool) {
	stuck := p.lastFinish.Before(before)
	for _, s := range p.order {
		n := 0
		for stuck && n < len(s.ready) && !s.ready[n].claimed.After(before) {
			p.giveBack(s.ready[n], false, "no worker came free")
			n++
		}
		s.ready = s.ready[n:]
		waiting = waiting || n > 0 || len(s.ready) > 0
	}
	return waiting
}

// claimAll makes due what has become so and claims what there is room for.
func (t *turn) claimAll() error {
	if t.p.stopping() {
		return nil
	}
	if err := t.lookInside(); err != nil {
		return err
	}
	if t.sight.next != 0 && t.sight.next <= t.now {
		if err := t.promoteAll(); err != nil {
			return err
		}
	}
	types := t.claimableTypes()
	left := min(t.p.room(t.outcomes...), t.p.batch())
	for i, typ := range types {
		// An even share of what is left, so that a flood of one type leaves room for
		// the others.
		share := (left + len(types) - i - 1) / (len(types) - i)
		limit := min(share, t.p.roomFor(typ, t.outcomes...))
		if limit <= 0 {
			continue
		}
		got, more, err := t.claim(typ, t.p.owner, t.now+t.p.q.opts.Lease.Milliseconds(), limit)
		if err != nil {
			return err
		}
		t.claimed = append(t.claimed, got...)
		left -= len(got)
		t.more = t.more || more
	}
	return nil
}

func (t *turn) lookInside() error {
	if t.p.sight.fresh && len(t.outcomes) == 0 && len(t.sight.types) == 0 && len(t.p.sight.types) > 0 {
		t.sight = t.p.sight // a moment ago, in this step
		t.p.sight.fresh = false
		return nil
	}
	st, err := t.stmt(lookSQL)
	if err != nil {
		return err
	}
	t.sight = sight{}
	return t.sight.scan(st.QueryRowContext(t.ctx, t.now))
}

func (t *turn) promoteAll() error {
	for _, query := range []string{promoteScheduledSQL, promoteRetrySQL} {
		n, err := t.promote(query)
		if err != nil {
			return err
		}
		t.more = t.more || n == maxPromoted
	}
	return t.lookInside()
}

// claimableTypes are the types with due tasks that are handled here; each turn
// another is first.
func (t *turn) claimableTypes() []*taskType {
	var types []*taskType
	for i := range t.sight.types {
		name := t.sight.types[(i+t.p.rotation)%len(t.sight.types)]
		if typ := t.p.q.typeOf(name); typ != nil {
			types = append(types, typ)
		}
	}
	t.p.rotation++
	return types
}

// committed brings the poller's memory in line with the file.
func (t *turn) committed() {
	p := t.p
	for _, h := range t.marks {
		h.marked = true
	}
	p.registered = p.registered || t.registered
	p.rebase = p.rebase && !t.rebased
	p.doubt = p.doubt && !t.beat
	p.settled(t.outcomes)
	p.answer(t.requests)
	p.loseAll(t.gone)
	if t.beat {
		p.lastBeat = time.Now()
		p.beatAt = p.lastBeat.Add(p.beatEvery())
		if t.unfinished {
			p.beatAt = p.lastBeat
		}
	}
	p.sight = t.sight
	p.free(t.suspects, t.now)
	p.begin(t.claimed)
	if n := len(t.claimed); n > 0 && n < 4 {
		runtime.Gosched() // a lone task's worker has this processor at once
	}
	p.claimable = t.more && p.room() > 0 && !p.stopping()
	t.logAll()
}

// free lets suspects start that are recorded as processing; until then they haven't
// started, because a turn that fails begins again.
func (p *poller) free(hs []*held, now int64) {
	if len(hs) == 0 {
		return
	}
	p.lastStart = time.Now()
	p.suspects = slices.DeleteFunc(p.suspects, func(h *held) bool { return slices.Contains(hs, h) })
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, h := range hs {
		h.started = now
		s := p.slotOf(h.typ)
		s.ready = append([]*held{h}, s.ready...)
	}
}

// begin hands claimed tasks to the workers; those that have been lost before wait
// until they may start, see canStartSuspect.
func (p *poller) begin(hs []*held) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, h := range hs {
		if old := p.held[h.id]; old != nil {
			// It was taken from us, and its handler hasn't noticed yet.
			old.gone = true
			if old.cancel != nil {
				old.cancel(ErrLeaseLost)
			}
		}
		p.held[h.id] = h
		s := p.slotOf(h.typ)
		s.held++
		if h.lost > 0 {
			p.suspects = append(p.suspects, h)
			p.suspected = len(p.suspects)
			slices.SortStableFunc(p.suspects, func(a, b *held) int { return a.lost - b.lost })
		} else {
			s.ready = append(s.ready, h)
		}
	}
	p.launch()
	if len(hs) > 0 && p.markAt.IsZero() {
		p.markAt = time.Now().Add(markAfter)
	}
}

// logAll writes the turn's transitions to the log.
func (t *turn) logAll() {
	log := t.p.log
	if !log.Enabled(t.ctx, slog.LevelError) {
		return
	}
	debug := log.Enabled(t.ctx, slog.LevelDebug)
	for i := range t.audit {
		r := &t.audit[i]
		level := levelOf(r.event)
		if level == slog.LevelDebug && !debug || !log.Enabled(t.ctx, level) {
			continue
		}
		log.LogAttrs(t.ctx, level, "taskbox: "+r.event, r.attrs()...)
	}
}

func levelOf(event string) slog.Level {
	switch event {
	case "dead_letter":
		return slog.LevelError
	case "retry_wait", "failed", "lost":
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

func (r *auditRow) attrs() []slog.Attr {
	as := []slog.Attr{
		slog.Int64("task", r.h.id), slog.String("type", r.h.typ.name), slog.String("trace", r.h.traceID),
	}
	if r.attempt != 0 {
		as = append(as, slog.Int("attempt", r.attempt))
	}
	if d := r.detail; d != nil {
		if d.quoting {
			d = &detail{Cause: d.Cause, Class: d.Class}
		}
		for _, a := range []slog.Attr{slog.String("cause", d.Cause), slog.String("error", d.Error), slog.String("class", d.Class)} {
			if a.Value.String() != "" {
				as = append(as, a)
			}
		}
		if d.Next != 0 {
			as = append(as, slog.Time("next", time.UnixMilli(d.Next)))
		}
	}
	return as
}
