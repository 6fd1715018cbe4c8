package taskbox_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/taskbox-go/taskbox"
	"modernc.org/sqlite"
)

func TestQueue_Run_StopIdle(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		stop := f.run()
		time.Sleep(10 * time.Second)
		start := time.Now()
		if err := stop(); err != nil {
			f.Errorf("Run = %v", err)
		}
		if d := time.Since(start); d > 10*time.Millisecond {
			f.Errorf("an idle queue took %v to stop", d)
		}
		f.wantInt(0, `select count(*) from task_meta where key like 'poller:%'`)
		ctx, cancel := context.WithCancel(f.Context())
		cancel()
		id := f.enqueue(note.New("")) // ctx has ended before Run begins
		note.Handle(f.q, func(context.Context, *taskbox.Task[string]) error { return nil })
		if err := f.q.Run(ctx); err != nil {
			f.Errorf("Run with an ended ctx = %v", err)
		}
		f.wantTrail(id, "")
	})
}

// What runs may finish within Grace; what doesn't run is left to others.
func TestQueue_Run_StopGracefully(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 4, Grace: 10 * time.Second}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "x", 5*time.Second)
		for range 20 {
			f.enqueue(typ.New(""))
		}
		stop := f.run()
		time.Sleep(time.Second)
		start := time.Now()
		if err := stop(); err != nil {
			f.Errorf("Run = %v", err)
		}
		if d := time.Since(start); d < 4*time.Second || d > 4100*time.Millisecond {
			f.Errorf("it took %v to stop, want 4 s", d)
		}
		f.wantInt(4, `select count(*) from task_outbox where status = 'success' and attempt = 1`)
		f.wantInt(16, `select count(*) from task_outbox where status = 'pending' and attempt = 0 and owner is null and retry_count = 0`)
		if n := r.count("x"); n != 4 {
			f.Errorf("%d starts, want 4", n)
		}
		f.drain()
		f.wantInt(20, `select count(*) from task_outbox where status = 'success' and attempt = 1`)
	})
}

// Quick tasks are claimed ahead of the workers: those go back, at no cost.
func TestQueue_Run_StopWithClaimedAhead(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 2}, func(f *fixture) {
		var n atomic.Int32
		ctx, cancel := context.WithCancel(f.Context())
		typ := taskbox.NewType[int]("x")
		typ.Handle(f.q, func(context.Context, *taskbox.Task[int]) error {
			if n.Add(1) == 100 {
				cancel()
			}
			return nil
		})
		var ds []taskbox.Draft
		for i := range 500 {
			ds = append(ds, typ.New(i))
		}
		if _, err := f.q.EnqueueMany(f.Context(), f.db, ds...); err != nil {
			f.Fatal(err)
		}
		if err := f.q.Run(ctx); err != nil {
			f.Errorf("Run = %v", err)
		}
		done := f.int(`select count(*) from task_outbox where status = 'success' and attempt = 1`)
		if done != int64(n.Load()) {
			f.Errorf("%d successes, %d handlers ran", done, n.Load())
		}
		f.wantInt(500-done, `select count(*) from task_outbox where status = 'pending' and attempt = 0 and owner is null`)
		f.wantInt(0, `select count(*) from task_audit where event = 'interrupted' and detail ->> 'cause' <> 'shutdown'`)
		f.drain()
		f.wantInt(500, `select count(*) from task_audit where event = 'success'`)
	})
}

