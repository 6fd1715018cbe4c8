package taskbox

import (
	"cmp"
	"context"
	"database/sql"
	"slices"
	"time"
)

// statsReader gathers [Stats] from one snapshot.
type statsReader struct {
	ctx   context.Context
	tx    *sql.Tx
	now   int64
	types map[string]*TypeStats
	sums  attemptSums
}

// attemptSums are what rates and averages are made of.
type attemptSums struct{ picked, good, bad, waitMS int64 }

func (a *attemptSums) averageWait() time.Duration { return average(a.waitMS, a.picked) }

func (a *attemptSums) failureRate() float64 {
	if a.good+a.bad == 0 {
		return 0
	}
	return float64(a.bad) / float64(a.good+a.bad)
}

func average(ms, n int64) time.Duration {
	if n == 0 {
		return 0
	}
	return time.Duration(float64(ms) / float64(n) * float64(time.Millisecond))
}

func (r *statsReader) read() (s Stats, err error) {
	s.At = time.UnixMilli(r.now)
	for _, step := range []func(*Stats) error{r.recent, r.lengths, r.dead} {
		if err := step(&s); err != nil {
			return s, err
		}
	}
	err = r.tx.QueryRowContext(r.ctx, waitingSQL).Scan(&s.Scheduled, &s.RetryWait, &s.Blocked, &s.Running)
	s.AverageWait, s.FailureRate = r.sums.averageWait(), r.sums.failureRate()
	for _, t := range r.types {
		s.Types = append(s.Types, *t)
	}
	slices.SortFunc(s.Types, func(a, b TypeStats) int { return cmp.Compare(a.Type, b.Type) })
	return s, err
}

func (r *statsReader) typ(name string) *TypeStats {
	if r.types[name] == nil {
		r.types[name] = &TypeStats{Type: name}
	}
	return r.types[name]
}

func (r *statsReader) recent(*Stats) error {
	return r.each(recentSQL, func(rows *sql.Rows) error {
		var name string
		var t TypeStats
		var waitMS, runMS int64
		err := rows.Scan(&name, &t.Picked, &t.Succeeded, &t.Retried, &t.Dead, &t.Lost, &waitMS, &runMS)
		a := attemptSums{picked: t.Picked, good: t.Succeeded, bad: t.Retried + t.Dead + t.Lost, waitMS: waitMS}
		t.Type, t.AverageWait, t.FailureRate = name, a.averageWait(), a.failureRate()
		t.AverageRun = average(runMS, t.Succeeded+t.Retried+t.Dead)
		*r.typ(name) = t
		r.sums.picked += a.picked
		r.sums.good += a.good
		r.sums.bad += a.bad
		r.sums.waitMS += a.waitMS
		return err
	}, r.now/60_000-recentMinutes)
}

func (r *statsReader) lengths(s *Stats) error {
	return r.each(queueLengthSQL, func(rows *sql.Rows) error {
		var name string
		var n, since int64
		err := rows.Scan(&name, &n, &since)
		t := r.typ(name)
		t.QueueLength, t.OldestDue = n, time.Duration(max(0, r.now-since))*time.Millisecond
		s.QueueLength += n
		s.OldestDue = max(s.OldestDue, t.OldestDue)
		return err
	})
}

func (r *statsReader) dead(s *Stats) error {
	return r.each(deadLettersSQL, func(rows *sql.Rows) error {
		var name string
		var n int64
		err := rows.Scan(&name, &n)
		r.typ(name).DeadLetters = n
		s.DeadLetters += n
		return err
	})
}

func (r *statsReader) each(query string, row func(*sql.Rows) error, args ...any) error {
	rows, err := r.tx.QueryContext(r.ctx, query, args...)
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
