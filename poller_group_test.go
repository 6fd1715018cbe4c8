package taskbox_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

// handle registers a type whose handler notes its starts in r, under the type and the
// payload, and takes d.
func (f *fixture) handle(r *record, name string, d time.Duration, o ...taskbox.TypeOptions) *taskbox.Type[string] {
	typ := taskbox.NewType[string](name, o...)
	typ.Handle(f.q, func(ctx context.Context, task *taskbox.Task[string]) error {
		end := r.start(name)
		defer end()
		end2 := r.start(task.Payload)
		defer end2()
		if d > 0 {
			time.Sleep(d)
		}
		return nil
	})
	return typ
}

func TestQueue_Run_Concurrency(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 6}, func(f *fixture) {
		var r record
		one := f.handle(&r, "one", 70*time.Millisecond, taskbox.TypeOptions{Concurrency: 1})
		two := f.handle(&r, "two", 30*time.Millisecond, taskbox.TypeOptions{Concurrency: 2})
		short := f.handle(&r, "short", 2*time.Millisecond, taskbox.TypeOptions{Concurrency: 3})
		all := f.handle(&r, "all", 50*time.Millisecond, taskbox.TypeOptions{Concurrency: 100})
		f.run()
		for i := range 60 {
			for _, typ := range []*taskbox.Type[string]{one, two, short, all} {
				f.enqueue(typ.New(fmt.Sprintf("task %s %d", typ.Name(), i)))
			}
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		for name, most := range map[string]int{"one": 1, "two": 2, "short": 3, "all": 6} {
			if n := r.atOnce(name); n > most || n < min(most, 2) {
				f.Errorf("%d of type %s ran at once, want up to %d", n, name, most)
			}
			if n := r.count(name); n != 60 {
				f.Errorf("%d of type %s ran, want 60", n, name)
			}
		}
		f.wantInt(240, `select count(*) from task_outbox where status = 'success' and attempt = 1`)
		f.wantInt(0, `select count(*) from task_audit where event not in ('picked', 'processing', 'success', 'interrupted')`)
	})
}

func TestQueue_Run_Workers(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 3}, func(f *fixture) {
		var r record
		typ := taskbox.NewType[string]("x")
		typ.Handle(f.q, func(context.Context, *taskbox.Task[string]) error {
			defer r.start("x")()
			time.Sleep(time.Second)
			return nil
		})
		for range 30 {
			f.enqueue(typ.New(""))
		}
		start := time.Now()
		f.drain()
		if n, d := r.atOnce("x"), time.Since(start); n != 3 || d < 10*time.Second || d > 12*time.Second {
			f.Errorf("%d ran at once and all took %v, want 3 and 10 s", n, d)
		}
	})
}

// A flood of one type doesn't keep another waiting: counted in starts, not in time.
func TestQueue_Run_FairBetweenTypes(t *testing.T) {
	for _, tt := range []struct {
		tasks int
		d     time.Duration
	}{{5000, 0}, {1000, 20 * time.Millisecond}} {
		t.Run(fmt.Sprint(tt.tasks, " of ", tt.d), func(t *testing.T) {
			bubble(t, taskbox.Options{Workers: 8}, func(f *fixture) {
				const before = 300 // starts of the flood
				var r record
				other := f.handle(&r, "other", tt.d)
				flood := taskbox.NewType[int]("flood")
				flood.Handle(f.q, func(ctx context.Context, task *taskbox.Task[int]) error {
					defer r.start("flood")()
					time.Sleep(tt.d)
					if task.Payload != before {
						return nil
					}
					r.start("enqueue")
					var ds []taskbox.Draft
					for range 10 {
						ds = append(ds, other.New("o"))
					}
					_, err := f.q.EnqueueMany(ctx, f.db, ds...)
					return err
				})
				var ds []taskbox.Draft
				for i := range tt.tasks {
					ds = append(ds, flood.New(i, taskbox.Priority(9)))
				}
				if _, err := f.q.EnqueueMany(f.Context(), f.db, ds...); err != nil {
					f.Fatal(err)
				}
				f.drain()
				f.wantInt(int64(tt.tasks+10), `select count(*) from task_outbox where status = 'success'`)
				starts := r.all()
				starts = starts[slices.Index(starts, "enqueue"):]
				// What has been claimed may go first, and then the types share each turn.
				if n := slices.Index(starts, "other"); n < 0 || n > 300 {
					f.Errorf("the flood started %d times before the other type's first", n)
				}
				last := len(starts) - 1
				for starts[last] != "other" {
					last--
				}
				if last > 600 {
					f.Errorf("%d starts before the other type's tenth", last)
				}
			})
		})
	}
}

