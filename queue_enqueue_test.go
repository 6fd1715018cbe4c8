package taskbox_test

import (
	"context"
	"crypto/rand"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

var note = taskbox.NewType[string]("note")

// tasks returns a column of all tasks, in order of id.
func (f *fixture) tasks(column string) []string {
	f.Helper()
	return f.rows(`select ` + column + ` from task_outbox order by id`)
}

func (f *fixture) wantTasks(column string, want ...string) {
	f.Helper()
	if diff := gocmp.Diff(want, f.tasks(column)); diff != "" {
		f.Errorf("%s of the tasks (-want +got):\n%s", column, diff)
	}
}

func TestQueue_Enqueue_Rollback(t *testing.T) {
	f := open(t, taskbox.Options{})
	f.exec(`create table orders (id integer primary key)`)
	tx := f.begin()
	if _, err := tx.Exec(`insert into orders values (1)`); err != nil {
		t.Fatal(err)
	}
	if _, err := f.q.Enqueue(t.Context(), tx, note.New("a")); err != nil {
		t.Fatal(err)
	}
	if _, err := f.q.EnqueueMany(t.Context(), tx, note.New("b", taskbox.Key("k")), note.New("c")); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		t.Fatal(err)
	}
	for _, table := range []string{"orders", "task_outbox", "task_audit", "task_stats"} {
		f.wantInt(0, `select count(*) from `+table)
	}
	// The key is free again.
	if r, err := f.q.Enqueue(t.Context(), f.db, note.New("b", taskbox.Key("k"))); err != nil || r.Duplicate {
		t.Errorf("after the rollback: %+v, %v", r, err)
	}
}

// Applications wrap these; methods like Commit and StmtContext come along.
type (
	appTx   struct{ *sql.Tx }
	appConn struct{ *sql.Conn }
	appDB   struct{ *sql.DB }
	// bareTx has what Tx asks for and nothing else.
	bareTx struct{ taskbox.Tx }
)

func TestQueue_Enqueue_Txs(t *testing.T) {
	for _, tt := range []struct {
		name string
		make func(f *fixture) (tx taskbox.Tx, commit func() error)
	}{
		{"sql.Tx", func(f *fixture) (taskbox.Tx, func() error) { tx := f.begin(); return tx, tx.Commit }},
		{"struct with sql.Tx", func(f *fixture) (taskbox.Tx, func() error) { tx := f.begin(); return appTx{tx}, tx.Commit }},
		{"pointer to struct with sql.Tx", func(f *fixture) (taskbox.Tx, func() error) { tx := f.begin(); return &appTx{tx}, tx.Commit }},
		{"bare", func(f *fixture) (taskbox.Tx, func() error) { tx := f.begin(); return bareTx{tx}, tx.Commit }},
		{"sql.Conn", func(f *fixture) (taskbox.Tx, func() error) { c := f.conn(); return c, c.Close }},
		{"struct with sql.Conn", func(f *fixture) (taskbox.Tx, func() error) { c := f.conn(); return appConn{c}, c.Close }},
		{"sql.Conn in a transaction", func(f *fixture) (taskbox.Tx, func() error) {
			c := f.conn()
			if _, err := c.ExecContext(f.Context(), "begin immediate"); err != nil {
				f.Fatal(err)
			}
			return c, func() error {
				_, err := c.ExecContext(f.Context(), "commit")
				return errors.Join(err, c.Close())
			}
		}},
		{"sql.DB", func(f *fixture) (taskbox.Tx, func() error) { return f.db, func() error { return nil } }},
		{"struct with sql.DB", func(f *fixture) (taskbox.Tx, func() error) { return appDB{f.db}, func() error { return nil } }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := open(t, taskbox.Options{})
			tx, commit := tt.make(f)
			ctx := t.Context()
			first, err := f.q.Enqueue(ctx, tx, note.New("1"))
			if err != nil {
				t.Fatal(err)
			}
			many, err := f.q.EnqueueMany(ctx, tx, note.New("2"), note.New("3", taskbox.Key("k")), note.New("4", taskbox.Key("k")))
			if err != nil {
				t.Fatal(err)
			}
			if err := commit(); err != nil {
				t.Fatal(err)
			}
			traces := f.tasks("trace_id")
			traces = append(traces, traces[2])
			got := append([]taskbox.Receipt{first}, many...)
			want := []taskbox.Receipt{{ID: 1}, {ID: 2}, {ID: 3}, {ID: 3, Duplicate: true}}
			for i := range want {
				want[i].TraceID = traces[i]
			}
			if diff := gocmp.Diff(want, got); diff != "" {
				t.Errorf("receipts (-want +got):\n%s", diff)
			}
			f.wantTasks("payload", `"1"`, `"2"`, `"3"`)
		})
	}
}

func (f *fixture) conn() *sql.Conn {
	f.Helper()
	c, err := f.db.Conn(f.Context())
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { c.Close() })
	return c
}

