package taskbox

import (
	"context"
	"crypto/sha256"
	"database/sql"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
)

// InDoubt says what to do about a step whose outcome nobody knows: it had begun, and
// then its process died, its context ended or it panicked.
type InDoubt int

const (
	// RunAgain runs the step again, with the same [Task.IdempotencyKey], and says so
	// on the trail. It is for effects that are idempotent or can be given a key.
	RunAgain InDoubt = iota
	// Park makes the task a dead letter, for a person to find out.
	Park
)

// IdempotencyKey names a step of this task for the outside, fit for an
// Idempotency-Key header: the same in every attempt and replay of the task, another
// for every task and step.
func (t *Task[T]) IdempotencyKey(step string) string {
	sum := sha256.Sum256([]byte(strconv.FormatInt(t.ID, 10) + "\x00" + strconv.FormatInt(t.h.created, 10) +
		"\x00" + t.TraceID + "\x00" + step))
	return hex.EncodeToString(sum[:16])
}

// Step runs fn once for the task that ctx belongs to and remembers its result: in a
// later attempt or a replay it returns that result, as JSON has kept it, without
// running fn. An error of fn isn't remembered: the next attempt runs it again.
//
// The record that the step has begun is written before fn runs, that it is done
// after. What happens to a step which had begun and then broke off is said by
// [TypeOptions.InDoubt]. A name can be used once in an attempt.
func Step[R any](ctx context.Context, name string, fn func(context.Context) (R, error)) (R, error) {
	var result R
	h, err := useStep(ctx, name)
	if err != nil {
		return result, err
	}
	text, done, err := h.beginStep(ctx, name)
	if err != nil {
		return result, fmt.Errorf("begin step %s: %w", name, err)
	}
	if done {
		if err := json.Unmarshal([]byte(text), &result); err != nil {
			return result, fmt.Errorf("step %s: the kept result doesn't fit: %w", name, &DecodeError{Type: h.typ.name, Err: err})
		}
		return result, nil
	}
	result, err = fn(ctx)
	if err != nil {
		return result, h.failStep(ctx, name, err)
	}
	return result, h.endStep(ctx, name, result)
}

// insideKey marks the context of a function that runs inside StepTx or Once.
type insideKey struct{}

// handlerOf finds the task of a handler's context. Inside a transaction of StepTx or
// Once another step would wait for the lock that this one holds.
func handlerOf(ctx context.Context) (*held, error) {
	h, ok := ctx.Value(heldKey{}).(*held)
	if !ok || h.p == nil {
		return nil, fmt.Errorf("%w: the context isn't a handler's", ErrInvalid)
	}
	if ctx.Value(insideKey{}) != nil {
		return nil, fmt.Errorf("%w: it is inside the transaction of another StepTx or Once; call it before or after", ErrInvalid)
	}
	return h, nil
}

// useStep finds the task of a handler's context and takes the name.
func useStep(ctx context.Context, name string) (*held, error) {
	h, err := handlerOf(ctx)
	if err != nil {
		return nil, fmt.Errorf("step %s: %w", name, err)
	}
	if err := validName("step's name", name, maxNameLength); err != nil {
		return nil, err
	}
	h.p.mu.Lock()
	defer h.p.mu.Unlock()
	if h.steps[name] {
		return nil, fmt.Errorf("%w: the step %s is used twice in one attempt; each needs a name of its own", ErrInvalid, name)
	}
	h.steps[name] = true
	return h, nil
}

// beginStep returns the result of a step that is done or was passed by hand, or
// records that it begins.
func (h *held) beginStep(ctx context.Context, name string) (result string, done bool, err error) {
	var state string
	var attempt int
	read := func(row *sql.Row) error {
		err := row.Scan(&state, &result, &attempt)
		if isNoRows(err) {
			state, err = "", nil
		}
		return err
	}
	q := h.p.q
	if err := read(q.db.QueryRowContext(ctx, stepSQL, h.id, name)); err != nil {
		return "", false, err
	}
	if state == "done" || state == "skipped" {
		return result, true, nil
	}
	inDoubt := state == "processing"
	if inDoubt && h.typ.opts.InDoubt == Park {
		return "", false, Permanent(fmt.Errorf("%w: step %s had begun in attempt %d; find out whether it happened, then skip the step or replay the task", ErrInDoubt, name, attempt))
	}
	return "", false, h.p.ask(ctx, h, func(w *write) error {
		_, err := w.exec(putRecordSQL, "step", h.id, name, "processing", h.id, h.attempt, w.now, nil, nil)
		if err != nil || !inDoubt {
			return err
		}
		w.record(h, "in_doubt", w.now, &detail{Cause: fmt.Sprintf("step %s had begun in attempt %d; it runs again", name, attempt)})
		_, err = w.exec(touchSQL, h.version, w.now, h.id)
		return err
	})
}

// touchSQL notes an event that isn't a change of state.
const touchSQL = `update main.task_outbox set version = ?, updated_at = ? where id = ?`

// failStep records an error, unless the step broke off: whose context has ended may
// have reached the other side, so its record stays as it is, in doubt.
func (h *held) failStep(ctx context.Context, name string, cause error) error {
	if ctx.Err() != nil {
		return cause
	}
	err := h.p.ask(ctx, h, func(w *write) error {
		_, err := w.exec(putRecordSQL, "step", h.id, name, "failed", h.id, h.attempt, w.now, clip(textOf(cause), maxErrorText), nil)
		return err
	})
	if err != nil {
		return errors.Join(cause, fmt.Errorf("record the failure of step %s: %w", name, err))
	}
	return cause
}

