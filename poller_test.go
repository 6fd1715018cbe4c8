package taskbox_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/taskbox-go/taskbox"
)

func TestQueue_Run_Lifecycle(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var r record
		quick, slow := f.handle(&r, "quick", 0), f.handle(&r, "slow", time.Second)
		f.run()
		synctest.Wait()
		a, b := f.enqueue(quick.New("")), f.enqueue(slow.New(""))
		time.Sleep(500 * time.Millisecond)
		synctest.Wait()
		f.wantStatus(a, "success")
		f.wantStatus(b, "processing") // long enough to be recorded while it runs
		f.wantInt(1, `select owner is not null and lease_until > updated_at and fence = 1 and attempt = 1 from task_outbox where id = ?`, b)
		time.Sleep(time.Second)
		synctest.Wait()
		for _, id := range []int64{a, b} {
			if got := f.wholeTrail(id); got != "created queued picked processing success" {
				f.Errorf("trail: %s", got)
			}
			f.wantInt(1, `select status = 'success' and owner is null and lease_until is null and finished_at = updated_at and version = 3
				and attempt = 1 and retry_count = 0 and last_error is null from task_outbox where id = ?`, id)
		}
		if d := f.eventTime(b, "success", 0).Sub(f.eventTime(b, "processing", 0)); d != time.Second {
			f.Errorf("the slow one took %v by its trail, want 1 s", d)
		}
	})
}

// The insert of the notes is a complete enqueue, whoever makes it and when.
func TestQueue_Run_PlainInsert(t *testing.T) {
	real := time.Now() // SQLite's column defaults read the real clock in a bubble too
	bubble(t, taskbox.Options{PollInterval: 10 * time.Second, Lease: 2 * time.Minute}, func(f *fixture) {
		c := new(wallClock)
		c.jump(time.Until(real))
		f.q.SetClock(c.now)
		var r record
		f.handle(&r, "plain", 0)
		f.run()
		insert := func(more string, args ...any) int64 {
			f.exec(`insert into task_outbox(event_type, payload`+more, args...)
			return f.int(`select max(id) from task_outbox`)
		}
		at := func(d time.Duration) int64 { return c.now().Add(d).UnixMilli() }
		now := insert(`) values ('plain', '"now"')`)
		later := insert(`, next_run_at) values ('plain', '"later"', ?)`, at(time.Hour))
		past := insert(`, next_run_at) values ('plain', '"past"', ?)`, at(-time.Hour))
		zero := insert(`, next_run_at) values ('plain', '"zero"', 0)`)
		never := insert(`, next_run_at) values ('plain', '"never"', ?)`, int64(1)<<62)
		all := insert(`, next_run_at, priority, dedupe_key, trace_id, max_attempts, group_key) values ('plain', '"all"', ?, 3, 'k', 't', 2, 'g')`, at(time.Hour))
		time.Sleep(5 * time.Second)
		synctest.Wait()
		for _, id := range []int64{now, past, zero} {
			if got := f.wholeTrail(id); got != "created queued picked processing success" {
				f.Errorf("trail of task %d: %s", id, got)
			}
		}
		for _, id := range []int64{later, never, all} {
			f.wantStatus(id, "scheduled")
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		for _, id := range []int64{later, all} {
			if got := f.wholeTrail(id); got != "created scheduled queued picked processing success" {
				f.Errorf("trail of task %d: %s", id, got)
			}
			if late := f.eventTime(id, "picked", 0).Sub(time.UnixMilli(f.int(`select next_run_at from task_outbox where id = ?`, id))); late < 0 || late > time.Second {
				f.Errorf("task %d ran %v after it was due", id, late)
			}
		}
		f.wantStatus(never, "scheduled")
	})
}

func TestQueue_Run_Scheduled(t *testing.T) {
	bubble(t, taskbox.Options{PollInterval: time.Minute, Lease: 10 * time.Minute}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "x", 0)
		f.run()
		start := time.Now()
		due := map[int64]time.Duration{}
		for _, d := range []time.Duration{time.Millisecond, time.Second, time.Minute, time.Hour, 5 * time.Hour} {
			due[f.enqueue(typ.New("", taskbox.Delay(d)))] = d
			due[f.enqueue(typ.New("", taskbox.At(start.Add(d))))] = d
		}
		time.Sleep(6 * time.Hour)
		synctest.Wait()
		for id, d := range due {
			if got := f.wholeTrail(id); got != "created scheduled queued picked processing success" {
				f.Errorf("trail of the task due in %v: %s", d, got)
			}
			if late := f.eventTime(id, "picked", 0).Sub(start.Add(d)); late < 0 || late > 50*time.Millisecond {
				f.Errorf("the task due in %v ran %v late", d, late)
			}
		}
	})
}

