package taskbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/taskbox-go/taskbox"
)

// newLogger returns a logger to l.
func newLogger(l *logs) *slog.Logger { return slog.New(l) }

var errDown = errors.New("the downstream is down")

// failing registers a type whose tasks always fail with err.
func (f *fixture) failing(name string, err error, o ...taskbox.TypeOptions) *taskbox.Type[string] {
	typ := taskbox.NewType[string](name, o...)
	typ.Handle(f.q, func(context.Context, *taskbox.Task[string]) error { return err })
	return typ
}

// waited returns the times between the failures of a task and its next attempts.
func (f *fixture) waited(id int64) (ds []time.Duration) {
	f.Helper()
	for n := range len(f.rows(`select 1 from task_trail where task_id = ? and event = 'retry_wait'`, id)) {
		ds = append(ds, f.eventTime(id, "picked", n+1).Sub(f.eventTime(id, "retry_wait", n)))
	}
	return ds
}

func (f *fixture) wantWaits(id int64, want ...time.Duration) {
	f.Helper()
	got := f.waited(id)
	if len(got) != len(want) {
		f.Fatalf("task %d was retried after %v, want %v; trail: %s", id, got, want, f.trail(id))
	}
	for i := range got {
		if !near(got[i], want[i]) {
			f.Errorf("task %d: retry %d came after %v, want %v ± 10 %%", id, i+1, got[i], want[i])
		}
	}
}

func TestQueue_Run_Tiers(t *testing.T) {
	bubble(t, taskbox.Options{PollInterval: 10 * time.Second, Lease: 5 * time.Minute}, func(f *fixture) {
		typ := f.failing("order", errDown)
		id := f.enqueue(typ.New("x", taskbox.TraceID("trace")))
		var more []int64
		for range 10 {
			more = append(more, f.enqueue(typ.New("y")))
		}
		f.run()
		time.Sleep(2 * time.Hour)
		synctest.Wait()

		var b strings.Builder
		for _, row := range f.rows(`select event, coalesce(attempt, '-'), at - (select created_at from task_outbox where id = ?1), coalesce(detail, '')
			from task_trail where task_id = ?1`, id) {
			b.WriteString(row + "\n")
		}
		golden(f.T, "trail_tiers.txt", b.String())

		spread := map[time.Duration]bool{}
		for _, id := range append(more, id) {
			f.wantWaits(id, 30*time.Second, 2*time.Minute, 10*time.Minute, time.Hour)
			f.wantStatus(id, "dead_letter")
			spread[f.waited(id)[3]] = true
		}
		if len(spread) < 6 {
			f.Errorf("the last retries of 11 tasks came after %d different waits", len(spread))
		}
		f.wantInt(0, `select count(*) from task_outbox where retry_count <> 4 or attempt <> 5 or owner is not null
			or lease_until is not null or finished_at is null or last_error <> 'the downstream is down'`)
	})
}

