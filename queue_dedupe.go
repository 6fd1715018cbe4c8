package taskbox

// keepKey leaves the record of a keyed task that has ended: after a success its key
// stays taken, for good or for its window; after a dead letter only where the type
// says so.
func (w *write) keepKey(h *held, event string) error {
	if h.key == "" {
		return nil
	}
	switch {
	case event == "success":
		_, err := w.exec(keepKeySQL, "done", w.now, h.id)
		return err
	case event == "dead_letter" && h.typ.opts.KeepDeadKeys:
		_, err := w.exec(keepKeySQL, "failed", w.now, h.id)
		return err
	}
	return w.freeKey(h)
}

// freeKey lets go of a key that was kept for the task as a dead letter.
func (w *write) freeKey(h *held) error {
	if h.key == "" {
		return nil
	}
	_, err := w.exec(freeKeySQL, h.key, h.id)
	return err
}

const (
	keepKeySQL = `
insert into main.task_dedupe (kind, task_id, name, state, by_task, attempt, created_at, updated_at, expires_at)
select 'key', 0, dedupe_key, ?1, id, attempt, ?2, ?2, ?2 + key_window
from main.task_outbox where id = ?3
on conflict (kind, task_id, name) do update set
	state = excluded.state, by_task = excluded.by_task, attempt = excluded.attempt, updated_at = excluded.updated_at,
	expires_at = case
		when task_dedupe.state <> 'done' then excluded.expires_at
		when task_dedupe.expires_at is null or excluded.expires_at is null then null
		else max(task_dedupe.expires_at, excluded.expires_at) end
-- A success stays one, and its key taken, whatever a replay comes to.
where task_dedupe.state <> 'done' or excluded.state = 'done' or task_dedupe.expires_at <= excluded.updated_at`

	freeKeySQL = `
delete from main.task_dedupe
where kind = 'key' and task_id = 0 and name = ? and by_task = ? and state = 'failed'`

	stepSQL = `
select state, coalesce(result, 'null'), coalesce(attempt, 0) from main.task_dedupe
where kind = 'step' and task_id = ? and name = ?`

	putRecordSQL = `
insert into main.task_dedupe (kind, task_id, name, state, by_task, attempt, created_at, updated_at, error, result, seq)
select ?1, ?2, ?3, ?4, ?5, ?6, ?7, ?7, ?8, ?9, coalesce(max(seq), 0) + 1
from main.task_dedupe where kind = ?1 and task_id = ?2 and ?1 = 'step'
on conflict (kind, task_id, name) do update set
	state = excluded.state, by_task = excluded.by_task, attempt = excluded.attempt,
	updated_at = excluded.updated_at, error = excluded.error, result = excluded.result
-- What is done stays done: a failure may be that of a commit which went through.
where task_dedupe.state not in ('done', 'skipped') or excluded.state = 'done'`
)
