package taskbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"
)

// An outcome is how an attempt ended, on its way into the file. It stays in memory
// until a transaction with it is committed.
type outcome struct {
	h     *held
	event string // success, retry_wait, dead_letter, scheduled, skipped, interrupted
	begun bool   // the handler was called
	// worked tells that it came from a worker, whose place is free again.
	worked bool
	// completed tells that the handler ended the task in its own transaction.
	completed bool
	at        int64 // Unix ms
	next      int64 // when it is due again, for retry_wait and scheduled
	err       error
	why       *detail
}

var (
	// succeedBatch ends attempts as successes. The version stands in the condition
	// too: who is about to write the next row of a trail must know the last one.
	succeedBatch = newBatch(`
update or fail main.task_outbox as t
set status = 'success', version = v.column4, finished_at = v.column3, updated_at = v.column3,
	owner = null, lease_until = null
from (values `, "(?, ?, ?, ?, ?)", `) as v
where t.id = v.column1 and t.fence = v.column2 and t.version = v.column5 and t.owner = ?`)

	markBatch = newBatch(`
update or fail main.task_outbox as t
set status = 'processing', version = t.version + 1, updated_at = v.column3
from (values `, "(?, ?, ?, ?)", `) as v
where t.id = v.column1 and t.fence = v.column2 and t.version = v.column4 and t.owner = ? and t.status = 'picked'`)
)

const (
	endSQL = `
update main.task_outbox
set status = ?1, version = ?2, updated_at = ?3, finished_at = ?4,
	next_run_at = ?5, retry_count = retry_count + ?6, attempt = attempt - ?7,
	last_error = coalesce(?8, last_error), error_group = coalesce(?13, error_group), owner = null, lease_until = null
where id = ?9 and owner = ?10 and fence = ?11 and version = ?12`

	standingSQL = `
select status, coalesce(owner, ''), fence, version from main.task_outbox where id = ?`
)

// events lists what an outcome writes: the status that the task has then, and
// whether it has ended.
var events = map[string]struct {
	status   string
	finished bool
	free     bool // costs no attempt
}{
	"success":     {status: "success", finished: true},
	"retry_wait":  {status: "retry_wait"},
	"dead_letter": {status: "dead_letter", finished: true},
	"skipped":     {status: "skipped", finished: true},
	"scheduled":   {status: "scheduled", free: true},
	"interrupted": {status: "pending", free: true},
}

// settle writes outcomes; gone are those whose lease was lost, of which nothing was
// written. Successes go many to a statement: they are nearly all there is.
func (w *write) settle(os []outcome, owner string) (gone []*held, err error) {
	var good []outcome
	for _, o := range os {
		if o.event == "success" && !o.completed {
			good = append(good, o)
			continue
		}
		lost, err := w.end(o, owner)
		if err != nil {
			return nil, err
		}
		if lost {
			gone = append(gone, o.h)
		}
	}
	if len(good) == 0 {
		return gone, nil
	}
	err = inBatches(good, func(part []outcome) error {
		lost, err := w.succeed(part, owner)
		gone = append(gone, lost...)
		return err
	})
	return gone, err
}

func (w *write) succeed(part []outcome, owner string) (gone []*held, err error) {
	args := make([]any, 0, 5*len(part)+1)
	for _, o := range part {
		args = append(args, o.h.id, o.h.fence, o.at, o.h.version+o.rows(), o.h.version)
	}
	n, err := w.exec(succeedBatch.text(len(part)), append(args, owner)...)
	if err != nil {
		return nil, err
	}
	if n == int64(len(part)) {
		for i := range part {
			if err := w.trail(&part[i]); err != nil {
				return nil, err
			}
		}
		return nil, nil
	}
	return w.succeedEach(part, owner)
}

// succeedEach finds out which of a batch the statement has changed and deals with
// the others one by one.
func (w *write) succeedEach(part []outcome, owner string) (gone []*held, err error) {
	for i := range part {
		o := &part[i]
		s, err := w.standing(o.h.id)
		if err != nil {
			return nil, err
		}
		lost := false
		switch {
		case s.holds(o, owner):
			lost, err = w.end(*o, owner)
		case s.is("success", o.h.fence, o.h.version+o.rows()):
			err = w.trailOnce(o)
		default:
			lost = true
		}
		if err != nil {
			return nil, err
		}
		if lost {
			gone = append(gone, o.h)
		}
	}
	return gone, nil
}