func TestQueue_Run_StopCancels(t *testing.T) {
	for _, tt := range []struct {
		name  string
		grace time.Duration // as in Options
		after time.Duration // when the handlers are cancelled
	}{{"default", 0, 10 * time.Second}, {"3 s", 3 * time.Second, 3 * time.Second}, {"none", -1, 0}} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, taskbox.Options{Grace: tt.grace}, func(f *fixture) {
				var cause error
				var at time.Time
				typ := taskbox.NewType[string]("x", taskbox.TypeOptions{Timeout: -1, MaxAttempts: 1})
				typ.Handle(f.q, func(ctx context.Context, task *taskbox.Task[string]) error {
					<-ctx.Done()
					switch task.Payload {
					case "back":
						cause, at = context.Cause(ctx), time.Now()
					case "done":
						return nil // it could finish in time
					case "permanent":
						return taskbox.Permanent(ctx.Err())
					case "panic":
						panic("no")
					}
					return ctx.Err()
				})
				back, done := f.enqueue(typ.New("back")), f.enqueue(typ.New("done"))
				permanent, panics := f.enqueue(typ.New("permanent")), f.enqueue(typ.New("panic"))
				stop := f.run()
				time.Sleep(time.Second)
				start := time.Now()
				if err := stop(); err != nil {
					f.Errorf("Run = %v", err)
				}
				wantErr(f.T, cause, taskbox.ErrStopping)
				if d := at.Sub(start); d < tt.after || d > tt.after+50*time.Millisecond {
					f.Errorf("cancelled after %v, want %v", d, tt.after)
				}
				f.wantTrail(done, "picked processing success")
				for _, id := range []int64{back, permanent, panics} {
					f.wantTrail(id, "picked processing interrupted")
					f.wantInt(1, `select status = 'pending' and attempt = 0 and retry_count = 0 and owner is null and lease_until is null
						and lost_count = 0 from task_outbox where id = ?`, id)
				}
				f.wantInt(1, `select min(detail ->> 'cause' = 'shutdown') from task_audit where event = 'interrupted'`)
			})
		})
	}
}

// Heartbeats go on while the poller stops.
func TestQueue_Run_StopKeepsLeases(t *testing.T) {
	bubble(t, taskbox.Options{Lease: 3 * time.Second, Grace: 5 * time.Minute}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "x", 50*time.Second)
		g := f.again(taskbox.Options{Lease: 3 * time.Second})
		g.handle(&r, "x", 0)
		id := f.enqueue(typ.New(""))
		stop := f.run()
		time.Sleep(time.Second)
		g.run()
		if err := stop(); err != nil {
			f.Errorf("Run = %v", err)
		}
		f.wantTrail(id, "picked processing success")
		if n := r.count("x"); n != 1 {
			f.Errorf("%d starts, want 1", n)
		}
	})
}

// A stop that lasts longer than the time between two steps of pruning.
func TestQueue_Run_GracePastPrune(t *testing.T) {
	bubble(t, taskbox.Options{Grace: 10 * time.Minute}, func(f *fixture) {
		var r record
		id := f.enqueue(f.handle(&r, "x", 5*time.Minute, taskbox.TypeOptions{Timeout: -1}).New(""))
		stop := f.run()
		time.Sleep(2 * time.Second)
		if err := stop(); err != nil {
			f.Errorf("Run = %v", err)
		}
		f.wantStatus(id, "success")
	})
}

// A task that becomes due while the poller stops is left where it is.
func TestQueue_Run_StopPastADueTask(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "x", 8*time.Second)
		running := f.enqueue(typ.New(""))
		soon := f.enqueue(typ.New("", taskbox.Delay(1020*time.Millisecond)))
		later := f.enqueue(typ.New("", taskbox.Delay(3*time.Second)))
		retried := f.enqueue(f.failing("fails", errDown, taskbox.TypeOptions{Schedule: taskbox.Tiers(4 * time.Second)}).New(""))
		stop := f.run()
		time.Sleep(time.Second)
		start := time.Now()
		if err := stop(); err != nil {
			f.Errorf("Run = %v", err)
		}
		if d := time.Since(start); d != 7*time.Second {
			f.Errorf("it took %v to stop, want 7 s", d)
		}
		f.wantStatus(running, "success")
		f.wantStatus(soon, "scheduled")
		f.wantStatus(later, "scheduled")
		f.wantStatus(retried, "retry_wait")
	})
}

