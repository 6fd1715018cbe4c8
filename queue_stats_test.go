package taskbox_test

import (
	"context"
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

func (f *fixture) stats() taskbox.Stats {
	f.Helper()
	s, err := f.q.Stats(f.Context())
	if err != nil {
		f.Fatal(err)
	}
	return s
}

func TestQueue_Stats_Empty(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		if diff := gocmp.Diff(taskbox.Stats{At: time.UnixMilli(time.Now().UnixMilli())}, f.stats()); diff != "" {
			f.Errorf("Stats (-want +got):\n%s", diff)
		}
	})
}

// The five figures, in total and by type, of a small history.
func TestQueue_Stats(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 2}, func(f *fixture) {
		var r record
		slow := f.handle(&r, "slow", 2*time.Second)
		fails := f.failing("fails", errDown)
		dies := f.failing("dies", taskbox.Permanent(errDown))
		other := taskbox.NewType[string]("unknown")
		for range 3 {
			f.enqueue(slow.New(""))
		}
		f.enqueue(fails.New(""))
		f.enqueue(dies.New(""))
		f.enqueue(slow.New("", taskbox.Delay(time.Hour)))
		f.drain()
		time.Sleep(10 * time.Second)
		f.enqueue(other.New(""))
		time.Sleep(5 * time.Second)
		f.enqueue(other.New(""))
		for range 3 {
			f.enqueue(slow.New("", taskbox.Group("G")))
		}
		f.exec(`update task_outbox set blocked = 1 where group_key = 'G' and id > (select min(id) from task_outbox where group_key = 'G')`)
		held := f.enqueue(slow.New(""))
		f.ghost(held, "ghost", time.Minute)

		s := f.stats()
		want := taskbox.Stats{
			At: s.At, QueueLength: 3, FailureRate: 0.4, DeadLetters: 1, OldestDue: 5 * time.Second,
			Scheduled: 1, RetryWait: 1, Blocked: 2, Running: 1, AverageWait: s.AverageWait,
			Types: []taskbox.TypeStats{
				{Type: "dies", Picked: 1, Dead: 1, FailureRate: 1, DeadLetters: 1, AverageWait: s.Types[0].AverageWait},
				{Type: "fails", Picked: 1, Retried: 1, FailureRate: 1, AverageWait: s.Types[1].AverageWait},
				{Type: "slow", QueueLength: 1, Picked: 3, Succeeded: 3, AverageRun: 2 * time.Second, AverageWait: s.Types[2].AverageWait},
				{Type: "unknown", QueueLength: 2, OldestDue: 5 * time.Second},
			},
		}
		if diff := gocmp.Diff(want, s); diff != "" {
			f.Errorf("Stats (-want +got):\n%s", diff)
		}
		// The third slow one waited for two seconds, and what came with it, too.
		if d := s.Types[2].AverageWait; d < 600*time.Millisecond || d > 2*time.Second {
			f.Errorf("the slow ones waited %v on average", d)
		}
		var sum time.Duration
		for _, ts := range s.Types {
			sum += ts.AverageWait * time.Duration(ts.Picked)
		}
		if d := s.AverageWait - sum/5; d.Abs() > time.Millisecond {
			f.Errorf("the average wait is %v, by type it is %v", s.AverageWait, sum/5)
		}
		// Rates are of the last five minutes, counts of states are of now.
		time.Sleep(6 * time.Minute)
		s = f.stats()
		if s.FailureRate != 0 || s.AverageWait != 0 || s.QueueLength != 3 || s.DeadLetters != 1 || s.OldestDue < 6*time.Minute {
			f.Errorf("six minutes later: %+v", s)
		}
	})
}

// Only attempts that ended count as time that was run.
func TestQueue_Stats_AverageRun(t *testing.T) {
	bubble(t, taskbox.Options{Grace: -1}, func(f *fixture) {
		typ := taskbox.NewType[string]("x", taskbox.TypeOptions{Timeout: time.Hour})
		calls := 0
		typ.Handle(f.q, func(ctx context.Context, task *taskbox.Task[string]) error {
			switch calls++; calls {
			case 1:
				time.Sleep(40 * time.Second)
				return taskbox.Snooze(time.Second)
			case 2:
				time.Sleep(2 * time.Second)
				return nil
			}
			<-ctx.Done()
			return ctx.Err()
		})
		f.enqueue(typ.New(""))
		stop := f.run()
		time.Sleep(45 * time.Second)
		f.enqueue(typ.New(""))
		time.Sleep(10 * time.Second)
		stop() // interrupts the second
		s := f.stats().Types[0]
		if s.Succeeded != 1 || s.AverageRun != 2*time.Second {
			f.Errorf("%d succeeded after %v on average, want 1 after 2 s", s.Succeeded, s.AverageRun)
		}
		f.wantInt(2000, `select sum(run_ms) from task_stats`)
		f.wantInt(2, `select sum(released) from task_stats`)
	})
}

