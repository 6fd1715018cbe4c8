package taskbox

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"time"
)

// A Draft is a task that is yet to be enqueued. [Type.New] makes one.
type Draft struct {
	typ       string
	payload   string
	priority  int64
	delay     time.Duration
	at        int64 // Unix ms; 0: now
	expiresAt int64 // Unix ms; 0: never
	expiresIn time.Duration
	key       string
	keyWindow time.Duration // 0: for good
	group     string
	traceID   string
	parentID  int64
	attempts  int
	err       error // what is wrong with it, told at Enqueue
}

// A Receipt says what became of an enqueued task.
type Receipt struct {
	// ID is the task's id; for a duplicate, that of the task that holds the key.
	ID int64
	// TraceID is the trace that the task is under; empty for a duplicate of a task
	// whose time of retention is over.
	TraceID string
	// Duplicate is true when the key is taken, and nothing was inserted.
	Duplicate bool
}

// An EnqueueOption says something about one task.
type EnqueueOption func(*Draft)

// Key names the task, for example "order_created:42": while a task with the same key
// lives, and after its success for good, enqueuing it again inserts nothing and is no
// error. A dead letter, a skipped or cancelled task gives its key free; for dead
// letters see [TypeOptions.KeepDeadKeys]. 1 to 500 bytes; without a key nothing is
// compared.
func Key(key string) EnqueueOption {
	return func(d *Draft) { d.key = key; d.check(validName("key", key, maxKeyLength)) }
}

// KeyFor is [Key] whose key is free again when the window has passed since the task's
// success. More than zero.
func KeyFor(key string, window time.Duration) EnqueueOption {
	return func(d *Draft) {
		Key(key)(d)
		d.keyWindow = window
		if window <= 0 {
			d.check(fmt.Errorf("%w: the window of the key is %v, want more than 0", ErrInvalid, window))
		}
	}
}

// Delay makes the task due after d. Not negative.
func Delay(d time.Duration) EnqueueOption {
	return func(t *Draft) {
		t.delay = d
		if d < 0 {
			t.check(fmt.Errorf("%w: the delay is %v, want 0 or more", ErrInvalid, d))
		}
	}
}

// At makes the task due at t by the wall clock; at once if that has passed.
func At(t time.Time) EnqueueOption {
	return func(d *Draft) { d.at = d.millis("due time", t) }
}

// Expires ends the task as skipped if its first attempt hasn't been started before t.
func Expires(t time.Time) EnqueueOption {
	return func(d *Draft) { d.expiresAt = d.millis("expiry", t) }
}

// ExpiresIn is [Expires] with a time from now. More than zero.
func ExpiresIn(d time.Duration) EnqueueOption {
	return func(t *Draft) {
		t.expiresIn = d
		if d <= 0 {
			t.check(fmt.Errorf("%w: the expiry is in %v, want more than 0", ErrInvalid, d))
		}
	}
}

// Priority orders the due tasks of one type: the higher, the sooner. The default is
// 0; equal ones run in the order in which they became due.
func Priority(p int) EnqueueOption { return func(d *Draft) { d.priority = int64(p) } }

// Group runs the tasks with the same group key one at a time, in the order in which
// they were enqueued, over all processes and types. The first holds up those behind
// it whatever it waits for: its due time, a retry, a handler; one that ended, as a
// dead letter too, doesn't. 1 to 500 bytes.
func Group(key string) EnqueueOption {
	return func(d *Draft) { d.group = key; d.check(validName("group", key, maxKeyLength)) }
}

// MaxAttempts is how often this task may fail before it is a dead letter: at least 1.
// The default is what its type says, or else the queue.
func MaxAttempts(n int) EnqueueOption {
	return func(d *Draft) {
		d.attempts = n
		if n < 1 {
			d.check(fmt.Errorf("%w: MaxAttempts is %d, want at least 1", ErrInvalid, n))
		}
	}
}

// TraceID puts the task under a trace. The default is the trace of the task whose
// handler enqueues it, or else a new one of 32 hexadecimal digits.
func TraceID(id string) EnqueueOption {
	return func(d *Draft) { d.traceID = id; d.check(validName("trace id", id, maxNameLength)) }
}