func TestQueue_Run_ErrStuck(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 3, Grace: 4 * time.Second}, func(f *fixture) {
		release := make(chan struct{})
		defer close(release) // or the bubble would never end
		var r record
		typ := taskbox.NewType[string]("stuck")
		typ.Handle(f.q, func(context.Context, *taskbox.Task[string]) error {
			if r.count("stuck") < 2 {
				defer r.start("stuck")()
				<-release
			}
			return nil
		})
		a, b := f.enqueue(typ.New("a")), f.enqueue(typ.New("b"))
		c := f.enqueue(f.handle(&r, "heeds", 5*time.Second).New("c"))
		more := f.enqueue(typ.New("more"))
		stop := f.run()
		time.Sleep(time.Second)
		start := time.Now()
		err := stop()
		wantErr(f.T, err, taskbox.ErrStuck)
		for _, id := range []int64{a, b} {
			if err == nil || !strings.Contains(err.Error(), fmt.Sprint(id)) {
				f.Errorf("%v doesn't name task %d", err, id)
			}
			f.wantTrail(id, "picked processing interrupted")
			f.wantInt(1, `select status = 'pending' and attempt = 0 and owner is null from task_outbox where id = ?`, id)
		}
		if d := time.Since(start); d < 4*time.Second || d > 7*time.Second {
			f.Errorf("it took %v to give up, want Grace and up to 3 s", d)
		}
		f.wantTrail(c, "picked processing success")
		f.wantStatus(more, "pending")
		f.drain() // the queue is good for another run
		f.wantInt(4, `select count(*) from task_outbox where status = 'success'`)
	})
}

// A handler that was left behind and ends later changes nothing.
func TestQueue_Run_StuckEndsLater(t *testing.T) {
	bubble(t, taskbox.Options{Grace: -1}, func(f *fixture) {
		release := make(chan struct{})
		typ := taskbox.NewType[string]("stuck")
		typ.Handle(f.q, func(context.Context, *taskbox.Task[string]) error { <-release; return errDown })
		id := f.enqueue(typ.New(""))
		stop := f.run()
		time.Sleep(time.Second)
		wantErr(f.T, stop(), taskbox.ErrStuck)
		before := f.rows(`select * from task_outbox`)
		close(release)
		time.Sleep(time.Second)
		if after := f.rows(`select * from task_outbox`); after[0] != before[0] {
			f.Errorf("the row was %s and is %s", before, after)
		}
		f.wantTrail(id, "picked processing interrupted")
	})
}

func TestQueue_Run_ErrRunning(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		stop := f.run()
		synctest.Wait()
		wantErr(f.T, f.q.Run(f.Context()), taskbox.ErrRunning)
		wantErr(f.T, f.q.Drain(f.Context()), taskbox.ErrRunning)
		if err := stop(); err != nil {
			f.Errorf("the first Run = %v", err)
		}
		var r record
		typ := f.handle(&r, "x", 0)
		for range 3 { // and again after each
			id := f.enqueue(typ.New(""))
			stop := f.run()
			time.Sleep(time.Second)
			if err := stop(); err != nil {
				f.Errorf("Run = %v", err)
			}
			f.wantStatus(id, "success")
			f.drain()
		}
	})
}

func TestQueue_Drain(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var r record
		typ := taskbox.NewType[int]("chain")
		typ.Handle(f.q, func(ctx context.Context, task *taskbox.Task[int]) error {
			defer r.start("chain")()
			if task.Payload == 0 {
				return nil
			}
			_, err := f.q.Enqueue(ctx, f.db, typ.New(task.Payload-1))
			return err
		})
		failing := f.enqueue(f.failing("fails", errDown).New(""))
		later := f.enqueue(typ.New(0, taskbox.Delay(time.Hour)))
		unknown := f.enqueue(taskbox.NewType[int]("unknown").New(1))
		f.enqueue(typ.New(20))
		start := time.Now()
		f.drain()
		if d := time.Since(start); d > time.Second {
			f.Errorf("Drain took %v", d)
		}
		if n := r.count("chain"); n != 21 {
			f.Errorf("%d of the chain ran, want 21", n)
		}
		f.wantStatus(failing, "retry_wait") // due later
		f.wantStatus(later, "scheduled")
		f.wantStatus(unknown, "pending")
		time.Sleep(2 * time.Hour)
		f.drain()
		f.wantTrail(failing, "picked processing retry_wait queued picked processing retry_wait")
		f.wantStatus(later, "success")
		f.drain() // nothing to do
		f.wantInt(0, `select count(*) from task_meta where key like 'poller:%'`)
	})
}

