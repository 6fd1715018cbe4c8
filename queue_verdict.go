package taskbox

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// A VerdictKind says in one word whether a task can be replayed.
type VerdictKind string

// The kinds of verdicts, from good to bad. The words are stable.
const (
	// Safe: the task's handler has never been called, so that nothing can happen twice.
	Safe VerdictKind = "safe"
	// SafeIf: safe under the conditions that the verdict names.
	SafeIf VerdictKind = "safe_if"
	// Unknown: an attempt broke off, and nobody knows what it had done by then.
	Unknown VerdictKind = "unknown"
	// Unsafe: what the task is for has been done.
	Unsafe VerdictKind = "unsafe"
)

// A Verdict says whether a replay of a task could do something twice, and why, in
// plain words.
type Verdict struct {
	Kind    VerdictKind `json:"kind"`
	Reasons []string    `json:"reasons"`
	// Conditions are what must hold for a replay to be safe, with [SafeIf].
	Conditions []string `json:"conditions,omitempty"`
}

// risk returns [ErrRisk] with the reasons when a person must accept one.
func (v Verdict) risk(hint string) error {
	if v.Kind != Unknown && v.Kind != Unsafe {
		return nil
	}
	return fmt.Errorf("%w: it is %s: %s; %s", ErrRisk, v.Kind, strings.Join(v.Reasons, "; "), hint)
}

// Verdict says what the file knows about a replay of a task. The file knows what
// [Step], [StepTx], [Once] and [Task.Complete] record, and how each attempt ended. It
// doesn't know what a handler does outside of these: once the handler has been
// called, the best verdict is [SafeIf], on the condition that those effects are
// idempotent.
func (q *Queue) Verdict(ctx context.Context, id int64) (Verdict, error) {
	v, err := q.verdict(ctx, id)
	if err != nil {
		return Verdict{}, fmt.Errorf("verdict on task %d: %w", id, explainBusy(err))
	}
	return v, nil
}

func (q *Queue) verdict(ctx context.Context, id int64) (Verdict, error) {
	fs, err := q.factsOf(ctx, []int64{id})
	if err != nil {
		return Verdict{}, err
	}
	if len(fs) == 0 {
		return Verdict{}, q.notFound(ctx, q.db, id)
	}
	return fs[0].verdict(), nil
}

// weigh refuses a replay that may repeat effects, unless that is accepted. What is
// unsafe is never replayed as a part of a plan.
func (m *manual) weigh() error {
	fs, err := readFacts(m.query, []int64{m.h.id})
	if err != nil {
		return err
	}
	v := fs[0].verdict() // the task was loaded in this transaction
	m.verdict = v.Kind
	hint := "AcceptRisk replays it all the same"
	if m.opts.plan != "" && v.Kind == Unsafe {
		return v.risk("it isn't replayed in bulk")
	}
	if err := v.risk(hint); err != nil {
		if !m.opts.risk {
			return err
		}
		m.risk = v.Reasons
	}
	return nil
}

// facts are what the file knows of a task that bears on a replay.
type facts struct {
	PlannedTask
	created int64
	rival   int64 // a task with the same key that has succeeded since, or 0
	once    int   // records of Once
	steps   []stepFact

	cur         *spell // the attempt that has no end yet
	called      int    // attempts that called the handler and ended with its word
	broken      []spell
	undecodable bool
	succeeded   int64 // Unix ms, or 0
}

// A spell is the time of one attempt.
type spell struct {
	attempt  int
	from, to int64
	called   bool // the handler
	how      string
}

type stepFact struct {
	name, state, err string
	attempt          int
	created, updated int64
}

const (
	taskFactsSQL = `
select id, version, event_type, status, coalesce(error_group, ''), created_at,
	coalesce((select by_task from main.task_dedupe
		where kind = 'key' and task_id = 0 and name = dedupe_key and state = 'done'
			and by_task <> id and updated_at >= t.created_at), 0),
	(select count(*) from main.task_dedupe where kind = 'once' and by_task = id)
from main.task_outbox as t where id in (select value from json_each(?)) order by id`

	trailFactsSQL = `
select task_id, event, at, coalesce(attempt, 0), coalesce(detail ->> '$.before', ''), coalesce(detail ->> '$.broke_off', false)
from main.task_audit where task_id in (select value from json_each(?)) order by task_id, seq`

	stepFactsSQL = `
select task_id, name, state, coalesce(error, ''), coalesce(attempt, 0), created_at, updated_at
from main.task_dedupe where kind = 'step' and task_id in (select value from json_each(?))
order by task_id, created_at, name`
)

