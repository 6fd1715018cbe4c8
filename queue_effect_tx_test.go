package taskbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

func TestStepTx(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		effect := f.effects()
		var ran int
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			err := taskbox.StepTx(ctx, "a", func(ctx context.Context, tx *sql.Tx) error {
				ran++
				if err := effect(ctx, tx, fmt.Sprint("attempt ", task.Attempt)); err != nil {
					return err
				}
				if task.Attempt == 1 {
					return errEffect
				}
				return nil
			})
			if err == nil && task.Attempt < 4 {
				err = errEffect
			}
			return err
		})
		id := f.enqueue(typ.New(""))
		f.drain()
		f.wantEffects()
		for range 3 {
			f.later()
		}
		f.wantStatus(id, "success")
		if err := f.q.Replay(f.Context(), id, byAnn, risky()...); err != nil {
			t.Fatal(err)
		}
		f.drain()
		f.wantEffects("attempt 2")
		f.wantSteps(id, "a done 2")
		if ran != 2 {
			t.Errorf("it ran %d times, want 2", ran)
		}
		f.wantWhole()
	})
}

// txHelpers are the helpers that run a function inside a transaction of the queue's.
var txHelpers = map[string]func(context.Context, string, func(context.Context, *sql.Tx) error) error{
	"StepTx": taskbox.StepTx,
	"Once":   taskbox.Once,
}

// Whatever ends the transaction, the effect and its record are both there or both not.
func TestStepTx_RollsBack(t *testing.T) {
	for helper, call := range txHelpers {
		for name, c := range map[string]struct {
			fail func(ctx context.Context, tx *sql.Tx) error
			want error
		}{
			"error": {func(context.Context, *sql.Tx) error { return errEffect }, errEffect},
			"panic": {func(context.Context, *sql.Tx) error { panic("in the transaction") }, nil},
			"bad statement": {func(ctx context.Context, tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, `nonsense`)
				return err
			}, nil},
			"timeout": {func(ctx context.Context, tx *sql.Tx) error { <-ctx.Done(); return ctx.Err() }, context.DeadlineExceeded},
			"timeout unnoticed": {func(ctx context.Context, tx *sql.Tx) error {
				<-ctx.Done()
				time.Sleep(time.Second) // database/sql rolls back meanwhile
				return nil
			}, context.DeadlineExceeded},
			"ended by SQLite": {func(ctx context.Context, tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, `insert or rollback into one values (1)`)
				if err == nil {
					return errors.New("no conflict")
				}
				return nil // an application that doesn't look
			}, taskbox.ErrTxLost},
		} {
			t.Run(helper+"/"+name, func(t *testing.T) {
				bubble(t, taskbox.Options{}, func(f *fixture) {
					effect := f.effects()
					f.exec(`create table one (id integer primary key)`)
					f.exec(`insert into one values (1)`)
					var got error
					typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
						err := call(ctx, "a", func(ctx context.Context, tx *sql.Tx) error {
							if err := effect(ctx, tx, fmt.Sprint("attempt ", task.Attempt)); err != nil || task.Attempt > 1 {
								return err
							}
							return c.fail(ctx, tx)
						})
						if task.Attempt == 1 {
							got = err
						}
						return err
					}, taskbox.TypeOptions{Timeout: 10 * time.Second})
					id := f.enqueue(typ.New(""))
					f.drain()
					if c.want != nil {
						wantErr(t, got, c.want)
					}
					f.wantEffects()
					f.wantInt(0, `select count(*) from task_dedupe where state = 'done'`)
					f.later()
					f.wantStatus(id, "success")
					f.wantEffects("attempt 2")
					f.wantInt(1, `select count(*) from task_dedupe where state = 'done' and name = 'a'`)
					f.wantWhole()
				})
			})
		}
	}
}

// stealSQL is another poller that takes over a task while its handler runs.
const stealSQL = `update task_outbox set owner = 'thief', fence = fence + 1, lease_until = lease_until + 100000 where id = ?`