func TestQueue_Run_Schedules(t *testing.T) {
	const s, m = time.Second, time.Minute
	bubble(t, taskbox.Options{Schedule: taskbox.Tiers(5*s, 10*s), PollInterval: 5 * s}, func(f *fixture) {
		for _, tt := range []struct {
			name string
			typ  taskbox.TypeOptions
			task []taskbox.EnqueueOption
			want []time.Duration
		}{
			{"queue's", taskbox.TypeOptions{}, nil, []time.Duration{5 * s, 10 * s}},
			{"type's", taskbox.TypeOptions{Schedule: taskbox.Tiers(m, 2*m, 3*m)}, nil, []time.Duration{m, 2 * m, 3 * m}},
			{"exponential", taskbox.TypeOptions{Schedule: taskbox.Exponential{Base: s, Factor: 3, Max: 20 * s, Retries: 4}}, nil, []time.Duration{s, 3 * s, 9 * s, 20 * s}},
			{"type's attempts", taskbox.TypeOptions{MaxAttempts: 2}, nil, []time.Duration{5 * s}},
			{"type's attempts, more than tiers", taskbox.TypeOptions{MaxAttempts: 5}, nil, []time.Duration{5 * s, 10 * s, 10 * s, 10 * s}},
			{"task's attempts", taskbox.TypeOptions{MaxAttempts: 2}, []taskbox.EnqueueOption{taskbox.MaxAttempts(3)}, []time.Duration{5 * s, 10 * s}},
			{"task's attempts, more than tiers", taskbox.TypeOptions{}, []taskbox.EnqueueOption{taskbox.MaxAttempts(5)}, []time.Duration{5 * s, 10 * s, 10 * s, 10 * s}},
			{"one attempt", taskbox.TypeOptions{}, []taskbox.EnqueueOption{taskbox.MaxAttempts(1)}, nil},
		} {
			typ := f.failing(tt.name, errDown, tt.typ)
			id := f.enqueue(typ.New("", tt.task...))
			stop := f.run()
			time.Sleep(10 * time.Minute)
			stop()
			f.Log(tt.name)
			f.wantWaits(id, tt.want...)
			f.wantStatus(id, "dead_letter")
			f.wantInt(1, `select detail ->> 'cause' = ? from task_audit where task_id = ? and event = 'dead_letter'`,
				fmt.Sprintf("failed %d times", len(tt.want)+1), id)
		}
	})
}

func TestQueue_Run_MaxAttemptsOfTheQueue(t *testing.T) {
	bubble(t, taskbox.Options{MaxAttempts: 2, PollInterval: 20 * time.Second, Lease: time.Minute}, func(f *fixture) {
		own := taskbox.TypeOptions{Schedule: taskbox.Tiers(time.Second, time.Second)}
		for name, tt := range map[string]struct {
			typ  taskbox.TypeOptions
			task []taskbox.EnqueueOption
			want int64
		}{
			"queue's":                       {want: 2},
			"type's":                        {typ: taskbox.TypeOptions{MaxAttempts: 3}, want: 3},
			"task's":                        {typ: taskbox.TypeOptions{MaxAttempts: 3}, task: []taskbox.EnqueueOption{taskbox.MaxAttempts(1)}, want: 1},
			"a type's schedule counts more": {typ: own, want: 3},
		} {
			id := f.enqueue(f.failing(name, errDown, tt.typ).New("", tt.task...))
			stop := f.run()
			time.Sleep(20 * time.Minute)
			stop()
			f.Log(name)
			f.wantInt(tt.want, `select count(*) from task_audit where event = 'picked' and task_id = ?`, id)
			f.wantStatus(id, "dead_letter")
		}
	})
}

type badParameter struct{}

func (badParameter) Error() string   { return "bad parameter" }
func (badParameter) Permanent() bool { return true }

