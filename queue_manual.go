package taskbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// By says who does something by hand, and why. Both are required and end up in the
// audit record.
type By struct {
	Actor  string
	Reason string
}

func (by By) check() error {
	if err := validName("actor", by.Actor, maxNameLength); err != nil {
		return errors.Join(ErrActorRequired, err)
	}
	if by.Reason == "" || len(by.Reason) > maxErrorText {
		return fmt.Errorf("%w: the reason has %d bytes, want 1 to %d", ErrActorRequired, len(by.Reason), maxErrorText)
	}
	return nil
}

// A ManualOption says something about one operation by hand.
type ManualOption func(*manualOptions)

type manualOptions struct {
	version  *int64
	payload  any
	edit     bool
	fromStep string
	risk     bool
	plan     string // the id of the plan that it is a part of
	at       int64
	err      error
}

// IfVersion does the operation only if the task's version is still v, and otherwise
// fails with [ErrConflict]: so that two people don't overwrite each other's work.
func IfVersion(v int64) ManualOption { return func(o *manualOptions) { o.version = &v } }

// WithPayload replays the task with another payload; see [Queue.Edit].
func WithPayload(payload any) ManualOption {
	return func(o *manualOptions) { o.payload, o.edit = payload, true }
}

// FromStep forgets what is recorded of this step and of those that began after it, so
// that a replay runs them again. The default keeps all steps that are done.
func FromStep(name string) ManualOption { return func(o *manualOptions) { o.fromStep = name } }

// AcceptRisk replays a task although its [Queue.Verdict] is [Unknown] or [Unsafe]: its
// effects may happen twice. The reasons are written into the audit record.
func AcceptRisk() ManualOption { return func(o *manualOptions) { o.risk = true } }

// ReplayAt makes a replayed task due at t instead of at once.
func ReplayAt(t time.Time) ManualOption {
	return func(o *manualOptions) {
		var d Draft
		o.at, o.err = d.millis("due time", t), d.err
	}
}

// manual is one operation on one task, inside its transaction.
type manual struct {
	*write
	q    *Queue
	by   By
	opts manualOptions
	h    *held  // the task's id, version, type, group, key
	s    string // its status
	row  manualRow
	// verdict is that of a replay, risk what was accepted of it.
	verdict VerdictKind
	risk    []string
}

// manualRow is what the operations need to know beside.
type manualRow struct {
	payload  string
	finished int64
	resolved string
}

// byHand runs fn in an immediate transaction that has read the task and whose audit
// rows name who and why.
func (q *Queue) byHand(ctx context.Context, op string, id int64, by By, opts []ManualOption, fn func(*manual) error) error {
	m := manual{q: q, by: by}
	for _, o := range opts {
		o(&m.opts)
	}
	err := errors.Join(by.check(), m.opts.err)
	if err == nil {
		err = q.Tx(ctx, func(ctx context.Context, tx *sql.Tx) error {
			m.write = q.joined(context.WithoutCancel(ctx), tx)
			return m.do(id, fn)
		})
	}
	if err != nil {
		return fmt.Errorf("%s task %d: %w", op, id, err)
	}
	return nil
}

// do is the operation, inside the transaction.
func (m *manual) do(id int64, fn func(*manual) error) error {
	if err := m.load(id); err != nil {
		return err
	}
	if err := fn(m); err != nil {
		return err
	}
	return m.finish()
}

// joined is a write inside a transaction that somebody else commits.
func (q *Queue) joined(ctx context.Context, tx *sql.Tx) *write {
	return &write{ctx: ctx, tx: tx, stmts: q.stmts, used: map[string]*sql.Stmt{}, stats: map[statsKey]*statsRow{}, now: q.now()}
}

const loadSQL = `
select version, fence, attempt, event_type, trace_id, status, payload,
	coalesce(group_key, ''), coalesce(dedupe_key, ''), coalesce(finished_at, 0), coalesce(resolved_as, '')
from main.task_outbox where id = ?`