// Who has lost the lease can't write any effect, whatever has happened to the task.
func TestStepTx_LeaseLost(t *testing.T) {
	for _, c := range []struct {
		name string
		lose func(*fixture, int64)
	}{
		{"stolen", func(f *fixture, id int64) { f.exec(stealSQL, id) }},
		{"cancelled", func(f *fixture, id int64) {
			if err := f.q.Cancel(f.Context(), id, byAnn); err != nil {
				f.Fatal(err)
			}
		}},
		{"cancelled and replayed", func(f *fixture, id int64) {
			err := errors.Join(f.q.Cancel(f.Context(), id, byAnn), f.q.Replay(f.Context(), id, byAnn, risky(taskbox.ReplayAt(time.Now().Add(time.Hour)))...))
			if err != nil {
				f.Fatal(err)
			}
		}},
		{"deleted", func(f *fixture, id int64) { f.exec(`delete from task_outbox where id = ?`, id) }},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, taskbox.Options{}, func(f *fixture) {
				effect := f.effects()
				started, done := make(chan int64), make(chan map[string]error)
				typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
					if task.Attempt > 1 {
						return nil
					}
					ctx = context.WithoutCancel(ctx) // a handler that doesn't hear
					_, err := taskbox.Step(ctx, "before", func(context.Context) (int, error) { return 1, nil })
					if err != nil {
						t.Error(err)
					}
					started <- task.ID
					started <- 0
					errs := map[string]error{}
					var ran atomic.Int32
					_, errs["Step"] = taskbox.Step(ctx, "step", func(context.Context) (int, error) { ran.Add(1); return 1, nil })
					errs["StepTx"] = taskbox.StepTx(ctx, "tx", func(ctx context.Context, tx *sql.Tx) error { ran.Add(1); return effect(ctx, tx, "tx") })
					errs["Once"] = taskbox.Once(ctx, "once", func(ctx context.Context, tx *sql.Tx) error { ran.Add(1); return effect(ctx, tx, "once") })
					errs["Complete"] = f.completes(ctx, task, func(tx *sql.Tx) error { return effect(ctx, tx, "complete") })
					if n := ran.Load(); n != 0 {
						t.Errorf("%d effects ran without the lease", n)
					}
					done <- errs
					return nil
				})
				f.enqueue(typ.New(""))
				f.run()
				id := <-started
				c.lose(f, id)
				before := f.rows(`select * from task_outbox`)
				<-started
				for helper, err := range <-done {
					if !errors.Is(err, taskbox.ErrLeaseLost) {
						t.Errorf("%s: got error %v, want ErrLeaseLost", helper, err)
					}
				}
				f.wantEffects()
				f.wantInt(1, `select count(*) from task_dedupe`)
				time.Sleep(time.Second)
				if c.name != "stolen" { // whose lease the poller watches
					if diff := gocmp.Diff(before, f.rows(`select * from task_outbox`)); diff != "" {
						t.Errorf("the task has changed:\n%s", diff)
					}
				}
			})
		})
	}
}

// A result that comes when the lease is lost isn't recorded as the successor's.
func TestStep_LeaseLostInside(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		started, end := make(chan int64), make(chan error)
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			_, err := taskbox.Step(ctx, "a", func(context.Context) (int, error) {
				started <- task.ID
				started <- 0
				return 1, nil
			})
			end <- err
			return err
		})
		f.enqueue(typ.New(""))
		f.run()
		id := <-started
		f.exec(stealSQL, id)
		<-started
		wantErr(t, <-end, taskbox.ErrLeaseLost)
		f.wantSteps(id, "a processing 1")
	})
}

func TestOnce(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		effect := f.effects()
		var ran int
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			for range 2 { // a second time in one attempt is no mistake
				err := taskbox.Once(ctx, "paid:42", func(ctx context.Context, tx *sql.Tx) error {
					if ran++; ran == 1 {
						return errEffect
					}
					return effect(ctx, tx, task.Payload)
				})
				if err != nil {
					return err
				}
			}
			return nil
		})
		first, second := f.enqueue(typ.New("first")), f.enqueue(typ.New("second"))
		f.drain()
		f.later()
		for _, id := range []int64{first, second} {
			f.wantStatus(id, "success")
			if err := f.q.Replay(f.Context(), id, byAnn, risky()...); err != nil {
				t.Fatal(err)
			}
		}
		f.drain()
		f.wantInt(1, `select count(*) from effects`)
		f.wantInt(1, `select count(*) from task_dedupe where kind = 'once' and task_id = 0 and name = 'paid:42' and state = 'done'`)
		if ran != 2 {
			t.Errorf("it ran %d times, want 2", ran)
		}
		f.wantInt(0, `select count(*) from task_dedupe where kind = 'step'`)
		f.wantWhole()
	})
}

