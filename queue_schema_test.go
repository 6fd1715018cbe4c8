package taskbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

func TestSchema_Golden(t *testing.T) {
	golden(t, "schema.sql", open(t, taskbox.Options{}).schema())
}

// schema is the file's DDL.
func (f *fixture) schema() string {
	f.Helper()
	var b strings.Builder
	for _, s := range f.rows(`select sql from sqlite_schema where sql is not null and name not like 'sqlite_%'
		order by case type when 'table' then 1 when 'index' then 2 when 'trigger' then 3 else 4 end, name`) {
		b.WriteString(s + ";\n\n")
	}
	fmt.Fprintf(&b, "-- schema_version %s\n", f.one(`select value from task_meta where key = 'schema_version'`))
	return b.String()
}

// The columns, defaults and names that SQL from other languages relies on.
func TestSchema_Defaults(t *testing.T) {
	f := open(t, taskbox.Options{})
	before := time.Now().UnixMilli()
	f.exec(`insert into task_outbox(event_type, payload) values ('x', '{"a":1}')`)
	after := time.Now().UnixMilli()
	got := f.one(`select id, event_type, payload, status, retry_count, priority, dedupe_key, length(trace_id), next_run_at = created_at, created_at = updated_at from task_outbox`)
	if want := `1|x|{"a":1}|pending|0|0||32|1|1`; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	if at := f.int(`select created_at from task_outbox`); at < before-1 || at > after+1 {
		t.Errorf("created_at is %d, want %d to %d", at, before, after)
	}
}

func TestSchema_Refuses(t *testing.T) {
	f := open(t, taskbox.Options{})
	f.enqueue(note.New(""))
	f.exec(`insert into task_audit(task_id, seq, event, at) values (1, 1, 'picked', 1)`)
	f.exec(`insert into task_audit(task_id, seq, event, at, actor) values (0, 1, 'pause', 1, 'me')`)
	for _, query := range []string{
		`insert into task_outbox(event_type, payload) values ('x', 'no json')`,
		`insert into task_outbox(event_type, payload) values ('x', '')`,
		`insert into task_outbox(event_type, payload) values ('x', null)`,
		`insert into task_outbox(event_type, payload) values ('', '{}')`,
		`insert into task_outbox(event_type, payload) values (null, '{}')`,
		`insert into task_outbox(payload) values ('{}')`,
		`insert into task_outbox(event_type) values ('x')`,
		`insert into task_outbox(event_type, payload) values ('` + strings.Repeat("x", 201) + `', '{}')`,
		`insert into task_outbox(event_type, payload, status) values ('x', '{}', 'done')`,
		`insert into task_outbox(event_type, payload, next_run_at) values ('x', '{}', 'tomorrow')`,
		`insert into task_outbox(event_type, payload, next_run_at) values ('x', '{}', null)`,
		`insert into task_outbox(event_type, payload, dedupe_key) values ('x', '{}', '')`,
		`insert into task_outbox(event_type, payload, group_key) values ('x', '{}', '')`,
		`insert into task_outbox(event_type, payload, max_attempts) values ('x', '{}', 0)`,
		`update task_outbox set status = 'waiting'`,
		`update task_outbox set payload = 'no json'`,
		`update task_audit set event = 'success'`,
		`update task_audit set detail = null where task_id = 0`,
		`insert into task_audit(task_id, seq, event, at) values (1, 1, 'success', 2)`,
		`insert into task_audit(task_id, seq, event, at) values (1, 1, 'success', 2) on conflict do update set event = excluded.event`,
		`delete from task_audit where task_id = 1`,
		`delete from task_audit`,
	} {
		if _, err := f.db.Exec(query); err == nil {
			t.Errorf("%s: no error", query)
		}
	}
	f.wantInt(1, `select count(*) from task_outbox`)
	f.wantInt(2, `select count(*) from task_audit`)
	f.wantInt(1, `select count(*) from task_audit where event = 'picked'`)
	// Once its task is gone the trail may go too.
	f.exec(`delete from task_outbox where id = 1`)
	f.exec(`delete from task_audit where task_id = 1`)
	f.wantInt(1, `select count(*) from task_audit`)
}

func TestSchema_IDsAreNotReused(t *testing.T) {
	f := open(t, taskbox.Options{})
	for range 3 {
		f.enqueue(note.New(""))
	}
	f.exec(`delete from task_outbox where id = 3`)
	if id := f.enqueue(note.New("")); id != 4 {
		t.Errorf("id %d after 3 was deleted, want 4", id)
	}
	f.exec(`delete from task_outbox`)
	if id := f.enqueue(note.New("", taskbox.Key("k"))); id != 5 {
		t.Errorf("id %d after all were deleted, want 5", id)
	}
}