func TestQueue_Stats_Minutes(t *testing.T) {
	bubble(t, taskbox.Options{PollInterval: 10 * time.Second}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "x", 70*time.Millisecond)
		fails := f.failing("fails", errDown, taskbox.TypeOptions{MaxAttempts: 2})
		f.run()
		for range 10 {
			f.enqueue(typ.New(""))
			f.enqueue(fails.New(""))
			time.Sleep(time.Minute)
		}
		synctest.Wait()
		f.wantInt(10, `select count(*) from task_stats where event_type = 'x'`)
		f.wantInt(1, `select min(picked = 1 and success = 1 and retried + dead + lost + released + skipped + cancelled = 0 and run_100 = 1 and run_ms = 70) from task_stats where event_type = 'x'`)
		f.wantInt(1, `select sum(picked) = 20 and sum(retried) = 10 and sum(dead) = 10 and sum(success) = 0 from task_stats where event_type = 'fails'`)
		// The buckets hold everything that was counted.
		f.wantInt(0, `select count(*) from task_stats where picked <> wait_1 + wait_5 + wait_10 + wait_50 + wait_100 + wait_500 + wait_1000 + wait_5000 + wait_30000 + wait_120000 + wait_600000 + wait_inf`)
		f.wantInt(0, `select count(*) from task_stats where success + retried + dead <> run_1 + run_5 + run_10 + run_50 + run_100 + run_500 + run_1000 + run_5000 + run_30000 + run_120000 + run_600000 + run_inf`)
	})
}

// finished inserts a task that ended d ago, with a trail.
func (f *fixture) finished(status string, d time.Duration) int64 {
	f.Helper()
	at := time.Now().Add(-d).UnixMilli()
	f.exec(`insert into task_outbox(event_type, payload, status, created_at, next_run_at, updated_at, finished_at, version)
		values ('x', '{}', ?1, ?2, ?2, ?2, ?2, 3)`, status, at)
	id := f.int(`select max(id) from task_outbox`)
	f.exec(`insert into task_audit(task_id, seq, event, at) values (?1, 1, 'picked', ?2), (?1, 2, ?3, ?2)`, id, at, status)
	f.exec(`insert into task_audit(task_id, seq, event, at, actor, reason) values (?, 3, 'edit', ?, 'ann', 'why not')`, id, at)
	return id
}

const day = 24 * time.Hour

func TestQueue_Run_Retention(t *testing.T) {
	for _, tt := range []struct {
		name string
		o    taskbox.Options
		gone []string // of those that ended long ago
		days int      // after which success is pruned; 0: never
	}{
		{"default", taskbox.Options{}, []string{"success", "skipped", "cancelled"}, 7},
		{"a day", taskbox.Options{KeepDone: day}, []string{"success", "skipped", "cancelled"}, 1},
		{"dead letters as well", taskbox.Options{KeepDead: 30 * day}, []string{"success", "skipped", "cancelled", "dead_letter"}, 7},
		{"only dead letters", taskbox.Options{KeepDone: -1, KeepDead: 30 * day}, []string{"dead_letter"}, 0},
		{"nothing", taskbox.Options{KeepDone: -1}, nil, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, tt.o, func(f *fixture) {
				states := []string{"success", "skipped", "cancelled", "dead_letter"}
				ids := map[string]int64{}
				for _, status := range states {
					ids[status] = f.finished(status, 40*day)
				}
				old := f.enqueue(note.New("pending, and old"))
				f.exec(`update task_outbox set created_at = 1, next_run_at = 1, updated_at = 1 where id = ?`, old)
				before, after := int64(0), int64(0)
				if tt.days > 0 {
					before = f.finished("success", time.Duration(tt.days)*day+time.Hour)
					after = f.finished("success", time.Duration(tt.days)*day-time.Hour)
				}
				f.run()
				time.Sleep(3 * time.Minute)
				synctest.Wait()
				gone := map[int64]bool{before: true}
				for _, status := range tt.gone {
					gone[ids[status]] = true
				}
				for _, id := range append(f.ids(), ids["success"], ids["skipped"], ids["cancelled"], ids["dead_letter"]) {
					want := int64(1)
					if gone[id] {
						want = 0
					}
					f.wantInt(want, `select count(*) from task_outbox where id = ?`, id)
					if id != old {
						// What people did outlives the task.
						f.wantInt(1+2*want, `select count(*) from task_audit where task_id = ?`, id)
					}
				}
				f.wantInt(1, `select count(*) from task_outbox where id = ?`, old)
				if after != 0 {
					f.wantInt(1, `select count(*) from task_outbox where id = ?`, after)
				}
			})
		})
	}
}