// The record of a Once outlives the task that made it.
func TestOnce_Pruned(t *testing.T) {
	bubble(t, taskbox.Options{KeepDone: time.Minute}, func(f *fixture) {
		effect := f.effects()
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			return taskbox.Once(ctx, "k", func(ctx context.Context, tx *sql.Tx) error { return effect(ctx, tx, task.Payload) })
		})
		f.enqueue(typ.New("first"))
		f.run()
		time.Sleep(10 * time.Minute)
		f.wantInt(0, `select count(*) from task_outbox`)
		f.enqueue(typ.New("second"))
		time.Sleep(10 * time.Minute)
		f.wantEffects("first")
	})
}

// A Once and a StepTx of the same name, and steps of different tasks, are different things.
func TestOnce_Names(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		effect := f.effects()
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			for kind, call := range txHelpers {
				err := call(ctx, "a", func(ctx context.Context, tx *sql.Tx) error { return effect(ctx, tx, kind+task.Payload) })
				if err != nil {
					return err
				}
			}
			_, err := taskbox.Step(ctx, "b", func(context.Context) (int, error) { return 1, nil })
			return err
		})
		f.enqueue(typ.New(""))
		f.drain()
		f.enqueue(typ.New("2"))
		f.drain()
		f.wantEffects("Once", "StepTx", "StepTx2")
		f.wantInt(5, `select count(*) from task_dedupe`)
	})
}

// Many tasks in two pollers do one thing once.
func TestOnce_Concurrent(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 16}, func(f *fixture) {
		other := f.again(taskbox.Options{Workers: 16})
		effect := f.effects()
		typ := taskbox.NewType[string]("x")
		var ran atomic.Int32
		for _, g := range []*fixture{f, other} {
			typ.Handle(g.q, func(ctx context.Context, task *taskbox.Task[string]) error {
				time.Sleep(time.Second) // so that they begin together
				return taskbox.Once(ctx, "k"+task.Payload, func(ctx context.Context, tx *sql.Tx) error {
					time.Sleep(10 * time.Millisecond)
					if ran.Add(1) == 1 {
						return errEffect // the next in line does it
					}
					return effect(ctx, tx, task.Payload)
				})
			})
		}
		for i := range 100 {
			f.enqueue(typ.New(fmt.Sprint(i % 3)))
		}
		f.run()
		other.run()
		time.Sleep(10 * time.Minute)
		f.wantInt(100, `select count(*) from task_outbox where status = 'success'`)
		f.wantEffects("0", "1", "2")
		if n := ran.Load(); n != 4 {
			t.Errorf("%d runs, want 3 and the one that failed", n)
		}
		f.wantWhole()
	})
}

// A task enqueued inside StepTx is there exactly once, however often the step is tried.
func TestStepTx_Enqueue(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		child := f.does("child", func(context.Context, *taskbox.Task[string]) error { return nil })
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			err := taskbox.StepTx(ctx, "enqueue", func(ctx context.Context, tx *sql.Tx) error {
				if _, err := f.q.Enqueue(ctx, tx, child.New(task.Payload)); err != nil {
					return err
				}
				if task.Attempt == 1 {
					return errEffect
				}
				return nil
			})
			if err == nil && task.Attempt == 2 {
				err = errEffect
			}
			return err
		})
		id := f.enqueue(typ.New(""))
		f.drain()
		f.later()
		f.later()
		f.wantStatus(id, "success")
		if got := f.rows(`select event_type, status, parent_id from task_outbox where event_type = 'child'`); len(got) != 1 || got[0] != fmt.Sprintf("child|success|%d", id) {
			t.Errorf("children: %q, want one", got)
		}
	})
}