// A pool that isn't plainly a *sql.DB, such as sqlx's, hands out another connection
// with each call; here it always does.
func TestQueue_EnqueueMany_WrappedPool(t *testing.T) {
	f := open(t, taskbox.Options{})
	f.refuse("bad")
	f.db.SetMaxIdleConns(0)
	if _, err := f.q.EnqueueMany(t.Context(), appDB{f.db}, note.New("1"), note.New("2")); err != nil {
		t.Errorf("EnqueueMany: %v", err)
	}
	f.wantTasks("payload", `"1"`, `"2"`)
	if _, err := f.q.EnqueueMany(t.Context(), appDB{f.db}, note.New("3"), note.New("bad"), note.New("5")); err == nil {
		t.Error("EnqueueMany with a task that is refused: no error")
	}
	f.wantTasks("payload", `"1"`, `"2"`)
}

// refuse lets the file refuse tasks with a payload.
func (f *fixture) refuse(payload string) {
	f.Helper()
	f.exec(`create trigger refuse before insert on task_outbox when new.payload = '"` + payload + `"'
		begin select raise(abort, 'refused'); end`)
}

func TestQueue_EnqueueMany_AllOrNothing(t *testing.T) {
	for _, tt := range []struct {
		name string
		ds   []taskbox.Draft
		want error // nil: the file refuses it
	}{
		{"a bad draft in the middle", []taskbox.Draft{note.New("1"), note.New("2", taskbox.Delay(-1)), note.New("3")}, taskbox.ErrInvalid},
		{"an empty draft at the end", []taskbox.Draft{note.New("1"), {}}, taskbox.ErrInvalid},
		{"too large at the end", []taskbox.Draft{note.New("1"), note.New(strings.Repeat("x", 5000))}, taskbox.ErrPayloadTooLarge},
		{"refused by the file in the middle", []taskbox.Draft{note.New("1"), note.New("bad"), note.New("3")}, nil},
		{"refused by the file, with a key", []taskbox.Draft{note.New("1", taskbox.Key("k")), note.New("bad", taskbox.Key("l"))}, nil},
		{"too deep for SQLite in the middle", []taskbox.Draft{note.New("1"), raw.New(deep(1001)), note.New("3")}, taskbox.ErrInvalid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := open(t, taskbox.Options{MaxPayload: 4000})
			f.refuse("bad")
			f.exec(`create table orders (id integer primary key)`)
			tx := f.begin()
			if _, err := tx.Exec(`insert into orders values (1)`); err != nil {
				t.Fatal(err)
			}
			if _, err := f.q.Enqueue(t.Context(), tx, note.New("before")); err != nil {
				t.Fatal(err)
			}
			rs, err := f.q.EnqueueMany(t.Context(), tx, tt.ds...)
			if err == nil || rs != nil {
				t.Fatalf("EnqueueMany = %v, %v", rs, err)
			}
			if tt.want != nil {
				wantErr(t, err, tt.want)
			}
			// An application that goes on and commits has the rest, and no part of it.
			if _, err := f.q.Enqueue(t.Context(), tx, note.New("after")); err != nil {
				t.Fatal(err)
			}
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
			f.wantTasks("payload", `"before"`, `"after"`)
			f.wantInt(1, `select count(*) from orders`)
			// The same without a transaction of the application's.
			if _, err := f.q.EnqueueMany(t.Context(), f.db, tt.ds...); err == nil {
				t.Error("EnqueueMany with the pool: no error")
			}
			f.wantTasks("payload", `"before"`, `"after"`)
		})
	}
}

func TestQueue_EnqueueMany_None(t *testing.T) {
	f := open(t, taskbox.Options{})
	rs, err := f.q.EnqueueMany(t.Context(), f.db)
	if err != nil || len(rs) != 0 {
		t.Errorf("EnqueueMany of nothing = %v, %v", rs, err)
	}
}

// A list of drafts is the caller's: enqueued twice, it gives two traces for each.
func TestQueue_EnqueueMany_KeepsDrafts(t *testing.T) {
	f := open(t, taskbox.Options{})
	ds := []taskbox.Draft{note.New("1"), note.New("2")}
	for range 2 {
		if _, err := f.q.EnqueueMany(t.Context(), f.db, ds...); err != nil {
			t.Fatal(err)
		}
	}
	f.wantInt(4, `select count(distinct trace_id) from task_outbox`)
}

var raw = taskbox.NewType[json.RawMessage]("raw")

// deep is a JSON array of arrays.
func deep(n int) json.RawMessage {
	return json.RawMessage(strings.Repeat("[", n) + strings.Repeat("]", n))
}

