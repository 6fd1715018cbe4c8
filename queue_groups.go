package taskbox

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"time"
)

// An ErrorGroup is what is known of failures that are the same but for ids, numbers,
// addresses, times and quoted strings in their text: same task type, class, types of
// errors and text otherwise. An error that has a method
//
//	Fingerprint() string
//
// anywhere in its tree is grouped by what that returns, and its task's type.
type ErrorGroup struct {
	Fingerprint string `json:"fingerprint"`
	Type        string `json:"type"`
	Class       string `json:"class"`   // retryable, permanent, unclassified, or lost with the process
	Message     string `json:"message"` // the text, without what differs
	// Hour, Day and Week count the failures of the last 60 minutes, exact to the
	// minute, and of the last 24 and 168 hours, exact to the hour: the one that is
	// running counts in addition. Total counts all.
	Hour  int64 `json:"hour"`
	Day   int64 `json:"day"`
	Week  int64 `json:"week"`
	Total int64 `json:"total"`
	// Open is how many dead letters the group has that nobody has resolved.
	Open int64 `json:"open"`
	// SampleTask is the last task that failed so. It may have been deleted since.
	SampleTask int64     `json:"sample_task"`
	FirstSeen  time.Time `json:"first_seen"`
	LastSeen   time.Time `json:"last_seen"`
	// ResolvedAt, ResolvedBy and ResolvedAs are from [Queue.ResolveGroup], or zero.
	ResolvedAt time.Time `json:"resolved_at,omitzero"`
	ResolvedBy string    `json:"resolved_by,omitempty"`
	ResolvedAs string    `json:"resolved_as,omitempty"`
	// Regressed tells that the group has come back after it was resolved.
	Regressed bool `json:"regressed,omitempty"`
}

// A GroupFilter selects error groups. The zero value selects all; what is set must
// all hold.
type GroupFilter struct {
	Fingerprint string
	Type        string
	// Open selects the groups that have open dead letters.
	Open bool
	// Unresolved leaves out groups that are resolved and haven't come back.
	Unresolved bool
	// Since leaves out groups that haven't failed since.
	Since time.Time
	// Limit is the most groups to return: 0 is 100, the maximum is 10,000.
	Limit int
}

const groupsSQL = `
select fingerprint, event_type, class, message,
	(select coalesce(sum(n), 0) from main.task_error_count as c
		where c.fingerprint = g.fingerprint and span = 1 and at > ?1),
	(select coalesce(sum(n), 0) from main.task_error_count as c
		where c.fingerprint = g.fingerprint and span = 60 and at >= ?2),
	(select coalesce(sum(n), 0) from main.task_error_count as c
		where c.fingerprint = g.fingerprint and span = 60 and at >= ?3),
	total,
	(select count(*) from main.task_outbox
		where error_group = g.fingerprint and status = 'dead_letter' and resolved_as is null),
	sample_task, first_seen, last_seen,
	coalesce(resolved_at, 0), coalesce(resolved_by, ''), coalesce(resolved_as, ''),
	coalesce(total > resolved_total, false)
from main.task_error as g
where (?4 = '' or fingerprint = ?4) and (?5 = '' or event_type = ?5) and last_seen >= ?6
	and (not ?7 or exists (select 1 from main.task_outbox
		where error_group = g.fingerprint and status = 'dead_letter' and resolved_as is null))
	and (not ?8 or resolved_at is null or total > resolved_total)
order by last_seen desc
limit ?9`

func (g *ErrorGroup) dest() []any {
	return []any{&g.Fingerprint, &g.Type, &g.Class, &g.Message, &g.Hour, &g.Day, &g.Week, &g.Total, &g.Open,
		&g.SampleTask, millis{&g.FirstSeen}, millis{&g.LastSeen}, millis{&g.ResolvedAt}, &g.ResolvedBy, &g.ResolvedAs,
		&g.Regressed}
}