func TestQueue_Run_TypeWithoutHandler(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var r record
		f.handle(&r, "known", 0)
		unknown := taskbox.NewType[string]("unknown")
		for range 50 {
			f.enqueue(unknown.New("", taskbox.Priority(9)))
		}
		before := f.rows(`select * from task_outbox where event_type = 'unknown'`)
		id := f.enqueue(taskbox.NewType[string]("known").New(""))
		f.run()
		time.Sleep(time.Minute)
		synctest.Wait()
		f.wantStatus(id, "success")
		if after := f.rows(`select * from task_outbox where event_type = 'unknown'`); !slices.Equal(before, after) {
			f.Errorf("they have changed: %q to %q", before[0], after[0])
		}
		g := f.again(taskbox.Options{})
		g.handle(&r, "unknown", 0)
		g.run()
		time.Sleep(time.Second)
		synctest.Wait()
		f.wantInt(51, `select count(*) from task_outbox where status = 'success'`)
		// A handler that comes late is as good.
		late := f.handle(&r, "late", 0)
		last := f.enqueue(late.New(""))
		time.Sleep(time.Second)
		synctest.Wait()
		f.wantStatus(last, "success")
	})
}

// An idle queue writes nothing.
func TestQueue_Run_IdleWritesNothing(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "x", 0)
		f.enqueue(typ.New(""))
		f.enqueue(typ.New("", taskbox.Delay(100*time.Hour)))
		f.run()
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		other := f.again(taskbox.Options{}) // sees by its data_version that anybody has written
		conn := other.conn()
		version := func() (v int64) {
			if err := conn.QueryRowContext(f.Context(), "pragma data_version").Scan(&v); err != nil {
				f.Fatal(err)
			}
			return v
		}
		before := version()
		time.Sleep(time.Hour)
		synctest.Wait()
		if after := version(); after != before {
			f.Errorf("data_version went from %d to %d in an idle hour", before, after)
		}
	})
}

func TestQueue_Run_Heartbeat(t *testing.T) {
	bubble(t, taskbox.Options{Lease: 3 * time.Second}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "long", 30*time.Second)
		g := f.again(taskbox.Options{Lease: 3 * time.Second})
		g.handle(&r, "long", 30*time.Second)
		f.run()
		g.run()
		var ids []int64
		for range 5 {
			ids = append(ids, f.enqueue(typ.New("")))
		}
		for range 58 {
			time.Sleep(500 * time.Millisecond)
			synctest.Wait()
			if left := f.int(`select min(lease_until) from task_outbox`) - time.Now().UnixMilli(); left < 2000 {
				f.Errorf("a lease has %d ms left", left)
			}
		}
		time.Sleep(10 * time.Second)
		synctest.Wait()
		for _, id := range ids {
			f.wantTrail(id, "picked processing success")
		}
		if n := r.count("long"); n != 5 {
			f.Errorf("%d starts, want 5", n)
		}
	})
}

// ghost makes a task one that a poller of another process holds.
func (f *fixture) ghost(id int64, owner string, lease time.Duration) {
	f.Helper()
	f.exec(`update task_outbox set status = 'processing', owner = ?, lease_until = ?, fence = fence + 1, attempt = attempt + 1, updated_at = ?
		where id = ?`, owner, time.Now().Add(lease).UnixMilli(), time.Now().UnixMilli(), id)
}

