package taskbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// TaskInfo is a task as it stands in the file.
type TaskInfo struct {
	ID          int64           `json:"id"`
	Type        string          `json:"type"`
	Status      string          `json:"status"`
	Payload     json.RawMessage `json:"payload"`
	Priority    int             `json:"priority"`
	Key         string          `json:"key,omitempty"`
	Group       string          `json:"group,omitempty"`
	TraceID     string          `json:"trace_id"`
	ParentID    int64           `json:"parent_id,omitempty"`
	MaxAttempts int             `json:"max_attempts,omitempty"` // 0: what the type or the queue says
	Run         int             `json:"run"`                    // from 1; a replay begins another
	Attempt     int             `json:"attempt"`
	RetryCount  int             `json:"retry_count"`
	LostCount   int             `json:"lost_count,omitempty"`
	Version     int64           `json:"version"` // see [IfVersion]
	Blocked     bool            `json:"blocked,omitempty"`
	Owner       string          `json:"owner,omitempty"`
	LastError   string          `json:"last_error,omitempty"`
	ErrorGroup  string          `json:"error_group,omitempty"` // see [Queue.Groups]
	ResolvedAs  string          `json:"resolved_as,omitempty"`
	CreatedAt   time.Time       `json:"created_at"`
	UpdatedAt   time.Time       `json:"updated_at"`
	NextRunAt   time.Time       `json:"next_run_at"`
	FinishedAt  time.Time       `json:"finished_at,omitzero"`
	ExpiresAt   time.Time       `json:"expires_at,omitzero"`
	LeaseUntil  time.Time       `json:"lease_until,omitzero"`
}

const infoColumns = `
select id, event_type, status, payload, priority, coalesce(dedupe_key, ''), coalesce(group_key, ''), trace_id,
	coalesce(parent_id, 0), coalesce(max_attempts, 0), run, attempt, retry_count, lost_count, version, blocked,
	coalesce(owner, ''), coalesce(last_error, ''), coalesce(error_group, ''), coalesce(resolved_as, ''),
	created_at, updated_at, next_run_at, coalesce(finished_at, 0), coalesce(expires_at, 0), coalesce(lease_until, 0)
from main.task_outbox`

// millis scans Unix milliseconds; 0 is no time.
type millis struct{ t *time.Time }

func (m millis) Scan(v any) error {
	ms, ok := v.(int64)
	if !ok {
		return fmt.Errorf("a time is %v, want Unix milliseconds", v)
	}
	if ms != 0 {
		*m.t = time.UnixMilli(ms).UTC()
	}
	return nil
}

func (i *TaskInfo) dest() []any {
	return []any{&i.ID, &i.Type, &i.Status, (*[]byte)(&i.Payload), &i.Priority, &i.Key, &i.Group, &i.TraceID,
		&i.ParentID, &i.MaxAttempts, &i.Run, &i.Attempt, &i.RetryCount, &i.LostCount, &i.Version, &i.Blocked,
		&i.Owner, &i.LastError, &i.ErrorGroup, &i.ResolvedAs, millis{&i.CreatedAt}, millis{&i.UpdatedAt}, millis{&i.NextRunAt},
		millis{&i.FinishedAt}, millis{&i.ExpiresAt}, millis{&i.LeaseUntil}}
}

// Get returns a task. An unknown id is [ErrNotFound], and the error says why it may
// be unknown.
func (q *Queue) Get(ctx context.Context, id int64) (TaskInfo, error) {
	var i TaskInfo
	err := q.db.QueryRowContext(ctx, infoColumns+" where id = ?", id).Scan(i.dest()...)
	if isNoRows(err) {
		err = q.notFound(ctx, q.db, id)
	}
	if err != nil {
		return TaskInfo{}, fmt.Errorf("get task %d: %w", id, err)
	}
	return i, nil
}

// notFound says why an id may be unknown.
func (q *Queue) notFound(ctx context.Context, db Tx, id int64) error {
	var last sql.NullInt64
	err := db.QueryRowContext(ctx, `select seq from main.sqlite_sequence where name = 'task_outbox'`).Scan(&last)
	switch {
	case err != nil && !isNoRows(err):
		return err
	case id < 1:
		return fmt.Errorf("%w: ids begin with 1", ErrNotFound)
	case id > last.Int64:
		return fmt.Errorf("%w: ids in %s go up to %d; its transaction was never committed, or it is in another file", ErrNotFound, q.file(), last.Int64)
	}
	return fmt.Errorf("%w: there was a task with this id, or its insert was rolled back; it has been deleted, as tasks that ended are after Options.KeepDone", ErrNotFound)
}

// A Filter selects tasks. The zero value selects all; what is set must all hold.
type Filter struct {
	Status  string
	Type    string
	Group   string
	Key     string
	TraceID string
	// Error is a part of the last error's text.
	Error string
	// ErrorGroup is the fingerprint of the last error; see [Queue.Groups].
	ErrorGroup string
	// Open leaves out dead letters that are resolved.
	Open bool
	// Before selects tasks with smaller ids: the last id of a page gives the next one.
	Before int64
	// Limit is the most tasks to return: 0 is 100, the maximum is 10,000.
	Limit int
}

const (
	defaultList = 100
	maxList     = 10_000
)