// Groups returns the errors in groups, those first that failed last. Its cost grows
// with the number of groups it returns and of their open dead letters, not with the
// history.
func (q *Queue) Groups(ctx context.Context, f GroupFilter) ([]ErrorGroup, error) {
	if f.Limit < 0 || f.Limit > maxList {
		return nil, fmt.Errorf("list error groups: %w: the limit is %d, want 1 to %d, or 0 for %d", ErrInvalid, f.Limit, maxList, defaultList)
	}
	rows, err := q.db.QueryContext(ctx, groupsSQL, f.args(q.now())...)
	if err != nil {
		return nil, fmt.Errorf("list error groups: %w", explainBusy(err))
	}
	defer rows.Close()
	var gs []ErrorGroup
	for rows.Next() {
		var g ErrorGroup
		if err := rows.Scan(g.dest()...); err != nil {
			return nil, fmt.Errorf("list error groups: %w", err)
		}
		gs = append(gs, g)
	}
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("list error groups: %w", explainBusy(err))
	}
	return gs, nil
}

func (f GroupFilter) args(now int64) []any {
	minute := now / 60_000
	hour := minute - minute%60
	since := int64(0)
	if !f.Since.IsZero() {
		since = f.Since.UnixMilli()
	}
	return []any{minute - 60, hour - 24*60, hour - 7*24*60, f.Fingerprint, f.Type, since, f.Open, f.Unresolved,
		cmp.Or(f.Limit, defaultList)}
}

// noGroup is the group of what isn't a failure. It is never written to.
var noGroup errorGroup

// group is the group of the failure that the outcome is.
func (o *outcome) group() *errorGroup {
	if o.why == nil || o.why.group == nil {
		return &noGroup
	}
	g := o.why.group
	if g.fingerprint == "" {
		g.typ = o.h.typ.name
		g.fingerprint = fingerprint(g.typ, g.class, o.why.Types, g.message, g.own)
	}
	return g
}

// countFailure notes a failure of a task; it goes in with the others at the end.
func (w *write) countFailure(g *errorGroup, id, at int64) {
	if g.fingerprint == "" {
		return
	}
	if w.groups == nil {
		w.groups = map[string]*errorGroup{}
	}
	c := w.groups[g.fingerprint]
	if c == nil {
		fresh := *g
		fresh.first, fresh.last = at, at
		c = &fresh
		w.groups[g.fingerprint] = c
	}
	c.first, c.last = min(c.first, at), max(c.last, at)
	c.sample, c.n = id, c.n+1
}

// failLost notes the failure of a task whose process ended.
func (w *write) failLost(h *held) error {
	g := errorGroup{typ: h.typ.name, class: "lost", message: "its process ended or was silent for too long"}
	g.fingerprint = fingerprint(g.typ, g.class, nil, g.message, "")
	w.countFailure(&g, h.id, w.now)
	_, err := w.exec(setGroupSQL, g.fingerprint, h.id)
	return err
}

const (
	setGroupSQL = `update main.task_outbox set error_group = ? where id = ?`

	putGroupSQL = `
insert into main.task_error (fingerprint, event_type, class, message, sample_task, first_seen, last_seen, total)
values (?, ?, ?, ?, ?, ?, ?, ?)
on conflict (fingerprint) do update set
	sample_task = excluded.sample_task, total = total + excluded.total,
	first_seen = min(first_seen, excluded.first_seen), last_seen = max(last_seen, excluded.last_seen)`

	countGroupSQL = `
insert into main.task_error_count (fingerprint, span, at, n)
values (?1, 1, ?2, ?4), (?1, 60, ?3, ?4)
on conflict (fingerprint, span, at) do update set n = n + excluded.n`
)

func (w *write) writeGroups() error {
	for _, g := range w.groups {
		_, err := w.exec(putGroupSQL, g.fingerprint, g.typ, g.class, g.message, g.sample, g.first, g.last, g.n)
		if err != nil {
			return err
		}
		minute := g.last / 60_000
		if _, err := w.exec(countGroupSQL, g.fingerprint, minute, minute-minute%60, g.n); err != nil {
			return err
		}
	}
	return nil
}