type queryFunc func(text string, args ...any) (*sql.Rows, error)

// factsOf reads the facts of tasks in one snapshot; those that don't exist are
// left out.
func (q *Queue) factsOf(ctx context.Context, ids []int64) ([]*facts, error) {
	tx, err := q.db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return nil, err
	}
	defer tx.Rollback()
	return readFacts(func(text string, args ...any) (*sql.Rows, error) {
		return tx.QueryContext(ctx, text, args...)
	}, ids)
}

func readFacts(query queryFunc, ids []int64) (fs []*facts, err error) {
	list, err := json.Marshal(ids)
	if err != nil {
		return nil, err
	}
	byID := map[int64]*facts{}
	err = eachRow(query, taskFactsSQL, string(list), func(rows *sql.Rows) error {
		f := new(facts)
		fs = append(fs, f)
		err := rows.Scan(&f.ID, &f.Version, &f.Type, &f.Status, &f.ErrorGroup, &f.created, &f.rival, &f.once)
		byID[f.ID] = f
		return err
	})
	if err == nil {
		err = eachRow(query, trailFactsSQL, string(list), func(rows *sql.Rows) error { return scanEvent(rows, byID) })
	}
	if err == nil {
		err = eachRow(query, stepFactsSQL, string(list), func(rows *sql.Rows) error { return scanStep(rows, byID) })
	}
	return fs, err
}

func eachRow(query queryFunc, text, arg string, row func(*sql.Rows) error) error {
	rows, err := query(text, arg)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		if err := row(rows); err != nil {
			return err
		}
	}
	return rows.Err()
}

func scanEvent(rows *sql.Rows, byID map[int64]*facts) error {
	var id, at int64
	var event, before string
	var attempt int
	var broke bool
	if err := rows.Scan(&id, &event, &at, &attempt, &before, &broke); err != nil {
		return err
	}
	if f := byID[id]; f != nil { // nil: what is left of a task that was deleted
		f.event(event, at, attempt, before, broke)
	}
	return nil
}

func scanStep(rows *sql.Rows, byID map[int64]*facts) error {
	var id int64
	var s stepFact
	if err := rows.Scan(&id, &s.name, &s.state, &s.err, &s.attempt, &s.created, &s.updated); err != nil {
		return err
	}
	if f := byID[id]; f != nil {
		f.steps = append(f.steps, s)
	}
	return nil
}

// event follows the attempts along the trail.
func (f *facts) event(event string, at int64, attempt int, before string, broke bool) {
	switch event {
	case "picked":
		f.cur = &spell{attempt: attempt, from: at}
	case "processing":
		if f.cur != nil {
			f.cur.called = true
		}
	case "success":
		f.succeeded = at
		f.end(at, "")
	case "failed", "retry_wait":
		how := ""
		if broke {
			how = "ended with a timeout, a cancellation or a broken connection"
		}
		f.undecodable = f.undecodable || f.cur != nil && !f.cur.called
		f.end(at, how)
	default:
		f.ended(event, at, before)
	}
}

// ended follows the ends of attempts that aren't the handler's answer.
func (f *facts) ended(event string, at int64, before string) {
	switch {
	case event == "scheduled" || event == "skipped":
		f.end(at, "")
	case event == "lost":
		f.end(at, "was lost with its process, or its process was silent for too long")
	case event == "interrupted" && f.cur != nil && f.cur.called:
		f.end(at, "was cancelled at a shutdown")
	case event == "interrupted": // before its handler was called
		f.cur = nil
	case event == "cancelled" && (before == "picked" || before == "processing"):
		f.end(at, "was cancelled by hand")
	}
}

func (f *facts) end(at int64, how string) {
	if f.cur == nil {
		return
	}
	f.cur.to, f.cur.how = at, how
	switch {
	case how != "":
		f.broken = append(f.broken, *f.cur)
	case f.cur.called:
		f.called++
	}
	f.cur = nil
}

// maxReasons bounds a verdict on a task that has failed a thousand times.
const maxReasons = 8

