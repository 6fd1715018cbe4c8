package taskbox_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

func (f *fixture) plan(filter taskbox.Filter, do taskbox.Operation) taskbox.Plan {
	f.Helper()
	p, err := f.q.Plan(f.Context(), filter, taskbox.Action{Do: do})
	if err != nil {
		f.Fatal(err)
	}
	return p
}

func (f *fixture) apply(p taskbox.Plan, o taskbox.BulkOptions) taskbox.BulkResult {
	f.Helper()
	r, err := f.q.Apply(f.Context(), p, ann, o)
	if err != nil {
		f.Fatal(err)
	}
	return r
}

// figures are a result's numbers: done, refused, skipped, left.
func figures(r taskbox.BulkResult) [4]int { return [4]int{r.Done, r.Refused, r.Skipped, r.Left} }

// bury makes n dead letters whose next attempt does what next says.
func bury(f *fixture, typ *taskbox.Type[script], n int, next string) {
	f.Helper()
	for range n {
		f.enqueue(typ.New(script{"die", next}))
	}
	f.drain()
}

func TestQueue_Plan(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		typ := scripted(f)
		bury(f, typ, 3, "step:a")
		f.enqueue(typ.New(script{"step:a"}))
		f.enqueue(typ.New(script{}, taskbox.Delay(time.Hour)))
		f.exec(`insert into task_outbox (event_type, payload) values ('scripted', '{}')`)
		f.drain()
		p := f.plan(taskbox.Filter{}, taskbox.DoReplay)
		group := f.one(`select error_group from task_outbox where id = 1`)
		undecodable := f.one(`select error_group from task_outbox order by id desc limit 1`)
		got := []any{p.Action, len(p.Tasks), p.ByType, p.ByStatus, p.ByGroup, p.ByVerdict, p.Tasks[0]}
		want := []any{taskbox.Action{Do: taskbox.DoReplay}, 6, map[string]int{"scripted": 6},
			map[string]int{"dead_letter": 4, "success": 1, "scheduled": 1},
			map[string]int{group: 3, undecodable: 1, "": 2},
			map[taskbox.VerdictKind]int{taskbox.SafeIf: 3, taskbox.Unsafe: 1, taskbox.Safe: 2},
			taskbox.PlannedTask{ID: 1, Version: f.int(`select version from task_outbox where id = 1`), Type: "scripted",
				Status: "dead_letter", ErrorGroup: group, Verdict: taskbox.SafeIf}}
		if diff := gocmp.Diff(want, got); diff != "" {
			f.Errorf("plan (-want +got):\n%s", diff)
		}
		if p := f.plan(taskbox.Filter{ErrorGroup: group, Limit: 2}, taskbox.DoReplay); len(p.Tasks) != 2 || p.Tasks[1].ID != 2 {
			f.Errorf("the first two of the group: %+v", p.Tasks)
		}
		f.wantInt(0, `select count(*) from task_audit where actor is not null`)
	})
}

func TestQueue_Plan_BadInput(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		for _, c := range []struct {
			filter taskbox.Filter
			action taskbox.Action
		}{
			{taskbox.Filter{}, taskbox.Action{}},
			{taskbox.Filter{}, taskbox.Action{Do: "drop"}},
			{taskbox.Filter{}, taskbox.Action{Do: taskbox.DoResolve}},
			{taskbox.Filter{}, taskbox.Action{Do: taskbox.DoSkip, As: "x"}},
			{taskbox.Filter{Limit: -1}, taskbox.Action{Do: taskbox.DoSkip}},
			{taskbox.Filter{Limit: 100_001}, taskbox.Action{Do: taskbox.DoSkip}},
		} {
			_, err := f.q.Plan(f.Context(), c.filter, c.action)
			wantErr(f, err, taskbox.ErrInvalid)
		}
	})
}

func TestQueue_Plan_TooMany(t *testing.T) {
	f := open(t, taskbox.Options{})
	f.exec(`insert into task_outbox (event_type, payload)
with recursive n(i) as (select 1 union all select i + 1 from n where i < 100001) select 'a', '1' from n`)
	_, err := f.q.Plan(t.Context(), taskbox.Filter{Type: "a"}, taskbox.Action{Do: taskbox.DoCancel})
	wantErr(t, err, taskbox.ErrInvalid)
	if err == nil || !strings.Contains(err.Error(), "more than 100000 tasks") {
		t.Errorf("got %v", err)
	}
}

