package main

import (
	"context"
	"database/sql"
	"strings"
	"time"
)

// The statements of the queue's turn, as the library has them; a test of the library
// asserts their plans, so here they may only be as good.
const (
	floorDueSQL = `
select id, payload, version, fence, attempt, retry_count, lost_count, coalesce(max_attempts, 0),
	next_run_at, created_at, coalesce(expires_at, 0),
	coalesce(dedupe_key, ''), coalesce(group_key, ''), trace_id, coalesce(parent_id, 0)
from main.task_outbox
where status = 'pending' and blocked = 0 and event_type = ?
order by priority desc, next_run_at
limit ?`

	floorInsertSQL = `
insert into main.task_outbox (event_type, payload, status, priority, next_run_at, created_at, updated_at,
	dedupe_key, group_key, trace_id, max_attempts, expires_at, parent_id)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`

	floorLookSQL = `
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
	(select json_group_array(type) from due where type is not null)`
)

var (
	floorClaim = floorBatch(`
update or fail main.task_outbox
set status = 'picked', attempt = attempt + 1, fence = fence + 1, version = version + 1,
	owner = ?, lease_until = ?, updated_at = ?
where id in (`, "?", ")")

	floorSucceed = floorBatch(`
update or fail main.task_outbox as t
set status = 'success', version = v.column4, finished_at = v.column3, updated_at = v.column3,
	owner = null, lease_until = null
from (values `, "(?, ?, ?, ?, ?)", `) as v
where t.id = v.column1 and t.fence = v.column2 and t.version = v.column5 and t.owner = ?`)

	floorAudit = floorBatch(`
insert or fail into main.task_audit (task_id, seq, event, at, attempt, owner, detail)
values `, "(?, ?, ?, ?, ?, ?, ?)", "")
)

// floorStats are the columns of task_stats beside its key; the first six are the ones
// that an uneventful turn adds to.
var floorStats = func() []string {
	cols := strings.Fields("picked success wait_ms run_ms wait_1 run_1 retried dead lost released skipped cancelled")
	for _, bound := range strings.Fields("5 10 50 100 500 1000 5000 30000 120000 600000 inf") {
		cols = append(cols, "wait_"+bound, "run_"+bound)
	}
	return cols
}()

var floorStatsSQL = func() string {
	adds := make([]string, len(floorStats))
	for i, c := range floorStats {
		adds[i] = c + " = " + c + " + excluded." + c
	}
	return `
insert into main.task_stats (minute, event_type, ` + strings.Join(floorStats, ", ") + `)
values (?, ?` + strings.Repeat(", ?", len(floorStats)) + `)
on conflict (minute, event_type) do update set ` + strings.Join(adds, ", ")
}()

// floorSizes are the rows of one statement, as in the library.
var floorSizes = [...]int{64, 16, 4, 1}

func floorBatch(head, row, tail string) map[int]string {
	texts := map[int]string{}
	for _, n := range floorSizes {
		texts[n] = head + strings.Repeat(row+", ", n-1) + row + tail
	}
	return texts
}

// A floor is one connection that does by hand, in one goroutine, what the queue does.
type floor struct {
	ctx     context.Context // never cancelled: a cancellable one costs a goroutine a call
	conn    *sql.Conn
	stmts   map[string]*sql.Stmt
	now     int64
	running []floorTask // claimed in the last turn
	audit   []any       // seven for each row
	args    []any
}

type floorTask struct{ id, version, fence, attempt, due int64 }

const floorOwner = "FLOORFLOORFLOORFLOORFLOORF" // as long as the queue's

func newFloor(ctx context.Context, db *sql.DB) (*floor, error) {
	ctx = context.WithoutCancel(ctx)
	conn, err := db.Conn(ctx)
	return &floor{ctx: ctx, conn: conn, stmts: map[string]*sql.Stmt{}}, err
}

func (f *floor) close() {
	for _, st := range f.stmts {
		st.Close()
	}
	f.conn.Close()
}

func (f *floor) stmt(text string) (*sql.Stmt, error) {
	st, ok := f.stmts[text]
	if ok {
		return st, nil
	}
	st, err := f.conn.PrepareContext(f.ctx, text)
	if err == nil {
		f.stmts[text] = st
	}
	return st, err
}

func (f *floor) exec(text string, args ...any) error {
	st, err := f.stmt(text)
	if err != nil {
		return err
	}
	_, err = st.ExecContext(f.ctx, args...)
	return err
}

