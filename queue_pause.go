package taskbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

// A Pause says that the tasks of a type aren't claimed, by any process, and why.
type Pause struct {
	Type   string    `json:"type"`
	Actor  string    `json:"actor"`
	Reason string    `json:"reason"`
	Since  time.Time `json:"since"`
	Until  time.Time `json:"until,omitzero"` // zero: until [Queue.Resume]
}

// pauseRow is a Pause as task_meta has it.
type pauseRow struct {
	Pause
	UntilMS int64 `json:"until_ms,omitzero"` // Until in Unix milliseconds, for SQL
}

const pausePrefix = "paused:"

const (
	pausesSQL = `select value from main.task_meta where key >= 'paused:' and key < 'paused;' order by key`

	putMetaSQL = `
insert into main.task_meta (key, value) values (?, ?)
on conflict (key) do update set value = excluded.value`

	dropMetaSQL = `delete from main.task_meta where key = ?`

	// queueAuditSQL records what concerns no single task, under the task id 0.
	queueAuditSQL = `
insert into main.task_audit (task_id, seq, event, at, actor, reason, detail)
select 0, coalesce(max(seq), 0) + 1, ?, ?, ?, ?, ? from main.task_audit where task_id = 0`
)

// Pause stops claiming the tasks of a type, in all processes on the file, until a
// time or, with the zero time, until [Queue.Resume]. What runs goes on; tasks are
// still enqueued. Pausing a paused type replaces who, why and until when.
func (q *Queue) Pause(ctx context.Context, typ string, until time.Time, by By) error {
	var ms int64
	if !until.IsZero() {
		var d Draft
		if ms = d.millis("end of the pause", until); d.err == nil && ms <= q.now() {
			d.err = fmt.Errorf("%w: the end of the pause, %v, has passed", ErrInvalid, until)
		}
		if d.err != nil {
			return fmt.Errorf("pause %s: %w", typ, d.err)
		}
	}
	return q.changePause(ctx, "pause", typ, by, func(tx *sql.Tx, now int64) error {
		p := pauseRow{Pause{Type: typ, Actor: by.Actor, Reason: by.Reason, Since: time.UnixMilli(now).UTC(), Until: until}, ms}
		text, err := json.Marshal(p)
		if err == nil {
			_, err = tx.ExecContext(ctx, putMetaSQL, pausePrefix+typ, string(text))
		}
		return err
	})
}

// Resume ends a pause. A type that isn't paused is [ErrState].
func (q *Queue) Resume(ctx context.Context, typ string, by By) error {
	return q.changePause(ctx, "resume", typ, by, func(tx *sql.Tx, now int64) error {
		rows, err := tx.QueryContext(ctx, pausesSQL)
		if err != nil {
			return err
		}
		ps, err := scanPauses(rows, now)
		if err != nil {
			return err
		}
		if !slices.ContainsFunc(ps, func(p Pause) bool { return p.Type == typ }) {
			return fmt.Errorf("%w: the type isn't paused", ErrState)
		}
		_, err = tx.ExecContext(ctx, dropMetaSQL, pausePrefix+typ)
		return err
	})
}

func (q *Queue) changePause(ctx context.Context, op, typ string, by By, change func(*sql.Tx, int64) error) error {
	err := by.check()
	if err == nil {
		err = validName("type", typ, maxNameLength)
	}
	if err == nil {
		err = q.Tx(ctx, func(ctx context.Context, tx *sql.Tx) error {
			now := q.now()
			if err := change(tx, now); err != nil {
				return err
			}
			detail, err := json.Marshal(map[string]string{"type": typ})
			if err == nil {
				_, err = tx.ExecContext(ctx, queueAuditSQL, op+"d", now, by.Actor, by.Reason, string(detail))
			}
			return err
		})
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", op, typ, err)
	}
	q.opts.Logger.InfoContext(ctx, "taskbox: by hand", "type", typ, "event", op+"d", "actor", by.Actor, "reason", by.Reason)
	return nil
}

// Pauses lists the types that are paused now.
func (q *Queue) Pauses(ctx context.Context) ([]Pause, error) {
	rows, err := q.db.QueryContext(ctx, pausesSQL)
	if err != nil {
		return nil, fmt.Errorf("list pauses: %w", explainBusy(err))
	}
	ps, err := scanPauses(rows, q.now())
	if err != nil {
		return nil, fmt.Errorf("list pauses: %w", err)
	}
	return ps, nil
}

// scanPauses leaves out those whose time is over.
func scanPauses(rows *sql.Rows, now int64) (ps []Pause, err error) {
	defer rows.Close()
	for rows.Next() {
		var text string
		var p Pause
		if err := rows.Scan(&text); err != nil {
			return nil, err
		}
		if err := json.Unmarshal([]byte(text), &p); err != nil {
			return nil, fmt.Errorf("task_meta has a pause that can't be read: %w", err)
		}
		if p.Until.IsZero() || p.Until.UnixMilli() > now {
			ps = append(ps, p)
		}
	}
	return ps, rows.Err()
}