// verdict judges.
func (f *facts) verdict() Verdict {
	for _, v := range []Verdict{
		{Kind: Unsafe, Reasons: f.done()},
		{Kind: Unknown, Reasons: f.doubts()},
		{Kind: Safe, Reasons: f.harmless()},
	} {
		if len(v.Reasons) > 0 {
			return v.bounded()
		}
	}
	return Verdict{Kind: SafeIf, Reasons: f.recorded(), Conditions: f.conditions()}.bounded()
}

func (v Verdict) bounded() Verdict {
	for _, list := range []*[]string{&v.Reasons, &v.Conditions} {
		if n := len(*list) - maxReasons; n > 0 {
			*list = append((*list)[:maxReasons:maxReasons], fmt.Sprintf("and %d more", n))
		}
	}
	return v
}

// done says why what the task is for has happened.
func (f *facts) done() (reasons []string) {
	switch {
	case f.Status == "success":
		reasons = append(reasons, "it has succeeded, at "+utc(f.succeeded))
	case f.succeeded != 0:
		reasons = append(reasons, "it had succeeded before, at "+utc(f.succeeded))
	}
	if f.rival != 0 {
		reasons = append(reasons, fmt.Sprintf("task %d with the same key has succeeded since", f.rival))
	}
	return reasons
}

func utc(ms int64) string { return time.UnixMilli(ms).UTC().Format(time.RFC3339) }

// doubts says which effects may have happened or not.
func (f *facts) doubts() (reasons []string) {
	if f.Status == "picked" || f.Status == "processing" {
		return []string{"it is running now"}
	}
	for _, s := range f.steps {
		if s.state == "processing" {
			reasons = append(reasons, fmt.Sprintf("step %s had begun in attempt %d and broke off: nobody knows whether it happened", s.name, s.attempt))
		}
	}
	for _, b := range f.broken {
		if why := f.doubt(b); why != "" {
			reasons = append(reasons, fmt.Sprintf("attempt %d %s: %s", b.attempt, b.how, why))
		}
	}
	return reasons
}

// doubt says what is unknown of an attempt that broke off. Where effects are
// recorded and none of them was open, it broke off in between.
func (f *facts) doubt(b spell) string {
	if len(f.steps) == 0 && f.once == 0 {
		return "nobody knows what its handler had done by then, since it has recorded no step"
	}
	for _, s := range f.steps {
		// A later failure has overwritten what the record said at that time.
		if s.state == "failed" && s.created <= b.to && s.updated >= b.from {
			return fmt.Sprintf("step %s may have been under way, and may have happened", s.name)
		}
	}
	return ""
}

// harmless says why nothing can have happened.
func (f *facts) harmless() []string {
	switch {
	case f.called > 0 || len(f.broken) > 0 || len(f.steps) > 0 || f.once > 0:
		return nil
	case f.undecodable:
		return []string{"its payload couldn't be decoded, so its handler was never called"}
	}
	return []string{"its handler was never called"}
}

// recorded says what is known of what has happened.
func (f *facts) recorded() (reasons []string) {
	if f.called > 0 {
		reasons = append(reasons, "its handler returned, without success, from "+times(f.called))
	}
	for _, b := range f.broken {
		reasons = append(reasons, fmt.Sprintf("attempt %d %s, while no recorded step was under way", b.attempt, b.how))
	}
	for _, s := range f.steps {
		switch s.state {
		case "done":
			reasons = append(reasons, fmt.Sprintf("step %s is done and won't run again", s.name))
		case "skipped":
			reasons = append(reasons, fmt.Sprintf("step %s was passed by hand and won't run", s.name))
		}
	}
	if f.once > 0 {
		reasons = append(reasons, fmt.Sprintf("effects by Once that won't run again: %d", f.once))
	}
	return reasons
}

func times(n int) string {
	if n == 1 {
		return "one attempt"
	}
	return fmt.Sprintf("%d attempts", n)
}

func (f *facts) conditions() []string {
	conds := []string{"the handler's effects outside Step, StepTx and Once are idempotent"}
	for _, s := range f.steps {
		if s.state == "failed" {
			conds = append(conds, fmt.Sprintf("step %s, which failed in attempt %d (%s), can run again", s.name, s.attempt,
				cmp.Or(clip(s.err, 100), "no text")))
		}
	}
	return conds
}