// completed is what a handler of these tests does with its transaction and returns.
type completed struct {
	name   string
	finish func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error
	// what the first attempt leads to
	trail   string
	effects []string
	err     string // part of last_error
}

func TestTask_Complete(t *testing.T) {
	const (
		success = "picked processing success"
		retry   = "picked processing retry_wait queued picked processing success"
	)
	for _, c := range []completed{
		{"commit", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error { return tx.Commit() }, success, []string{"attempt 1"}, ""},
		{"commit and an error", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			return errors.Join(tx.Commit(), errEffect)
		}, success, []string{"attempt 1"}, ""},
		{"commit and a permanent error", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			return taskbox.Permanent(errors.Join(tx.Commit(), errEffect))
		}, success, []string{"attempt 1"}, ""},
		{"commit and a snooze", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			tx.Commit()
			return taskbox.Snooze(time.Minute)
		}, success, []string{"attempt 1"}, ""},
		{"commit and a panic", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			tx.Commit()
			panic("after the commit")
		}, success, []string{"attempt 1"}, ""},
		{"commit and a timeout", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			tx.Commit()
			time.Sleep(time.Hour)
			return nil
		}, success, []string{"attempt 1"}, ""},
		{"rollback", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error { return tx.Rollback() }, retry, []string{"attempt 2"}, taskbox.ErrNotCommitted.Error()},
		{"rollback and an error", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			return errors.Join(tx.Rollback(), errEffect)
		}, retry, []string{"attempt 2"}, errEffect.Error()},
		{"rollback and a permanent error", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			return taskbox.Permanent(errors.Join(tx.Rollback(), errEffect))
		}, "picked processing failed dead_letter", nil, errEffect.Error()},
		{"rollback and a snooze", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			tx.Rollback()
			return taskbox.Snooze(time.Minute)
		}, "picked processing scheduled queued picked processing success", []string{"attempt 1"}, ""},
		{"twice, and a commit", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			if err := task.Complete(f.Context(), tx); err == nil {
				f.Error("a second Complete gives no error")
			}
			return tx.Commit()
		}, success, []string{"attempt 1"}, ""},
		{"again after a commit", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			tx.Commit()
			if err := f.completes(f.Context(), task, func(tx *sql.Tx) error { return nil }); err == nil {
				f.Error("a second Complete gives no error")
			}
			return nil
		}, success, []string{"attempt 1"}, ""},
		{"again after a rollback", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			tx.Rollback()
			return f.completes(f.Context(), task, func(tx *sql.Tx) error {
				_, err := tx.Exec(`insert into effects values ('second try')`)
				return err
			})
		}, success, []string{"second try"}, ""},
		{"never ended", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error {
			f.Cleanup(func() { tx.Rollback() })
			go func() { time.Sleep(time.Second); tx.Rollback() }()
			return nil
		}, retry, []string{"attempt 2"}, taskbox.ErrNotCommitted.Error()},
		{"after a Step", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error { return tx.Commit() }, success, []string{"attempt 1"}, ""},
		{"after a long time", func(f *fixture, tx *sql.Tx, task *taskbox.Task[string]) error { return tx.Commit() }, success, []string{"attempt 1"}, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, taskbox.Options{}, func(f *fixture) { f.tryComplete(c) })
		})
	}
}