func TestQueue_Enqueue_BadInput(t *testing.T) {
	long := strings.Repeat("x", 201)
	year := func(y int) time.Time { return time.Date(y, 1, 1, 12, 0, 0, 0, time.UTC) }
	f := open(t, taskbox.Options{MaxPayload: 3000})
	for _, tt := range []struct {
		name string
		d    taskbox.Draft
		want error
		text string
	}{
		{"empty draft", taskbox.Draft{}, taskbox.ErrInvalid, "Type.New"},
		{"empty type", taskbox.NewType[int]("").New(1), taskbox.ErrInvalid, "empty"},
		{"type too long", taskbox.NewType[int](long).New(1), taskbox.ErrInvalid, "201 bytes"},
		{"type with a control character", taskbox.NewType[int]("a\nb").New(1), taskbox.ErrInvalid, "U+000A"},
		{"type with NUL", taskbox.NewType[int]("a\x00b").New(1), taskbox.ErrInvalid, "U+0000"},
		{"type not UTF-8", taskbox.NewType[int]("a\xffb").New(1), taskbox.ErrInvalid, "UTF-8"},
		{"empty key", note.New("", taskbox.Key("")), taskbox.ErrInvalid, "key is empty"},
		{"key too long", note.New("", taskbox.Key(strings.Repeat("k", 501))), taskbox.ErrInvalid, "501"},
		{"key with a tab", note.New("", taskbox.Key("a\tb")), taskbox.ErrInvalid, "U+0009"},
		{"empty group", note.New("", taskbox.Group("")), taskbox.ErrInvalid, "group is empty"},
		{"group too long", note.New("", taskbox.Group(strings.Repeat("k", 501))), taskbox.ErrInvalid, "501"},
		{"empty trace", note.New("", taskbox.TraceID("")), taskbox.ErrInvalid, "trace"},
		{"trace too long", note.New("", taskbox.TraceID(long)), taskbox.ErrInvalid, "trace"},
		{"negative delay", note.New("", taskbox.Delay(-time.Nanosecond)), taskbox.ErrInvalid, "delay"},
		{"least delay", note.New("", taskbox.Delay(math.MinInt64)), taskbox.ErrInvalid, "delay"},
		{"year 0", note.New("", taskbox.At(year(0))), taskbox.ErrInvalid, "year"},
		{"year 10000", note.New("", taskbox.At(year(10000))), taskbox.ErrInvalid, "year"},
		{"zero time", note.New("", taskbox.At(time.Time{})), taskbox.ErrInvalid, "year"},
		{"expiry in year 0", note.New("", taskbox.Expires(year(0))), taskbox.ErrInvalid, "expiry"},
		{"expiry in year 10000", note.New("", taskbox.Expires(year(10000))), taskbox.ErrInvalid, "expiry"},
		{"expiry now", note.New("", taskbox.ExpiresIn(0)), taskbox.ErrInvalid, "expiry"},
		{"expiry before", note.New("", taskbox.ExpiresIn(-time.Hour)), taskbox.ErrInvalid, "expiry"},
		{"no attempts", note.New("", taskbox.MaxAttempts(0)), taskbox.ErrInvalid, "MaxAttempts"},
		{"fewer attempts", note.New("", taskbox.MaxAttempts(-1)), taskbox.ErrInvalid, "MaxAttempts"},
		{"payload that isn't JSON", raw.New(json.RawMessage(`{"a":`)), taskbox.ErrInvalid, "payload"},
		{"payload of two values", raw.New(json.RawMessage(`1 2`)), taskbox.ErrInvalid, "payload"},
		{"payload that can't be JSON", taskbox.NewType[float64]("f").New(math.NaN()), taskbox.ErrInvalid, "NaN"},
		{"payload that is a channel", taskbox.NewType[chan int]("c").New(nil), taskbox.ErrInvalid, "payload"},
		{"payload too deep", raw.New(deep(1001)), taskbox.ErrInvalid, "depth"},
		{"payload too deep, with a key", raw.New(deep(1001), taskbox.Key("deep")), taskbox.ErrInvalid, "depth"},
		{"payload too large", note.New(strings.Repeat("x", 3000)), taskbox.ErrPayloadTooLarge, "3002 bytes"},
		{"the first error counts", note.New("", taskbox.Key(""), taskbox.Delay(-1)), taskbox.ErrInvalid, "key"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f.exec(`delete from task_outbox`)
			tx := f.begin()
			r, err := f.q.Enqueue(t.Context(), tx, tt.d)
			wantErr(t, err, tt.want)
			if r != (taskbox.Receipt{}) {
				t.Errorf("receipt %+v with the error", r)
			}
			if err == nil || !strings.Contains(err.Error(), tt.text) {
				t.Errorf("%q doesn't mention %q", err, tt.text)
			}
			if err != nil && len(err.Error()) > 500 {
				t.Errorf("the error is %d bytes long", len(err.Error()))
			}
			// The application's transaction is as it was.
			if _, err := f.q.Enqueue(t.Context(), tx, note.New("good")); err != nil {
				t.Fatalf("the next one in the transaction: %v", err)
			}
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
			f.wantTasks("payload", `"good"`)
			_, err = f.q.Enqueue(t.Context(), f.db, tt.d)
			wantErr(t, err, tt.want)
		})
	}
}

func TestQueue_Enqueue_Bounds(t *testing.T) {
	f := open(t, taskbox.Options{})
	for _, d := range []taskbox.Draft{
		taskbox.NewType[int](strings.Repeat("x", 200)).New(1),
		note.New("", taskbox.Key(strings.Repeat("k", 500)), taskbox.Group(strings.Repeat("g", 500)), taskbox.TraceID(strings.Repeat("t", 200))),
		note.New(strings.Repeat("x", 1<<20-2)),
		note.New("", taskbox.Delay(math.MaxInt64), taskbox.Priority(math.MinInt), taskbox.MaxAttempts(math.MaxInt32)),
		note.New("", taskbox.At(time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)), taskbox.Delay(math.MaxInt64), taskbox.Priority(math.MaxInt)),
		note.New("", taskbox.At(time.Date(1, 1, 2, 0, 0, 0, 0, time.UTC))),
		raw.New(deep(1000)),
		raw.New(nil),
		taskbox.NewType[string]("größe ☃").New("\x00\u2028</script>"),
	} {
		if _, err := f.q.Enqueue(t.Context(), f.db, d); err != nil {
			t.Error(err)
		}
	}
	f.wantInt(9, `select count(*) from task_outbox where typeof(next_run_at) = 'integer'`)
	_, err := f.q.Enqueue(t.Context(), f.db, note.New(strings.Repeat("x", 1<<20-1)))
	wantErr(t, err, taskbox.ErrPayloadTooLarge)
}

