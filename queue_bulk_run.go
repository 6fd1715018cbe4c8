package taskbox

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"
)

// BulkOptions say how carefully a plan is applied. The zero value applies it at once
// and accepts no risk.
type BulkOptions struct {
	// PerSecond is the most tasks in a second. 0: no limit.
	PerSecond int
	// Canary applies the plan to one task first and goes on only when that has
	// succeeded: Apply waits for it, through its retries, as long as ctx lasts. It is
	// for replay and run now, and needs a poller that runs.
	Canary bool
	// StopAfter stops after so many failures: tasks that were refused, or that were
	// run by the plan and have failed since. 0: goes on to the end.
	StopAfter int
	// AcceptRisk replays tasks whose verdict is [Unknown], too; see [AcceptRisk].
	AcceptRisk bool
}

func (o BulkOptions) check(a Action) error {
	switch {
	case o.PerSecond < 0:
		return fmt.Errorf("%w: BulkOptions.PerSecond is %d, want a positive number, or 0 for no limit", ErrInvalid, o.PerSecond)
	case o.StopAfter < 0:
		return fmt.Errorf("%w: BulkOptions.StopAfter is %d, want a positive number, or 0 for never", ErrInvalid, o.StopAfter)
	case o.Canary && !a.runs():
		return fmt.Errorf("%w: BulkOptions.Canary is for replay and run_now: after %s no task runs", ErrInvalid, a.Do)
	}
	return nil
}

// A BulkResult says what was done.
type BulkResult struct {
	Plan    string `json:"plan"`
	Done    int    `json:"done"`
	Refused int    `json:"refused"` // changed since, gone, or in a wrong state
	Skipped int    `json:"skipped"` // for their verdict
	Left    int    `json:"left"`    // not come to
	// FailedAgain is how many of those done have been run and have failed since, as
	// far as StopAfter had it looked for.
	FailedAgain int `json:"failed_again,omitempty"`
	// Stopped says why the run ended early: its canary, StopAfter, or an error. Empty:
	// it came to the end.
	Stopped string     `json:"stopped,omitempty"`
	Tasks   []BulkTask `json:"tasks"` // those that it came to, in the order of the plan
}

// A BulkTask is the result for one task.
type BulkTask struct {
	ID   int64 `json:"id"`
	Done bool  `json:"done"`
	// Skipped is why it was left alone for its verdict.
	Skipped string `json:"skipped,omitempty"`
	// Err is why it was refused: [ErrConflict] when it has changed since.
	Err   error  `json:"-"`
	Error string `json:"error,omitempty"` // Err's text
}

// Apply does what was planned, to each task that hasn't changed since, in short
// transactions with pauses, so that the application's own writes are hardly delayed.
// Each task is done with its audit row or not at all. Those whose verdict is [Unsafe]
// aren't replayed, those of which it is [Unknown] only with
// [BulkOptions].AcceptRisk; verdicts are judged anew.
//
// The error tells that the run couldn't go on: that ctx has ended, between two
// batches, or what is wrong with the file or an argument. The result says in any case
// what was done.
func (q *Queue) Apply(ctx context.Context, p Plan, by By, o BulkOptions) (BulkResult, error) {
	_, err := p.Action.fn()
	if err = cmp.Or(by.check(), err, o.check(p.Action), p.check()); err != nil {
		return BulkResult{Plan: p.ID, Left: len(p.Tasks)}, fmt.Errorf("apply plan %.40s: %w", p.ID, err)
	}
	res, err := q.newBulk(p.ID, p.Action, by, o).apply(ctx, p.Tasks)
	if err != nil {
		return res, fmt.Errorf("apply plan %.40s: %w", p.ID, err)
	}
	return res, nil
}

const (
	// bulkBatch and bulkTime bound a transaction of a run.
	bulkBatch = 50
	bulkTime  = 4 * time.Millisecond
	// bulkPause is the least time between two transactions.
	bulkPause = time.Millisecond
)

// A bulkRun applies a plan.
type bulkRun struct {
	q      *Queue
	action Action
	fn     func(*manual) error
	by     By
	o      BulkOptions
	event  string // of the run's audit row
	group  string // the error group that is resolved, or empty
	canary bool   // still to be found
	watch  []int64
	res    BulkResult
}

// newBulk returns a run whose arguments have been checked.
func (q *Queue) newBulk(plan string, a Action, by By, o BulkOptions) *bulkRun {
	fn, _ := a.fn()
	return &bulkRun{q: q, action: a, fn: fn, by: by, o: o, event: "applied", canary: o.Canary,
		res: BulkResult{Plan: plan, Tasks: []BulkTask{}}}
}