// List returns tasks, the newest first.
func (q *Queue) List(ctx context.Context, f Filter) ([]TaskInfo, error) {
	if f.Limit < 0 || f.Limit > maxList {
		return nil, fmt.Errorf("list tasks: %w: the limit is %d, want 1 to %d, or 0 for %d", ErrInvalid, f.Limit, maxList, defaultList)
	}
	where, args := f.where()
	if f.Limit == 0 {
		f.Limit = defaultList
	}
	rows, err := q.db.QueryContext(ctx, infoColumns+where+" order by id desc limit ?", append(args, f.Limit)...)
	if err != nil {
		return nil, fmt.Errorf("list tasks: %w", explainBusy(err))
	}
	defer rows.Close()
	var is []TaskInfo
	for rows.Next() {
		var i TaskInfo
		if err := rows.Scan(i.dest()...); err != nil {
			return nil, fmt.Errorf("list tasks: %w", err)
		}
		is = append(is, i)
	}
	return is, rows.Err()
}

func (f Filter) where() (string, []any) {
	var conds []string
	var args []any
	for _, c := range []struct {
		cond  string
		value string
	}{
		{"status = ?", f.Status}, {"event_type = ?", f.Type}, {"group_key = ?", f.Group},
		{"dedupe_key = ?", f.Key}, {"trace_id = ?", f.TraceID}, {"instr(last_error, ?) > 0", f.Error},
		{"error_group = ?", f.ErrorGroup},
	} {
		if c.value != "" {
			conds, args = append(conds, c.cond), append(args, c.value)
		}
	}
	if f.Open {
		conds = append(conds, "resolved_as is null")
	}
	if f.Before > 0 {
		conds, args = append(conds, "id < ?"), append(args, f.Before)
	}
	if len(conds) == 0 {
		return "", nil
	}
	return " where " + strings.Join(conds, " and "), args
}

// An Event is a row of a task's trail.
type Event struct {
	TaskID  int64           `json:"task_id"` // 0: the queue as a whole
	Seq     int64           `json:"seq"`
	Event   string          `json:"event"`
	At      time.Time       `json:"at"`
	Attempt int             `json:"attempt,omitempty"`
	Owner   string          `json:"owner,omitempty"`
	Actor   string          `json:"actor,omitempty"`
	Reason  string          `json:"reason,omitempty"`
	Detail  json.RawMessage `json:"detail,omitempty"`
}

const eventColumns = `
select task_id, seq, event, at, coalesce(attempt, 0), coalesce(owner, ''), coalesce(actor, ''),
	coalesce(reason, ''), coalesce(detail, '')`

// Trail returns a task's history, oldest first, its creation included. Of a task
// that has been deleted, what people did to it is left; where nothing is, the error
// is [ErrNotFound].
func (q *Queue) Trail(ctx context.Context, id int64) ([]Event, error) {
	es, err := q.events(ctx, eventColumns+" from main.task_trail where task_id = ? order by seq", id)
	if err == nil && len(es) == 0 {
		err = q.notFound(ctx, q.db, id)
	}
	if err != nil {
		return nil, fmt.Errorf("trail of task %d: %w", id, explainBusy(err))
	}
	return es, nil
}

// Audit returns the newest operations by hand, newest first: at most limit of them,
// 1 to 10,000.
func (q *Queue) Audit(ctx context.Context, limit int) ([]Event, error) {
	if limit < 1 || limit > maxList {
		return nil, fmt.Errorf("audit: %w: the limit is %d, want 1 to %d", ErrInvalid, limit, maxList)
	}
	es, err := q.events(ctx, eventColumns+`
from main.task_audit where actor is not null order by at desc limit ?`, limit)
	if err != nil {
		return nil, fmt.Errorf("audit: %w", explainBusy(err))
	}
	return es, nil
}

func (q *Queue) events(ctx context.Context, query string, args ...any) (es []Event, err error) {
	rows, err := q.db.QueryContext(ctx, query, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var e Event
		err := rows.Scan(&e.TaskID, &e.Seq, &e.Event, millis{&e.At}, &e.Attempt, &e.Owner, &e.Actor, &e.Reason, (*[]byte)(&e.Detail))
		if err != nil {
			return nil, err
		}
		es = append(es, e)
	}
	return es, rows.Err()
}

// A StepInfo is what is recorded of a step.
type StepInfo struct {
	Name      string          `json:"name"`
	State     string          `json:"state"` // processing, done, failed, skipped
	Attempt   int             `json:"attempt"`
	Error     string          `json:"error,omitempty"`
	Result    json.RawMessage `json:"result,omitempty"`
	StartedAt time.Time       `json:"started_at"`
	UpdatedAt time.Time       `json:"updated_at"`
}

// Steps returns what is recorded of a task's steps, in the order in which they first
// began.
func (q *Queue) Steps(ctx context.Context, id int64) (ss []StepInfo, err error) {
	rows, err := q.db.QueryContext(ctx, `
select name, state, coalesce(attempt, 0), coalesce(error, ''), coalesce(result, ''), created_at, updated_at
from main.task_dedupe where kind = 'step' and task_id = ? order by seq`, id)
	if err != nil {
		return nil, fmt.Errorf("steps of task %d: %w", id, explainBusy(err))
	}
	defer rows.Close()
	for rows.Next() {
		var s StepInfo
		err := rows.Scan(&s.Name, &s.State, &s.Attempt, &s.Error, (*[]byte)(&s.Result), millis{&s.StartedAt}, millis{&s.UpdatedAt})
		if err != nil {
			return nil, fmt.Errorf("steps of task %d: %w", id, err)
		}
		ss = append(ss, s)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("steps of task %d: %w", id, err)
	}
	if len(ss) == 0 {
		_, err = q.Get(ctx, id) // no steps, or no task
	}
	return ss, err
}