func TestQueue_Enqueue_NilTx(t *testing.T) {
	f := open(t, taskbox.Options{})
	for name, tx := range map[string]taskbox.Tx{
		"nil": nil, "nil *sql.Tx": (*sql.Tx)(nil), "nil *sql.DB": (*sql.DB)(nil), "nil *sql.Conn": (*sql.Conn)(nil),
	} {
		t.Run(name, func(t *testing.T) {
			defer func() {
				if v := recover(); v != nil {
					t.Errorf("it panics: %v", v)
				}
			}()
			_, err := f.q.Enqueue(t.Context(), tx, note.New(""))
			wantErr(t, err, taskbox.ErrInvalid)
		})
	}
}

func TestQueue_Enqueue_EndedTx(t *testing.T) {
	f := open(t, taskbox.Options{})
	tx := f.begin()
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	_, err := f.q.Enqueue(t.Context(), tx, note.New(""))
	wantErr(t, err, sql.ErrTxDone)
	f.wantInt(0, `select count(*) from task_outbox`)
}

func TestQueue_Enqueue_FileWithoutQueue(t *testing.T) {
	f := open(t, taskbox.Options{})
	other := fileDB(t, filepath.Join(t.TempDir(), "other.db"))
	tx, err := other.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	_, err = f.q.Enqueue(t.Context(), tx, note.New(""))
	wantErr(t, err, taskbox.ErrInvalid)
	if err == nil || !strings.Contains(err.Error(), "New") {
		t.Errorf("%v doesn't say what to do", err)
	}
}

// A transaction of another pool on the same file is as good.
func TestQueue_Enqueue_OtherPool(t *testing.T) {
	f := open(t, taskbox.Options{})
	for _, db := range []*sql.DB{fileDB(t, f.path), plainDB(t, f.path, "_busy_timeout=5000")} {
		tx, err := db.Begin()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.q.Enqueue(t.Context(), tx, note.New("1")); err != nil {
			t.Error(err)
		}
		if _, err := f.q.EnqueueMany(t.Context(), tx, note.New("2"), note.New("3", taskbox.Key("k"))); err != nil {
			t.Error(err)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
	}
	f.wantTasks("payload", `"1"`, `"2"`, `"3"`, `"1"`, `"2"`)
}

func TestQueue_Enqueue_Row(t *testing.T) {
	clock := time.Date(2026, 5, 4, 3, 2, 1, 0, time.UTC)
	in := func(d time.Duration) string { return fmt.Sprint(clock.Add(d).UnixMilli()) }
	f := open(t, taskbox.Options{})
	f.q.SetClock(func() time.Time { return clock })
	for _, tt := range []struct {
		name, column, want string
		opts               []taskbox.EnqueueOption
	}{
		{"nothing", "status || next_run_at || created_at || updated_at || priority || attempt", "pending" + in(0) + in(0) + in(0) + "00", nil},
		{"delay", "status || next_run_at", "scheduled" + in(time.Hour), []taskbox.EnqueueOption{taskbox.Delay(time.Hour)}},
		{"no delay", "status || next_run_at", "pending" + in(0), []taskbox.EnqueueOption{taskbox.Delay(0)}},
		{"delay is rounded up", "status || next_run_at", "scheduled" + in(time.Millisecond), []taskbox.EnqueueOption{taskbox.Delay(1)}},
		{"time", "status || next_run_at", "scheduled" + in(24*time.Hour), []taskbox.EnqueueOption{taskbox.At(clock.Add(24 * time.Hour))}},
		{"time that has passed", "status", "pending", []taskbox.EnqueueOption{taskbox.At(clock.Add(-time.Hour))}},
		{"time in another zone", "next_run_at", in(time.Hour), []taskbox.EnqueueOption{taskbox.At(clock.Add(time.Hour).In(time.FixedZone("x", 7200)))}},
		{"1970", "status", "pending", []taskbox.EnqueueOption{taskbox.At(time.UnixMilli(0))}},
		{"time and delay", "next_run_at", in(25 * time.Hour), []taskbox.EnqueueOption{taskbox.At(clock.Add(24 * time.Hour)), taskbox.Delay(time.Hour)}},
		{"priority", "priority", "-7", []taskbox.EnqueueOption{taskbox.Priority(-7)}},
		{"key", "dedupe_key", "k", []taskbox.EnqueueOption{taskbox.Key("k")}},
		{"group", "group_key", "g", []taskbox.EnqueueOption{taskbox.Group("g")}},
		{"max attempts", "max_attempts", "3", []taskbox.EnqueueOption{taskbox.MaxAttempts(3)}},
		{"expiry", "expires_at", in(time.Minute), []taskbox.EnqueueOption{taskbox.Expires(clock.Add(time.Minute))}},
		{"expiry from now", "expires_at", in(time.Minute), []taskbox.EnqueueOption{taskbox.ExpiresIn(time.Minute)}},
		{"no expiry", "expires_at is null", "1", nil},
		{"expiry in 1970", "expires_at is not null", "1", []taskbox.EnqueueOption{taskbox.Expires(time.UnixMilli(0))}},
		{"trace", "trace_id", "abc", []taskbox.EnqueueOption{taskbox.TraceID("abc")}},
		{"traceparent", "trace_id", "0af7651916cd43dd8448eb211c80319c", []taskbox.EnqueueOption{taskbox.Traceparent("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01")}},
		{"bad traceparent leaves the trace", "trace_id", "abc", []taskbox.EnqueueOption{taskbox.TraceID("abc"), taskbox.Traceparent("00-x")}},
		{"no parent", "parent_id is null", "1", nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := &fixture{T: t, db: f.db, q: f.q}
			f.exec(`delete from task_outbox`)
			f.enqueue(note.New("", tt.opts...))
			f.wantTasks(tt.column, tt.want)
		})
	}
}