// Traceparent is [TraceID] with the trace id of a W3C traceparent header. An empty or
// malformed header is ignored, as https://www.w3.org/TR/trace-context/ asks.
func Traceparent(header string) EnqueueOption {
	return func(d *Draft) {
		if id, ok := traceOf(header); ok {
			d.traceID = id
		}
	}
}

// traceOf takes the trace id out of "version-traceid-parentid-flags".
func traceOf(header string) (string, bool) {
	parts := strings.Split(strings.TrimSpace(header), "-")
	if len(parts) < 4 || len(parts[0]) != 2 || parts[0] == "ff" || parts[0] == "00" && len(parts) != 4 {
		return "", false
	}
	for i, n := range []int{2, 32, 16, 2} {
		if len(parts[i]) != n || strings.Trim(parts[i], "0123456789abcdef") != "" {
			return "", false
		}
	}
	zero := strings.Trim(parts[1], "0") == "" || strings.Trim(parts[2], "0") == ""
	return parts[1], !zero
}

// New returns a task of the type, ready for [Queue.Enqueue]. What is wrong with it is
// reported there.
func (t *Type[T]) New(payload T, opts ...EnqueueOption) Draft {
	d := Draft{typ: t.name, err: validName("type", t.name, maxNameLength)}
	text, err := json.Marshal(payload)
	if err != nil {
		d.check(fmt.Errorf("%w: the payload can't be encoded: %w", ErrInvalid, err))
	}
	d.payload = string(text)
	for _, o := range opts {
		o(&d)
	}
	return d
}

// check keeps the first error.
func (d *Draft) check(err error) {
	if d.err == nil {
		d.err = err
	}
}

// millis refuses what isn't a time that a calendar has: year 1 to 9999.
func (d *Draft) millis(what string, t time.Time) int64 {
	if y := t.Year(); y < 1 || y > 9999 || t.IsZero() {
		d.check(fmt.Errorf("%w: the %s is %v, want a year from 1 to 9999", ErrInvalid, what, t))
		return 0
	}
	return cmp.Or(t.UnixMilli(), 1) // 0 stands for no time at all
}

// Statements that go through the caller's transaction have plain parameters: bun
// counts numbered ones its own way.
const (
	insertSQL = `
insert into main.task_outbox (event_type, payload, status, priority, next_run_at, created_at, updated_at,
	dedupe_key, group_key, trace_id, max_attempts, expires_at, parent_id, key_window)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)`

	insertKeyedSQL = insertSQL + `
on conflict do nothing
returning id`

	// keyHolderSQL finds the task that has the key: a living one, or by its record.
	keyHolderSQL = `
select id, trace_id from main.task_outbox
where dedupe_key = ? and finished_at is null
union all
select by_task, coalesce((select trace_id from main.task_outbox where id = by_task), '')
from main.task_dedupe where kind = 'key' and task_id = 0 and name = ?
limit 1`
)

// Enqueue inserts the task through tx: it is there when tx commits, and never if it
// rolls back. Where tx is a transaction that SQLite has silently ended, nothing is
// inserted and the error is [ErrTxLost]; where the write lock can't be had it is
// [ErrBusy]; a bad task is [ErrInvalid] or [ErrPayloadTooLarge]. ctx is asked before,
// but doesn't interrupt the insert: that could roll the application's transaction back.
func (q *Queue) Enqueue(ctx context.Context, tx Tx, d Draft) (Receipt, error) {
	rs, err := q.enqueue(ctx, tx, []Draft{d})
	if err != nil {
		return Receipt{}, fmt.Errorf("enqueue %s: %w", d.typ, err)
	}
	return rs[0], nil
}

// EnqueueMany is [Queue.Enqueue] for many tasks: all of them are inserted, or none.
func (q *Queue) EnqueueMany(ctx context.Context, tx Tx, ds ...Draft) ([]Receipt, error) {
	rs, err := q.enqueue(ctx, tx, ds)
	if err != nil {
		return nil, fmt.Errorf("enqueue %d tasks: %w", len(ds), err)
	}
	return rs, nil
}