func TestQueue_Apply_BadInput(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		good := f.plan(taskbox.Filter{}, taskbox.DoCancel)
		twice := good
		twice.Tasks = []taskbox.PlannedTask{{ID: 1}, {ID: 1}}
		for _, c := range []struct {
			plan taskbox.Plan
			by   taskbox.By
			o    taskbox.BulkOptions
			want error
		}{
			{good, taskbox.By{}, taskbox.BulkOptions{}, taskbox.ErrActorRequired},
			{taskbox.Plan{}, ann, taskbox.BulkOptions{}, taskbox.ErrInvalid},
			{taskbox.Plan{Action: good.Action}, ann, taskbox.BulkOptions{}, taskbox.ErrInvalid},
			{twice, ann, taskbox.BulkOptions{}, taskbox.ErrInvalid},
			{good, ann, taskbox.BulkOptions{PerSecond: -1}, taskbox.ErrInvalid},
			{good, ann, taskbox.BulkOptions{StopAfter: -1}, taskbox.ErrInvalid},
			{good, ann, taskbox.BulkOptions{Canary: true}, taskbox.ErrInvalid},
		} {
			_, err := f.q.Apply(f.Context(), c.plan, c.by, c.o)
			wantErr(f, err, c.want)
		}
		f.wantInt(0, `select count(*) from task_audit`)
	})
}

func TestQueue_Apply_Conflict(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		typ := scripted(f)
		bury(f, typ, 4, "step:a")
		p := f.plan(taskbox.Filter{}, taskbox.DoReplay)
		text, err := json.Marshal(p) // as the CLI keeps it
		if err != nil {
			f.Fatal(err)
		}
		if p = (taskbox.Plan{}); json.Unmarshal(text, &p) != nil {
			f.Fatal("the plan can't be read again")
		}
		if err := f.q.Skip(f.Context(), 2, ann); err != nil {
			f.Fatal(err)
		}
		f.exec(`delete from task_outbox where id = 3`)
		r := f.apply(p, taskbox.BulkOptions{})
		if want := [4]int{2, 2, 0, 0}; figures(r) != want {
			f.Fatalf("done, refused, skipped, left: %v, want %v: %+v", figures(r), want, r)
		}
		wantErr(f, r.Tasks[1].Err, taskbox.ErrConflict)
		wantErr(f, r.Tasks[2].Err, taskbox.ErrNotFound)
		f.wantStatus(2, "skipped")
		f.wantInt(2, `select count(*) from task_audit where event = 'replayed' and actor = 'ann' and detail ->> '$.plan' = ?`, p.ID)
		got := f.one(`select event, actor, reason, detail ->> '$.plan', detail ->> '$.planned', detail ->> '$.done', detail ->> '$.refused'
from task_audit where task_id = 0`)
		if want := "applied|ann|because|" + p.ID + "|4|2|2"; got != want {
			f.Errorf("the run's audit row: got %s, want %s", got, want)
		}
		f.drain()
		if r := f.apply(p, taskbox.BulkOptions{}); r.Done != 0 || r.Refused != 4 {
			f.Errorf("applied again: %+v", r)
		}
	})
}

// A task whose key another living task has is refused, and nothing of it is written.
func TestQueue_Apply_KeyTaken(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		typ := scripted(f)
		dead := f.enqueue(typ.New(script{"die"}, taskbox.Key("k")))
		f.drain()
		f.enqueue(typ.New(script{"step:a"}, taskbox.Key("k"), taskbox.Delay(time.Hour)))
		r := f.apply(f.plan(taskbox.Filter{Status: "dead_letter"}, taskbox.DoReplay), taskbox.BulkOptions{})
		wantErr(f, r.Tasks[0].Err, taskbox.ErrConflict)
		f.wantTrail(dead, "picked processing failed dead_letter")
		f.wantStatus(dead, "dead_letter")
	})
}