func TestQueue_Enqueue_TraceIDs(t *testing.T) {
	f := open(t, taskbox.Options{})
	for range 100 {
		f.enqueue(note.New(""))
	}
	f.exec(`insert into task_outbox(event_type, payload) values ('note', '""')`)
	seen := map[string]bool{}
	for _, id := range f.tasks("trace_id") {
		if !regexp.MustCompile(`^[0-9a-f]{32}$`).MatchString(id) || seen[id] {
			t.Errorf("trace id %q, seen before: %v", id, seen[id])
		}
		seen[id] = true
	}
}

func TestTraceparent(t *testing.T) {
	const id, span = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
	for _, tt := range []struct {
		header string
		ok     bool
	}{
		{"00-" + id + "-" + span + "-01", true},
		{"00-" + id + "-" + span + "-00", true},
		{" 00-" + id + "-" + span + "-01\t", true},
		{"01-" + id + "-" + span + "-01", true},
		{"cc-" + id + "-" + span + "-01-what-the-future-brings", true},
		{"00-" + id + "-" + span + "-01-extra", false},
		{"00-" + id + "-" + span + "-01-", false},
		{"ff-" + id + "-" + span + "-01", false},
		{"00-" + strings.ToUpper(id) + "-" + span + "-01", false},
		{"00-" + strings.Repeat("0", 32) + "-" + span + "-01", false},
		{"00-" + id + "-" + strings.Repeat("0", 16) + "-01", false},
		{"00-" + id[:31] + "-" + span + "-01", false},
		{"00-" + id + "0-" + span + "-01", false},
		{"00-" + id[:15] + "g" + id[16:] + "-" + span + "-01", false},
		{"00-" + id + "-" + span[:15] + "-01", false},
		{"00-" + id + "-" + span + "-1", false},
		{"00-" + id + "-" + span + "-0x", false},
		{"00-" + id + "-" + span, false},
		{"0-" + id + "-" + span + "-01", false},
		{"", false}, {"-", false}, {"---", false}, {id, false}, {"00", false}, {"☃", false},
	} {
		got, ok := taskbox.TraceOf(tt.header)
		if ok != tt.ok || ok && got != id {
			t.Errorf("%q: got %q, %v, want ok %v", tt.header, got, ok, tt.ok)
		}
	}
}

// traceparentRE says the same as the specification's grammar, in another way.
var traceparentRE = regexp.MustCompile(`^(?:00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}|([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(?:-(?s:.*))?)$`)

func FuzzTraceparent(f *testing.F) {
	for _, s := range []string{"", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "01-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-x", "ff---", "00-0-0-0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, header string) {
		want, m := "", traceparentRE.FindStringSubmatch(strings.TrimSpace(header))
		if m != nil && m[3] != "00" && m[3] != "ff" && strings.Trim(m[1]+m[4], "0") != "" && strings.Trim(m[2]+m[5], "0") != "" {
			want = m[1] + m[4]
		}
		got, ok := taskbox.TraceOf(header)
		if ok != (want != "") || ok && got != want {
			t.Errorf("%q: got %q, %v, want %q", header, got, ok, want)
		}
	})
}