func (m *manual) load(id int64) error {
	m.h = &held{id: id, typ: new(taskType)}
	err := m.queryRow(loadSQL, []any{id}, &m.h.version, &m.h.fence, &m.h.attempt, &m.h.typ.name, &m.h.traceID,
		&m.s, &m.row.payload, &m.h.group, &m.h.key, &m.row.finished, &m.row.resolved)
	if isNoRows(err) {
		return m.q.notFound(m.ctx, m.tx, id)
	}
	if err != nil {
		return err
	}
	if v := m.opts.version; v != nil && *v != m.h.version {
		return m.conflict(*v)
	}
	return nil
}

// conflict names what has happened since the version that the caller has seen.
func (m *manual) conflict(seen int64) error {
	var event, actor string
	var at int64
	err := m.queryRow(`
select event, at, coalesce(actor, 'the queue') from main.task_audit
where task_id = ? and seq > ? order by seq limit 1`, []any{m.h.id, seen}, &event, &at, &actor)
	if err != nil {
		return fmt.Errorf("%w: its version is %d, not %d", ErrConflict, m.h.version, seen)
	}
	return fmt.Errorf("%w: since version %d it was %s by %s at %s; its version is %d now", ErrConflict, seen,
		event, actor, time.UnixMilli(at).UTC().Format(time.RFC3339), m.h.version)
}

// note records the operation.
func (m *manual) note(event string, d *detail) {
	d.Plan = m.opts.plan
	m.record(m.h, event, m.now, d)
	row := &m.audit[len(m.audit)-1]
	row.attempt, row.by = 0, m.by
}

func (m *manual) finish() error {
	if err := m.writeAudit(); err != nil {
		return err
	}
	if err := m.writeStats(); err != nil {
		return err
	}
	if m.opts.plan != "" {
		return nil // the run is logged
	}
	m.q.opts.Logger.InfoContext(m.ctx, "taskbox: by hand", "task", m.h.id, "type", m.h.typ.name,
		"event", m.audit[len(m.audit)-1].event, "actor", m.by.Actor, "reason", m.by.Reason, "trace", m.h.traceID)
	return nil
}

func (m *manual) held() bool { return m.s == "picked" || m.s == "processing" }

func (m *manual) ended() bool { return m.row.finished != 0 }

// wrongState says what the operation can't do to a task in this state.
func (m *manual) wrongState(hint string) error {
	if m.held() {
		return fmt.Errorf("%w: it is %s; cancel it first, or wait for its end", ErrTaskRunning, m.s)
	}
	return fmt.Errorf("%w: it is %s; %s", ErrState, m.s, hint)
}

const reviveSQL = `
update main.task_outbox
set status = ?1, version = ?2, run = run + ?3, retry_count = 0, lost_count = 0, next_run_at = ?4, updated_at = ?5,
	finished_at = null, last_error = null, error_group = null, resolved_as = null, expires_at = null, payload = ?6,
	blocked = exists (select 1 from main.task_outbox as o
		where o.group_key = task_outbox.group_key and o.finished_at is null and o.owner is not null)
where id = ?7`

// Replay runs a task again that has ended, as a new run of the same task: its retries
// begin anew, what happened before stays on the trail, and steps that are done aren't
// run again, unless [FromStep] says so. [WithPayload] replaces the payload,
// [ReplayAt] plans it for later.
//
// A task whose [Queue.Verdict] is [Unknown] or [Unsafe], as that of a success is, is
// [ErrRisk] unless [AcceptRisk] is given; the verdict is in the audit record.
//
// A task that hasn't ended is [ErrTaskRunning] or [ErrState]; one whose key another
// living task has is [ErrConflict].
func (q *Queue) Replay(ctx context.Context, id int64, by By, opts ...ManualOption) error {
	return q.byHand(ctx, "replay", id, by, opts, (*manual).replay)
}

func (m *manual) replay() error {
	if !m.ended() {
		return m.wrongState("it will run by itself; RunNow runs it at once")
	}
	if err := m.weigh(); err != nil {
		return err
	}
	if m.opts.edit {
		if err := m.edit(m.opts.payload); err != nil {
			return err
		}
	}
	if m.opts.fromStep != "" {
		if err := m.forgetSteps(m.opts.fromStep); err != nil {
			return err
		}
	}
	return m.revive("replayed", 1)
}