// An application's own things in the file are left alone.
func TestSchema_LeavesTheRestAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	f := &fixture{T: t, path: path, db: plainDB(t, path, "_busy_timeout=5000")}
	f.exec(`pragma user_version = 42`)
	f.exec(`pragma application_id = 4711`)
	f.exec(`create table orders (id integer primary key)`)
	f.exec(`create trigger mine after insert on orders begin select 1; end`)
	f.q = newQueue(t, f.db, taskbox.Options{})
	note.Handle(f.q, func(context.Context, *taskbox.Task[string]) error { return nil })
	f.enqueue(note.New(""))
	f.drain()
	f.wantInt(42, `pragma user_version`)
	f.wantInt(4711, `pragma application_id`)
	want := []string{"orders", "mine"}
	got := f.rows(`select name from sqlite_schema where name not like 'task_%' and name not like 'sqlite_%'`)
	if diff := gocmp.Diff(want, got); diff != "" {
		t.Errorf("the schema without ours (-want +got):\n%s", diff)
	}
}

// dump is all that is in the file.
func dump(t *testing.T, db *sql.DB) string {
	t.Helper()
	var b strings.Builder
	for _, table := range append(rowsOf(t, db, `select name from sqlite_schema where type = 'table'`), "sqlite_schema") {
		fmt.Fprintf(&b, "%s:\n%s\n", table, strings.Join(rowsOf(t, db, `select * from "`+table+`"`), "\n"))
	}
	for _, pragma := range []string{"user_version", "application_id", "schema_version"} {
		fmt.Fprintln(&b, pragma, rowsOf(t, db, "pragma "+pragma))
	}
	return b.String()
}

// A file that New can't work with is the same afterwards.
func TestNew_RefusedFiles(t *testing.T) {
	newer := fmt.Sprint(taskbox.SchemaVersion + 1)
	for _, tt := range []struct {
		name, setup string
		want        error // nil: any
		text        string
	}{
		{"newer schema", `update task_meta set value = '` + newer + `' where key = 'schema_version'`, taskbox.ErrNewerSchema, newer},
		{"much newer schema", `drop table task_outbox; update task_meta set value = '1000' where key = 'schema_version'`, taskbox.ErrNewerSchema, "1000"},
		{"version that is no number", `update task_meta set value = 'x' where key = 'schema_version'`, nil, "schema_version"},
		{"version 0", `update task_meta set value = '0' where key = 'schema_version'`, nil, "schema_version"},
		{"version that is gone", `delete from task_meta where key = 'schema_version'`, nil, "another program"},
		{"task_meta of another program", `drop table task_meta; create table task_meta (id integer, note text)`, nil, "another program"},
		{"task_outbox of another program", `drop table task_meta; drop view task_trail; drop table task_audit; drop table task_stats`, nil, "task_outbox"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := open(t, taskbox.Options{})
			f.enqueue(note.New(""))
			f.exec(tt.setup)
			before := dump(t, f.db)
			for range 2 {
				q, err := taskbox.New(t.Context(), fileDB(t, f.path), taskbox.Options{Logger: newLogger(new(logs))})
				if err == nil || q != nil {
					t.Fatalf("New = %v, %v", q, err)
				}
				if tt.want != nil {
					wantErr(t, err, tt.want)
				}
				for _, text := range []string{tt.text, f.path} {
					if !strings.Contains(err.Error(), text) {
						t.Errorf("%q doesn't mention %q", err, text)
					}
				}
			}
			if diff := gocmp.Diff(before, dump(t, f.db)); diff != "" {
				t.Errorf("the file has changed (-before +after):\n%s", diff)
			}
		})
	}
}

// Opening a file that is up to date writes nothing.
func TestNew_AgainWritesNothing(t *testing.T) {
	f := open(t, taskbox.Options{})
	conn := f.conn()
	version := func() (v int) {
		if err := conn.QueryRowContext(t.Context(), "pragma data_version").Scan(&v); err != nil {
			t.Fatal(err)
		}
		return v
	}
	before := version()
	for range 3 {
		f.again(taskbox.Options{})
	}
	if after := version(); after != before {
		t.Errorf("data_version went from %d to %d", before, after)
	}
}

// Several open a new file at the same moment: here with real concurrency.
func TestNew_AtOnce(t *testing.T) {
	for round := range 5 {
		path := filepath.Join(t.TempDir(), "t.db")
		var wg sync.WaitGroup
		start := make(chan struct{})
		errs := make([]error, 6)
		for i := range errs {
			db, err := taskbox.OpenDB(dsn(path, "_synchronous=OFF"))
			if i%2 == 1 {
				db.Close()
				db, err = sql.Open("sqlite", dsn(path, "_busy_timeout=5000&_synchronous=OFF"))
			}
			if err != nil {
				t.Fatal(err)
			}
			defer db.Close()
			wg.Go(func() {
				<-start
				q, err := taskbox.New(t.Context(), db, taskbox.Options{Logger: newLogger(new(logs))})
				if err == nil {
					_, err = q.Enqueue(t.Context(), db, note.New(""))
				}
				errs[i] = err
			})
		}
		close(start)
		wg.Wait()
		if err := errors.Join(errs...); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		db := fileDB(t, path)
		if got := rowsOf(t, db, `select count(*), (select value from task_meta where key = 'schema_version') from task_outbox`); got[0] != fmt.Sprintf("6|%d", taskbox.SchemaVersion) {
			t.Errorf("round %d: tasks and version %s", round, got)
		}
	}
}