func (f *fixture) ids() (ids []int64) {
	f.Helper()
	for _, s := range f.tasks("id") {
		var id int64
		fmt.Sscan(s, &id)
		ids = append(ids, id)
	}
	return ids
}

// The retention of tasks, of manual records and of statistics, by a clock that goes on.
func TestQueue_Run_RetentionOfRecords(t *testing.T) {
	bubble(t, taskbox.Options{KeepAudit: 100 * day}, func(f *fixture) {
		c := new(wallClock)
		f.q.SetClock(c.now)
		var r record
		f.handle(&r, "x", 0)
		gone := f.finished("success", 8*day)
		lives := f.finished("dead_letter", 8*day)
		f.enqueue(taskbox.NewType[string]("x").New(""))
		f.run()
		for range 3 {
			time.Sleep(time.Minute)
			synctest.Wait()
		}
		f.wantInt(1, `select count(*) from task_audit where task_id = ?`, gone)
		f.wantInt(1, `select count(*) from task_stats`)
		c.jump(32 * day)
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		f.wantInt(0, `select count(*) from task_stats`)
		f.wantInt(1, `select count(*) from task_audit where task_id = ?`, gone)
		f.wantInt(1, `select count(*) from task_outbox`)
		c.jump(70 * day)
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		f.wantInt(0, `select count(*) from task_audit where task_id = ?`, gone)
		f.wantInt(3, `select count(*) from task_audit where task_id = ?`, lives) // its task is there
	})
}

// Pruning goes in small steps, and work goes on in between.
func TestQueue_Run_RetentionInSteps(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		f.exec(`insert into task_outbox(event_type, payload, status, created_at, next_run_at, updated_at, finished_at, version)
			with recursive n(i) as (select 1 union all select i + 1 from n limit 1500) select 'x', '{}', 'success', 1, 1, 1, 1, 2 from n`)
		f.exec(`insert into task_audit(task_id, seq, event, at) select id, n, 'picked', 1 from task_outbox, (select 1 as n union all select 2)`)
		f.exec(`create table steps (n integer)`)
		var r record
		typ := f.handle(&r, "y", 0)
		f.run()
		last, steps := int64(1500), 0
		for i := range 300 {
			time.Sleep(10 * time.Millisecond)
			if i%10 == 0 {
				f.enqueue(typ.New(""))
			}
			synctest.Wait()
			n := f.int(`select count(*) from task_outbox where event_type = 'x'`)
			if last-n > 100 {
				f.Errorf("%d tasks went at once", last-n)
			}
			if n < last {
				steps++
			}
			last = n
		}
		if last != 0 || steps < 15 {
			f.Errorf("%d tasks are left after %d steps", last, steps)
		}
		f.wantInt(0, `select count(*) from task_audit where at = 1`)
		f.wantInt(30, `select count(*) from task_outbox where status = 'success'`)
		f.wantInt(0, `select max(wait_ms) > 20 from task_stats`)
	})
}

// A task from a clock that was far ahead doesn't keep what comes after it.
func TestQueue_Run_RetentionAfterAClockFarAhead(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		ahead := f.finished("success", -1000*day)
		var behind []int64
		for range 5 {
			behind = append(behind, f.finished("success", 40*day))
		}
		f.run()
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		f.wantInt(1, `select count(*) from task_outbox where id = ?`, ahead)
		for _, id := range behind {
			f.wantInt(0, `select count(*) from task_outbox where id = ?`, id)
		}
	})
}

// Replayed by hand while the pruner was about to delete it: it stays.
func TestQueue_Run_RetentionOfAReplayed(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		id := f.finished("success", 40*day)
		f.exec(`update task_outbox set status = 'pending', finished_at = null where id = ?`, id)
		f.run()
		time.Sleep(3 * time.Minute)
		synctest.Wait()
		f.wantInt(1, `select count(*) from task_outbox`)
		f.wantInt(3, `select count(*) from task_audit`)
	})
}

// A long history isn't in the figures. (That it costs nothing is TestPlans's matter.)
func TestQueue_Stats_LongHistory(t *testing.T) {
	f := open(t, taskbox.Options{})
	f.exec(`insert into task_stats(minute, event_type, success) with recursive n(i) as (select 1 union all select i + 1 from n limit 5000) select i, 'x', 1 from n`)
	f.exec(`insert into task_outbox(event_type, payload, status, created_at, finished_at) with recursive n(i) as (select 1 union all select i + 1 from n limit 5000)
		select 'x', '{}', 'success', 1, 1 from n`)
	s := f.stats()
	if len(s.Types) != 0 || s.QueueLength != 0 || math.IsNaN(s.FailureRate) {
		t.Errorf("Stats of an old history: %+v", s)
	}
}