func TestQueue_Run_TakeOver(t *testing.T) {
	const lease = 6 * time.Second // and a beat a second
	bubble(t, taskbox.Options{Lease: lease}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "x", 0)
		ended, alive, slow, far := f.enqueue(typ.New("")), f.enqueue(typ.New("")), f.enqueue(typ.New("")), f.enqueue(typ.New(""))
		f.ghost(ended, "dead", -time.Hour)           // its end by the wall clock proves nothing yet
		f.ghost(alive, "alive", lease)               // is renewed in time
		f.ghost(slow, "slow clock", -time.Hour)      // is renewed, by a clock that is an hour behind
		f.ghost(far, "fast clock", 10_000*time.Hour) // dead, and its clock was far ahead
		f.run()
		start := time.Now()
		for range 70 {
			time.Sleep(500 * time.Millisecond)
			f.exec(`update task_outbox set lease_until = ? where owner = 'alive'`, time.Now().Add(lease).UnixMilli())
			f.exec(`update task_outbox set lease_until = lease_until + 500 where owner = 'slow clock'`)
			synctest.Wait()
		}
		f.wantTrail(ended, "lost picked processing success")
		if d := f.eventTime(ended, "lost", 0).Sub(start); d < 2*time.Second || d > 3*time.Second+100*time.Millisecond {
			f.Errorf("it was taken over after %v, want two beats, 2 s", d)
		}
		f.wantTrail(far, "lost picked processing success")
		if d := f.eventTime(far, "lost", 0).Sub(start); d < lease || d > 2*lease {
			f.Errorf("the one far ahead was taken over after %v", d)
		}
		for _, id := range []int64{alive, slow} {
			f.wantStatus(id, "processing")
			f.wantTrail(id, "")
		}
		f.wantInt(2, `select attempt from task_outbox where id = ?`, ended)
		f.wantInt(1, `select lost_count from task_outbox where id = ?`, ended)
		f.wantInt(2, `select sum(lost) from task_stats`)
		// They die now.
		time.Sleep(30 * time.Second)
		synctest.Wait()
		f.wantInt(4, `select count(*) from task_outbox where status = 'success'`)
	})
}

// A task that takes its process down each time is a dead letter after the third.
func TestQueue_Run_Lost3Times(t *testing.T) {
	bubble(t, taskbox.Options{Lease: 3 * time.Second}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "poison", 0)
		id := f.enqueue(typ.New("", taskbox.Group("G")))
		behind := f.enqueue(typ.New("", taskbox.Group("G")))
		for n := range 3 {
			// A process claims it, marks it, and is gone.
			f.exec(`insert into task_audit(task_id, seq, event, at, attempt, owner)
				select id, version + 1, 'picked', 1, attempt + 1, 'x' from task_outbox where id = ?1 union all
				select id, version + 2, 'processing', 1, attempt + 1, null from task_outbox where id = ?1`, id)
			f.exec(`update task_outbox set version = version + 2 where id = ?`, id)
			f.ghost(id, fmt.Sprint("gone ", n), -time.Second)
			if n == 2 {
				break
			}
			f.exec(`update task_outbox set event_type = 'later' where id = ?`, id) // nobody here runs it
			stop := f.run()
			time.Sleep(5 * time.Second)
			stop()
			f.exec(`update task_outbox set event_type = 'poison' where id = ?`, id)
			f.wantStatus(id, "pending")
		}
		f.run()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		f.wantTrail(id, "picked processing lost picked processing lost picked processing lost dead_letter")
		f.wantInt(1, `select detail ->> 'cause' = 'lost 3 times' from task_audit where event = 'dead_letter'`)
		f.wantInt(1, `select status = 'dead_letter' and last_error = 'lost 3 times' and finished_at is not null and owner is null and lost_count = 3
			from task_outbox where id = ?`, id)
		f.wantStatus(behind, "success")
	})
}

// Those that were running when their process died start one by one; all of them do.
func TestQueue_Run_Suspects(t *testing.T) {
	bubble(t, taskbox.Options{Lease: 3 * time.Second, Workers: 8}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "x", 100*time.Millisecond, taskbox.TypeOptions{Concurrency: 6})
		for i := range 12 {
			id := f.enqueue(typ.New("p"))
			if i%3 == 0 {
				f.exec(`update task_outbox set lost_count = 1 where id = ?`, id)
			}
			f.ghost(id, "gone", -time.Second)
		}
		f.run()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		f.wantInt(12, `select count(*) from task_outbox where status = 'success'`)
		if n := r.atOnce("x"); n > 6 {
			f.Errorf("%d at once, want up to 6", n)
		}
	})
}