func TestNew_BadInput(t *testing.T) {
	for name, o := range map[string]taskbox.Options{
		"Workers":      {Workers: -1},
		"Workers 10^6": {Workers: 1_000_000},
		"MaxAttempts":  {MaxAttempts: -1},
		"Lease":        {Lease: time.Millisecond},
		"PollInterval": {PollInterval: -1},
		"MaxPayload":   {MaxPayload: -1},
		"KeepDead":     {KeepDead: -1},
		"Schedule":     {Schedule: taskbox.Tiers()},
		"tier":         {Schedule: taskbox.Tiers(time.Second, 0)},
		"Factor":       {Schedule: taskbox.Exponential{Factor: 0.5}},
	} {
		db := fileDB(t, filepath.Join(t.TempDir(), "t.db"))
		_, err := taskbox.New(t.Context(), db, o)
		if wantErr(t, err, taskbox.ErrInvalid); err != nil && len(err.Error()) < 40 {
			t.Errorf("%s: %q doesn't say what to do", name, err)
		}
		if n := len(rowsOf(t, db, `select * from sqlite_schema`)); n != 0 {
			t.Errorf("%s: %d tables and indexes were made", name, n)
		}
	}
	_, err := taskbox.New(t.Context(), nil, taskbox.Options{})
	wantErr(t, err, taskbox.ErrInvalid)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = taskbox.New(ctx, fileDB(t, filepath.Join(t.TempDir(), "t.db")), taskbox.Options{})
	wantErr(t, err, context.Canceled)
}

func TestType_Handle_Panics(t *testing.T) {
	f := open(t, taskbox.Options{})
	handler := func(context.Context, *taskbox.Task[int]) error { return nil }
	taskbox.NewType[int]("twice").Handle(f.q, handler)
	for name, tt := range map[string]struct {
		typ     *taskbox.Type[int]
		handler func(context.Context, *taskbox.Task[int]) error
	}{
		"twice":       {taskbox.NewType[int]("twice"), handler},
		"nil":         {taskbox.NewType[int]("nil"), nil},
		"empty":       {taskbox.NewType[int](""), handler},
		"long":        {taskbox.NewType[int](strings.Repeat("x", 201)), handler},
		"control":     {taskbox.NewType[int]("a\x7f"), handler},
		"concurrency": {taskbox.NewType[int]("c", taskbox.TypeOptions{Concurrency: -1}), handler},
		"attempts":    {taskbox.NewType[int]("a", taskbox.TypeOptions{MaxAttempts: -1}), handler},
		"schedule":    {taskbox.NewType[int]("s", taskbox.TypeOptions{Schedule: taskbox.Tiers(-1)}), handler},
	} {
		func() {
			defer func() {
				if v := recover(); v == nil || !strings.Contains(fmt.Sprint(v), "taskbox") {
					t.Errorf("%s: panic %v", name, v)
				}
			}()
			tt.typ.Handle(f.q, tt.handler)
		}()
	}
}

// Every released schema's file is upgraded, and what is in it runs on. With -update a
// file of the current version is made, once: a frozen file is never written again.
func TestSchema_FrozenFiles(t *testing.T) {
	current := filepath.Join("testdata", "db", fmt.Sprintf("v%03d.db", taskbox.SchemaVersion))
	if _, err := os.Stat(current); *update && errors.Is(err, os.ErrNotExist) {
		freeze(t, current)
	}
	files, err := filepath.Glob("testdata/db/*.db")
	if err != nil || len(files) != taskbox.SchemaVersion {
		t.Fatalf("%d files in testdata/db, want one for each of %d versions; %v", len(files), taskbox.SchemaVersion, err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			path := filepath.Join(t.TempDir(), "t.db")
			if err := os.WriteFile(path, b, 0o600); err != nil {
				t.Fatal(err)
			}
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(24 * time.Hour) // the file was made in a bubble, too
				f := &fixture{T: t, path: path, db: fileDB(t, path)}
				f.q = newQueue(t, f.db, taskbox.Options{})
				if diff := gocmp.Diff(open(t, taskbox.Options{}).schema(), f.schema()); diff != "" {
					t.Errorf("its schema isn't a new file's (-new +this):\n%s", diff)
				}
				f.runFrozen()
			})
		})
	}
}