const (
	// minuteSpans is how many minutes the counts by minute stay.
	minuteSpans = 2 * 60

	pruneCountsSQL = `
delete from main.task_error_count where (fingerprint, span, at) in (
	select fingerprint, span, at from main.task_error_count where span = ? and at < ? limit ?)`

	pruneGroupsSQL = `
delete from main.task_error where fingerprint in (
	select fingerprint from main.task_error as g where last_seen < ?
		and not exists (select 1 from main.task_outbox
			where error_group = g.fingerprint and status = 'dead_letter' and resolved_as is null)
	limit ?)`
)

// pruneGroups deletes old counts, and groups that haven't failed for as long as the
// audit record stays.
func (w *write) pruneGroups(auditCutoff int64) error {
	if _, err := w.exec(pruneCountsSQL, 1, w.now/60_000-minuteSpans, pruneScan); err != nil {
		return err
	}
	if _, err := w.exec(pruneCountsSQL, 60, statsCutoff(w.now), pruneScan); err != nil {
		return err
	}
	_, err := w.exec(pruneGroupsSQL, auditCutoff, pruneBatch)
	return err
}

const resolveGroupSQL = `
update main.task_error set resolved_at = ?, resolved_by = ?, resolved_as = ?, resolved_total = ?
where fingerprint = ?`

// ResolveGroup marks an error group as dealt with, in a few words such as "fixed in
// v1.2", and resolves its open dead letters as [Queue.Resolve] does, a few in each
// transaction. It returns how many it has resolved. Those that have changed meanwhile
// stay open. If the group fails again, it says that it has come back.
//
// When ctx ends between two batches, the rest stays open; calling it again goes on.
// An unknown fingerprint is [ErrNoGroup].
func (q *Queue) ResolveGroup(ctx context.Context, fingerprint, as string, by By) (int, error) {
	r, err := q.resolveGroup(ctx, fingerprint, as, by)
	if err != nil {
		return r.Done, fmt.Errorf("resolve the error group %.40q: %w", fingerprint, err)
	}
	return r.Done, nil
}

func (q *Queue) resolveGroup(ctx context.Context, fingerprint, as string, by By) (BulkResult, error) {
	if err := cmp.Or(by.check(), validName("resolution", as, maxNameLength)); err != nil {
		return BulkResult{}, err
	}
	total, tasks, err := q.openOf(ctx, fingerprint)
	if err != nil {
		return BulkResult{}, err
	}
	err = q.Tx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, resolveGroupSQL, q.now(), by.Actor, as, total, fingerprint)
		return err
	})
	if err != nil {
		return BulkResult{}, err
	}
	r := q.newBulk(newPlanID(), Action{Do: DoResolve, As: as}, by, BulkOptions{})
	r.event, r.group = "group_resolved", fingerprint
	return r.apply(ctx, tasks)
}

// openOf returns the group's failures and its open dead letters, in one snapshot.
func (q *Queue) openOf(ctx context.Context, fingerprint string) (total int64, tasks []PlannedTask, err error) {
	tx, err := q.db.BeginTx(ctx, &sql.TxOptions{ReadOnly: true})
	if err != nil {
		return 0, nil, explainBusy(err)
	}
	defer tx.Rollback()
	err = tx.QueryRowContext(ctx, `select total from main.task_error where fingerprint = ?`, fingerprint).Scan(&total)
	if isNoRows(err) {
		return 0, nil, ErrNoGroup
	}
	if err != nil {
		return 0, nil, err
	}
	rows, err := tx.QueryContext(ctx, `
select id, version from main.task_outbox
where error_group = ? and status = 'dead_letter' and resolved_as is null order by id`, fingerprint)
	if err != nil {
		return 0, nil, err
	}
	tasks, err = scanPlanned(rows)
	return total, tasks, err
}