// A transaction that fails just when a suspect was to start leaves it able to.
func TestQueue_Run_SuspectAfterTrouble(t *testing.T) {
	bubble(t, taskbox.Options{Lease: 3 * time.Second}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "x", 0)
		id := f.enqueue(typ.New(""))
		f.exec(`update task_outbox set lost_count = 2 where id = ?`, id)
		f.exec(`create trigger trouble before insert on task_audit when new.event = 'processing' begin select raise(abort, 'trouble'); end`)
		f.run()
		time.Sleep(time.Second)
		f.exec(`drop trigger trouble`)
		time.Sleep(time.Minute)
		synctest.Wait()
		f.wantStatus(id, "success")
		if n := r.count("x"); n != 1 {
			f.Errorf("%d starts, want 1", n)
		}
	})
}

func TestQueue_Run_LeaseLost(t *testing.T) {
	for _, tt := range []struct {
		name, steal, end string // the statement, and the row that stays
	}{
		{"another owner", `update task_outbox set owner = 'thief', fence = fence + 1, lease_until = lease_until + 1000000`, "processing|thief|2|1"},
		{"another attempt of ours", `update task_outbox set fence = fence + 1`, ""},
		{"ended by a person", `update task_outbox set status = 'cancelled', owner = null, lease_until = null, finished_at = 5`, "cancelled||1|1"},
		{"finished by another", `update task_outbox set status = 'success', owner = null, lease_until = null, finished_at = 5, fence = fence + 1, attempt = 2`, "success||2|2"},
		{"deleted", `delete from task_outbox where event_type = 'long'`, ""},
	} {
		for _, how := range []string{"waits", "returns nil before the beat", "fails before the beat"} {
			t.Run(tt.name+", "+how, func(t *testing.T) {
				bubble(t, taskbox.Options{Lease: 6 * time.Second}, func(f *fixture) {
					var cause error
					var starts atomic.Int32
					typ := taskbox.NewType[string]("long", taskbox.TypeOptions{Timeout: time.Hour})
					typ.Handle(f.q, func(ctx context.Context, _ *taskbox.Task[string]) error {
						if starts.Add(1) > 1 {
							return nil
						}
						switch how {
						case "waits":
							<-ctx.Done()
							cause = context.Cause(ctx)
							return nil // "success"
						case "fails before the beat":
							time.Sleep(1200 * time.Millisecond)
							return errDown
						}
						time.Sleep(1200 * time.Millisecond)
						return nil
					})
					var r record
					other := f.handle(&r, "other", 0)
					f.run()
					id := f.enqueue(typ.New(""))
					time.Sleep(1100 * time.Millisecond)
					f.exec(tt.steal)
					begin := time.Now()
					time.Sleep(1500 * time.Millisecond)
					synctest.Wait()
					if how == "waits" {
						wantErr(f.T, cause, taskbox.ErrLeaseLost)
					}
					if tt.end != "" {
						if got := f.one(`select status, owner, fence, attempt from task_outbox where id = ?`, id); got != tt.end {
							f.Errorf("the row is %s, want %s; %v after", got, tt.end, time.Since(begin))
						}
						f.wantTrail(id, "picked processing")
					}
					// The loop goes on.
					last := f.enqueue(other.New(""))
					time.Sleep(time.Second)
					synctest.Wait()
					f.wantStatus(last, "success")
				})
			})
		}
	}
}