func (q *Queue) enqueue(ctx context.Context, tx Tx, ds []Draft) ([]Receipt, error) {
	if isNil(tx) {
		return nil, fmt.Errorf("%w: the transaction is nil", ErrInvalid)
	}
	ds = slices.Clone(ds) // the caller may enqueue them again
	for i := range ds {
		if err := q.complete(ctx, &ds[i]); err != nil {
			return nil, err
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if db, ok := tx.(pool); ok {
		return q.enqueueAlone(ctx, db, ds)
	}
	q.expectTask()
	ctx = context.WithoutCancel(ctx)
	rs, err := insertAll(ctx, q.inserter(ctx, tx), ds, q.now())
	return rs, explainBusy(err)
}

// pool is a *sql.DB, or what embeds one.
type pool interface {
	Conn(context.Context) (*sql.Conn, error)
}

// isNil sees a nil pointer in the interface too.
func isNil(tx Tx) bool {
	switch t := tx.(type) {
	case nil:
		return true
	case *sql.Tx:
		return t == nil
	case *sql.DB:
		return t == nil
	case *sql.Conn:
		return t == nil
	}
	return false
}

// complete checks a draft and fills in what comes from the context.
func (q *Queue) complete(ctx context.Context, d *Draft) error {
	if d.err != nil {
		return d.err
	}
	if d.typ == "" {
		return fmt.Errorf("%w: the draft is empty; make one with Type.New", ErrInvalid)
	}
	if len(d.payload) > q.opts.MaxPayload {
		return fmt.Errorf("%w: %d bytes, at most %d are allowed (Options.MaxPayload); keep large data in a table or file of its own and its key in the task",
			ErrPayloadTooLarge, len(d.payload), q.opts.MaxPayload)
	}
	if h, ok := ctx.Value(heldKey{}).(*held); ok {
		d.parentID = h.id
		if d.traceID == "" {
			d.traceID = h.traceID
		}
	}
	if d.traceID == "" {
		d.traceID = newTraceID()
	}
	return nil
}

func newTraceID() string { return fmt.Sprintf("%016x%016x", rand.Uint64()|1, rand.Uint64()) }

// enqueueAlone inserts in a transaction of its own, on one connection: waiting for
// that heeds ctx, the insert doesn't.
func (q *Queue) enqueueAlone(ctx context.Context, db pool, ds []Draft) ([]Receipt, error) {
	conn, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx = context.WithoutCancel(ctx)
	q.expectTask()
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return nil, explainBusy(err)
	}
	defer tx.Rollback() // does nothing after a commit
	in := q.inserter(ctx, tx)
	in.own = true
	rs, err := insertAll(ctx, in, ds, q.now())
	if err != nil {
		return nil, explainBusy(err)
	}
	if err := tx.Commit(); err != nil {
		return nil, explainBusy(err)
	}
	q.wake()
	return rs, nil
}

// inserter runs the insert statements through tx, prepared where tx can do that.
type inserter struct {
	Tx
	insert *sql.Stmt // nil: by text
	own    bool      // the transaction is ours, and rolled back on an error
}

// stmtTx is a *sql.Tx, or what embeds one.
type stmtTx interface {
	StmtContext(context.Context, *sql.Stmt) *sql.Stmt
}

func (q *Queue) inserter(ctx context.Context, tx Tx) inserter {
	in := inserter{Tx: tx}
	if t, ok := tx.(stmtTx); ok {
		if st := q.stmts.get(insertSQL); st != nil {
			in.insert = t.StmtContext(ctx, st)
		}
	}
	return in
}

// insertAll inserts all drafts or none.
func insertAll(ctx context.Context, in inserter, ds []Draft, now int64) ([]Receipt, error) {
	if err := checkAlive(ctx, in.Tx, len(ds)); err != nil {
		return nil, err
	}
	if len(ds) == 1 || in.own {
		return in.each(ctx, ds, now)
	}
	// A savepoint, so that an application that commits in spite of an error commits
	// no part of them.
	if _, err := in.ExecContext(ctx, "savepoint taskbox_enqueue"); err != nil {
		return nil, err
	}
	rs, err := in.each(ctx, ds, now)
	if err != nil {
		_, err2 := in.ExecContext(ctx, "rollback to taskbox_enqueue")
		_, err3 := in.ExecContext(ctx, "release taskbox_enqueue")
		return nil, errors.Join(err, err2, err3)
	}
	_, err = in.ExecContext(ctx, "release taskbox_enqueue")
	return rs, err
}

func (in *inserter) each(ctx context.Context, ds []Draft, now int64) ([]Receipt, error) {
	rs := make([]Receipt, len(ds))
	for i := range ds {
		r, err := in.one(ctx, &ds[i], now)
		if err != nil && len(ds) > 1 {
			err = fmt.Errorf("task %d: %w", i+1, err)
		}
		if err != nil {
			return nil, err
		}
		rs[i] = r
	}
	return rs, nil
}

func (in *inserter) one(ctx context.Context, d *Draft, now int64) (Receipt, error) {
	args := d.row(now)
	if d.key != "" {
		return in.oneKeyed(ctx, d, args)
	}
	res, err := in.exec(ctx, args)
	if err != nil {
		return Receipt{}, explainInsert(err)
	}
	id, err := res.LastInsertId()
	return Receipt{ID: id, TraceID: d.traceID}, err
}

// exec falls back to text where tx belongs to another pool on the same file than
// the prepared statement.
func (in *inserter) exec(ctx context.Context, args []any) (sql.Result, error) {
	if in.insert != nil {
		res, err := in.insert.ExecContext(ctx, args...)
		if err == nil || !strings.Contains(err.Error(), "statement from different database") {
			return res, err
		}
		in.insert = nil
	}
	return in.ExecContext(ctx, insertSQL, args...)
}

func (in *inserter) oneKeyed(ctx context.Context, d *Draft, args []any) (Receipt, error) {
	r := Receipt{TraceID: d.traceID}
	err := in.QueryRowContext(ctx, insertKeyedSQL, args...).Scan(&r.ID)
	if !errors.Is(err, sql.ErrNoRows) {
		return r, explainInsert(err)
	}
	r.Duplicate = true
	if err := in.QueryRowContext(ctx, keyHolderSQL, d.key, d.key).Scan(&r.ID, &r.TraceID); err != nil {
		return Receipt{}, fmt.Errorf("find the task with the key %q: %w", d.key, err)
	}
	return r, nil
}

// row returns the arguments of insertSQL.
func (d *Draft) row(now int64) []any {
	due, status := now, "pending"
	if d.at != 0 {
		due = d.at
	}
	due = addMillis(due, d.delay)
	if due > now {
		status = "scheduled"
	}
	expires := d.expiresAt
	if d.expiresIn > 0 {
		expires = addMillis(now, d.expiresIn)
	}
	return []any{d.typ, d.payload, status, d.priority, due, now, now,
		orNull(d.key), orNull(d.group), d.traceID, orNull(d.attempts), orNull(expires), orNull(d.parentID),
		orNull(addMillis(0, d.keyWindow))}
}

// addMillis rounds up, so that nothing is due too early, and doesn't overflow.
func addMillis(ms int64, d time.Duration) int64 {
	add := int64(d / time.Millisecond)
	if d%time.Millisecond > 0 {
		add++
	}
	if add > math.MaxInt64-max(ms, 0) {
		return math.MaxInt64
	}
	return ms + add
}

func orNull[T comparable](v T) any {
	var zero T
	if v == zero {
		return nil
	}
	return v
}

// explainInsert says in our words what SQLite's constraints mean.
func explainInsert(err error) error {
	switch {
	case err == nil:
		return nil
	case strings.Contains(err.Error(), "json_valid"):
		return fmt.Errorf("%w: SQLite doesn't take the payload as JSON (it allows a depth of 1000): %w", ErrInvalid, err)
	case strings.Contains(err.Error(), "no such table: main.task_outbox"):
		return fmt.Errorf("%w: the transaction is on a file without a queue; open that file with New first: %w", ErrInvalid, err)
	}
	return err
}