// enqueue is one transaction with a task, and with an order where that is asked for.
func (f *floor) enqueue(order bool) error {
	if err := f.exec("begin immediate"); err != nil {
		return err
	}
	if order {
		if err := f.exec(orderSQL, 42); err != nil {
			return err
		}
	}
	now := time.Now().UnixMilli()
	err := f.exec(floorInsertSQL, benchType, `{"n":12345}`, "pending", 0, now, now, now,
		nil, nil, "0123456789abcdef0123456789abcdef", nil, nil, nil)
	if err != nil {
		return err
	}
	return f.exec("commit")
}

// drain runs turns until nothing is left and returns the number of tasks.
func (f *floor) drain(batch int) (n int, err error) {
	for {
		claimed, settled, err := f.turn(batch)
		n += settled
		if err != nil || claimed == 0 {
			return n, err
		}
	}
}

// turn is one transaction: it ends the tasks of the last one and claims the next.
func (f *floor) turn(batch int) (claimed, settled int, err error) {
	if err := f.exec("begin immediate"); err != nil {
		return 0, 0, err
	}
	f.now, f.audit = time.Now().UnixMilli(), f.audit[:0]
	settled = len(f.running)
	if err := f.settle(); err != nil {
		return 0, 0, err
	}
	if err := f.claim(batch); err != nil {
		return 0, 0, err
	}
	if err := f.writeAudit(); err != nil {
		return 0, 0, err
	}
	claimed = len(f.running)
	if err := f.count(claimed, settled); err != nil {
		return 0, 0, err
	}
	return claimed, settled, f.exec("commit")
}

// count adds to the minute's statistics.
func (f *floor) count(claimed, settled int) error {
	f.args = append(f.args[:0], f.now/60_000, benchType, claimed, settled, claimed, settled, claimed, settled)
	for range len(floorStats) - 6 {
		f.args = append(f.args, 0)
	}
	return f.exec(floorStatsSQL, f.args...)
}

func (f *floor) settle() error {
	for _, t := range f.running {
		f.record(t.id, t.version+1, "processing", t.attempt, nil)
		f.record(t.id, t.version+2, "success", t.attempt, nil)
	}
	return inFloorBatches(f.running, func(part []floorTask) error {
		f.args = f.args[:0]
		for _, t := range part {
			f.args = append(f.args, t.id, t.fence, f.now, t.version+2, t.version)
		}
		return f.exec(floorSucceed[len(part)], append(f.args, floorOwner)...)
	})
}

func (f *floor) claim(limit int) error {
	if err := f.due(limit); err != nil {
		return err
	}
	return inFloorBatches(f.running, func(part []floorTask) error {
		f.args = append(f.args[:0], floorOwner, f.now+30_000, f.now)
		for i := range part {
			t := &part[i]
			t.version, t.fence, t.attempt = t.version+1, t.fence+1, t.attempt+1
			f.args = append(f.args, t.id)
			f.record(t.id, t.version, "picked", t.attempt, floorOwner)
		}
		return f.exec(floorClaim[len(part)], f.args...)
	})
}

// due reads the tasks to claim into running.
func (f *floor) due(limit int) error {
	st, err := f.stmt(floorDueSQL)
	if err != nil {
		return err
	}
	rows, err := st.QueryContext(f.ctx, benchType, limit)
	if err != nil {
		return err
	}
	defer rows.Close()
	f.running = f.running[:0]
	for rows.Next() {
		var t floorTask
		var retry, lost, attempts, created, expires, parent int64
		var payload, key, group, trace string
		err := rows.Scan(&t.id, &payload, &t.version, &t.fence, &t.attempt, &retry, &lost, &attempts,
			&t.due, &created, &expires, &key, &group, &trace, &parent)
		if err != nil {
			return err
		}
		f.running = append(f.running, t)
	}
	return rows.Err()
}

func (f *floor) record(id, seq int64, event string, attempt int64, owner any) {
	f.audit = append(f.audit, id, seq, event, f.now, attempt, owner, nil)
}

func (f *floor) writeAudit() error {
	const columns = 7
	return inFloorBatches(f.audit, func(part []any) error {
		return f.exec(floorAudit[len(part)/columns], part...)
	}, columns)
}

// inFloorBatches calls fn with pieces of as many rows as a statement takes; a row has
// one item, or as many as width says.
func inFloorBatches[T any](items []T, fn func([]T) error, width ...int) error {
	w := 1
	if len(width) > 0 {
		w = width[0]
	}
	for _, n := range floorSizes {
		for len(items) >= n*w {
			if err := fn(items[:n*w]); err != nil {
				return err
			}
			items = items[n*w:]
		}
	}
	return nil
}