// Both wait in the file from the start: the flood of high priority has no more than its share.
func TestQueue_Run_FairFromTheStart(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 8}, func(f *fixture) {
		var r record
		f.handle(&r, "a flood", 10*time.Millisecond)
		other := f.handle(&r, "other", 10*time.Millisecond)
		f.exec(`insert into task_outbox(event_type, payload, priority) with recursive n(i) as (select 1 union all select i + 1 from n limit 5000)
			select 'a flood', '"f"', 5 from n`)
		f.enqueue(other.New("o"))
		stop := f.run()
		time.Sleep(50 * time.Millisecond)
		stop()
		starts := slices.DeleteFunc(r.all(), func(s string) bool { return s != "a flood" && s != "other" })
		if n := slices.Index(starts, "other"); n < 0 || n > 16 {
			f.Errorf("the other type's task was start number %d", n)
		}
	})
}

func TestQueue_Run_Priority(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 1}, func(f *fixture) {
		var r record
		typ := f.handle(&r, "type", time.Second)
		for _, p := range []int{0, 5, -3, 5, 100, 0, -3} {
			f.enqueue(typ.New(fmt.Sprint(p, " ", len(f.tasks("id"))), taskbox.Priority(p)))
			time.Sleep(time.Millisecond)
		}
		f.drain()
		got := slices.DeleteFunc(r.all(), func(s string) bool { return s == "type" })
		want := []string{"100 4", "5 1", "5 3", "0 0", "0 5", "-3 2", "-3 6"}
		if diff := gocmp.Diff(want, got); diff != "" {
			f.Errorf("order (-want +got):\n%s", diff)
		}
	})
}

func TestQueue_Run_Expiry(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 1}, func(f *fixture) {
		var r record
		slow := f.handle(&r, "slow", 10*time.Second)
		f.run()
		first := f.enqueue(slow.New("1", taskbox.ExpiresIn(time.Second))) // starts at once and is left alone
		time.Sleep(time.Second / 2)
		late := f.enqueue(slow.New("2", taskbox.ExpiresIn(5*time.Second)))
		soon := f.enqueue(slow.New("3", taskbox.ExpiresIn(15*time.Second)))
		past := f.enqueue(slow.New("4", taskbox.Expires(time.Now().Add(-time.Hour))))
		delayed := f.enqueue(slow.New("5", taskbox.Delay(time.Minute), taskbox.ExpiresIn(time.Second)))
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		f.wantTrail(first, "picked processing success")
		f.wantTrail(soon, "picked processing success")
		for _, id := range []int64{late, past} {
			f.wantTrail(id, "skipped")
			f.wantInt(1, `select status = 'skipped' and finished_at is not null and last_error = 'expired' from task_outbox where id = ?`, id)
		}
		f.wantTrail(delayed, "queued skipped")
		f.wantInt(3, `select sum(skipped) from task_stats`)
		if n := r.count("slow"); n != 2 {
			f.Errorf("%d handlers ran, want 2", n)
		}
	})
}

// What was started in time isn't too late for its retry.
func TestQueue_Run_ExpiryBeforeARetry(t *testing.T) {
	bubble(t, taskbox.Options{Schedule: taskbox.Tiers(time.Minute)}, func(f *fixture) {
		id := f.enqueue(f.failing("x", errDown).New("", taskbox.ExpiresIn(10*time.Second)))
		f.run()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		f.wantTrail(id, "picked processing retry_wait queued picked processing failed dead_letter")
	})
}

// grouped registers a type for tests of groups; run is called in each handler.
func (f *fixture) grouped(r *record, o taskbox.TypeOptions, run func(payload string) error) *taskbox.Type[string] {
	typ := taskbox.NewType[string]("grouped", o)
	typ.Handle(f.q, func(_ context.Context, task *taskbox.Task[string]) error {
		defer r.start(task.Group)()
		if n := task.Group + "!"; r.atOnce(task.Group) > 1 {
			r.start(n)
		}
		r.start(task.Group + task.Payload)
		if run != nil {
			return run(task.Payload)
		}
		return nil
	})
	return typ
}

// order returns the payloads of a group's tasks as they started.
func (r *record) order(group string) string {
	var ps []string
	for _, s := range r.all() {
		if p, ok := strings.CutPrefix(s, group); ok && p != "" {
			ps = append(ps, p)
		}
	}
	return strings.Join(ps, " ")
}

