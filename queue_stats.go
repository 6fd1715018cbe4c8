package taskbox

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"time"
)

// bucketBounds are the upper bounds of the duration histograms in task_stats, in
// milliseconds; a last bucket takes what is longer.
var bucketBounds = [...]int64{1, 5, 10, 50, 100, 500, 1000, 5000, 30_000, 120_000, 600_000}

type buckets [len(bucketBounds) + 1]int64

func (b *buckets) add(ms int64) {
	for i, bound := range bucketBounds {
		if ms <= bound {
			b[i]++
			return
		}
	}
	b[len(bucketBounds)]++
}

type statsKey struct {
	minute int64
	typ    string
}

// statsRow is what a transaction adds to a row of task_stats.
type statsRow struct {
	picked, success, retried, dead, lost, released, skipped, cancelled int64
	waitMS, runMS                                                      int64
	wait, run                                                          buckets
}

// count returns the row of the current minute for a type.
func (w *write) count(typ string) *statsRow {
	k := statsKey{w.now / 60_000, typ}
	r, ok := w.stats[k]
	if !ok {
		r = new(statsRow)
		w.stats[k] = r
	}
	return r
}

func (r *statsRow) pick(waited int64) {
	waited = max(0, waited)
	r.picked++
	r.waitMS += waited
	r.wait.add(waited)
}

func (r *statsRow) end(o *outcome) {
	switch o.event {
	case "success":
		r.success++
	case "retry_wait":
		r.retried++
	case "dead_letter":
		r.dead++
	case "skipped":
		r.skipped++
		return
	default:
		r.released++
		return
	}
	if o.begun {
		ms := max(0, o.at-o.h.started)
		r.runMS += ms
		r.run.add(ms)
	}
}

// statsColumns are the columns of task_stats beside its key, in the order of
// statsRow.values.
var statsColumns = func() []string {
	cols := []string{"picked", "success", "retried", "dead", "lost", "released", "skipped", "cancelled", "wait_ms", "run_ms"}
	for _, kind := range []string{"wait", "run"} {
		for _, b := range bucketBounds {
			cols = append(cols, fmt.Sprintf("%s_%d", kind, b))
		}
		cols = append(cols, kind+"_inf")
	}
	return cols
}()

var addStatsSQL = func() string {
	adds := make([]string, len(statsColumns))
	for i, c := range statsColumns {
		adds[i] = c + " = " + c + " + excluded." + c
	}
	return `
insert into main.task_stats (minute, event_type, ` + strings.Join(statsColumns, ", ") + `)
values (?, ?` + strings.Repeat(", ?", len(statsColumns)) + `)
on conflict (minute, event_type) do update set ` + strings.Join(adds, ", ")
}()

func (r *statsRow) values() []any {
	vs := []any{r.picked, r.success, r.retried, r.dead, r.lost, r.released, r.skipped, r.cancelled, r.waitMS, r.runMS}
	for _, b := range []*buckets{&r.wait, &r.run} {
		for _, n := range b {
			vs = append(vs, n)
		}
	}
	return vs
}

func (w *write) writeStats() error {
	for k, r := range w.stats {
		if _, err := w.exec(addStatsSQL, append([]any{k.minute, k.typ}, r.values()...)...); err != nil {
			return err
		}
	}
	return w.writeGroups()
}

// Stats are the figures of the queue at one moment. Durations and rates are over
// the last five minutes, the running one included.
type Stats struct {
	// At is when they were taken.
	At time.Time
	// QueueLength is how many tasks are due and wait for a worker.
	QueueLength int64
	// AverageWait is how long the tasks that were picked had been due.
	AverageWait time.Duration
	// FailureRate is the share of attempts that failed, from 0 to 1.
	FailureRate float64
	// DeadLetters is how many dead letters there are.
	DeadLetters int64
	// OldestDue is how long the first task in the queue has been due, or 0.
	OldestDue time.Duration
	// Scheduled, RetryWait, Blocked and Running count the tasks that aren't due yet,
	// wait for a retry, wait behind the first of their group, and are held by a
	// poller (picked or processing).
	Scheduled, RetryWait, Blocked, Running int64
	// Types has the same by type, sorted by name.
	Types []TypeStats
}

// TypeStats are the figures of one type; see [Stats].
type TypeStats struct {
	Type        string
	QueueLength int64
	DeadLetters int64
	AverageWait time.Duration
	FailureRate float64
	OldestDue   time.Duration
	// Picked, Succeeded, Retried, Dead and Lost count the attempts of the last five
	// minutes: begun, succeeded, failed and to be retried, failed for good, ended
	// with their process.
	Picked, Succeeded, Retried, Dead, Lost int64
	// AverageRun is how long the attempts that ended took.
	AverageRun time.Duration
}

const (
	// recentSQL reads five minutes' rows: their number doesn't grow with the history.
	recentSQL = `
select event_type, sum(picked), sum(success), sum(retried), sum(dead), sum(lost), sum(wait_ms), sum(run_ms)
from main.task_stats where minute > ? group by event_type`

	queueLengthSQL = `
select event_type, count(*), min(next_run_at) from main.task_outbox
where status = 'pending' and blocked = 0 group by event_type`

	deadLettersSQL = `
select event_type, count(*) from main.task_outbox
where status = 'dead_letter' and resolved_as is null group by event_type`

	waitingSQL = `
select (select count(*) from main.task_outbox where status = 'scheduled'),
	(select count(*) from main.task_outbox where status = 'retry_wait'),
	(select count(*) from main.task_outbox where blocked = 1),
	(select count(*) from main.task_outbox where owner is not null)`
)

const recentMinutes = 5

// Stats reads the figures from the minute's statistics and from indexes that hold
// living tasks only, so that their cost doesn't grow with the history.
func (q *Queue) Stats(ctx context.Context) (Stats, error) {
	tx, err := q.db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true}) // one snapshot
	if err != nil {
		return Stats{}, fmt.Errorf("read the statistics: %w", explainBusy(err))
	}
	defer tx.Rollback()
	r := statsReader{ctx: ctx, tx: tx, now: q.now(), types: map[string]*TypeStats{}}
	s, err := r.read()
	if err != nil {
		return Stats{}, fmt.Errorf("read the statistics: %w", err)
	}
	return s, nil
}