// rows is the number of audit rows that the outcome writes.
func (o *outcome) rows() int64 {
	n := int64(1)
	if o.begun && !o.h.marked {
		n++
	}
	if o.event == "dead_letter" {
		n++ // failed
	}
	return n
}

// standing is what the file says of a task.
type standing struct {
	status, owner  string
	fence, version int64
}

func (w *write) standing(id int64) (s standing, err error) {
	err = w.queryRow(standingSQL, []any{id}, &s.status, &s.owner, &s.fence, &s.version)
	if isNoRows(err) {
		return standing{}, nil // deleted
	}
	return s, err
}

func (s standing) holds(o *outcome, owner string) bool {
	return s.owner == owner && s.fence == o.h.fence
}

func (s standing) is(status string, fence, version int64) bool {
	return s.status == status && s.fence == fence && s.version == version
}

// end writes one outcome of any kind; lost tells that the task isn't ours any more.
func (w *write) end(o outcome, owner string) (lost bool, err error) {
	s, err := w.standing(o.h.id)
	if err != nil {
		return false, err
	}
	if s.holds(&o, owner) {
		return false, w.endHeld(o, owner, s)
	}
	// A commit whose answer was lost may have brought it in already, or the handler's
	// own transaction.
	return !s.is(events[o.event].status, o.h.fence, o.h.version+o.rows()) &&
		!(o.completed && s.status == "success" && s.fence == o.h.fence), nil
}

func (w *write) endHeld(o outcome, owner string, s standing) error {
	o.h.version, o.h.marked = s.version, s.status == "processing"
	if o.completed && o.event == "success" {
		o.uncommitted()
	}
	e := events[o.event]
	var finished, free, retried any = nil, 0, 0
	if e.finished {
		finished = o.at
	}
	if e.free {
		free = 1
	}
	if o.event == "retry_wait" {
		retried = 1
	}
	_, err := w.exec(endSQL, e.status, s.version+o.rows(), o.at, finished, cmp.Or(o.next, o.h.priorDue), retried, free,
		errorText(o.err), o.h.id, owner, o.h.fence, s.version, orNull(o.group().fingerprint))
	if err != nil {
		return err
	}
	return w.trail(&o)
}

// uncommitted makes a failure of a success whose transaction isn't there.
func (o *outcome) uncommitted() {
	*o = o.h.p.q.outcomeOf(o.h, ErrNotCommitted, o.at)
	o.worked, o.completed = true, true
}

// textOf is err.Error(), also where that panics: a nil pointer may be an error.
func textOf(err error) string { return fmt.Sprint(err) }

func errorText(err error) any {
	if err == nil {
		return nil
	}
	return clip(textOf(err), maxErrorText)
}

// trail records the outcome's events and figures, and lets the group go on.
func (w *write) trail(o *outcome) error {
	if o.begun && !o.h.marked {
		w.record(o.h, "processing", o.h.started, nil)
	}
	if o.event == "dead_letter" {
		w.record(o.h, "failed", o.at, o.why)
		w.record(o.h, "dead_letter", o.at, &detail{Cause: o.why.Cause})
	} else {
		w.record(o.h, o.event, o.at, o.why)
	}
	w.count(o.h.typ.name).end(o)
	w.countFailure(o.group(), o.h.id, o.at)
	if events[o.event].finished {
		if err := w.keepKey(o.h, o.event); err != nil {
			return err
		}
	}
	// Not at its end only: a replayed task may have come before this one meanwhile.
	return w.unblock(o.h.group)
}

// trailOnce is trail, unless an earlier commit in doubt has brought the rows in.
func (w *write) trailOnce(o *outcome) error {
	on, err := w.onTrail(o.h.id, o.h.version+1)
	if err != nil || on {
		return err
	}
	return w.trail(o)
}

// mark records attempts that take a while as processing. One that isn't ours any
// more is left to the next heartbeat.
func (w *write) mark(hs []*held, owner string) error {
	return inBatches(hs, func(part []*held) error {
		args := make([]any, 0, 4*len(part)+1)
		for _, h := range part {
			args = append(args, h.id, h.fence, cmp.Or(h.started, w.now), h.version)
		}
		n, err := w.exec(markBatch.text(len(part)), append(args, owner)...)
		if err != nil {
			return err
		}
		return w.marked(part, owner, n == int64(len(part)))
	})
}