func (r *record) wantOrder(t *testing.T, group, want string) {
	t.Helper()
	if got := r.order(group); got != want {
		t.Errorf("group %s ran as %q, want %q", group, got, want)
	}
	if n := r.atOnce(group); n > 1 {
		t.Errorf("%d of group %s ran at once", n, group)
	}
}

func TestQueue_Run_GroupInOrder(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 16}, func(f *fixture) {
		var r record
		typ := f.grouped(&r, taskbox.TypeOptions{}, func(string) error { time.Sleep(5 * time.Millisecond); return nil })
		stop := f.run()
		want := map[string][]string{}
		rnd := rand.New(rand.NewPCG(1, 2))
		for i := range 300 {
			g := string(rune('A' + rnd.IntN(5)))
			n := fmt.Sprint(i)
			// Neither priority nor delay changes the order in a group.
			opts := []taskbox.EnqueueOption{taskbox.Group(g), taskbox.Priority(rnd.IntN(3))}
			if rnd.IntN(4) == 0 {
				opts = append(opts, taskbox.Delay(time.Duration(rnd.IntN(1000))*time.Millisecond))
			}
			f.enqueue(typ.New(n, opts...))
			want[g] = append(want[g], n)
			if i%40 == 0 {
				time.Sleep(20 * time.Millisecond)
			}
		}
		time.Sleep(time.Minute)
		stop()
		for g, order := range want {
			r.wantOrder(f.T, g, strings.Join(order, " "))
		}
		f.wantInt(300, `select count(*) from task_outbox where status = 'success' and attempt = 1 and blocked = 0`)
	})
}

func TestQueue_Run_GroupHead(t *testing.T) {
	for _, tt := range []struct {
		name string
		head func(typ *taskbox.Type[string]) taskbox.Draft
		run  func(attempt int) error
		want string
		end  string // of the head
	}{
		{"waits for its retry", nil, func(n int) error {
			if n == 1 {
				return errDown
			}
			return nil
		}, "1 1 2 3", "success"},
		{"dies", nil, func(int) error { return taskbox.Permanent(errDown) }, "1 2 3", "dead_letter"},
		{"dies at last", nil, func(int) error { return errDown }, "1 1 1 2 3", "dead_letter"},
		{"is skipped", nil, func(int) error { return taskbox.Skip("no") }, "1 2 3", "skipped"},
		{"is snoozed", nil, func(n int) error {
			if n == 1 {
				return taskbox.Snooze(time.Minute)
			}
			return nil
		}, "1 1 2 3", "success"},
		{"panics", nil, func(n int) error {
			if n == 1 {
				panic("no")
			}
			return nil
		}, "1 1 2 3", "success"},
		{"has expired", func(typ *taskbox.Type[string]) taskbox.Draft {
			return typ.New("1", taskbox.Group("G"), taskbox.Expires(time.Now().Add(-time.Second)))
		}, nil, "2 3", "skipped"},
		{"isn't due yet", func(typ *taskbox.Type[string]) taskbox.Draft {
			return typ.New("1", taskbox.Group("G"), taskbox.Delay(time.Minute))
		}, func(int) error { return nil }, "1 2 3", "success"},
		{"can't be decoded", func(*taskbox.Type[string]) taskbox.Draft {
			return taskbox.NewType[int]("grouped").New(1, taskbox.Group("G"))
		}, nil, "2 3", "dead_letter"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, taskbox.Options{Schedule: taskbox.Tiers(time.Minute, time.Minute)}, func(f *fixture) {
				var r record
				attempts := 0
				typ := f.grouped(&r, taskbox.TypeOptions{}, func(payload string) error {
					if payload != "1" {
						return nil
					}
					attempts++
					return tt.run(attempts)
				})
				f.handle(&r, "free", 0)
				stop := f.run()
				draft := typ.New("1", taskbox.Group("G"))
				if tt.head != nil {
					draft = tt.head(typ)
				}
				head := f.enqueue(draft)
				f.enqueue(typ.New("2", taskbox.Group("G"), taskbox.Priority(5)))
				f.enqueue(typ.New("3", taskbox.Group("G"), taskbox.Priority(9)))
				// Others are not held up.
				f.enqueue(typ.New("other", taskbox.Group("H")))
				f.enqueue(typ.New("none"))
				time.Sleep(10 * time.Millisecond)
				synctest.Wait()
				f.wantInt(2, `select count(*) from task_outbox where status = 'success' and payload in ('"other"', '"none"')`)
				time.Sleep(5 * time.Minute)
				stop()
				r.wantOrder(f.T, "G", tt.want)
				f.wantStatus(head, tt.end)
				f.wantInt(4, `select count(*) from task_outbox where status = 'success' and id <> ?`, head)
				f.wantInt(0, `select count(*) from task_outbox where blocked <> 0`)
			})
		})
	}
}

