package taskbox

import (
	"database/sql"
	"time"
)

const (
	// lookSQL tells what there is to do, at the cost of a few index lookups: which
	// types have due tasks (it hops from type to type), and when the next task that
	// isn't due yet will be.
	lookSQL = `
with recursive due(type) as (
	select min(event_type) from main.task_outbox where status = 'pending' and blocked = 0
	union all
	select (select min(event_type) from main.task_outbox
		where status = 'pending' and blocked = 0 and event_type > due.type)
	from due where due.type is not null
)
select
	(select min(next_run_at) from main.task_outbox where status = 'scheduled'),
	(select min(next_run_at) from main.task_outbox where status = 'retry_wait'),
	(select json_group_array(type) from due where type is not null
		and not exists (select 1 from main.task_meta where key = 'paused:' || type
			and coalesce(value ->> 'until_ms' > ?, true)))`

	dueSQL = `
select id, payload, version, fence, attempt, retry_count, lost_count, coalesce(max_attempts, 0),
	next_run_at, created_at, coalesce(expires_at, 0),
	coalesce(dedupe_key, ''), coalesce(group_key, ''), trace_id, coalesce(parent_id, 0)
from main.task_outbox
where status = 'pending' and blocked = 0 and event_type = ?
order by priority desc, next_run_at
limit ?`

	groupHeadSQL = `
select min(id) from main.task_outbox
where group_key = ? and finished_at is null`

	blockSQL = `update main.task_outbox set blocked = 1 where id = ?`

	unblockSQL = `
update main.task_outbox set blocked = 0
where blocked = 1 and id = (
	select min(id) from main.task_outbox where group_key = ? and finished_at is null)`

	parkSQL = `
update main.task_outbox set status = 'scheduled', version = ?, updated_at = ?
where id = ?`

	expireSQL = `
update main.task_outbox set status = 'skipped', version = ?, updated_at = ?, finished_at = ?, last_error = 'expired'
where id = ?`

	promoteScheduledSQL = `
select id, version, event_type, trace_id from main.task_outbox
where status = 'scheduled' and next_run_at <= ?
order by next_run_at limit ?`

	promoteRetrySQL = `
select id, version, event_type, trace_id from main.task_outbox
where status = 'retry_wait' and next_run_at <= ?
order by next_run_at limit ?`
)

var (
	claimBatch = newBatch(`
update or fail main.task_outbox
set status = 'picked', attempt = attempt + 1, fence = fence + 1, version = version + 1,
	owner = ?, lease_until = ?, updated_at = ?
where id in (`, "?", ")")

	promoteBatch = newBatch(`
update or fail main.task_outbox set status = 'pending', version = version + 1, updated_at = ?
where id in (`, "?", ")")
)

// maxPromoted bounds how many tasks become due in one turn.
const maxPromoted = 256

// promote makes tasks whose time has come due: an event of its own, so that the
// claim needs to look in one place only and finds nothing there that isn't due.
func (w *write) promote(query string) (int, error) {
	rows, err := w.query(query, w.now, maxPromoted)
	if err != nil {
		return 0, err
	}
	hs, err := scanAll(rows, func(h *held) []any {
		h.typ = new(taskType)
		return []any{&h.id, &h.version, &h.typ.name, &h.traceID}
	})
	if err != nil {
		return 0, err
	}
	return len(hs), inBatches(hs, func(part []*held) error {
		args := []any{w.now}
		for _, h := range part {
			args = append(args, h.id)
			w.record(h, "queued", w.now, nil)
		}
		_, err := w.exec(promoteBatch.text(len(part)), args...)
		return err
	})
}

// claim takes up to limit due tasks of one type for owner until lease. Those that it
// meets and can't take now it puts where they are in nobody's way; more tells
// whether it stopped at the limit.
func (w *write) claim(typ *taskType, owner string, lease int64, limit int) (got []*held, more bool, err error) {
	rows, err := w.query(dueSQL, typ.name, limit)
	if err != nil {
		return nil, false, err
	}
	found, err := scanAll(rows, func(h *held) []any {
		h.typ = typ
		return []any{&h.id, &h.payload, &h.version, &h.fence, &h.attempt, &h.retry, &h.lost, &h.max,
			&h.priorDue, &h.created, &h.expires, &h.key, &h.group, &h.traceID, &h.parentID}
	})
	if err != nil {
		return nil, false, err
	}
	for _, h := range found {
		ok, err := w.sift(h)
		if err != nil {
			return nil, false, err
		}
		if ok {
			got = append(got, h)
		}
	}
	return got, len(found) == limit, w.take(got, owner, lease)
}

// sift tells whether a pending task may run now. One that isn't due (a plain insert
// with a later next_run_at), has expired, or isn't the first of its group is moved
// out of the claim's index.
func (w *write) sift(h *held) (bool, error) {
	switch {
	case h.version == 0 && h.priorDue > max(w.now, h.created):
		// A later due time is meant only where it was later than the creation: the
		// clock may have been put back since.
		w.record(h, "scheduled", w.now, nil)
		_, err := w.exec(parkSQL, h.version, w.now, h.id)
		return false, err
	case h.attempt == 0 && h.expires != 0 && h.expires < w.now:
		w.record(h, "skipped", w.now, &detail{Cause: "expired before it was started"})
		w.count(h.typ.name).skipped++
		if _, err := w.exec(expireSQL, h.version, w.now, w.now, h.id); err != nil {
			return false, err
		}
		return false, w.unblock(h.group)
	case h.group != "":
		var head int64
		if err := w.queryRow(groupHeadSQL, []any{h.group}, &head); err != nil || head == h.id {
			return err == nil, err
		}
		_, err := w.exec(blockSQL, h.id)
		return false, err
	}
	return true, nil
}

// unblock lets the first living task of a group come forward.
func (w *write) unblock(group string) error {
	if group == "" {
		return nil
	}
	_, err := w.exec(unblockSQL, group)
	return err
}

func (w *write) take(hs []*held, owner string, lease int64) error {
	args := make([]any, 0, claimBatch.largest()+3)
	return inBatches(hs, func(part []*held) error {
		args = append(args[:0], owner, lease, w.now)
		for _, h := range part {
			args = append(args, h.id)
			h.fence++
			h.attempt++
			h.picked, h.claimed = w.now, time.Now()
			h.due = max(h.priorDue, h.created)
			w.record(h, "picked", w.now, nil)
			w.audit[len(w.audit)-1].owner = owner
			w.count(h.typ.name).pick(w.now - h.due)
		}
		_, err := w.exec(claimBatch.text(len(part)), args...)
		return err
	})
}

// scanAll reads all rows and closes them.
func scanAll(rows *sql.Rows, dest func(*held) []any) ([]*held, error) {
	defer rows.Close()
	var hs []*held
	for rows.Next() {
		h := new(held)
		if err := rows.Scan(dest(h)...); err != nil {
			return nil, err
		}
		hs = append(hs, h)
	}
	return hs, rows.Err()
}