// endStep records the result. It waits for the commit even when the handler's time is
// over: what has happened should be known.
func (h *held) endStep(ctx context.Context, name string, result any) error {
	text, err := h.p.q.encodeResult(result)
	if err == nil {
		err = explainResult(h.p.ask(context.WithoutCancel(ctx), h, func(w *write) error {
			_, err := w.exec(putRecordSQL, "step", h.id, name, "done", h.id, h.attempt, w.now, nil, text)
			return err
		}))
	}
	if err != nil {
		return fmt.Errorf("record step %s: %w", name, err)
	}
	return nil
}

// encodeResult makes the JSON that is kept of a step.
func (q *Queue) encodeResult(result any) (string, error) {
	text, err := json.Marshal(result)
	if err != nil {
		return "", fmt.Errorf("%w: the result can't be encoded: %w", ErrInvalid, err)
	}
	if len(text) > q.opts.MaxPayload {
		return "", fmt.Errorf("%w: the result has %d bytes, at most %d are allowed (Options.MaxPayload)", ErrPayloadTooLarge, len(text), q.opts.MaxPayload)
	}
	return string(text), nil
}

func explainResult(err error) error {
	if sqliteCode(err)&0xff == constraintCode {
		return fmt.Errorf("%w: SQLite doesn't take the result as JSON (it allows a depth of 1000): %w", ErrInvalid, err)
	}
	return err
}

// StepTx is [Step] for an effect in the queue's own file: fn's writes and the record
// that the step is done are one transaction, so they happen exactly once. It begins
// with the write lock and is run again as a whole when that can't be had, see
// [Queue.Tx]; keep it short. When the lease is lost, nothing is written: [ErrLeaseLost].
func StepTx(ctx context.Context, name string, fn func(context.Context, *sql.Tx) error) error {
	h, err := useStep(ctx, name)
	if err != nil {
		return err
	}
	err = h.effect(ctx, "step", h.id, name, fn)
	if err != nil && !errors.Is(err, ErrLeaseLost) {
		err = h.failStep(ctx, name, err) // so that a person sees it, and can skip it
	}
	return wrapStep(name, err)
}

// Once runs fn, and records the key, in one transaction, unless another task has done
// so before: exactly once for a business key, across all tasks, attempts and
// processes. Of several at the same time one runs and the others wait for it. When it
// was done before, Once returns nil without running fn. See [StepTx] for the rest.
func Once(ctx context.Context, key string, fn func(context.Context, *sql.Tx) error) error {
	h, err := handlerOf(ctx)
	if err != nil {
		return fmt.Errorf("once %s: %w", key, err)
	}
	if err := validName("key", key, maxKeyLength); err != nil {
		return err
	}
	return wrapStep(key, h.effect(ctx, "once", 0, key, fn))
}

func wrapStep(name string, err error) error {
	if err != nil {
		err = fmt.Errorf("step %s: %w", name, err)
	}
	return err
}

// effect runs fn and records it in one transaction, if the lease still stands and
// there is no record of it.
func (h *held) effect(ctx context.Context, kind string, task int64, name string, fn func(context.Context, *sql.Tx) error) error {
	return h.p.q.Tx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		if err := h.checkLease(ctx, tx); err != nil {
			return err
		}
		var state string
		err := tx.QueryRowContext(ctx, recordSQL, kind, task, name).Scan(&state)
		if state == "done" || state == "skipped" || err != nil && !isNoRows(err) {
			return err
		}
		if err := fn(context.WithValue(ctx, insideKey{}, true), tx); err != nil {
			return err
		}
		// SQLite may have ended the transaction under fn; then the record would
		// commit alone.
		if err := checkAlive(ctx, tx, 1); err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, putRecordSQL, kind, task, name, "done", h.id, h.attempt, h.p.q.now(), nil, nil)
		return err
	})
}

const recordSQL = `
select state from main.task_dedupe where kind = ? and task_id = ? and name = ?`

// checkLease returns [ErrLeaseLost] unless the task is this attempt's. Under the write
// lock that holds until the commit.
func (h *held) checkLease(ctx context.Context, tx Tx) error {
	var s standing
	err := tx.QueryRowContext(ctx, standingSQL, h.id).Scan(&s.status, &s.owner, &s.fence, &s.version)
	if err != nil && !isNoRows(err) {
		return err
	}
	if s.owner != h.p.owner || s.fence != h.fence {
		return ErrLeaseLost
	}
	return nil
}

// Complete ends the task as a success inside the application's transaction: the
// handler's own writes and the success are committed together, or not at all. The
// handler returns nil after the commit. If it returns nil and the transaction wasn't
// committed, the attempt has failed with [ErrNotCommitted].
func (t *Task[T]) Complete(ctx context.Context, tx *sql.Tx) error {
	if err := t.h.complete(context.WithoutCancel(ctx), tx); err != nil {
		return fmt.Errorf("complete task %d: %w", t.ID, explainBusy(err))
	}
	return nil
}

func (h *held) complete(ctx context.Context, tx *sql.Tx) error {
	if err := checkAlive(ctx, tx, 1); err != nil {
		return err
	}
	q := h.p.q
	w := q.joined(ctx, tx)
	w.stmts = nil // the transaction may be of another pool
	if _, err := w.exec(lockSQL); err != nil {
		return err
	}
	h.p.mu.Lock()
	h.completed = true
	own := &held{ // the loop's fields stay the loop's
		id: h.id, fence: h.fence, typ: h.typ, attempt: h.attempt, priorDue: h.priorDue,
		key: h.key, group: h.group, traceID: h.traceID, started: h.started,
	}
	h.p.mu.Unlock()
	lost, err := w.end(outcome{h: own, event: "success", begun: true, at: w.now}, h.p.owner)
	if err == nil && lost {
		err = ErrLeaseLost
	}
	if err != nil {
		return err
	}
	if err := w.writeAudit(); err != nil {
		return err
	}
	return w.writeStats()
}