// A group is one at a time over all processes.
func TestQueue_Run_GroupOverTwoQueues(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var r record
		g := f.again(taskbox.Options{})
		run := func(string) error { time.Sleep(3 * time.Millisecond); return nil }
		typ := f.grouped(&r, taskbox.TypeOptions{}, run)
		g.grouped(&r, taskbox.TypeOptions{}, run)
		var want []string
		for i := range 60 {
			f.enqueue(typ.New(fmt.Sprint(i), taskbox.Group("G")))
			f.enqueue(typ.New(fmt.Sprint(i), taskbox.Group("H")))
			want = append(want, fmt.Sprint(i))
		}
		f.run()
		g.run()
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		r.wantOrder(f.T, "G", strings.Join(want, " "))
		r.wantOrder(f.T, "H", strings.Join(want, " "))
		f.wantInt(120, `select count(*) from task_outbox where status = 'success' and attempt = 1`)
	})
}

// 10,000 tasks that wait behind the first of their group are in nobody's way.
func TestQueue_Run_GroupBlocked(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 4}, func(f *fixture) {
		var r record
		release := make(chan struct{})
		typ := f.grouped(&r, taskbox.TypeOptions{}, func(payload string) error {
			if payload == "head" {
				<-release
			}
			return nil
		})
		other := f.handle(&r, "other", 0)
		stop := f.run()
		f.enqueue(typ.New("head", taskbox.Group("G")))
		// Most of them stand as a poller leaves them that has met them once.
		f.exec(`insert into task_outbox(event_type, payload, group_key, priority, blocked) with recursive n(i) as (select 1 union all select i + 1 from n limit 10000)
			select 'grouped', '"x"', 'G', 5, i <= 9000 from n`)
		late, foreign := f.enqueue(typ.New("late")), f.enqueue(other.New("o"))
		time.Sleep(30 * time.Second)
		synctest.Wait()
		f.wantStatus(late, "success")
		f.wantStatus(foreign, "success")
		f.wantInt(10_000, `select count(*) from task_outbox where blocked = 1 and version = 0`)
		turns := f.int(`select sum(picked) from task_stats`)
		// Blocked ones aren't looked at again: another task needs one claim.
		more := f.enqueue(typ.New("more"))
		time.Sleep(time.Second)
		synctest.Wait()
		f.wantStatus(more, "success")
		f.wantInt(turns+1, `select sum(picked) from task_stats`)
		s, err := f.q.Stats(f.Context())
		if err != nil || s.Blocked != 10_000 || s.QueueLength != 0 {
			f.Errorf("Stats: %d blocked, queue length %d, %v", s.Blocked, s.QueueLength, err)
		}
		f.exec(`delete from task_outbox where id > 200 and blocked = 1`)
		close(release)
		time.Sleep(time.Minute)
		stop()
		f.wantInt(0, `select count(*) from task_outbox where status <> 'success'`)
	})
}

// The second of a group can't start in the moment in which the first ends.
func TestQueue_Run_GroupQuick(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var r record
		typ := f.grouped(&r, taskbox.TypeOptions{Concurrency: 4}, nil)
		var ds []taskbox.Draft
		var want []string
		for i := range 500 {
			ds = append(ds, typ.New(fmt.Sprint(i), taskbox.Group("G")))
			want = append(want, fmt.Sprint(i))
		}
		if _, err := f.q.EnqueueMany(f.Context(), f.db, ds...); err != nil {
			f.Fatal(err)
		}
		f.drain()
		r.wantOrder(f.T, "G", strings.Join(want, " "))
		f.wantInt(500, `select count(*) from task_outbox where status = 'success' and attempt = 1`)
	})
}

func TestQueue_Run_GroupOfAnotherType(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var r record
		typ := f.grouped(&r, taskbox.TypeOptions{}, nil)
		unknown := taskbox.NewType[string]("nobody's")
		first := f.enqueue(unknown.New("1", taskbox.Group("G")))
		second := f.enqueue(typ.New("2", taskbox.Group("G")))
		f.drain()
		f.wantStatus(first, "pending")
		f.wantStatus(second, "pending")
		unknown.Handle(f.q, func(context.Context, *taskbox.Task[string]) error { return errors.Join() })
		f.drain()
		f.wantStatus(first, "success")
		f.wantStatus(second, "success")
	})
}
