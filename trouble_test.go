package taskbox_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/taskbox-go/taskbox"
	"modernc.org/sqlite"
)

// faults make the connections of a pool fail at random. The zero value lets all pass.
type faults struct {
	on        atomic.Bool
	frozen    atomic.Bool  // nothing passes at all
	commits   int          // how many of a thousand fail; constant
	mode      int          // how the commit number one fails; constant
	number    atomic.Int64 // of the commit that fails, counting from now
	others    int          // statements and begins, of ten thousand; constant
	mu        sync.Mutex
	rng       *rand.Rand // mu
	nCommits  int        // of them, those in doubt that have committed; mu
	nFailures int        // mu
}

// pick returns a mode of failure from 1 to modes, or 0 for none.
func (f *faults) pick(rate, of, modes int) int {
	if f.frozen.Load() {
		return 1
	}
	if !f.on.Load() {
		return 0
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.rng.IntN(of) >= rate {
		return 0
	}
	f.nFailures++
	return 1 + f.rng.IntN(modes)
}

func (f *faults) statement(modes int) int { return f.pick(f.others, 10_000, modes) }

// err is what SQLite might say, mostly something else each time.
func (f *faults) err() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return errors.New([]string{"database is locked (5) (a test's)", "disk I/O error (a test's)", "database or disk is full (a test's)"}[f.rng.IntN(3)])
}

// faultyDB opens a pool whose connections fail as f says.
func faultyDB(t testing.TB, path string, f *faults) *sql.DB {
	t.Helper()
	inner, err := sqlite.NewConnector(dsn(path, "_synchronous=OFF&_pragma=journal_mode(WAL)&_pragma=busy_timeout(5000)"))
	if err != nil {
		t.Fatal(err)
	}
	db := sql.OpenDB(&faultyConnector{inner, f})
	t.Cleanup(func() { db.Close() })
	return db
}

type faultyConnector struct {
	driver.Connector
	f *faults
}

func (c *faultyConnector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &faultyConn{conn.(innerConn), c.f}, nil
}

type innerConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.SessionResetter
	driver.Validator
}

type faultyConn struct {
	innerConn
	f *faults
}

func (c *faultyConn) BeginTx(ctx context.Context, o driver.TxOptions) (driver.Tx, error) {
	if c.f.statement(1) != 0 {
		return nil, c.f.err()
	}
	tx, err := c.innerConn.BeginTx(ctx, o)
	if err != nil {
		return nil, err
	}
	return &faultyTx{tx, c}, nil
}

type faultyTx struct {
	driver.Tx
	c *faultyConn
}

// Commit commits and says that it hasn't, or fails, and nobody can tell which it was.
func (t *faultyTx) Commit() error {
	mode := t.c.f.pick(t.c.f.commits, 1000, 2)
	if t.c.f.number.Add(-1) == 0 {
		mode = t.c.f.mode
	}
	switch mode {
	case 1:
		t.Tx.Rollback()
		return t.c.f.err()
	case 2:
		if err := t.Tx.Commit(); err != nil {
			return err
		}
		t.c.f.mu.Lock()
		t.c.f.nCommits++
		t.c.f.mu.Unlock()
		return t.c.f.err()
	}
	return t.Tx.Commit()
}

// fail fails a statement before it was run, after that, or with the end of the
// transaction, as SQLite itself ends it when the disk is full.
func fail[T any](c *faultyConn, call func() (T, error)) (v T, err error) {
	switch c.f.statement(3) {
	case 1:
		return v, c.f.err()
	case 2:
		if v, err := call(); err != nil {
			return v, err
		} else if rows, ok := any(v).(driver.Rows); ok {
			return any(&faultyRows{rows, c.f}).(T), nil
		}
		return v, c.f.err()
	case 3:
		c.innerConn.ExecContext(context.Background(), "rollback", nil)
		return v, c.f.err()
	}
	return call()
}

func (c *faultyConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	return fail(c, func() (driver.Result, error) { return c.innerConn.ExecContext(ctx, query, args) })
}

func (c *faultyConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	return fail(c, func() (driver.Rows, error) { return c.innerConn.QueryContext(ctx, query, args) })
}

func (c *faultyConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	st, err := c.innerConn.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	if c.f.statement(1) != 0 {
		st.Close()
		return nil, c.f.err()
	}
	return &faultyStmt{st.(innerStmt), c}, nil
}