// A task that was taken away and given back while its first handler still runs here.
func TestQueue_Run_ClaimedAgainWhileItRuns(t *testing.T) {
	bubble(t, taskbox.Options{Lease: 6 * time.Second}, func(f *fixture) {
		var causes [2]error // of the first and the second
		var starts atomic.Int32
		typ := taskbox.NewType[string]("x", taskbox.TypeOptions{Timeout: time.Hour})
		typ.Handle(f.q, func(ctx context.Context, task *taskbox.Task[string]) error {
			if starts.Add(1) == 1 {
				time.Sleep(10 * time.Second) // ignores its ctx
				causes[0] = context.Cause(ctx)
				return nil
			}
			time.Sleep(30 * time.Second)
			causes[1] = context.Cause(ctx)
			return nil
		})
		f.run()
		id := f.enqueue(typ.New(""))
		time.Sleep(2 * time.Second)
		f.exec(`update task_outbox set status = 'pending', owner = null, lease_until = null where id = ?`, id)
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := starts.Load(); n != 2 {
			f.Errorf("%d starts, want 2; trail: %s", n, f.trail(id))
		}
		f.wantTrail(id, "picked processing picked processing success")
		wantErr(f.T, causes[0], taskbox.ErrLeaseLost)
		if causes[1] != nil {
			f.Errorf("the second attempt's ctx ended: %v", causes[1])
		}
	})
}

func TestQueue_Run_ClockJumps(t *testing.T) {
	o := taskbox.Options{Schedule: taskbox.Tiers(30 * time.Second), PollInterval: 5 * time.Second} // and a beat every 5 s
	for _, tt := range []struct {
		name string
		jump time.Duration
	}{{"back an hour", -time.Hour}, {"forward a day", 24 * time.Hour}} {
		// clocked runs fn with two queues on one file whose clocks jump together.
		clocked := func(name string, fn func(f *fixture, r *record, typ *taskbox.Type[string], c *wallClock)) {
			t.Run(tt.name+"/"+name, func(t *testing.T) {
				bubble(t, o, func(f *fixture) {
					var r record
					c := new(wallClock)
					g := f.again(o)
					var typ *taskbox.Type[string]
					for _, f := range []*fixture{f, g} {
						f.q.SetClock(c.now)
						typ = taskbox.NewType[string]("x")
						typ.Handle(f.q, func(ctx context.Context, task *taskbox.Task[string]) error {
							defer r.start("x")()
							switch {
							case task.Payload == "long":
								time.Sleep(40 * time.Second)
								return context.Cause(ctx)
							case task.Payload == "retry" && task.Retry == 0:
								return errDown
							case task.Payload == "snooze" && r.count("x") == 1:
								return taskbox.Snooze(30 * time.Second)
							}
							return nil
						})
						f.run()
					}
					time.Sleep(7 * time.Second)
					synctest.Wait()
					fn(f, &r, typ, c)
					f.wantInt(0, `select count(*) from task_audit where event in ('lost', 'interrupted', 'dead_letter')`)
				})
			})
		}
		wantRun := func(f *fixture, r *record, id int64, starts int, end string) {
			f.Helper()
			synctest.Wait()
			if n := r.count("x"); n != starts {
				f.Errorf("%d starts, want %d", n, starts)
			}
			f.wantStatus(id, end)
		}
		clocked("idle", func(f *fixture, r *record, typ *taskbox.Type[string], c *wallClock) {
			c.jump(tt.jump)
			id := f.enqueue(typ.New(""))
			time.Sleep(time.Second)
			wantRun(f, r, id, 1, "success")
		})
		clocked("pending", func(f *fixture, r *record, typ *taskbox.Type[string], c *wallClock) {
			unknown := taskbox.NewType[string]("unknown")
			id := f.enqueue(unknown.New(""))
			time.Sleep(time.Second)
			c.jump(tt.jump)
			time.Sleep(time.Second)
			f.handle(r, "unknown", 0)
			time.Sleep(6 * time.Second)
			wantRun(f, r, id, 0, "success")
		})
		clocked("running", func(f *fixture, r *record, typ *taskbox.Type[string], c *wallClock) {
			id := f.enqueue(typ.New("long"))
			time.Sleep(10 * time.Second)
			c.jump(tt.jump)
			time.Sleep(29 * time.Second)
			wantRun(f, r, id, 1, "processing")
			time.Sleep(2 * time.Second)
			wantRun(f, r, id, 1, "success")
			time.Sleep(30 * time.Second)
			wantRun(f, r, id, 1, "success")
			f.wantTrail(id, "picked processing success")
		})
		clocked("just begun", func(f *fixture, r *record, typ *taskbox.Type[string], c *wallClock) {
			id := f.enqueue(typ.New("long"))
			time.Sleep(20 * time.Millisecond)
			c.jump(tt.jump)
			time.Sleep(2 * time.Second)
			wantRun(f, r, id, 1, "processing")
			time.Sleep(45 * time.Second)
			wantRun(f, r, id, 1, "success")
		})
		clocked("retry_wait", func(f *fixture, r *record, typ *taskbox.Type[string], c *wallClock) {
			id := f.enqueue(typ.New("retry"))
			time.Sleep(10 * time.Second)
			wantRun(f, r, id, 1, "retry_wait")
			c.jump(tt.jump)
			time.Sleep(42 * time.Second) // it is noticed at a beat, and the wait may begin anew
			wantRun(f, r, id, 2, "success")
		})
		clocked("retry_wait, and back again", func(f *fixture, r *record, typ *taskbox.Type[string], c *wallClock) {
			c.jump(tt.jump)
			id := f.enqueue(typ.New("retry"))
			time.Sleep(2 * time.Second)
			wantRun(f, r, id, 1, "retry_wait")
			c.jump(-tt.jump)
			time.Sleep(45 * time.Second)
			wantRun(f, r, id, 2, "success")
		})
		clocked("snoozed", func(f *fixture, r *record, typ *taskbox.Type[string], c *wallClock) {
			id := f.enqueue(typ.New("snooze"))
			time.Sleep(10 * time.Second)
			wantRun(f, r, id, 1, "scheduled")
			c.jump(tt.jump)
			time.Sleep(42 * time.Second)
			wantRun(f, r, id, 2, "success")
		})
	}
}

