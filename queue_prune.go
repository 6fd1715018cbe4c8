package taskbox

import (
	"context"
	"fmt"
	"math"
	"time"
)

const (
	// pruneScan and pruneBatch bound one step: rows looked at, rows deleted.
	pruneScan  = 500
	pruneBatch = 100
	// pruneKeys is the same for keys, which may run out at any rate.
	pruneKeys = 2000
	// keepStats is how long the minutes' statistics stay.
	keepStats = 31 * 24 * time.Hour
)

const (
	sweepSQL = `
select id, status, coalesce(finished_at, 0), created_at from main.task_outbox
where id > ? order by id limit ?`

	pruneTaskSQL = `
delete from main.task_outbox where id = ? and finished_at = ?`

	pruneTrailSQL = `
delete from main.task_audit where task_id = ? and actor is null`

	pruneAuditSQL = `
delete from main.task_audit where (task_id, seq) in (
	select task_id, seq from main.task_audit
	where actor is not null and at < ?
		and not exists (select 1 from main.task_outbox where id = task_id)
	limit ?)`

	pruneStepsSQL = `
delete from main.task_dedupe where kind in ('step', 'duplicate') and task_id = ?`

	pruneKeysSQL = `
delete from main.task_dedupe where (kind, task_id, name) in (
	select kind, task_id, name from main.task_dedupe
	where expires_at is not null and expires_at < ? limit ?)`

	pruneStatsSQL = `
delete from main.task_stats where minute < ?`
)

// A pruner walks the tasks by id, a few at a time, and deletes those whose time is
// over. It needs no index: a task can't have ended before it was created, and ids
// grow with creation, so the walk ends at the first task that is too young.
type pruner struct {
	q      *Queue
	cursor int64
}

// expired is a task to delete.
type expired struct{ id, finished int64 }

// cutoffs are the times before which tasks must have ended to go; 0: none goes.
func (q *Queue) cutoffs(now int64) (done, dead int64) {
	if q.opts.KeepDone > 0 {
		done = now - q.opts.KeepDone.Milliseconds()
	}
	if q.opts.KeepDead > 0 {
		dead = now - q.opts.KeepDead.Milliseconds()
	}
	return done, dead
}

// sweep looks at the next tasks; end tells that the walk is over.
func (p *pruner) sweep(ctx context.Context, db querier) (found []expired, end bool, err error) {
	now := p.q.now()
	done, dead := p.q.cutoffs(now)
	rows, err := db.QueryContext(ctx, sweepSQL, p.cursor, pruneScan)
	if err != nil {
		return nil, false, err
	}
	defer rows.Close()
	n := 0
	for rows.Next() && len(found) < pruneBatch {
		var e expired
		var status string
		var created int64
		if err := rows.Scan(&e.id, &status, &e.finished, &created); err != nil {
			return nil, false, err
		}
		// A time in the future was written by a clock that was wrong: it says nothing.
		if created > max(done, dead) && created <= now {
			return found, true, nil
		}
		n, p.cursor = n+1, e.id
		if e.finished != 0 && e.finished < map[bool]int64{true: dead, false: done}[status == "dead_letter"] {
			found = append(found, e)
		}
	}
	return found, n < pruneScan && len(found) < pruneBatch, rows.Err()
}

// step prunes a little and tells whether the walk is over.
func (p *pruner) step(ctx context.Context, db querier, conn txBeginner) (end bool, err error) {
	found, end, err := p.sweep(ctx, db)
	if err != nil {
		return false, fmt.Errorf("prune: %w", err)
	}
	if len(found) == 0 && !end {
		return false, nil
	}
	if end {
		p.cursor = 0
	}
	if len(found) == 0 && !p.hasOldRecords(ctx, db) {
		return end, nil
	}
	return end, p.delete(ctx, conn, found)
}

// hasOldRecords saves an idle queue the write.
func (p *pruner) hasOldRecords(ctx context.Context, db querier) bool {
	var old bool
	now := p.q.now()
	err := db.QueryRowContext(ctx, `
select exists (select 1 from main.task_audit where actor is not null and at < ?
		and not exists (select 1 from main.task_outbox where id = task_id))
	or exists (select 1 from main.task_stats where minute < ?)
	or exists (select 1 from main.task_dedupe where expires_at is not null and expires_at < ?)
	or exists (select 1 from main.task_error_count where span = 1 and at < ?)
	or exists (select 1 from main.task_error_count where span = 60 and at < ?)`,
		p.auditCutoff(now), statsCutoff(now), now, now/60_000-minuteSpans, statsCutoff(now)).Scan(&old)
	return err == nil && old // an error will be met, and told, by the next turn
}

func (p *pruner) auditCutoff(now int64) int64 {
	if p.q.opts.KeepAudit < 0 {
		return math.MinInt64
	}
	return now - p.q.opts.KeepAudit.Milliseconds()
}

func statsCutoff(now int64) int64 { return (now - keepStats.Milliseconds()) / 60_000 }

func (p *pruner) delete(ctx context.Context, conn txBeginner, found []expired) error {
	w, err := p.q.begin(ctx, conn)
	if err != nil {
		return fmt.Errorf("prune: %w", err)
	}
	if err := w.prune(found, p.auditCutoff(w.now)); err != nil {
		w.abort()
		return fmt.Errorf("prune: %w", err)
	}
	if err := w.commit(); err != nil {
		w.abort()
		return fmt.Errorf("prune: %w", err)
	}
	return nil
}

// prune deletes tasks with their trails; what people did stays a while longer.
func (w *write) prune(found []expired, auditCutoff int64) error {
	for _, e := range found {
		n, err := w.exec(pruneTaskSQL, e.id, e.finished)
		if err != nil {
			return err
		}
		if n == 0 {
			continue // replayed meanwhile
		}
		for _, query := range []string{pruneTrailSQL, pruneStepsSQL} {
			if _, err := w.exec(query, e.id); err != nil {
				return err
			}
		}
	}
	if _, err := w.exec(pruneKeysSQL, w.now, pruneKeys); err != nil {
		return err
	}
	if _, err := w.exec(pruneAuditSQL, auditCutoff, pruneBatch); err != nil {
		return err
	}
	if err := w.pruneGroups(auditCutoff); err != nil {
		return err
	}
	_, err := w.exec(pruneStatsSQL, statsCutoff(w.now))
	return err
}