func TestQueue_Drain_LongHandler(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var r record
		id := f.enqueue(f.handle(&r, "long", 50*time.Second).New(""))
		f.drain()
		f.wantTrail(id, "picked processing success")
	})
}

func TestQueue_Drain_Cancelled(t *testing.T) {
	bubble(t, taskbox.Options{Grace: time.Second}, func(f *fixture) {
		typ := taskbox.NewType[string]("x")
		typ.Handle(f.q, func(ctx context.Context, _ *taskbox.Task[string]) error {
			<-ctx.Done()
			return ctx.Err()
		})
		id := f.enqueue(typ.New(""))
		enough := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(f.Context(), 5*time.Second, enough)
		defer cancel()
		start := time.Now()
		wantErr(f.T, f.q.Drain(ctx), enough)
		if d := time.Since(start); d < 6*time.Second || d > 7*time.Second {
			f.Errorf("it took %v, want 5 s and a second of grace", d)
		}
		f.wantTrail(id, "picked processing interrupted")
	})
}

// Drain waits for the last attempt of a task that another queue doesn't hold up.
func TestQueue_Drain_BesideAnotherQueue(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var r record
		g := f.again(taskbox.Options{})
		typ := f.handle(&r, "x", 8*time.Second)
		g.handle(&r, "x", 8*time.Second)
		first := f.enqueue(typ.New(""))
		g.run()
		time.Sleep(time.Second)
		second := f.enqueue(typ.New(""))
		time.Sleep(2 * time.Second) // it looks once a second
		f.drain()                   // not our task
		f.wantStatus(first, "processing")
		f.wantStatus(second, "processing")
	})
}

// When Run has returned nothing is left: outside a bubble, with the file watched.
func TestQueue_Run_LeavesNothing(t *testing.T) {
	f := open(t, taskbox.Options{})
	typ := taskbox.NewType[int]("x")
	done := make(chan struct{}, 100) // one for each task
	typ.Handle(f.q, func(context.Context, *taskbox.Task[int]) error { done <- struct{}{}; return nil })
	// Once, so that what is made only once is there.
	once := func() {
		ctx, cancel := context.WithCancel(f.Context())
		end := make(chan error)
		go func() { end <- f.q.Run(ctx) }()
		for i := range 100 {
			f.enqueue(typ.New(i))
		}
		for range 100 {
			<-done
		}
		cancel()
		if err := <-end; err != nil {
			f.Fatal(err)
		}
	}
	once()
	files := openFiles()
	for range 5 {
		once()
		stacks := make([]byte, 1<<20)
		for _, stack := range strings.Split(string(stacks[:runtime.Stack(stacks, true)]), "\n\n") {
			if strings.Contains(stack, "taskbox.(*poller)") {
				t.Errorf("left behind: %s", stack)
			}
		}
	}
	if n := openFiles(); n > files+10 { // the pool may have opened another connection
		f.Errorf("%d open files, %d before", n, files)
	}
	f.wantInt(600, `select count(*) from task_outbox where status = 'success'`)
}

func openFiles() int {
	fs, _ := os.ReadDir("/proc/self/fd") // none where there is no such directory
	return len(fs)
}