type innerStmt interface {
	driver.Stmt
	driver.StmtExecContext
	driver.StmtQueryContext
}

type faultyStmt struct {
	innerStmt
	c *faultyConn
}

func (s *faultyStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	return fail(s.c, func() (driver.Result, error) { return s.innerStmt.ExecContext(ctx, args) })
}

func (s *faultyStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	return fail(s.c, func() (driver.Rows, error) { return s.innerStmt.QueryContext(ctx, args) })
}

// faultyRows end with an error in the middle.
type faultyRows struct {
	driver.Rows
	f *faults
}

func (r *faultyRows) Next(dest []driver.Value) error {
	if err := r.Rows.Next(dest); err != nil && err != io.EOF {
		return err
	}
	return r.f.err()
}

// Commits whose answer is lost, commits and statements that fail: nothing is lost,
// nothing happens twice, and nothing stays where it was.
func TestQueue_Run_InDoubt(t *testing.T) {
	seed := seedOf(t)
	tasks, inDoubt, failures := 0, 0, 0
	for round := range uint64(25) {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSim(t, rand.New(rand.NewPCG(seed, round)))
				f := &faults{rng: rand.New(rand.NewPCG(seed, ^round)), commits: []int{10, 50, 200, 400}[s.rng.IntN(4)], others: []int{0, 5, 30}[s.rng.IntN(3)]}
				for range 1 + s.rng.IntN(2) {
					db := faultyDB(t, s.path, f)
					db.SetMaxOpenConns([]int{1, 3, 10}[s.rng.IntN(3)])
					s.addNode(db)
				}
				f.on.Store(true)
				for range 60 {
					s.act()
				}
				for _, n := range s.nodes {
					s.start(n)
				}
				time.Sleep(20 * time.Second)
				f.on.Store(false)
				s.finish()
				tasks, inDoubt, failures = tasks+len(s.calls), inDoubt+f.nCommits, failures+f.nFailures
			})
		})
	}
	t.Logf("%d tasks, %d failures, %d of them commits that were made", tasks, failures, inDoubt)
}

// Pollers that can't reach the file for longer than their lease, as if their process had
// been stopped, lose their tasks to others, and find that out.
func TestQueue_Run_Frozen(t *testing.T) {
	seed := seedOf(t)
	lost := 0
	for round := range uint64(10) {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSim(t, rand.New(rand.NewPCG(seed, round)))
				s.sure = false
				var fs []*faults
				for i := range 3 {
					f := &faults{rng: rand.New(rand.NewPCG(seed, 99*round+uint64(i))), commits: 20}
					fs = append(fs, f)
					db := faultyDB(t, s.path, f)
					db.SetMaxOpenConns([]int{1, 10}[s.rng.IntN(2)])
					s.addNode(db)
					f.on.Store(true)
					s.start(s.nodes[i])
				}
				for range 60 {
					if s.rng.IntN(4) == 0 {
						f := fs[s.rng.IntN(len(fs))]
						f.frozen.Store(!f.frozen.Load())
					}
					time.Sleep(time.Duration(s.rng.IntN(3000)) * time.Millisecond)
					s.enqueue()
					s.act()
				}
				for _, f := range fs {
					f.frozen.Store(false)
					f.on.Store(false)
				}
				s.finish()
				n, err := strconv.Atoi(rowsOf(t, s.db, `select count(*) from task_audit where event = 'lost'`)[0])
				if err != nil {
					t.Fatal(err)
				}
				lost += n
			})
		})
	}
	t.Logf("%d attempts were lost", lost)
	if lost == 0 {
		t.Error("nobody lost a lease; what does this test try?")
	}
}

// The same with one commit that fails, each in turn.
func TestQueue_Run_EachCommitInDoubt(t *testing.T) {
	for mode, name := range map[int]string{1: "rolled back", 2: "committed"} {
		t.Run(name, func(t *testing.T) {
			for number := int64(1); ; number++ {
				ended := false
				synctest.Test(t, func(t *testing.T) { ended = oneCommitInDoubt(t, mode, number) })
				if ended {
					t.Logf("%d commits", number-1)
					break
				}
				if t.Failed() {
					t.Fatalf("commit %d", number)
				}
			}
		})
	}
}