// apply runs to the end, or to where it must stop, and records the run.
func (r *bulkRun) apply(ctx context.Context, tasks []PlannedTask) (BulkResult, error) {
	err := r.batches(ctx, tasks)
	r.res.Left = len(tasks) - len(r.res.Tasks)
	if err != nil {
		err = fmt.Errorf("%d of %d tasks done: %w", r.res.Done, len(tasks), explainBusy(err))
		r.res.Stopped = err.Error()
	}
	return r.res, errors.Join(err, r.record(context.WithoutCancel(ctx), len(tasks)))
}

func (r *bulkRun) batches(ctx context.Context, tasks []PlannedTask) error {
	for len(tasks) > 0 && r.res.Stopped == "" {
		if err := ctx.Err(); err != nil {
			return err
		}
		start := time.Now()
		n, err := r.batch(ctx, tasks[:min(len(tasks), r.size())])
		if err != nil {
			return err
		}
		tasks = tasks[n:]
		if err := r.between(ctx, n, time.Since(start), len(tasks) > 0); err != nil {
			return err
		}
	}
	return nil
}

// size is the number of tasks of the next transaction.
func (r *bulkRun) size() int {
	switch {
	case r.canary:
		return 1
	case r.o.PerSecond > 0: // twenty small steps a second
		return max(1, min(bulkBatch, r.o.PerSecond/20))
	}
	return bulkBatch
}

// batch does some tasks in one transaction and returns how many it came to.
func (r *bulkRun) batch(ctx context.Context, tasks []PlannedTask) (int, error) {
	var done []BulkTask
	var missing []string
	err := r.q.Tx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		done = done[:0] // it may be run again
		w := r.q.joined(context.WithoutCancel(ctx), tx)
		for start := time.Now(); len(done) < len(tasks) && (len(done) == 0 || time.Since(start) < bulkTime); {
			t, err := r.one(w, tasks[len(done)])
			if err != nil {
				return err
			}
			done = append(done, t)
		}
		missing = w.missing
		return nil
	})
	if err != nil {
		return 0, err
	}
	for _, t := range done {
		r.count(t)
	}
	if r.action.Do == DoCancel {
		r.q.checkHeld()
	}
	return len(done), r.q.stmts.prepare(context.WithoutCancel(ctx), missing...)
}

// one does one task, or nothing: what it has written until it failed is taken back.
func (r *bulkRun) one(w *write, t PlannedTask) (BulkTask, error) {
	if _, err := w.exec(`savepoint task`); err != nil {
		return BulkTask{}, err
	}
	m := manual{q: r.q, by: r.by, opts: manualOptions{version: &t.Version, risk: r.o.AcceptRisk, plan: r.res.Plan}}
	own := *w // audit rows and figures of its own, the statements of all
	own.stats, own.missing = map[statsKey]*statsRow{}, nil
	m.write = &own
	err := m.do(t.ID, r.fn)
	w.missing = append(w.missing, own.missing...)
	if err != nil {
		if _, err := w.exec(`rollback to task`); err != nil {
			return BulkTask{}, err
		}
	}
	if _, err := w.exec(`release task`); err != nil {
		return BulkTask{}, err
	}
	return resultOf(t.ID, err)
}

// resultOf tells errors of one task from those of the file.
func resultOf(id int64, err error) (BulkTask, error) {
	t := BulkTask{ID: id, Done: err == nil}
	switch {
	case err == nil:
	case errors.Is(err, ErrRisk):
		t.Skipped = textOf(err)
	case isAny(ErrConflict, ErrState, ErrTaskRunning, ErrNotFound, ErrInvalid)(err):
		t.Err, t.Error = err, textOf(err)
	default:
		return t, fmt.Errorf("task %d: %w", id, err)
	}
	return t, nil
}

func (r *bulkRun) count(t BulkTask) {
	r.res.Tasks = append(r.res.Tasks, t)
	switch {
	case t.Done:
		r.res.Done++
		if r.o.StopAfter > 0 && r.action.runs() {
			r.watch = append(r.watch, t.ID)
		}
	case t.Err != nil:
		r.res.Refused++
	default:
		r.res.Skipped++
	}
}

// between does what comes after a batch of n tasks that took so long.
func (r *bulkRun) between(ctx context.Context, n int, took time.Duration, more bool) error {
	if r.canary && r.res.Done > 0 {
		r.canary = false
		if err := r.awaitCanary(ctx, r.res.Tasks[len(r.res.Tasks)-1].ID); err != nil || r.res.Stopped != "" {
			return err
		}
	}
	if !more {
		return nil
	}
	if err := r.pause(ctx, n, took); err != nil {
		return err
	}
	return r.stopAfter(ctx)
}