func TestQueue_Apply_Verdict(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		typ := scripted(f, taskbox.TypeOptions{Timeout: time.Second, MaxAttempts: 1})
		success := f.enqueue(typ.New(script{"step:a"}))
		unknown := f.enqueue(typ.New(script{"slow", "step:a"}))
		f.enqueue(typ.New(script{"die", "step:a"}))
		f.drain()
		p := f.plan(taskbox.Filter{}, taskbox.DoReplay)
		r := f.apply(p, taskbox.BulkOptions{})
		if want := [4]int{1, 0, 2, 0}; figures(r) != want {
			f.Fatalf("done, refused, skipped, left: %v, want %v", figures(r), want)
		}
		if !strings.Contains(r.Tasks[0].Skipped, "it has succeeded") || !strings.Contains(r.Tasks[1].Skipped, "with a timeout") {
			f.Errorf("the reasons: %+v", r.Tasks)
		}
		f.wantStatus(unknown, "dead_letter")
		r = f.apply(f.plan(taskbox.Filter{}, taskbox.DoReplay), taskbox.BulkOptions{AcceptRisk: true})
		if r.Done != 1 || r.Skipped != 1 || r.Refused != 1 {
			f.Errorf("with accepted risk: %+v", r)
		}
		f.wantInt(1, `select count(*) from task_audit where task_id = ? and detail ->> '$.verdict' = 'unknown' and detail ->> '$.accepted_risk' is not null`, unknown)
		f.wantStatus(success, "success")
	})
}

func TestQueue_Apply_Operations(t *testing.T) {
	for _, c := range []struct {
		action taskbox.Action
		filter taskbox.Filter
		status string
		event  string
	}{
		{taskbox.Action{Do: taskbox.DoSkip}, taskbox.Filter{Status: "dead_letter"}, "skipped", "skipped"},
		{taskbox.Action{Do: taskbox.DoCancel}, taskbox.Filter{Status: "scheduled"}, "cancelled", "cancelled"},
		{taskbox.Action{Do: taskbox.DoRunNow}, taskbox.Filter{Status: "scheduled"}, "pending", "run_now"},
		{taskbox.Action{Do: taskbox.DoResolve, As: "refunded"}, taskbox.Filter{Status: "dead_letter"}, "dead_letter", "resolved"},
	} {
		t.Run(string(c.action.Do), func(t *testing.T) {
			bubble(t, taskbox.Options{}, func(f *fixture) {
				typ := scripted(f)
				bury(f, typ, 60, "step:a")
				for range 60 {
					f.enqueue(typ.New(script{"step:a"}, taskbox.Delay(time.Hour)))
				}
				p, err := f.q.Plan(f.Context(), c.filter, c.action)
				if err != nil {
					f.Fatal(err)
				}
				if r := f.apply(p, taskbox.BulkOptions{}); r.Done != 60 {
					f.Fatalf("done: %d, want 60: %+v", r.Done, r)
				}
				f.wantInt(60, `select count(*) from task_outbox where status = ? and exists (
					select 1 from task_audit where task_id = id and event = ? and actor = 'ann')`, c.status, c.event)
			})
		})
	}
}

func TestQueue_Apply_PerSecond(t *testing.T) {
	for _, perSecond := range []int{1, 10, 400} {
		bubble(t, taskbox.Options{}, func(f *fixture) {
			bury(f, scripted(f), 60, "step:a")
			start := time.Now()
			f.apply(f.plan(taskbox.Filter{}, taskbox.DoReplay), taskbox.BulkOptions{PerSecond: perSecond})
			// The last step needs no pause after it.
			if took, want := time.Since(start), time.Duration(60-max(1, perSecond/20))*time.Second/time.Duration(perSecond); !near(took, want) {
				f.Errorf("%d a second: 60 took %v, want %v", perSecond, took, want)
			}
		})
	}
}

func TestQueue_Apply_Canary(t *testing.T) {
	for _, c := range []struct {
		next    string
		done    int
		stopped string
	}{
		{"step:a", 10, ""},
		{"die", 1, "the canary, task 1, is dead_letter: bad"},
	} {
		bubble(t, taskbox.Options{}, func(f *fixture) {
			bury(f, scripted(f), 10, c.next)
			f.run()
			r := f.apply(f.plan(taskbox.Filter{}, taskbox.DoReplay), taskbox.BulkOptions{Canary: true})
			if r.Done != c.done || r.Left != 10-c.done || r.Stopped != c.stopped {
				f.Errorf("%s: got %+v, want %d done, %q", c.next, r, c.done, c.stopped)
			}
		})
	}
}