func oneCommitInDoubt(t *testing.T, mode int, number int64) (ended bool) {
	path := t.TempDir() + "/t.db"
	clean := &fixture{T: t, db: fileDB(t, path), path: path}
	faults := &faults{rng: rand.New(rand.NewPCG(1, 1)), mode: mode}
	f := &fixture{T: t, db: faultyDB(t, path, faults), path: path}
	f.q = newQueue(t, f.db, taskbox.Options{Lease: 3 * time.Second, Schedule: taskbox.Tiers(time.Second), Workers: 3})
	var r record
	typ := taskbox.NewType[string]("x")
	typ.Handle(f.q, func(ctx context.Context, task *taskbox.Task[string]) error {
		r.start(fmt.Sprint(task.ID))
		switch {
		case task.Payload == "long" || task.Payload == "long, fails" && task.Retry == 0:
			time.Sleep(200 * time.Millisecond)
		case task.Payload == "snoozes" && r.count(fmt.Sprint(task.ID)) == 1:
			return taskbox.Snooze(time.Second)
		}
		if (task.Payload == "fails" || task.Payload == "long, fails") && task.Retry == 0 || task.Payload == "dies" {
			return errFlaky
		}
		return nil
	})
	starts := map[int64]int{}
	add := func(n int, payload string, o ...taskbox.EnqueueOption) int64 {
		r, err := f.q.Enqueue(t.Context(), clean.db, typ.New(payload, o...))
		if err != nil {
			t.Fatal(err)
		}
		starts[r.ID] = n
		return r.ID
	}
	add(1, "")
	add(1, "long")
	add(2, "fails", taskbox.Group("g"))
	add(1, "long", taskbox.Group("g"))
	add(2, "dies", taskbox.Group("g"))
	add(1, "", taskbox.Group("g"))
	add(2, "long, fails")
	add(2, "snoozes")
	add(1, "", taskbox.Delay(2*time.Second))
	add(0, "", taskbox.Delay(time.Second), taskbox.ExpiresIn(time.Millisecond))
	for range 3 { // they were running when their process died
		id := add(1, "long")
		clean.exec(`update task_outbox set status = 'picked', version = 1, fence = 1, attempt = 1, owner = 'dead', lease_until = 1 where id = ?`, id)
		clean.exec(`insert into task_audit(task_id, seq, event, at, attempt, owner) values (?, 1, 'picked', 1, 1, 'dead')`, id)
		clean.exec(`insert into task_stats(minute, event_type, picked, wait_1) values (?, 'x', 1, 1) on conflict do update set picked = picked + 1, wait_1 = wait_1 + 1`,
			time.Now().Unix()/60)
	}
	faults.number.Store(number)
	stop := f.run()
	time.Sleep(30 * time.Second)
	if err := stop(); err != nil {
		t.Errorf("Run: %v", err)
	}
	clean.wantInt(0, `select count(*) from task_outbox where finished_at is null`)
	for id, n := range starts {
		if got := r.count(fmt.Sprint(id)); got != n {
			t.Errorf("task %d: %d starts, want %d; trail: %s", id, got, n, clean.trail(id))
		}
	}
	checkInvariants(t, clean.db)
	return faults.number.Load() > 0
}

// A logbook keeps the messages of a logger, from a level on.
type logbook struct {
	slog.Handler
	mu       sync.Mutex
	messages []string // mu
}

func newLogbook() *logbook { return &logbook{Handler: slog.DiscardHandler} }

func (l *logbook) Enabled(_ context.Context, level slog.Level) bool { return level >= slog.LevelInfo }

func (l *logbook) Handle(_ context.Context, r slog.Record) error {
	text := r.Level.String() + " " + r.Message
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "error" {
			text += ": " + a.Value.String()
		}
		return true
	})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.messages = append(l.messages, text)
	return nil
}

// with returns the messages that contain a text.
func (l *logbook) with(text string) (found []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.messages {
		if strings.Contains(m, text) {
			found = append(found, m)
		}
	}
	return found
}

func (l *logbook) want(t *testing.T, n int, text string) {
	t.Helper()
	if got := l.with(text); len(got) != n {
		t.Errorf("%d log records with %q, want %d: %q", len(got), text, n, got)
	}
}