func (f *fixture) tryComplete(c completed) {
	effect := f.effects()
	var tries int
	typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
		tries++
		switch c.name {
		case "after a Step":
			if _, err := taskbox.Step(ctx, "a", func(context.Context) (int, error) { return 1, nil }); err != nil {
				return err
			}
		case "after a long time": // the poller records it as processing meanwhile
			time.Sleep(30 * time.Second)
		}
		tx, err := f.db.BeginTx(context.WithoutCancel(ctx), nil)
		if err != nil {
			return err
		}
		defer func() {
			if c.name != "never ended" || tries > 1 {
				tx.Rollback()
			}
		}()
		if err := effect(context.WithoutCancel(ctx), tx, fmt.Sprint("attempt ", task.Attempt)); err != nil {
			return err
		}
		if err := task.Complete(ctx, tx); err != nil {
			return err
		}
		if tries > 1 {
			return tx.Commit()
		}
		return c.finish(f, tx, task)
	})
	id := f.enqueue(typ.New("", taskbox.Key("k"), taskbox.Group("g")))
	next := f.enqueue(typ.New("", taskbox.Group("g")))
	f.exec(`update task_outbox set event_type = 'nobody' where id = ?`, next) // it only stands behind
	f.drain()
	if c.err != "" {
		if got := f.one(`select last_error from task_outbox where id = ?`, id); !strings.Contains(got, c.err) {
			f.Errorf("last error %q, want %q in it", got, c.err)
		}
	}
	f.later()
	f.wantTrail(id, c.trail)
	f.wantEffects(c.effects...)
	last := c.trail[strings.LastIndex(c.trail, " ")+1:]
	f.wantStatus(id, last)
	f.wantInt(1, `select count(*) from task_outbox where id = ? and owner is null and lease_until is null and finished_at > 0`, id)
	f.wantInt(0, `select blocked from task_outbox where id = ?`, next)
	f.wantInt(map[string]int64{"success": 1, "dead_letter": 0}[last], `select count(*) from task_dedupe where kind = 'key' and state = 'done'`)
	f.wantWhole()
	// How long attempts took is counted once for each that has ended.
	ended := f.int(`select count(*) from task_audit where event in ('success', 'retry_wait', 'dead_letter')`)
	f.wantInt(ended, `select sum(run_1+run_5+run_10+run_50+run_100+run_500+run_1000+run_5000+run_30000+run_120000+run_600000+run_inf) from task_stats`)
}

// Until the commit nobody sees a success, and the group stays in order.
func TestTask_Complete_Group(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		effect := f.effects()
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			if n := f.int(`select count(*) from effects`); fmt.Sprint(n) != task.Payload {
				t.Errorf("task %s starts after %d effects", task.Payload, n)
			}
			return f.completes(ctx, task, func(tx *sql.Tx) error {
				time.Sleep(100 * time.Millisecond)
				return effect(ctx, tx, task.Payload)
			})
		})
		f.run()
		var want []string
		for i := range 9 {
			f.enqueue(typ.New(fmt.Sprint(i), taskbox.Group("g")))
			want = append(want, fmt.Sprint(i))
		}
		time.Sleep(time.Minute)
		f.wantEffects(want...)
		f.wantInt(9, `select count(*) from task_outbox where status = 'success' and attempt = 1`)
		f.wantWhole()
	})
}

// The transaction may come from another pool on the same file, as with Enqueue.
func TestTask_Complete_OtherPool(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		effect := f.effects()
		app := plainDB(f.T, f.path, "_busy_timeout=5000")
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			g := &fixture{T: f.T, db: app}
			return g.completes(ctx, task, func(tx *sql.Tx) error { return effect(ctx, tx, "a") })
		})
		id := f.enqueue(typ.New(""))
		f.drain()
		f.wantTrail(id, "picked processing success")
		f.wantEffects("a")
	})
}

// A transaction that SQLite has ended completes nothing.
func TestTask_Complete_ErrTxLost(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		f.exec(`create table one (id integer primary key)`)
		f.exec(`insert into one values (1)`)
		var got error
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			got = f.completes(ctx, task, func(tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, `insert or rollback into one values (1)`)
				if err == nil {
					t.Error("no conflict")
				}
				return nil
			})
			return got
		}, taskbox.TypeOptions{MaxAttempts: 1})
		id := f.enqueue(typ.New(""))
		f.drain()
		wantErr(t, got, taskbox.ErrTxLost)
		f.wantStatus(id, "dead_letter")
		f.wantWhole()
	})
}

// A task that was completed is replayed like any other.
func TestTask_Complete_Replay(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		effect := f.effects()
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			return f.completes(ctx, task, func(tx *sql.Tx) error { return effect(ctx, tx, fmt.Sprint(task.Attempt)) })
		})
		f.run()
		id := f.enqueue(typ.New(""))
		for range 3 {
			time.Sleep(time.Second)
			if err := f.q.Replay(f.Context(), id, byAnn, risky()...); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		f.wantEffects("1", "2", "3", "4")
		f.wantTrail(id, "picked processing success"+strings.Repeat(" replayed picked processing success", 3))
		f.wantWhole()
	})
}