// revive makes the task due, or planned.
func (m *manual) revive(event string, run int) error {
	status, due := "pending", m.now
	if m.opts.at > m.now {
		status, due = "scheduled", m.opts.at
	}
	if err := m.decideDoubts(); err != nil {
		return err
	}
	m.note(event, &detail{Before: m.s, After: status, Next: m.opts.at, Verdict: m.verdict, Risk: m.risk})
	_, err := m.exec(reviveSQL, status, m.h.version, run, due, m.now, m.row.payload, m.h.id)
	if sqliteCode(err) == uniqueCode {
		return fmt.Errorf("%w: another living task has its key %q", ErrConflict, m.h.key)
	}
	return explainInsert(err)
}

// uniqueCode is SQLite's extended code for a unique index that refuses a row.
const uniqueCode = 2067

// decideDoubts lets steps run again that had broken off: that a person has the task
// run again is the decision about them.
func (m *manual) decideDoubts() error {
	_, err := m.exec(`
update main.task_dedupe set state = 'failed', error = 'in doubt; run again by hand', updated_at = ?
where kind = 'step' and task_id = ? and state = 'processing'`, m.now, m.h.id)
	return err
}

// forgetSteps deletes the records of a step and of those that began after it.
func (m *manual) forgetSteps(name string) error {
	var first int64
	err := m.queryRow(`
select seq from main.task_dedupe where kind = 'step' and task_id = ? and name = ?`, []any{m.h.id, name}, &first)
	if isNoRows(err) {
		return m.noStep(name)
	}
	if err != nil {
		return err
	}
	_, err = m.exec(`
delete from main.task_dedupe where kind = 'step' and task_id = ? and seq >= ?`, m.h.id, first)
	return err
}

// noStep names the steps that there are.
func (m *manual) noStep(name string) error {
	var known string
	err := m.queryRow(`
select coalesce(group_concat(name, ', '), 'none') from main.task_dedupe where kind = 'step' and task_id = ?`, []any{m.h.id}, &known)
	if err != nil {
		return err
	}
	return fmt.Errorf("%w: it has begun no step %q; begun are: %s", ErrNoStep, name, known)
}

// Edit replaces the payload of a task that isn't running; its type stays. The old
// payload is kept in the audit record. Where this process handles the type, the new
// payload must decode into it.
func (q *Queue) Edit(ctx context.Context, id int64, payload any, by By, opts ...ManualOption) error {
	return q.byHand(ctx, "edit", id, by, opts, func(m *manual) error {
		if m.held() {
			return m.wrongState("")
		}
		if err := m.edit(payload); err != nil {
			return err
		}
		_, err := m.exec(`
update main.task_outbox set payload = ?, version = ?, updated_at = ? where id = ?`, m.row.payload, m.h.version, m.now, m.h.id)
		return explainInsert(err)
	})
}