func TestQueue_Run_Outcomes(t *testing.T) {
	const retried = "picked processing retry_wait"
	const dead = "picked processing failed dead_letter"
	for _, tt := range []struct {
		name  string
		err   error
		trail string
		class string // of the last event but dead_letter
	}{
		{"success", nil, "picked processing success", ""},
		{"unknown", errors.New("who knows"), retried, "unclassified"},
		{"network", &net.OpError{Op: "dial", Err: io.EOF}, retried, "retryable"},
		{"deadline", fmt.Errorf("call: %w", context.DeadlineExceeded), retried, "retryable"},
		{"503", &taskbox.StatusError{Code: 503}, retried, "retryable"},
		{"400", &taskbox.StatusError{Code: 400}, dead, "permanent"},
		{"validation", fmt.Errorf("order 7: %w", badParameter{}), dead, "permanent"},
		{"permanent", taskbox.Permanent(errDown), dead, "permanent"},
		{"permanent, wrapped", fmt.Errorf("call: %w", taskbox.Permanent(errDown)), dead, "permanent"},
		{"permanent, joined", errors.Join(errDown, taskbox.Permanent(errDown)), dead, "permanent"},
		{"retryable", taskbox.Retryable(badParameter{}), retried, "retryable"},
		{"invalid draft enqueued", taskbox.ErrInvalid, dead, "permanent"},
		{"skip", taskbox.Skip("cancelled by the customer"), "picked processing skipped", ""},
		{"snooze", taskbox.Snooze(time.Hour), "picked processing scheduled", ""},
		{"nil pointer as an error", (*fs.PathError)(nil), retried, "unclassified"},
		{"nil pointer as an error, wrapped", fmt.Errorf("call: %w", (*url.Error)(nil)), retried, "unclassified"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, taskbox.Options{}, func(f *fixture) {
				if strings.HasPrefix(tt.name, "nil pointer") { // on a worker it'd end the process
					defer func() {
						if v := recover(); v != nil {
							f.Fatalf("it panics outside the handler: %v", v)
						}
					}()
					f.q.Judge(tt.err)
				}
				id := f.enqueue(f.failing("x", tt.err).New(""))
				f.drain()
				f.wantTrail(id, tt.trail)
				f.wantInt(1, `select max(coalesce(detail ->> 'class', '')) = ? from task_audit where task_id = ?`, tt.class, id)
				f.wantInt(0, `select count(*) from task_outbox where owner is not null or lease_until is not null`)
			})
		})
	}
}

func TestQueue_Run_TrailOfAFailure(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		err := fmt.Errorf("charge: %w", &net.OpError{Op: "dial", Net: "tcp", Err: errDown})
		id := f.enqueue(f.failing("x", err).New(""))
		f.drain()
		var got struct {
			Error, Class string
			Types        []string
			Next         int64 `json:"next_run_at"`
		}
		detail := f.one(`select detail from task_audit where task_id = ? and event = 'retry_wait'`, id)
		if err := json.Unmarshal([]byte(detail), &got); err != nil {
			f.Fatal(err)
		}
		want := got
		want.Error, want.Class = "charge: dial tcp: the downstream is down", "unclassified"
		want.Types = []string{"*fmt.wrapError", "*net.OpError", "*errors.errorString"}
		want.Next = f.int(`select next_run_at from task_outbox`)
		if diff := gocmp.Diff(want, got); diff != "" {
			f.Errorf("detail (-want +got):\n%s", diff)
		}
	})
}

// An error of any size and bytes leaves a trail that can be read.
func TestQueue_Run_StrangeErrors(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		long := f.enqueue(f.failing("long", errors.New(strings.Repeat("ü", 100_000))).New(""))
		bad := f.enqueue(f.failing("bad", errors.New("a\x00b\xffc")).New(""))
		panics := f.enqueue(f.failing("panics", errorFunc(func() string { panic("in Error") })).New(""))
		f.drain()
		for _, id := range []int64{long, bad, panics} {
			f.wantTrail(id, "picked processing retry_wait")
			f.wantInt(1, `select json_valid(detail) and length(detail) < 20000 from task_audit where task_id = ? and event = 'retry_wait'`, id)
			f.wantInt(1, `select length(last_error) between 1 and 10000 from task_outbox where id = ?`, id)
		}
	})
}

type errorFunc func() string

func (f errorFunc) Error() string { return f() }