func TestQueue_Enqueue_Key(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		fail := true
		note.Handle(f.q, func(context.Context, *taskbox.Task[string]) error {
			if fail {
				return errors.New("not now")
			}
			return nil
		})
		id := f.enqueue(note.New("first", taskbox.Key("k"), taskbox.Priority(1)))
		row := func() string { return strings.Join(f.rows(`select * from task_outbox`), "\n") }
		duplicate := func(when string) {
			before := row()
			for _, tx := range []taskbox.Tx{f.db, bareTx{f.db}} {
				r, err := f.q.Enqueue(f.Context(), tx, note.New("second", taskbox.Key("k"), taskbox.Delay(time.Hour)))
				if want := (taskbox.Receipt{ID: id, TraceID: f.one(`select trace_id from task_outbox`), Duplicate: true}); err != nil || r != want {
					f.Errorf("%s: %+v, %v, want %+v", when, r, err, want)
				}
			}
			f.exec(`insert into task_outbox(event_type, payload, dedupe_key) values ('other', '{}', 'k')`)
			f.exec(`insert or ignore into task_outbox(event_type, payload, dedupe_key) values ('other', '{}', 'k')`)
			if after := row(); after != before {
				f.Errorf("%s: the row has changed:\n%s\n%s", when, before, after)
			}
		}
		duplicate("pending")
		f.drain()
		f.wantStatus(id, "retry_wait")
		duplicate("retry_wait")
		fail = false
		time.Sleep(time.Minute)
		f.drain()
		f.wantStatus(id, "success")
		duplicate("success")
		// The next id isn't one further for each duplicate.
		if other := f.enqueue(note.New("", taskbox.Key("l"))); other != id+1 {
			f.Errorf("id %d, want %d", other, id+1)
		}
	})
}

func TestQueue_Enqueue_KeyOfEnded(t *testing.T) {
	for _, status := range []string{"success", "dead_letter", "skipped", "cancelled"} {
		f := open(t, taskbox.Options{})
		id := f.enqueue(note.New("", taskbox.Key("k")))
		f.exec(`update task_outbox set status = ?, finished_at = 1`, status)
		if r, err := f.q.Enqueue(t.Context(), f.db, note.New("", taskbox.Key("k"))); err != nil || r.Duplicate || r.ID == id {
			t.Errorf("%s: %+v, %v", status, r, err)
		}
	}
}

func TestQueue_Enqueue_FollowUp(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 1}, func(f *fixture) {
		first, next := taskbox.NewType[int]("first"), taskbox.NewType[int]("next")
		var ids []int64
		first.Handle(f.q, func(ctx context.Context, task *taskbox.Task[int]) error {
			rs, err := f.q.EnqueueMany(ctx, f.db, next.New(1), next.New(2, taskbox.TraceID("own")))
			for _, r := range rs {
				ids = append(ids, r.ID)
			}
			return err
		})
		type seen struct {
			Trace  string
			Parent int64
		}
		got := map[int]seen{}
		next.Handle(f.q, func(ctx context.Context, task *taskbox.Task[int]) error {
			got[task.Payload] = seen{task.TraceID, task.ParentID}
			if task.Payload > 2 {
				return nil
			}
			_, err := f.q.Enqueue(ctx, f.db, next.New(task.Payload+2)) // the trace goes on
			return err
		})
		id := f.enqueue(first.New(0, taskbox.TraceID("t")))
		f.drain()
		want := map[int]seen{1: {"t", id}, 2: {"own", id}, 3: {"t", ids[0]}, 4: {"own", ids[1]}}
		if diff := gocmp.Diff(want, got); diff != "" {
			f.Errorf("follow-up tasks (-want +got):\n%s", diff)
		}
	})
}

// lost returns a transaction that SQLite has ended by itself, after it inserted order 1.
func (f *fixture) lost(how string) *sql.Tx {
	f.Helper()
	tx := f.begin()
	if _, err := tx.Exec(`insert into orders values (1)`); err != nil {
		f.Fatal(err)
	}
	var err error
	switch how {
	case "conflict":
		_, err = tx.Exec(`insert or rollback into orders values (1)`)
	case "trigger":
		_, err = tx.Exec(`insert into orders values (-1)`)
	case "cancelled":
		ctx, cancel := context.WithTimeout(f.Context(), 30*time.Millisecond)
		defer cancel()
		_, err = tx.ExecContext(ctx, `update orders set id = (
			with recursive n(i) as (select 1 union all select i + 1 from n) select count(*) from n)`)
	}
	if err == nil {
		f.Fatalf("%s: no error", how)
	}
	return tx
}

func TestQueue_Enqueue_ErrTxLost(t *testing.T) {
	for _, how := range []string{"conflict", "trigger", "cancelled"} {
		for name, wrap := range map[string]func(*sql.Tx) taskbox.Tx{
			"sql.Tx":  func(tx *sql.Tx) taskbox.Tx { return tx },
			"wrapped": func(tx *sql.Tx) taskbox.Tx { return &appTx{tx} },
		} {
			t.Run(how+" "+name, func(t *testing.T) {
				f := open(t, taskbox.Options{})
				f.exec(`create table orders (id integer primary key)`)
				f.exec(`create trigger no before insert on orders when new.id < 0 begin select raise(rollback, 'no'); end`)
				tx := f.lost(how)
				_, err := f.q.Enqueue(t.Context(), wrap(tx), note.New("1"))
				wantErr(t, err, taskbox.ErrTxLost)
				_, err = f.q.Enqueue(t.Context(), wrap(tx), note.New("2", taskbox.Key("k")))
				wantErr(t, err, taskbox.ErrTxLost)
				_, err = f.q.EnqueueMany(t.Context(), wrap(tx), note.New("3"), note.New("4"))
				wantErr(t, err, taskbox.ErrTxLost)
				tx.Commit() // an application that doesn't look
				f.wantInt(0, `select count(*) from task_outbox`)
				f.wantInt(0, `select count(*) from orders`)
				// The connection is whole.
				f.enqueue(note.New("5"))
				f.wantTasks("payload", `"5"`)
			})
		}
	}
}