func (w *write) marked(part []*held, owner string, all bool) error {
	for _, h := range part {
		if !all {
			mine, err := w.markedNow(h, owner)
			if err != nil {
				return err
			}
			if !mine {
				continue
			}
		}
		w.record(h, "processing", cmp.Or(h.started, w.now), nil)
	}
	return nil
}

// markedNow tells whether the statement before has marked the task: otherwise it isn't
// ours, or a commit in doubt had done it, whose row stands on the trail already.
func (w *write) markedNow(h *held, owner string) (bool, error) {
	s, err := w.standing(h.id)
	if err != nil || s.owner != owner || !s.is("processing", h.fence, h.version+1) {
		return false, err
	}
	on, err := w.onTrail(h.id, h.version+1)
	if on {
		h.version, h.marked = s.version, true
	}
	return !on && err == nil, err
}

// onTrail tells whether a row of the trail is there.
func (w *write) onTrail(id, seq int64) (on bool, err error) {
	err = w.queryRow(onTrailSQL, []any{id, seq}, &on)
	return on, err
}

const onTrailSQL = `
select exists (select 1 from main.task_audit where task_id = ? and seq = ?)`

// minSnooze keeps a handler that always snoozes from spinning.
const minSnooze = 100 * time.Millisecond

// outcomeOf says what an error of the handler means for the task.
func (q *Queue) outcomeOf(h *held, err error, now int64) outcome {
	o := outcome{h: h, at: now, begun: true, err: err}
	v := judge(err, q.opts.Classify)
	switch v.kind {
	case verdictDone:
		o.event = "success"
	case verdictSkip:
		o.event, o.why, o.err = "skipped", &detail{Cause: v.reason}, nil
	case verdictSnooze:
		o.event, o.next, o.err = "scheduled", addMillis(now, max(v.after, minSnooze)), nil
		o.why = &detail{Cause: "snoozed", Next: o.next}
	case verdictDead:
		o.event, o.why = "dead_letter", describe(err, v)
		o.why.Cause = "permanent error"
	default:
		q.retryOrBury(&o, v)
	}
	return o
}

// retryOrBury plans the next retry, or makes the task a dead letter after the last.
func (q *Queue) retryOrBury(o *outcome, v verdict) {
	o.why = describe(o.err, v)
	o.why.Cause = v.reason
	wait, ok := o.h.nextWait(v)
	if !ok {
		o.event, o.why.Cause = "dead_letter", fmt.Sprintf("failed %d times", o.h.retry+1)
		return
	}
	o.event, o.next = "retry_wait", addMillis(o.at, wait)
	o.why.Next = o.next
}

func describe(err error, v verdict) *detail {
	d := &detail{Error: clip(textOf(err), maxErrorText), Class: v.class.String(), Types: errorTypes(err), BrokeOff: brokeOff(err)}
	d.group = &errorGroup{own: ownFingerprint(err), class: d.Class, message: normalise(d.Error)}
	// Not by errors.As: a method of the handler's error may panic, see children.
	for e := range tree(err) {
		if p, ok := e.(*PanicError); ok && d.Stack == "" {
			d.Stack = clip(string(p.Stack), maxStackText)
		}
	}
	return d
}

// undecodable is the outcome of a task whose payload its type can't take: its
// handler was never called.
func (q *Queue) undecodable(h *held, err error, now int64) outcome {
	v := verdict{kind: verdictDead, class: ClassPermanent}
	o := outcome{h: h, event: "dead_letter", at: now, err: err, why: describe(err, v)}
	o.why.Cause, o.why.quoting = "payload can't be decoded", true
	return o
}

// givenBack is the outcome of a task that another process, or a later start, is to
// run; it costs no attempt.
func givenBack(h *held, begun bool, cause string, now int64) outcome {
	return outcome{h: h, event: "interrupted", begun: begun, at: now, why: &detail{Cause: cause}}
}

// stopped tells whether an attempt ended because the poller is stopping.
func stopped(ctx context.Context, err error) bool {
	return err != nil && errors.Is(context.Cause(ctx), ErrStopping)
}