func TestQueue_Run_RetryAfter(t *testing.T) {
	bubble(t, taskbox.Options{PollInterval: time.Minute}, func(f *fixture) {
		later := f.enqueue(f.failing("later", taskbox.RetryAfter(errDown, 10*time.Minute)).New(""))
		sooner := f.enqueue(f.failing("sooner", taskbox.RetryAfter(errDown, time.Second)).New(""))
		status := f.enqueue(f.failing("status", &taskbox.StatusError{Code: 429, RetryAfter: 5 * time.Minute}).New(""))
		year := f.enqueue(f.failing("year", taskbox.RetryAfter(errDown, 365*24*time.Hour)).New(""))
		stop := f.run()
		time.Sleep(12 * time.Minute)
		stop()
		first := func(id int64, low, high time.Duration) {
			f.Helper()
			d := time.Duration(f.int(`select (detail ->> 'next_run_at') - at from task_audit where task_id = ? and event = 'retry_wait' order by seq limit 1`, id)) * time.Millisecond
			if d < low || d > high {
				f.Errorf("task %d: the first retry comes after %v, want %v to %v", id, d, low, high)
			}
		}
		first(later, 10*time.Minute, 11*time.Minute)
		first(sooner, 27*time.Second, 33*time.Second)
		first(status, 5*time.Minute, 5*time.Minute+30*time.Second)
		first(year, taskbox.MaxRetryAfter, taskbox.MaxRetryAfter*11/10)
		f.wantInt(2, `select count(*) from task_audit where task_id = ? and event = 'picked'`, later)
	})
}

func TestQueue_Run_Snooze(t *testing.T) {
	bubble(t, taskbox.Options{PollInterval: 30 * time.Second}, func(f *fixture) {
		typ := taskbox.NewType[string]("x", taskbox.TypeOptions{MaxAttempts: 2})
		var attempts, retries []int
		typ.Handle(f.q, func(_ context.Context, task *taskbox.Task[string]) error {
			attempts, retries = append(attempts, task.Attempt), append(retries, task.Retry)
			switch n := len(attempts); {
			case n <= 20:
				return taskbox.Snooze(5 * time.Minute)
			case n == 21:
				return errDown
			}
			return nil
		})
		id := f.enqueue(typ.New(""))
		stop := f.run()
		time.Sleep(101*time.Minute + 30*time.Second)
		stop()
		f.wantStatus(id, "success")
		f.wantInt(1, `select retry_count from task_outbox`)
		f.wantInt(2, `select attempt from task_outbox`)
		if len(attempts) != 22 || attempts[20] != 1 || attempts[21] != 2 || retries[20] != 0 || retries[21] != 1 {
			f.Errorf("attempts %v, retries %v", attempts, retries)
		}
		if d := f.eventTime(id, "picked", 1).Sub(f.eventTime(id, "scheduled", 0)); d < 5*time.Minute || d > 5*time.Minute+time.Second {
			f.Errorf("it came back after %v, want 5 minutes", d)
		}
	})
}

// A handler that always snoozes for nothing doesn't spin.
func TestQueue_Run_SnoozeZero(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		f.enqueue(f.failing("x", taskbox.Snooze(0)).New(""))
		f.run()
		time.Sleep(10 * time.Second)
		synctest.Wait()
		if n := f.int(`select count(*) from task_audit where event = 'picked'`); n < 50 || n > 101 {
			f.Errorf("%d attempts in 10 s, want 100", n)
		}
	})
}

func TestQueue_Run_Panic(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		typ := taskbox.NewType[string]("x")
		typ.Handle(f.q, func(_ context.Context, task *taskbox.Task[string]) error {
			switch task.Payload {
			case "text":
				panicDeepDown("the value")
			case "permanent":
				panic(taskbox.Permanent(errDown))
			case "nil":
				panic(nil)
			case "runtime":
				_ = []int{}[len(task.Payload)]
			}
			return nil
		})
		text, permanent := f.enqueue(typ.New("text")), f.enqueue(typ.New("permanent"))
		null, fault, good := f.enqueue(typ.New("nil")), f.enqueue(typ.New("runtime")), f.enqueue(typ.New("good"))
		f.drain()
		f.wantTrail(text, "picked processing retry_wait")
		f.wantTrail(permanent, "picked processing failed dead_letter")
		f.wantTrail(null, "picked processing retry_wait")
		f.wantTrail(fault, "picked processing retry_wait")
		f.wantTrail(good, "picked processing success")
		f.wantInt(1, `select detail ->> 'error' = 'panic: the value' and instr(detail ->> 'stack', 'panicDeepDown') > 0
			from task_audit where task_id = ? and event = 'retry_wait'`, text)
		f.wantInt(1, `select instr(detail ->> 'stack', 'poller_retry_test.go') > 0
			from task_audit where task_id = ? and event = 'failed'`, permanent)
	})
}