// A bad statement alone doesn't end a transaction.
func TestQueue_Enqueue_AfterAFailedStatement(t *testing.T) {
	f := open(t, taskbox.Options{})
	f.exec(`create table orders (id integer primary key)`)
	tx := f.begin()
	for _, query := range []string{`insert into orders values (1)`, `insert into orders values (1)`, `insert into nowhere values (1)`, `nonsense`} {
		tx.Exec(query)
	}
	if _, err := f.q.Enqueue(t.Context(), tx, note.New("1")); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	f.wantTasks("payload", `"1"`)
}

func TestQueue_Enqueue_CancelledCtx(t *testing.T) {
	f := open(t, taskbox.Options{})
	f.exec(`create table orders (id integer primary key)`)
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errors.New("the user has gone"))
	tx := f.begin()
	if _, err := tx.Exec(`insert into orders values (1)`); err != nil {
		t.Fatal(err)
	}
	for _, tx := range []taskbox.Tx{tx, f.conn(), f.db} {
		_, err := f.q.Enqueue(ctx, tx, note.New("1"))
		wantErr(t, err, context.Canceled)
		_, err = f.q.EnqueueMany(ctx, tx, note.New("1"), note.New("2"))
		wantErr(t, err, context.Canceled)
	}
	if _, err := f.q.Enqueue(t.Context(), tx, note.New("3")); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	f.wantInt(1, `select count(*) from orders`)
	f.wantTasks("payload", `"3"`)
}

// A context that ends while the insert runs neither interrupts it nor ends the transaction.
func TestQueue_Enqueue_CancelledMeanwhile(t *testing.T) {
	f := open(t, taskbox.Options{})
	f.exec(`create table orders (id integer primary key)`)
	// A slow insert: each row counts on the way.
	f.exec(`create trigger slow before insert on task_outbox begin
		select (with recursive n(i) as (select 1 union all select i + 1 from n limit 20000) select count(*) from n); end`)
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Millisecond)
		tx := f.begin()
		if _, err := tx.Exec(`insert into orders default values`); err != nil {
			t.Fatal(err)
		}
		if _, err := f.q.EnqueueMany(ctx, tx, note.New("1"), note.New("2", taskbox.Key(rand.Text()))); err != nil && !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		} else if err != nil {
			t.Log("it was too late before it began")
			if _, err := f.q.EnqueueMany(t.Context(), tx, note.New("1"), note.New("2")); err != nil {
				t.Fatal(err)
			}
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		cancel()
	}
	f.wantInt(3, `select count(*) from orders`)
	f.wantInt(6, `select count(*) from task_outbox`)
}