// mixed registers a type whose tasks end in every way, and enqueues n of them.
func (f *fixture) mixed(n int, starts *atomic.Int32) {
	f.Helper()
	var snoozed sync.Map // by id
	typ := taskbox.NewType[int]("mixed", taskbox.TypeOptions{Schedule: taskbox.Tiers(time.Second, time.Second)})
	typ.Handle(f.q, func(ctx context.Context, task *taskbox.Task[int]) error {
		starts.Add(1)
		if task.Payload%3 == 0 {
			time.Sleep(time.Duration(task.Payload) * time.Millisecond)
		}
		switch {
		case task.Payload%10 == 1:
			return errDown // dies at the third failure
		case task.Payload%10 == 2 && task.Retry == 0:
			return errDown
		case task.Payload%10 == 3:
			return taskbox.Permanent(errDown)
		case task.Payload%10 == 4:
			return taskbox.Skip("no")
		case task.Payload%10 == 5:
			if _, again := snoozed.LoadOrStore(task.ID, true); !again {
				return taskbox.Snooze(time.Second)
			}
		}
		return nil
	})
	var ds []taskbox.Draft
	for i := range n {
		ds = append(ds, typ.New(i, taskbox.Group([]string{"A", "B", "C"}[i%3])))
		if i%2 == 0 {
			ds[i] = typ.New(i)
		}
	}
	if _, err := f.q.EnqueueMany(f.Context(), f.db, ds...); err != nil {
		f.Fatal(err)
	}
}

// wantMixed wants n of these tasks to have ended, each as it should and with a whole trail.
func (f *fixture) wantMixed(n int64) {
	f.Helper()
	f.wantStates(fmt.Sprintf("dead_letter %d, skipped %d, success %d", n/5, n/10, n*7/10))
	f.wantInt(n, `select count(*) from task_audit where event in ('success', 'skipped', 'dead_letter')`)
	f.wantInt(n/10*2, `select count(*) from task_audit where event = 'retry_wait' and detail ->> 'class' = 'unclassified' and attempt = 1`)
	f.wantInt(0, `select count(*) from (select task_id, seq, row_number() over (partition by task_id order by seq) as n from task_audit) where n <> seq`)
	f.wantInt(0, `select count(*) from task_outbox where version <> (select max(seq) from task_audit where task_id = id)`)
	f.wantInt(0, `select count(*) from task_outbox where owner is not null or lease_until is not null or blocked <> 0 or finished_at is null or lost_count <> 0`)
	f.wantInt(0, `select sum(success) <> ?1 * 7 / 10 or sum(dead) <> ?1 / 5 or sum(skipped) <> ?1 / 10 or sum(lost) <> 0 from task_stats`, n)
}

// Every pool that New takes runs the same.
func TestQueue_Run_Pools(t *testing.T) {
	for _, tt := range []struct {
		name   string
		params string // of sql.Open; empty: OpenDB
		conns  int
	}{
		{"OpenDB", "", 0},
		{"OpenDB of one", "", 1},
		{"two", "_busy_timeout=1000", 2},
		{"four", "_busy_timeout=1000", 4},
		{"no limit", "_busy_timeout=1000", 0},
		{"immediate", "_busy_timeout=1000&_txlock=immediate", 5},
		{"one without busy_timeout", "_busy_timeout=0", 1},
		{"rollback journal", "_busy_timeout=1000&_pragma=journal_mode(DELETE)", 4},
		{"rollback journal, one", "_busy_timeout=1000&_pragma=journal_mode(DELETE)", 1},
		{"full auto_vacuum, foreign keys", "_busy_timeout=1000&_auto_vacuum=full&_foreign_keys=1&_pragma=recursive_triggers(1)", 4},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "t.db")
				f := &fixture{T: t, path: path}
				if tt.params == "" {
					f.db = fileDB(t, path)
				} else {
					f.db = plainDB(t, path, tt.params)
				}
				if tt.conns > 0 {
					f.db.SetMaxOpenConns(tt.conns)
				}
				f.q = newQueue(t, f.db, taskbox.Options{Workers: 4})
				var starts atomic.Int32
				f.mixed(30, &starts)
				stop := f.run()
				time.Sleep(time.Minute)
				if err := stop(); err != nil {
					t.Errorf("Run = %v", err)
				}
				f.wantMixed(30)
				if n := starts.Load(); n != 30+2*3+3+3 {
					t.Errorf("%d starts, want 42", n)
				}
			})
		})
	}
}