// fill makes the file larger than a pool with max_page_count(1) accepts; the space comes
// back when the table is emptied.
func (f *fixture) fill() {
	f.exec(`create table if not exists filler(b)`)
	f.exec(`insert into filler select zeroblob(4000) from (with recursive n(i) as (select 1 union all select i + 1 from n limit 300) select i from n)`)
}

// A full disk: outcomes stay in memory, it is told once, and all goes on when there is
// space again.
func TestQueue_Run_DiskFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		path := t.TempDir() + "/t.db"
		clean := &fixture{T: t, db: fileDB(t, path), path: path}
		clean.q = newQueue(t, clean.db, taskbox.Options{})
		log := newLogbook()
		f := &fixture{T: t, db: plainDB(t, path, "_pragma=busy_timeout(5000)&_pragma=max_page_count(1)"), path: path}
		f.q = newQueue(t, f.db, taskbox.Options{Lease: 6 * time.Second, Logger: slog.New(log)})
		var r record
		typ := taskbox.NewType[string]("x")
		typ.Handle(f.q, func(_ context.Context, task *taskbox.Task[string]) error {
			r.start(fmt.Sprint(task.ID))
			time.Sleep(10 * time.Second)
			if task.Retry == 0 {
				return errors.New(strings.Repeat("a long story ", 300)) // to be written down
			}
			return nil
		})
		clean.fill()
		clean.exec(`delete from filler`)
		for range 20 {
			clean.enqueue(typ.New(""))
		}
		stop := f.run()
		time.Sleep(5 * time.Second)
		clean.wantInt(16, `select count(*) from task_outbox where owner is not null`)
		clean.fill()
		clean.fill()
		clean.wantInt(0, `select freelist_count from pragma_freelist_count`)
		time.Sleep(10 * time.Minute)
		if n := clean.int(`select count(*) from task_audit where event = 'retry_wait'`); n > 4 {
			t.Errorf("%d failures were written; the disk isn't full", n)
		}
		log.want(t, 1, "can't write")
		log.want(t, 1, "disk is full")
		clean.exec(`delete from filler`)
		time.Sleep(5 * time.Minute)
		clean.wantInt(20, `select count(*) from task_outbox where status = 'success' and attempt = 2`)
		log.want(t, 1, "can write again")
		stop()
		checkInvariants(t, clean.db)
		if n := r.count("1"); n != 2 {
			t.Errorf("%d starts of the first task, want 2", n)
		}
	})
}

// A pool that is closed while the queue runs: Run ends when it is told to, and says what
// couldn't be settled.
func TestQueue_Run_ClosedDB(t *testing.T) {
	for _, tt := range []struct {
		name    string
		conns   int
		handler func(ctx context.Context, id int64, release chan struct{}) error
		want    error // nil: any
		none    bool  // no task, and no error
		settled bool  // perhaps on the connection that is still open
	}{
		{name: "idle", none: true},
		{name: "idle, pool of one", conns: 1, none: true},
		{name: "handlers end before", settled: true, handler: func(context.Context, int64, chan struct{}) error { time.Sleep(time.Second); return nil }},
		{name: "handlers heed their ctx", settled: true, handler: func(ctx context.Context, _ int64, _ chan struct{}) error { <-ctx.Done(); return ctx.Err() }},
		{name: "handlers heed their ctx, pool of one", conns: 1, handler: func(ctx context.Context, _ int64, _ chan struct{}) error { <-ctx.Done(); return ctx.Err() }},
		{name: "handlers ignore their ctx", handler: func(_ context.Context, _ int64, release chan struct{}) error { <-release; return nil }, want: taskbox.ErrStuck},
		{name: "one handler ignores its ctx", conns: 1, handler: func(_ context.Context, id int64, release chan struct{}) error {
			if id == 1 {
				<-release
			}
			time.Sleep(time.Second)
			return nil
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				path := t.TempDir() + "/t.db"
				f := &fixture{T: t, db: plainDB(t, path, "_pragma=busy_timeout(5000)"), path: path}
				f.db.SetMaxOpenConns(tt.conns)
				log := newLogbook()
				f.q = newQueue(t, f.db, taskbox.Options{Logger: slog.New(log)})
				release := make(chan struct{})
				typ := taskbox.NewType[string]("x")
				typ.Handle(f.q, func(ctx context.Context, task *taskbox.Task[string]) error { return tt.handler(ctx, task.ID, release) })
				if !tt.none {
					f.enqueue(typ.New(""))
					f.enqueue(typ.New(""))
				}
				ctx, cancel := context.WithCancel(context.Background())
				run := make(chan error, 1)
				go func() { run <- f.q.Run(ctx) }()
				time.Sleep(100 * time.Millisecond)
				f.db.Close()
				time.Sleep(10 * time.Minute)
				if !tt.none && !tt.settled && tt.want == nil {
					log.want(t, 1, "can't write")
				}
				cancel()
				select {
				case err := <-run:
					if (err == nil) != tt.none && !tt.settled {
						t.Errorf("Run = %v", err)
					}
					if tt.want != nil {
						wantErr(t, err, tt.want)
					}
					close(release)
				case <-time.After(time.Hour):
					t.Error("Run doesn't return")
					close(release)
					<-run
				}
				time.Sleep(time.Minute) // what was left behind ends
			})
		})
	}
}