func TestQueue_Enqueue_ErrBusy(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	db := plainDB(t, path, "_busy_timeout=20") // and transactions that begin without the lock
	q := newQueue(t, db, taskbox.Options{})
	f := &fixture{T: t, db: db, q: q, path: path}
	f.exec(`create table orders (id integer primary key)`)
	other := f.begin()
	if _, err := other.Exec(`insert into orders values (1)`); err != nil {
		t.Fatal(err)
	}
	wantBusy := func(err error, texts ...string) {
		t.Helper()
		wantErr(t, err, taskbox.ErrBusy)
		for _, text := range texts {
			if err == nil || !strings.Contains(err.Error(), text) {
				t.Errorf("%q doesn't mention %q", err, text)
			}
		}
	}
	// SQLITE_BUSY: another holds the lock.
	waiting := f.begin()
	_, err := q.Enqueue(t.Context(), waiting, note.New("1"))
	wantBusy(err, "busy_timeout", "_txlock=immediate", "Queue.Tx", "(5)")
	_, err = q.EnqueueMany(t.Context(), waiting, note.New("1"), note.New("2"))
	wantBusy(err, "busy_timeout", "(5)")
	_, err = q.Enqueue(t.Context(), db, note.New("1"))
	wantBusy(err, "busy_timeout")
	conn := f.conn()
	_, err = q.Enqueue(t.Context(), conn, note.New("1", taskbox.Key("k")))
	wantBusy(err, "busy_timeout")

	// SQLITE_BUSY_SNAPSHOT: another has committed since our transaction first read.
	stale := f.begin()
	var n int
	if err := stale.QueryRow(`select count(*) from orders`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if err := other.Commit(); err != nil {
		t.Fatal(err)
	}
	_, err = q.Enqueue(t.Context(), stale, note.New("1"))
	wantBusy(err, "run the whole transaction again", "Queue.Tx", "517")

	// The one that waited goes on, now that the lock is free.
	if _, err := q.Enqueue(t.Context(), waiting, note.New("2")); err != nil {
		t.Error(err)
	}
	if err := waiting.Commit(); err != nil {
		t.Error(err)
	}
	f.wantTasks("payload", `"2"`)
}

func TestQueue_Enqueue_PoolOfOne(t *testing.T) {
	for _, path := range []string{filepath.Join(t.TempDir(), "t.db"), ":memory:"} {
		synctest.Test(t, func(t *testing.T) {
			db := closing(t)(taskbox.OpenDB(path))
			db.SetMaxOpenConns(1)
			f := &fixture{T: t, db: db, q: newQueue(t, db, taskbox.Options{Workers: 1})}
			done := 0
			note.Handle(f.q, func(ctx context.Context, task *taskbox.Task[string]) error {
				done++
				if task.Payload == "more" {
					_, err := f.q.Enqueue(ctx, f.db, note.New("next"))
					return err
				}
				return nil
			})
			tx := f.begin()
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			defer cancel()
			_, err := f.q.Enqueue(ctx, db, note.New("stuck"))
			wantErr(t, err, context.DeadlineExceeded)
			if _, err := f.q.EnqueueMany(t.Context(), tx, note.New("more"), note.New("2")); err != nil {
				t.Fatal(err)
			}
			if err := tx.Commit(); err != nil {
				t.Fatal(err)
			}
			f.drain()
			stop := f.run()
			f.enqueue(note.New("more"))
			time.Sleep(5 * time.Second)
			if err := stop(); err != nil || done != 5 {
				t.Errorf("%s: %d tasks done, want 5; Run: %v", path, done, err)
			}
			if s, err := f.q.Stats(t.Context()); err != nil || s.QueueLength != 0 {
				t.Errorf("Stats = %+v, %v", s, err)
			}
		})
	}
}

func TestQueue_Tx(t *testing.T) {
	f := open(t, taskbox.Options{})
	f.exec(`create table orders (id integer primary key)`)
	put := func(ctx context.Context, tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `insert into orders default values`)
		if err != nil {
			return err
		}
		_, err = f.q.Enqueue(ctx, tx, note.New("1"))
		return err
	}
	want := func(when string, n int64) {
		t.Helper()
		if orders, tasks := f.int(`select count(*) from orders`), f.int(`select count(*) from task_outbox`); orders != n || tasks != n {
			t.Errorf("%s: %d orders and %d tasks, want %d of both", when, orders, tasks, n)
		}
	}
	if err := f.q.Tx(t.Context(), put); err != nil {
		t.Fatal(err)
	}
	want("commit", 1)

	no := errors.New("no")
	err := f.q.Tx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		return errors.Join(put(ctx, tx), no)
	})
	wantErr(t, err, no)
	want("error", 1)

	func() {
		defer func() {
			if v := recover(); v != "no" {
				t.Errorf("recovered %v, want the panic", v)
			}
		}()
		f.q.Tx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
			put(ctx, tx)
			panic("no")
		})
	}()
	want("panic", 1)

	ctx, cancel := context.WithCancel(t.Context())
	err = f.q.Tx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		err := put(ctx, tx)
		cancel()
		for tx.QueryRow(`select 1`).Err() == nil {
			// Until database/sql has rolled it back.
		}
		return err
	})
	wantErr(t, err, context.Canceled)
	want("cancelled", 1)
	if err := f.q.Tx(t.Context(), put); err != nil {
		t.Fatal(err)
	}
	want("afterwards", 2)
}

// A transaction that meets a busy file, at whatever statement, runs again as a whole.
func TestQueue_Tx_Again(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	db := plainDB(t, path, "_busy_timeout=1")
	f := &fixture{T: t, db: db, q: newQueue(t, db, taskbox.Options{}), path: path}
	f.exec(`create table orders (id integer primary key)`)

	// The lock is taken before fn, so that another holder delays its first call.
	other := f.begin()
	if _, err := other.Exec(`insert into orders values (1)`); err != nil {
		t.Fatal(err)
	}
	calls := 0
	err := f.q.Tx(t.Context(), func(context.Context, *sql.Tx) error { calls++; return nil })
	wantErr(t, err, taskbox.ErrBusy)
	if calls != 0 {
		t.Errorf("fn was called %d times without the lock", calls)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	wantErr(t, f.q.Tx(ctx, func(context.Context, *sql.Tx) error { return nil }), context.Canceled)
	if err := other.Commit(); err != nil {
		t.Fatal(err)
	}

	// A busy error of fn's own, here from another pool's lock on the file, which it
	// meets twice.
	busy := func() error {
		tx := f.begin() // holds the lock
		defer tx.Rollback()
		if _, err := tx.Exec(`insert into orders values (2)`); err != nil {
			return err
		}
		conn := f.conn()
		defer conn.Close()
		_, err := conn.ExecContext(t.Context(), `insert into orders values (3)`)
		return err
	}()
	if busy == nil {
		t.Fatal("two writers at once")
	}
	err = f.q.Tx(t.Context(), func(ctx context.Context, tx *sql.Tx) error {
		if _, err := f.q.Enqueue(ctx, tx, note.New("1")); err != nil {
			return err
		}
		if calls++; calls <= 2 {
			return fmt.Errorf("wrapped: %w", busy)
		}
		return nil
	})
	if err != nil || calls != 3 {
		t.Errorf("Tx = %v after %d calls, want 3", err, calls)
	}
	f.wantTasks("payload", `"1"`)

	calls = 0
	err = f.q.Tx(t.Context(), func(context.Context, *sql.Tx) error { calls++; return busy })
	wantErr(t, err, taskbox.ErrBusy)
	if calls < 2 || calls > 100 {
		t.Errorf("a transaction that is always busy was run %d times", calls)
	}
	f.wantInt(1, `select count(*) from task_outbox`)
}