// A due time by the calendar stays one: whoever puts the clock back gets it later.
func TestQueue_Run_ClockBackAndCalendar(t *testing.T) {
	bubble(t, taskbox.Options{PollInterval: 20 * time.Second, Lease: 2 * time.Minute}, func(f *fixture) {
		var r record
		c := new(wallClock)
		f.q.SetClock(c.now)
		typ := f.handle(&r, "x", 0)
		f.run()
		id := f.enqueue(typ.New("", taskbox.At(time.Now().Add(10*time.Minute))))
		time.Sleep(5 * time.Minute)
		c.jump(-time.Hour)
		time.Sleep(64 * time.Minute)
		synctest.Wait()
		f.wantStatus(id, "scheduled")
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		f.wantStatus(id, "success")
	})
}

// Several queues on one file share the work, each task once.
func TestQueue_Run_SeveralQueues(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 4}, func(f *fixture) {
		var r record
		queues := []*fixture{f, f.again(taskbox.Options{Workers: 4}), f.again(taskbox.Options{Workers: 4})}
		var typ *taskbox.Type[string]
		for _, g := range queues {
			typ = taskbox.NewType[string]("x")
			typ.Handle(g.q, func(_ context.Context, task *taskbox.Task[string]) error {
				r.start(task.Payload)
				time.Sleep(time.Duration(task.ID%7) * time.Millisecond)
				if task.ID%10 == 0 && task.Retry == 0 {
					return errors.New("the first time always fails")
				}
				return nil
			})
		}
		var ds []taskbox.Draft
		for i := range 600 {
			ds = append(ds, typ.New(fmt.Sprint(i)))
		}
		if _, err := f.q.EnqueueMany(f.Context(), f.db, ds...); err != nil {
			f.Fatal(err)
		}
		for _, g := range queues {
			g.run()
		}
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		f.wantInt(600, `select count(*) from task_outbox where status = 'success' and lost_count = 0`)
		f.wantInt(600, `select count(*) from task_audit where event = 'success'`)
		if n := len(r.all()); n != 660 {
			f.Errorf("%d starts, want 660", n)
		}
		f.wantInt(3, `select count(distinct owner) from task_audit where event = 'picked'`)
		f.wantInt(0, `select count(*) from (select task_id, seq, row_number() over (partition by task_id order by seq) as n from task_audit) where n <> seq`)
		if got := strings.Join(f.rows(`select distinct group_concat(event, ' ') from (select task_id, event from task_audit order by task_id, seq) group by task_id order by 1`), "; "); got !=
			"picked processing retry_wait queued picked processing success; picked processing success" {
			f.Errorf("trails: %s", got)
		}
	})
}