func (f *fixture) wantStates(want string) {
	f.Helper()
	if got := strings.Join(f.rows(`select status || ' ' || count(*) from task_outbox group by status order by status`), ", "); got != want {
		f.Errorf("got %s, want %s", got, want)
	}
}

// runFrozen runs what freeze has left in a file, whatever its version was.
func (f *fixture) runFrozen() {
	f.Helper()
	f.wantStates("cancelled 1, dead_letter 2, pending 3, picked 1, processing 1, retry_wait 1, scheduled 1, skipped 1, success 1")
	old := f.rows(`select * from task_audit`)
	if len(old) < 20 {
		f.Errorf("only %d rows of history", len(old))
	}
	f.wantInt(1, `select count(*) from task_audit where actor = 'ann'`)
	f.wantInt(1, `select sum(picked) > 5 and sum(success) = 1 and sum(dead) = 2 from task_stats`)
	for _, name := range []string{"ok", "fails", "unknown"} {
		taskbox.NewType[map[string]any](name).Handle(f.q, func(context.Context, *taskbox.Task[map[string]any]) error { return nil })
	}
	f.run()
	time.Sleep(2 * time.Minute)
	synctest.Wait()
	f.wantStates("cancelled 1, dead_letter 2, skipped 1, success 8")
	now := f.rows(`select * from task_audit`)
	for _, row := range old {
		if !slices.Contains(now, row) {
			f.Errorf("history has lost %s", row)
		}
	}
	f.wantInt(0, `select count(*) from task_outbox where event_type = 'ok' and json_extract(payload, '$.n') is null`)
	f.wantInt(12, `select seq from sqlite_sequence where name = 'task_outbox'`)
}

// freeze makes a file with a task in every state.
func freeze(t *testing.T, file string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		t.Fatal(err)
	}
	bubble(t, taskbox.Options{Schedule: taskbox.Tiers(time.Hour)}, func(f *fixture) {
		ok, fails := taskbox.NewType[map[string]any]("ok"), taskbox.NewType[map[string]any]("fails")
		ok.Handle(f.q, func(_ context.Context, task *taskbox.Task[map[string]any]) error {
			if task.Payload["skip"] != nil {
				return taskbox.Skip("nothing to do")
			}
			return nil
		})
		fails.Handle(f.q, func(_ context.Context, task *taskbox.Task[map[string]any]) error {
			if task.Payload["permanent"] != nil {
				return taskbox.Permanent(errDown)
			}
			return errDown
		})
		type m = map[string]any
		stop := f.run()
		f.enqueue(ok.New(m{"n": 1}, taskbox.Key("k"), taskbox.Priority(3), taskbox.TraceID("trace")))
		f.enqueue(ok.New(m{"n": 2, "skip": true}))
		f.enqueue(fails.New(m{"n": 3, "permanent": true}))
		f.enqueue(fails.New(m{"n": 4}))
		f.enqueue(ok.New(m{"n": 5}, taskbox.Delay(5*time.Hour)))
		time.Sleep(2 * time.Hour)
		f.enqueue(fails.New(m{"n": 6}, taskbox.Group("G"), taskbox.MaxAttempts(5)))
		f.enqueue(ok.New(m{"n": 7}, taskbox.Group("G")))
		f.enqueue(taskbox.NewType[m]("unknown").New(m{"n": 8}, taskbox.ExpiresIn(9000*time.Hour)))
		time.Sleep(time.Second)
		synctest.Wait()
		stop()
		f.enqueue(ok.New(m{"n": 9}, taskbox.Key("l")))
		for i, status := range []string{"cancelled", "picked", "processing"} {
			id := f.enqueue(ok.New(m{"n": 10 + i}))
			if status == "cancelled" {
				f.exec(`insert into task_audit(task_id, seq, event, at, actor, reason) values (?1, 1, 'cancelled', ?2, 'ann', 'ordered twice')`, id, time.Now().UnixMilli())
				f.exec(`update task_outbox set status = 'cancelled', version = 1, finished_at = created_at where id = ?`, id)
				continue
			}
			// Left behind by a process that has ended.
			f.ghost(id, "GHOST", 30*time.Second)
			f.exec(`insert into task_audit(task_id, seq, event, at, attempt, owner)
				select id, n, iif(n = 1, 'picked', 'processing'), created_at, 1, iif(n = 1, owner, null)
				from task_outbox, (select 1 as n union all select 2) where id = ? and n <= ?`, id, i)
			f.exec(`update task_outbox set status = ?, version = ? where id = ?`, status, i, id)
		}
		f.exec(`insert into task_meta values ('poller:GHOST', '{"host":"elsewhere","pid":1,"started_at":1,"types":["ok"]}')`)
		f.exec(`vacuum into ?`, file)
	})
}