func panicDeepDown(v any) { panic(v) }

func TestQueue_Run_Goexit(t *testing.T) {
	bubble(t, taskbox.Options{Workers: 2}, func(f *fixture) {
		typ := taskbox.NewType[int]("x", taskbox.TypeOptions{MaxAttempts: 1})
		typ.Handle(f.q, func(_ context.Context, task *taskbox.Task[int]) error {
			if task.Payload%2 == 0 {
				runtime.Goexit()
			}
			return nil
		})
		for i := range 50 {
			f.enqueue(typ.New(i))
		}
		f.drain()
		f.wantInt(25, `select count(*) from task_outbox where status = 'success'`)
		f.wantInt(25, `select count(*) from task_outbox where status = 'dead_letter' and last_error like '%Goexit%'`)
	})
}

type picky struct{ N int8 }

type grenade struct{}

func (*grenade) UnmarshalJSON([]byte) error { panic("in UnmarshalJSON") }

type leaver struct{}

func (*leaver) UnmarshalJSON([]byte) error { runtime.Goexit(); return nil }

func TestQueue_Run_Undecodable(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		called := func(name string) {
			f.Errorf("the handler of %s was called", name)
		}
		taskbox.NewType[picky]("picky").Handle(f.q, func(context.Context, *taskbox.Task[picky]) error { called("picky"); return nil })
		taskbox.NewType[grenade]("grenade").Handle(f.q, func(context.Context, *taskbox.Task[grenade]) error { called("grenade"); return nil })
		taskbox.NewType[leaver]("leaver").Handle(f.q, func(context.Context, *taskbox.Task[leaver]) error { called("leaver"); return nil })
		for _, insert := range []string{`('picky', '"text"')`, `('picky', '{"N":1000}')`, `('picky', '[]')`, `('grenade', '{}')`} {
			f.exec(`insert into task_outbox(event_type, payload) values ` + insert)
		}
		f.drain()
		for id := range int64(4) {
			f.wantTrail(id+1, "picked failed dead_letter")
			f.wantInt(1, `select detail ->> 'class' = 'permanent' and detail ->> 'cause' = 'payload can''t be decoded'
				from task_audit where task_id = ? and event = 'failed'`, id+1)
		}
		f.wantInt(1, `select instr(detail ->> 'stack', 'UnmarshalJSON') > 0 from task_audit where task_id = 4 and event = 'failed'`)
		// Nothing was running, so that there is no time that it ran.
		f.wantInt(0, `select sum(run_ms) from task_stats`)

		f.exec(`insert into task_outbox(event_type, payload) values ('leaver', '{}')`)
		f.drain()
		f.wantInt(0, `select count(*) from task_audit where at < 946684800000`) // 2000, when bubbles begin
		if ms := f.int(`select sum(run_ms) from task_stats`); ms > 1000 {
			f.Errorf("attempts took %d ms", ms)
		}
	})
}