// The file is moved away under a running queue, and comes back.
func TestQueue_Run_FileMoved(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := open(t, taskbox.Options{})
		log := newLogbook()
		f.q = newQueue(t, f.db, taskbox.Options{Logger: slog.New(log)})
		typ := taskbox.NewType[string]("x")
		typ.Handle(f.q, func(context.Context, *taskbox.Task[string]) error { time.Sleep(8 * time.Second); return nil })
		for range 3 {
			f.enqueue(typ.New(""))
		}
		f.run()
		time.Sleep(time.Second)
		for _, suffix := range []string{"", "-wal", "-shm"} {
			if err := os.Rename(f.path+suffix, f.path+".moved"+suffix); err != nil {
				t.Skip(err)
			}
		}
		time.Sleep(time.Hour)
		log.want(t, 1, "can't write")
		log.want(t, 1, taskbox.ErrFileMoved.Error())
		for _, suffix := range []string{"", "-wal", "-shm"} {
			if err := os.Rename(f.path+".moved"+suffix, f.path+suffix); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Minute)
		f.wantInt(3, `select count(*) from task_outbox where status = 'success' and attempt = 1`)
		log.want(t, 1, "can write again")
		checkInvariants(t, f.db)
	})
}

// The queue works with whatever pool the application has.
func TestQueue_Run_PoolsOfAllKinds(t *testing.T) {
	const usual = "_pragma=busy_timeout(5000)"
	for _, tt := range []struct {
		name string
		pool func(t *testing.T, path string) *sql.DB
	}{
		{"OpenDB", fileDB},
		{"memory", func(t *testing.T, _ string) *sql.DB { return closing(t)(taskbox.OpenDB(":memory:")) }},
		{"unlimited", func(t *testing.T, path string) *sql.DB { return plainDB(t, path, usual) }},
		{"of one", limited(usual, 1)},
		{"of two", limited(usual, 2)},
		{"of three", limited(usual, 3)},
		{"of four", limited(usual, 4)},
		{"of ten, immediate", limited(usual+"&_txlock=immediate", 10)},
		{"of one, immediate", limited(usual+"&_txlock=immediate", 1)},
		{"without idle connections", func(t *testing.T, path string) *sql.DB {
			db := plainDB(t, path, usual)
			db.SetMaxIdleConns(-1)
			return db
		}},
		{"of one, without idle connections", func(t *testing.T, path string) *sql.DB {
			db := limited(usual, 1)(t, path)
			db.SetMaxIdleConns(-1)
			return db
		}},
		{"with short-lived connections", func(t *testing.T, path string) *sql.DB {
			db := limited(usual, 5)(t, path)
			db.SetConnMaxLifetime(time.Millisecond)
			return db
		}},
		{"of one, without busy_timeout", limited("", 1)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				path := t.TempDir() + "/t.db"
				f := &fixture{T: t, db: tt.pool(t, path), path: path}
				f.q = newQueue(t, f.db, taskbox.Options{Workers: 5, Schedule: taskbox.Tiers(time.Second)})
				f.exec(`create table effects(id)`)
				typ := taskbox.NewType[int]("x")
				typ.Handle(f.q, func(ctx context.Context, task *taskbox.Task[int]) error {
					if task.Payload%10 == 0 && task.Retry == 0 {
						return errFlaky
					}
					if task.Payload%7 == 0 {
						time.Sleep(100 * time.Millisecond)
					}
					return f.q.Tx(ctx, func(ctx context.Context, tx *sql.Tx) error {
						_, err := tx.ExecContext(ctx, `insert into effects values (?)`, task.ID)
						return err
					})
				})
				stop := f.run()
				for i := range 100 {
					switch i % 3 {
					case 0:
						f.enqueue(typ.New(i))
					case 1:
						tx := f.begin()
						if _, err := f.q.Enqueue(t.Context(), tx, typ.New(i)); err != nil {
							t.Fatal(err)
						}
						if err := tx.Commit(); err != nil {
							t.Fatal(err)
						}
					case 2:
						f.exec(`insert into task_outbox(event_type, payload) values ('x', ?)`, fmt.Sprint(i))
					}
				}
				time.Sleep(time.Minute)
				if err := stop(); err != nil {
					t.Errorf("Run = %v", err)
				}
				f.wantInt(100, `select count(*) from task_outbox where status = 'success'`)
				f.wantInt(100, `select count(distinct id) from effects`)
				checkInvariants(t, f.db)
			})
		})
	}
}