// A commit may have been made although it returns an error. Nothing is lost then, and
// nothing is recorded twice.
func TestQueue_Run_CommitInDoubt(t *testing.T) {
	for _, every := range []int32{2, 5} {
		t.Run(fmt.Sprint("each ", every), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "t.db")
				c := newDoubtful(t, path)
				f := &fixture{T: t, path: path, db: closing(t)(sql.OpenDB(c), nil)}
				f.q = newQueue(t, f.db, taskbox.Options{Workers: 4, Lease: 3 * time.Second})
				var starts atomic.Int32
				f.mixed(30, &starts)
				c.every.Store(every)
				stop := f.run()
				time.Sleep(2 * time.Minute)
				c.every.Store(0)
				time.Sleep(10 * time.Second)
				if err := stop(); err != nil {
					t.Errorf("Run = %v", err)
				}
				if c.failed.Load() < 5 {
					t.Errorf("only %d commits failed", c.failed.Load())
				}
				f.wantMixed(30)
				if n := starts.Load(); n != 42 {
					t.Errorf("%d starts, want 42", n)
				}
			})
		})
	}
}

// doubtful opens connections of which each n-th commit is made and returns an error.
type doubtful struct {
	driver.Connector
	every, commits, failed atomic.Int32
}

func newDoubtful(t *testing.T, path string) *doubtful {
	t.Helper()
	base, err := sqlite.NewConnector(dsn(path, "_synchronous=OFF&_busy_timeout=1000&_pragma=journal_mode(WAL)"))
	if err != nil {
		t.Fatal(err)
	}
	return &doubtful{Connector: base}
}

func (d *doubtful) Connect(ctx context.Context) (driver.Conn, error) {
	c, err := d.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &doubtfulConn{c.(fullConn), d}, nil
}

type fullConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.SessionResetter
	driver.Validator
}

type doubtfulConn struct {
	fullConn
	d *doubtful
}

func (c *doubtfulConn) BeginTx(ctx context.Context, o driver.TxOptions) (driver.Tx, error) {
	tx, err := c.fullConn.BeginTx(ctx, o)
	return doubtfulTx{tx, c.d}, err
}

type doubtfulTx struct {
	driver.Tx
	d *doubtful
}

func (tx doubtfulTx) Commit() error {
	if err := tx.Tx.Commit(); err != nil {
		return err
	}
	if c, n := tx.d.commits.Add(1), tx.d.every.Load(); n > 0 && c%n == 0 {
		tx.d.failed.Add(1)
		return errors.New("disk I/O error (in doubt)")
	}
	return nil
}

// While handlers run the poller writes for its heartbeats, and for nothing else.
func TestQueue_Run_LongHandlersAreLeftAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newDoubtful(t, filepath.Join(t.TempDir(), "t.db"))
		f := &fixture{T: t, db: closing(t)(sql.OpenDB(c), nil)}
		f.q = newQueue(t, f.db, taskbox.Options{}) // a beat every 5 s
		var r record
		typ := f.handle(&r, "x", 10*time.Minute, taskbox.TypeOptions{Timeout: -1})
		for range 3 {
			f.enqueue(typ.New(""))
			f.enqueue(typ.New("", taskbox.Group("G")))
			f.enqueue(note.New("nobody's"))
			f.enqueue(typ.New("", taskbox.Delay(24*time.Hour)))
		}
		f.run()
		time.Sleep(10 * time.Second)
		before := c.commits.Load()
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := c.commits.Load() - before; n < 10 || n > 20 {
			t.Errorf("%d transactions in a minute, want 12", n)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		f.wantStates("pending 3, scheduled 3, success 6")
	})
}

// An application that holds the write lock for long delays the queue and that is all:
// also where it is longer than a lease, and another queue waits for the lock as well.
// Which of the two has it first depends on a tenth of a second.
func TestQueue_Run_LockedForLong(t *testing.T) {
	for _, d := range []time.Duration{5200 * time.Millisecond, 5400 * time.Millisecond} {
		t.Run(d.String(), func(t *testing.T) {
			lockedFor(t, d, func(t *testing.T, path string) *sql.DB { return plainDB(t, path, "_busy_timeout=1") })
		})
	}
	t.Run("OpenDB", func(t *testing.T) { lockedFor(t, 8*time.Second, fileDB) })
}