func TestQueue_Run_Timeout(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		heeds := taskbox.NewType[string]("heeds", taskbox.TypeOptions{Timeout: 3 * time.Second})
		heeds.Handle(f.q, func(ctx context.Context, _ *taskbox.Task[string]) error {
			<-ctx.Done()
			return fmt.Errorf("wait: %w", ctx.Err())
		})
		late := taskbox.NewType[string]("late", taskbox.TypeOptions{Timeout: 3 * time.Second})
		late.Handle(f.q, func(ctx context.Context, _ *taskbox.Task[string]) error {
			time.Sleep(5 * time.Second)
			return nil // it has done its work all the same
		})
		var has sync.Map
		deadline := func(name string, o taskbox.TypeOptions) *taskbox.Type[string] {
			typ := taskbox.NewType[string](name, o)
			typ.Handle(f.q, func(ctx context.Context, _ *taskbox.Task[string]) error {
				d, ok := ctx.Deadline()
				has.Store(name, map[bool]time.Duration{true: time.Until(d)}[ok])
				return nil
			})
			return typ
		}
		a, b := f.enqueue(heeds.New("")), f.enqueue(late.New(""))
		f.enqueue(deadline("default", taskbox.TypeOptions{}).New(""))
		f.enqueue(deadline("none", taskbox.TypeOptions{Timeout: -1}).New(""))
		stop := f.run()
		time.Sleep(10 * time.Second)
		stop()
		f.wantTrail(a, "picked processing retry_wait")
		f.wantInt(1, `select detail ->> 'class' = 'retryable' from task_audit where event = 'retry_wait'`)
		if d := f.eventTime(a, "retry_wait", 0).Sub(f.eventTime(a, "processing", 0)); d != 3*time.Second {
			f.Errorf("it timed out after %v, want 3 s", d)
		}
		f.wantTrail(b, "picked processing success")
		for name, want := range map[string]time.Duration{"default": time.Minute, "none": 0} {
			if got, _ := has.Load(name); got != want {
				f.Errorf("deadline of %s in %v, want %v", name, got, want)
			}
		}
	})
}

func TestQueue_Run_Classify(t *testing.T) {
	classify := func(err error) taskbox.Class {
		switch {
		case strings.Contains(err.Error(), "panic"):
			panic("in Classify")
		case errors.Is(err, errDown):
			return taskbox.ClassPermanent
		case errors.Is(err, badParameter{}):
			return taskbox.ClassRetryable
		}
		return taskbox.Unclassified
	}
	bubble(t, taskbox.Options{Classify: classify}, func(f *fixture) {
		for name, tt := range map[string]struct {
			err   error
			trail string
		}{
			"permanent":                {errDown, "picked processing failed dead_letter"},
			"retryable":                {badParameter{}, "picked processing retry_wait"},
			"the table":                {&taskbox.StatusError{Code: 404}, "picked processing failed dead_letter"},
			"unknown":                  {io.ErrNoProgress, "picked processing retry_wait"},
			"the handler's word first": {taskbox.Retryable(errDown), "picked processing retry_wait"},
			"panics":                   {errors.New("panic"), "picked processing retry_wait"},
		} {
			id := f.enqueue(f.failing(name, tt.err).New(""))
			f.drain()
			f.Log(name)
			f.wantTrail(id, tt.trail)
		}
	})
}

// logs is a slog.Handler that keeps what it is given.
type logs struct {
	mu      sync.Mutex
	records []map[string]string // mu
}

func (l *logs) Enabled(context.Context, slog.Level) bool { return true }
func (l *logs) WithAttrs([]slog.Attr) slog.Handler       { return l }
func (l *logs) WithGroup(string) slog.Handler            { return l }
func (l *logs) Handle(_ context.Context, r slog.Record) error {
	m := map[string]string{"level": r.Level.String(), "msg": r.Message}
	r.Attrs(func(a slog.Attr) bool { m[a.Key] = a.Value.String(); return true })
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records = append(l.records, m)
	return nil
}

// of returns the records of a task.
func (l *logs) of(id int64) (ms []map[string]string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, m := range l.records {
		if m["task"] == fmt.Sprint(id) {
			ms = append(ms, m)
		}
	}
	return ms
}