func limited(params string, conns int) func(*testing.T, string) *sql.DB {
	return func(t *testing.T, path string) *sql.DB {
		db := plainDB(t, path, params)
		db.SetMaxOpenConns(conns)
		return db
	}
}

// The application has all connections for a while, longer than a lease lasts. A loop
// with a connection of its own doesn't notice.
func TestQueue_Run_PoolExhausted(t *testing.T) {
	for _, conns := range []int{1, 3, 4, 10} {
		t.Run(fmt.Sprint(conns), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				path := t.TempDir() + "/t.db"
				f := &fixture{T: t, db: limited("_pragma=busy_timeout(5000)", conns)(t, path), path: path}
				f.q = newQueue(t, f.db, taskbox.Options{Lease: 3 * time.Second, Schedule: taskbox.Tiers(time.Second)})
				typ := taskbox.NewType[int]("x")
				typ.Handle(f.q, func(ctx context.Context, task *taskbox.Task[int]) error {
					time.Sleep(time.Duration(task.Payload) * time.Second)
					if task.Payload%2 == 1 && task.Retry == 0 {
						return errFlaky
					}
					return nil
				})
				other := f.again(taskbox.Options{Lease: 3 * time.Second}) // would take over
				f.run()
				first := f.enqueue(typ.New(20))
				time.Sleep(500 * time.Millisecond)
				for range 3 {
					f.enqueue(typ.New(1))
					f.enqueue(typ.New(2))
				}
				time.Sleep(400 * time.Millisecond)
				pinned := conns >= 4
				if pinned {
					other.run()
				}
				var held []*sql.Conn
				for range max(conns-1, 1) {
					c, err := f.db.Conn(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					held = append(held, c)
				}
				time.Sleep(10 * time.Second)
				if pinned {
					other.wantInt(6, `select count(*) from task_outbox where status = 'success'`)
				}
				for _, c := range held {
					c.Close()
				}
				time.Sleep(time.Minute)
				other.wantInt(7, `select count(*) from task_outbox where status = 'success' and lost_count = 0`)
				other.wantTrail(first, "picked processing success")
				checkInvariants(t, other.db)
			})
		})
	}
}

// Run ends though the application keeps the other connections for good.
func TestQueue_Run_StopWithPoolExhausted(t *testing.T) {
	for _, conns := range []int{4, 10} {
		t.Run(fmt.Sprint(conns), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				path := t.TempDir() + "/t.db"
				f := &fixture{T: t, db: limited("_pragma=busy_timeout(5000)", conns)(t, path), path: path}
				f.q = newQueue(t, f.db, taskbox.Options{})
				ctx, cancel := context.WithCancel(context.Background())
				run := make(chan error, 1)
				go func() { run <- f.q.Run(ctx) }()
				time.Sleep(10 * time.Second)
				var held []*sql.Conn
				for range max(conns-1, 1) {
					c, err := f.db.Conn(t.Context())
					if err != nil {
						t.Fatal(err)
					}
					held = append(held, c)
				}
				time.Sleep(20 * time.Second)
				cancel()
				select {
				case err := <-run:
					if err != nil && conns > 1 {
						t.Errorf("Run = %v", err)
					}
				case <-time.After(time.Hour):
					t.Error("Run doesn't return")
				}
				for _, c := range held {
					c.Close()
				}
			})
		})
	}
}