func lockedFor(t *testing.T, d time.Duration, open func(t *testing.T, path string) *sql.DB) {
	synctest.Test(t, func(t *testing.T) {
		var r record
		path := filepath.Join(t.TempDir(), "t.db")
		var fs []*fixture
		var typ, short *taskbox.Type[string]
		for range 2 {
			f := &fixture{T: t, path: path, db: open(t, path)}
			f.q = newQueue(t, f.db, taskbox.Options{Lease: 3 * time.Second, Workers: 8})
			typ, short = f.handle(&r, "long", 20*time.Second), f.handle(&r, "short", 2*time.Second)
			fs = append(fs, f)
		}
		f, g := fs[0], fs[1]
		f.enqueue(typ.New(""))
		f.run()
		time.Sleep(1100 * time.Millisecond)
		g.run() // its heartbeats come a little after the first one's
		time.Sleep(1950 * time.Millisecond)
		for range 3 {
			f.enqueue(short.New(""))
		}
		time.Sleep(100 * time.Millisecond)
		tx, err := open(t, path).Begin()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := tx.Exec(`create table orders (id integer)`); err != nil {
			t.Fatal(err)
		}
		time.Sleep(d)
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		for id := range int64(4) {
			f.wantTrail(id+1, "picked processing success")
		}
		if n := len(r.all()); n != 8 { // each counts twice
			t.Errorf("%d starts, want 4", n/2)
		}
	})
}

// A pool that is closed under the poller: it logs once, keeps trying, and stops when told to.
func TestQueue_Run_ClosedPool(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		note.Handle(f.q, func(context.Context, *taskbox.Task[string]) error { return nil })
		stop := f.run()
		f.enqueue(note.New(""))
		time.Sleep(5 * time.Second)
		f.db.Close()
		time.Sleep(time.Minute)
		start := time.Now()
		if err := stop(); err != nil {
			f.Logf("Run = %v", err)
		}
		if d := time.Since(start); d > 15*time.Second {
			f.Errorf("it took %v to stop", d)
		}
	})
}

// The file can't be written for a while, in the middle of things: nothing is lost.
func TestQueue_Run_Trouble(t *testing.T) {
	l := new(logs)
	bubble(t, taskbox.Options{Logger: newLogger(l)}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "x", 2*time.Second)
		var ids []int64
		f.run()
		for range 5 {
			ids = append(ids, f.enqueue(typ.New("")))
		}
		time.Sleep(time.Second)
		f.exec(`create trigger trouble before insert on task_audit begin select raise(abort, 'trouble'); end`)
		for range 5 {
			ids = append(ids, f.enqueue(typ.New("")))
		}
		time.Sleep(time.Minute)
		f.wantInt(0, `select count(*) from task_outbox where status = 'success'`)
		f.exec(`drop trigger trouble`)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		for _, id := range ids {
			f.wantTrail(id, "picked processing success")
		}
		if n := r.count("x"); n != 10 {
			f.Errorf("%d starts, want 10: each outcome was kept", n)
		}
	})
	told := 0
	for _, m := range l.records {
		if strings.Contains(m["msg"], "can't write") {
			told++
		}
	}
	if told != 1 {
		t.Errorf("the trouble was told %d times, want once", told)
	}
}

func TestQueue_New_RelativePath(t *testing.T) {
	t.Chdir(t.TempDir())
	f := &fixture{T: t, path: "t.db"}
	f.db = closing(t)(taskbox.OpenDB("t.db"))
	f.q = newQueue(t, f.db, taskbox.Options{})
	note.Handle(f.q, func(context.Context, *taskbox.Task[string]) error { return nil })
	t.Chdir(t.TempDir())
	id := f.enqueue(note.New(""))
	f.drain()
	f.wantStatus(id, "success")
	if names, err := filepath.Glob("*"); err != nil || len(names) != 0 {
		f.Errorf("files in another directory: %q, %v", names, err)
	}
}