// Nobody runs the canary: Apply waits until ctx ends.
func TestQueue_Apply_CanaryWaits(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		bury(f, scripted(f), 10, "step:a")
		p := f.plan(taskbox.Filter{}, taskbox.DoReplay)
		ctx, cancel := context.WithTimeout(f.Context(), time.Minute)
		defer cancel()
		r, err := f.q.Apply(ctx, p, ann, taskbox.BulkOptions{Canary: true})
		wantErr(f, err, context.DeadlineExceeded)
		if r.Done != 1 || r.Left != 9 {
			f.Errorf("got %+v", r)
		}
		f.wantInt(1, `select detail ->> '$.done' from task_audit where task_id = 0`)
	})
}

func TestQueue_Apply_StopAfter(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		bury(f, scripted(f), 40, "die")
		f.run()
		r := f.apply(f.plan(taskbox.Filter{}, taskbox.DoReplay), taskbox.BulkOptions{PerSecond: 10, StopAfter: 3})
		if r.FailedAgain != 3 || r.Done > 6 || !strings.HasPrefix(r.Stopped, "3 failures") {
			f.Errorf("tasks that fail again: %+v", r)
		}
		p := f.plan(taskbox.Filter{Status: "dead_letter"}, taskbox.DoSkip)
		for i := range p.Tasks {
			p.Tasks[i].Version--
		}
		r = f.apply(p, taskbox.BulkOptions{StopAfter: 3, PerSecond: 20})
		if r.Refused != 3 || r.Left == 0 {
			f.Errorf("tasks that are refused: %+v", r)
		}
	})
}

func TestQueue_Apply_Cancelled(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		bury(f, scripted(f), 30, "step:a")
		p := f.plan(taskbox.Filter{}, taskbox.DoReplay)
		ctx, cancel := context.WithTimeout(f.Context(), 950*time.Millisecond)
		defer cancel()
		r, err := f.q.Apply(ctx, p, ann, taskbox.BulkOptions{PerSecond: 10})
		wantErr(f, err, context.DeadlineExceeded)
		if want := [4]int{10, 0, 0, 20}; figures(r) != want || !strings.Contains(r.Stopped, "10 of 30 tasks done") {
			f.Errorf("done, refused, skipped, left: %v, want %v: %s", figures(r), want, r.Stopped)
		}
		f.wantInt(10, `select count(*) from task_outbox where status = 'pending'`)
		f.wantInt(10, `select count(*) from task_audit where event = 'replayed'`)
		f.wantInt(10, `select detail ->> '$.done' from task_audit where task_id = 0`)
	})
}

// Ten thousand tasks at once, while the application writes: none of its writes waits
// for long.
func TestQueue_Apply_10000(t *testing.T) {
	f := open(t, taskbox.Options{})
	f.exec(`create table app (at integer)`)
	f.exec(`insert into task_outbox (event_type, payload, next_run_at)
with recursive n(i) as (select 1 union all select i + 1 from n where i < 10000) select 'a', '1', 9e12 from n`)
	p := f.plan(taskbox.Filter{}, taskbox.DoCancel)
	other := plainDB(t, f.path, "_pragma=busy_timeout(5000)") // as another process
	ctx, cancel := context.WithCancel(t.Context())
	waits := make(chan []time.Duration)
	go func() {
		var all []time.Duration
		for ctx.Err() == nil {
			start := time.Now()
			if _, err := other.ExecContext(t.Context(), `insert into app values (1)`); err != nil {
				t.Error(err)
			}
			all = append(all, time.Since(start))
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Millisecond):
			}
		}
		waits <- all
	}()
	start := time.Now()
	r := f.apply(p, taskbox.BulkOptions{})
	took := time.Since(start)
	cancel()
	all := sorted(<-waits, func(a, b time.Duration) bool { return a < b })
	t.Logf("%d done in %v; %d writes beside: p50 %v, p95 %v, longest %v", r.Done, took, len(all), all[len(all)/2], all[len(all)*95/100], all[len(all)-1])
	if r.Done != 10_000 || len(r.Tasks) != 10_000 {
		t.Errorf("done: %d, results: %d, want 10,000", r.Done, len(r.Tasks))
	}
	if longest := all[len(all)-1]; longest > 2*time.Second {
		t.Errorf("a write of the application waited %v", longest)
	}
	f.wantInt(10_000, `select count(*) from task_audit where task_id > 0 and actor = 'ann' and detail ->> '$.plan' = ?`, p.ID)
}