func TestQueue_Run_Logs(t *testing.T) {
	l := new(logs)
	bubble(t, taskbox.Options{Logger: newLogger(l), Schedule: taskbox.Tiers(time.Minute)}, func(f *fixture) {
		typ := f.failing("order", errDown)
		id := f.enqueue(typ.New("secret", taskbox.TraceID("trace"), taskbox.Delay(time.Second)))
		bad := f.enqueue(f.failing("bad", taskbox.Permanent(errDown)).New("secret"))
		taskbox.NewType[picky]("picky").Handle(f.q, func(context.Context, *taskbox.Task[picky]) error { return nil })
		f.exec(`insert into task_outbox(event_type, payload) values ('picky', '{"N":4111111111111111}')`)
		stop := f.run()
		time.Sleep(5 * time.Minute)
		stop()

		want := []map[string]string{
			{"level": "DEBUG", "msg": "taskbox: queued"},
			{"level": "DEBUG", "msg": "taskbox: picked", "attempt": "1"},
			{"level": "DEBUG", "msg": "taskbox: processing", "attempt": "1"},
			{"level": "WARN", "msg": "taskbox: retry_wait", "attempt": "1", "error": errDown.Error(), "class": "unclassified", "next": ""},
			{"level": "DEBUG", "msg": "taskbox: queued"},
			{"level": "DEBUG", "msg": "taskbox: picked", "attempt": "2"},
			{"level": "DEBUG", "msg": "taskbox: processing", "attempt": "2"},
			{"level": "WARN", "msg": "taskbox: failed", "attempt": "2", "error": errDown.Error(), "class": "unclassified", "cause": "failed 2 times"},
			{"level": "ERROR", "msg": "taskbox: dead_letter", "attempt": "2", "cause": "failed 2 times"},
		}
		got := l.of(id)
		for _, m := range want {
			m["task"], m["type"], m["trace"] = fmt.Sprint(id), "order", "trace"
		}
		if len(got) > 3 {
			want[3]["next"] = got[3]["next"]
			if next, err := time.Parse("2006-01-02 15:04:05.999999999 -0700 MST", want[3]["next"]); err != nil || next.Year() != 2000 {
				f.Errorf("next is %q, want a time", want[3]["next"])
			}
		}
		if diff := gocmp.Diff(want, got); diff != "" {
			f.Errorf("records (-want +got):\n%s", diff)
		}
		for _, id := range []int64{id, bad, bad + 1} {
			if n := int64(len(l.of(id))); n == 0 || n != f.int(`select count(*) from task_audit where task_id = ?`, id) {
				f.Errorf("task %d: %d records for the trail %s", id, n, f.trail(id))
			}
		}
	})
	for _, m := range l.records {
		for k, v := range m {
			if strings.Contains(v, "secret") || strings.Contains(v, "4111") {
				t.Errorf("the payload is in the log: %s=%q of %v", k, v, m)
			}
		}
	}
}

func TestQueue_Run_Task(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		type order struct {
			ID   int
			Tags []string
		}
		typ := taskbox.NewType[order]("order")
		var got []taskbox.Task[order]
		typ.Handle(f.q, func(_ context.Context, task *taskbox.Task[order]) error {
			got = append(got, *task)
			if len(got) == 1 {
				return errDown
			}
			return nil
		})
		id := f.enqueue(typ.New(order{7, []string{"a"}}, taskbox.Key("k"), taskbox.Group("g"), taskbox.TraceID("t")))
		stop := f.run()
		time.Sleep(time.Minute)
		stop()
		first := taskbox.Task[order]{ID: id, Type: "order", Payload: order{7, []string{"a"}}, Attempt: 1, Key: "k", Group: "g", TraceID: "t",
			CreatedAt: time.UnixMilli(f.int(`select created_at from task_outbox`))}
		second := first
		second.Attempt, second.Retry = 2, 1
		if diff := gocmp.Diff([]taskbox.Task[order]{first, second}, got, cmpopts.IgnoreUnexported(taskbox.Task[order]{})); diff != "" {
			f.Errorf("tasks (-want +got):\n%s", diff)
		}
	})
}