// edit checks the new payload and records the change.
func (m *manual) edit(payload any) error {
	text, err := json.Marshal(payload)
	if err != nil {
		return fmt.Errorf("%w: the payload can't be encoded: %w", ErrInvalid, err)
	}
	if len(text) > m.q.opts.MaxPayload {
		return fmt.Errorf("%w: %d bytes, at most %d are allowed (Options.MaxPayload)", ErrPayloadTooLarge, len(text), m.q.opts.MaxPayload)
	}
	if typ := m.q.typeOf(m.h.typ.name); typ != nil {
		if _, err := (&held{typ: typ, payload: string(text)}).decode(); err != nil {
			return fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	m.note("edited", &detail{OldPayload: json.RawMessage(m.row.payload), NewPayload: text})
	m.row.payload = string(text)
	return nil
}

// Skip ends a task as skipped that waits or is a dead letter, without running it.
func (q *Queue) Skip(ctx context.Context, id int64, by By, opts ...ManualOption) error {
	return q.byHand(ctx, "skip", id, by, opts, (*manual).skip)
}

func (m *manual) skip() error {
	if m.held() || m.ended() && m.s != "dead_letter" {
		return m.wrongState("it has ended")
	}
	m.count(m.h.typ.name).skipped++
	return m.end("skipped", "skipped")
}

// Cancel ends a task as cancelled that hasn't ended. If it is running, its handler's
// context is cancelled with the cause [ErrLeaseLost], within a second in another
// process, and whatever it returns isn't recorded; what it has done stays done.
func (q *Queue) Cancel(ctx context.Context, id int64, by By, opts ...ManualOption) error {
	err := q.byHand(ctx, "cancel", id, by, opts, (*manual).cancel)
	if err == nil {
		q.checkHeld()
	}
	return err
}

func (m *manual) cancel() error {
	if m.ended() {
		return m.wrongState("it has ended")
	}
	m.count(m.h.typ.name).cancelled++
	return m.end("cancelled", "cancelled")
}

// checkHeld makes the poller of this process notice at once what was cancelled.
func (q *Queue) checkHeld() {
	if w := q.hint.Load(); w != nil {
		w.checkHeld.Store(true)
		w.wake()
	}
}

// end ends the task by hand.
func (m *manual) end(event, status string) error {
	m.note(event, &detail{Before: m.s, After: status})
	_, err := m.exec(`
update main.task_outbox
set status = ?, version = ?, updated_at = ?, finished_at = ?, blocked = 0, owner = null, lease_until = null
where id = ?`, status, m.h.version, m.now, m.now, m.h.id)
	if err != nil {
		return err
	}
	if err := m.freeKey(m.h); err != nil {
		return err
	}
	return m.unblock(m.h.group)
}

// RunNow makes a task due at once that is scheduled or waits for its retry.
func (q *Queue) RunNow(ctx context.Context, id int64, by By, opts ...ManualOption) error {
	return q.byHand(ctx, "run now", id, by, opts, (*manual).runNow)
}

func (m *manual) runNow() error {
	if m.s != "scheduled" && m.s != "retry_wait" {
		return m.wrongState("only a task that is scheduled or waits for its retry can be run sooner")
	}
	m.note("run_now", &detail{Before: m.s, After: "pending"})
	_, err := m.exec(`
update main.task_outbox set status = 'pending', version = ?, updated_at = ?, next_run_at = ? where id = ?`,
		m.h.version, m.now, m.now, m.h.id)
	return err
}

// SkipStep makes a step that has begun count as passed, with a stand-in for its
// result, and has the task run what follows: at once, as a new run if it had ended.
// nil stands for no result. A step that never began is [ErrNoStep].
func (q *Queue) SkipStep(ctx context.Context, id int64, step string, result any, by By, opts ...ManualOption) error {
	text, err := q.encodeResult(result)
	if err != nil {
		return fmt.Errorf("skip step %s of task %d: %w", step, id, err)
	}
	return q.byHand(ctx, "skip step "+step+" of", id, by, opts, func(m *manual) error {
		if m.held() {
			return m.wrongState("")
		}
		n, err := m.exec(`
update main.task_dedupe set state = 'skipped', result = ?, updated_at = ?
where kind = 'step' and task_id = ? and name = ?`, text, m.now, m.h.id, step)
		if err != nil {
			return explainResult(err)
		}
		if n == 0 {
			return m.noStep(step)
		}
		m.note("step_skipped", &detail{Step: step, Result: json.RawMessage(text)})
		run := 0
		if m.ended() {
			run = 1
		}
		return m.revive("replayed", run)
	})
}

// Resolve marks a dead letter as dealt with elsewhere, in a few words such as
// "refunded by hand": it stays a dead letter and no longer counts as open.
func (q *Queue) Resolve(ctx context.Context, id int64, as string, by By, opts ...ManualOption) error {
	if err := validName("resolution", as, maxNameLength); err != nil {
		return fmt.Errorf("resolve task %d: %w", id, err)
	}
	return q.byHand(ctx, "resolve", id, by, opts, resolveAs(as))
}

func resolveAs(as string) func(*manual) error {
	return func(m *manual) error {
		if m.s != "dead_letter" {
			return m.wrongState("only a dead letter can be resolved")
		}
		m.note("resolved", &detail{Cause: as})
		_, err := m.exec(`
update main.task_outbox set resolved_as = ?, version = ?, updated_at = ? where id = ?`, as, m.h.version, m.now, m.h.id)
		return err
	}
}