// pause leaves the write lock to others for as long as it was held, and keeps the
// rate. Time that was lost isn't made up for by going faster.
func (r *bulkRun) pause(ctx context.Context, n int, took time.Duration) error {
	wait := max(bulkPause, took)
	if r.o.PerSecond > 0 {
		share := time.Duration(float64(n) / float64(r.o.PerSecond) * float64(time.Second))
		wait = max(wait, share-took)
	}
	return sleep(ctx, wait)
}

// awaitCanary waits for the end of the first task.
func (r *bulkRun) awaitCanary(ctx context.Context, id int64) error {
	for wait := 10 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		if err := sleep(ctx, wait); err != nil {
			return fmt.Errorf("wait for the canary, task %d: %w", id, err)
		}
		i, err := r.q.Get(ctx, id)
		switch {
		case err != nil:
			return fmt.Errorf("wait for the canary: %w", err)
		case i.Status == "success":
			return nil
		case !i.FinishedAt.IsZero():
			r.res.Stopped = fmt.Sprintf("the canary, task %d, is %s: %s", id, i.Status, cmp.Or(clip(i.LastError, maxGroupText), "no error"))
			return nil
		}
	}
}

// watchAtOnce is how many of the tasks done are looked at between two batches.
const watchAtOnce = 200

// stopAfter stops the run after too many failures.
func (r *bulkRun) stopAfter(ctx context.Context) error {
	if r.o.StopAfter == 0 {
		return nil
	}
	if err := r.look(ctx); err != nil {
		return err
	}
	if n := r.res.Refused + r.res.FailedAgain; n >= r.o.StopAfter {
		r.res.Stopped = fmt.Sprintf("%d failures: %d refused, %d failed again", n, r.res.Refused, r.res.FailedAgain)
	}
	return nil
}

// look counts those of the tasks done that have failed since, the ones first that
// were looked at the longest ago.
func (r *bulkRun) look(ctx context.Context) error {
	n := min(len(r.watch), watchAtOnce)
	if n == 0 {
		return nil
	}
	list, err := json.Marshal(r.watch[:n])
	if err != nil {
		return err
	}
	r.watch = r.watch[n:]
	return eachRow(func(text string, args ...any) (*sql.Rows, error) { return r.q.db.QueryContext(ctx, text, args...) }, `
select id, status in ('dead_letter', 'retry_wait'), finished_at is null from main.task_outbox
where id in (select value from json_each(?)) order by id`, string(list), func(rows *sql.Rows) error {
		var id int64
		var failed, alive bool
		err := rows.Scan(&id, &failed, &alive)
		switch {
		case failed:
			r.res.FailedAgain++
		case alive:
			r.watch = append(r.watch, id)
		}
		return err
	})
}

// bulkDetail is the detail of the run's audit row.
type bulkDetail struct {
	Plan        string    `json:"plan"`
	Do          Operation `json:"do"`
	As          string    `json:"as,omitempty"`
	ErrorGroup  string    `json:"error_group,omitempty"`
	Planned     int       `json:"planned"`
	Done        int       `json:"done"`
	Refused     int       `json:"refused"`
	Skipped     int       `json:"skipped"`
	Left        int       `json:"left"`
	FailedAgain int       `json:"failed_again,omitempty"`
	Stopped     string    `json:"stopped,omitempty"`
	Risk        bool      `json:"accepted_risk,omitempty"`
}

// record writes the run's own audit row.
func (r *bulkRun) record(ctx context.Context, planned int) error {
	s := &r.res
	text, err := json.Marshal(bulkDetail{
		Plan: s.Plan, Do: r.action.Do, As: r.action.As, ErrorGroup: r.group, Planned: planned, Done: s.Done, Refused: s.Refused,
		Skipped: s.Skipped, Left: s.Left, FailedAgain: s.FailedAgain, Stopped: s.Stopped, Risk: r.o.AcceptRisk,
	})
	if err == nil {
		err = r.q.Tx(ctx, func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, queueAuditSQL, r.event, r.q.now(), r.by.Actor, r.by.Reason, string(text))
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("record the run: %w", err)
	}
	r.q.opts.Logger.InfoContext(ctx, "taskbox: by hand", "event", r.event, "do", r.action.Do, "plan", s.Plan, "planned", planned,
		"done", s.Done, "refused", s.Refused, "skipped", s.Skipped, "actor", r.by.Actor, "reason", r.by.Reason)
	return nil
}