// A completion that was rolled back leaves the handler under its lease: who cancels the
// task reaches it.
func TestTask_Complete_RolledBackThenCancelled(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		f.effects()
		ready, cause := make(chan struct{}), make(chan error, 1)
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			err := f.completes(ctx, task, func(tx *sql.Tx) error { return nil })
			if err != nil {
				return err
			}
			return nil
		})
		rolls := f.does("rolls", func(ctx context.Context, task *taskbox.Task[string]) error {
			tx, err := f.db.BeginTx(ctx, nil)
			if err == nil {
				err = errors.Join(task.Complete(ctx, tx), tx.Rollback())
			}
			close(ready)
			select {
			case <-ctx.Done():
				cause <- context.Cause(ctx)
			case <-time.After(30 * time.Second):
				cause <- err
			}
			return errEffect
		})
		f.run()
		f.enqueue(typ.New(""))
		id := f.enqueue(rolls.New(""))
		<-ready
		if err := f.q.Cancel(f.Context(), id, byAnn); err != nil {
			t.Fatal(err)
		}
		wantErr(t, <-cause, taskbox.ErrLeaseLost)
		time.Sleep(time.Minute)
		f.wantStatus(id, "cancelled")
		f.wantWhole()
	})
}

// A helper inside the transaction of another would wait for the lock that this one
// holds: it is refused at once.
func TestStepTx_Nested(t *testing.T) {
	for outer, call := range txHelpers {
		bubble(t, taskbox.Options{}, func(f *fixture) {
			effect := f.effects()
			var took time.Duration
			typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
				start := time.Now()
				err := call(ctx, "outer", func(ctx context.Context, tx *sql.Tx) error {
					_, err := taskbox.Step(ctx, "step", func(context.Context) (int, error) { return 1, nil })
					wantErr(f.T, err, taskbox.ErrInvalid)
					for inner, call := range txHelpers {
						err := call(ctx, "inner "+inner, func(context.Context, *sql.Tx) error { return nil })
						wantErr(f.T, err, taskbox.ErrInvalid)
					}
					return effect(ctx, tx, outer)
				})
				took = time.Since(start)
				return err
			})
			id := f.enqueue(typ.New(""))
			f.drain()
			f.wantTrail(id, "picked processing success")
			f.wantEffects(outer)
			if took > time.Second {
				t.Errorf("%s took %v", outer, took)
			}
		})
	}
}

// A transaction whose snapshot is too old can't complete the task, and says what to do.
func TestTask_Complete_ErrBusy(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		f.db = plainDB(f.T, f.path, "_busy_timeout=5000") // and transactions begin without the lock
		f.q = newQueue(f.T, f.db, taskbox.Options{})
		f.effects()
		var got error
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			err := f.completes(ctx, task, func(tx *sql.Tx) error {
				var n int
				err := tx.QueryRowContext(ctx, `select count(*) from effects`).Scan(&n)
				if task.Attempt == 1 {
					f.exec(`insert into effects values ('of somebody else')`)
				}
				return err
			})
			if task.Attempt == 1 {
				got = err
			}
			return err
		})
		id := f.enqueue(typ.New(""))
		f.drain()
		wantErr(t, got, taskbox.ErrBusy)
		f.later()
		f.wantTrail(id, "picked processing retry_wait queued picked processing success")
		f.wantWhole()
	})
}

// A task that was lost before and hadn't been started when its process died again was
// given back: the figures say so.
func TestQueue_Run_InterruptedCounted(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		id := m.enqueue(m.typ.New(""))
		m.exec(`update task_outbox set status = 'picked', lost_count = 1, attempt = 2, fence = 2, version = 1, owner = 'gone', lease_until = 1 where id = ?`, id)
		m.exec(`insert into task_audit (task_id, seq, event, at, attempt, owner) values (?, 1, 'picked', 1, 2, 'gone')`, id)
		m.exec(`insert into task_stats (minute, event_type, picked) values (?, 'x', 1)`, time.Now().Unix()/60)
		m.run()
		time.Sleep(5 * time.Minute)
		m.wantTrail(id, "picked interrupted picked processing success")
		m.wantWhole()
	})
}
