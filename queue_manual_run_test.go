package taskbox_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

// A replay begins another run at the first tier; the runs before stay on the trail.
func TestQueue_Replay(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		id := m.enqueue(m.typ.New("retry", taskbox.MaxAttempts(3)))
		for range 3 {
			m.later()
		}
		m.wantStatus(id, "dead_letter")
		const run = "picked processing retry_wait queued picked processing retry_wait queued picked processing failed dead_letter"
		m.wantTrail(id, run)
		m.ok(m.q.Resolve(m.Context(), id, "wrongly", byAnn))
		m.ok(m.q.Replay(m.Context(), id, byAnn))
		m.wantInt(0, `select retry_count + lost_count + (last_error is not null) + (resolved_as is not null) + (finished_at is not null) from task_outbox where id = ?`, id)
		m.drain()
		first := m.int(`select next_run_at - updated_at from task_outbox where id = ?`, id)
		if d := time.Duration(first) * time.Millisecond; d < 15*time.Second || d > 45*time.Second {
			t.Errorf("the first retry after a replay comes after %v, want the first tier's 30 s", d)
		}
		for range 2 {
			m.later()
		}
		m.wantTrail(id, run+" resolved replayed "+run)
		m.wantInt(6, `select attempt from task_outbox where id = ?`, id)
		m.wantInt(2, `select run from task_outbox where id = ?`, id)
		if n := m.ran.count("step of retry"); n != 1 {
			t.Errorf("the step ran %d times, want once", n)
		}
		m.wantWhole()
	})
}

// An expiry is about the first start, not about what a person asks for.
func TestQueue_Replay_Expired(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		id := m.enqueue(m.typ.New("", taskbox.ExpiresIn(time.Minute)))
		time.Sleep(time.Hour)
		m.drain()
		m.wantStatus(id, "skipped")
		m.ok(m.q.Replay(m.Context(), id, byAnn))
		m.drain()
		m.wantTrail(id, "skipped replayed picked processing success")
		m.wantWhole()
	})
}

// A new payload goes to the handler, and the type stays.
func TestQueue_Replay_WithPayload(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		id := m.end("dead")
		m.ok(m.q.Replay(m.Context(), id, byAnn, taskbox.WithPayload("mended")))
		m.drain()
		m.wantTrail(id, "picked processing failed dead_letter edited replayed picked processing success")
		if diff := gocmp.Diff([]string{"dead", "step of dead", "mended", "step of mended"}, m.ran.all()); diff != "" {
			t.Errorf("ran (-want +got):\n%s", diff)
		}
		if got := m.one(`select event_type, payload from task_outbox`); got != `x|"mended"` {
			t.Errorf("the task is %s", got)
		}
		m.wantWhole()
	})
}

func TestQueue_Replay_At(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		id := m.end("dead")
		m.run()
		at := time.Now().Add(90 * time.Minute)
		m.ok(m.q.Replay(m.Context(), id, byAnn, taskbox.WithPayload(""), taskbox.ReplayAt(at)))
		time.Sleep(89 * time.Minute)
		m.wantStatus(id, "scheduled")
		time.Sleep(2 * time.Minute)
		m.wantTrail(id, "picked processing failed dead_letter edited replayed queued picked processing success")
		if d := m.eventTime(id, "picked", 1).Sub(at); d < 0 || d > 2*time.Second {
			t.Errorf("it was picked %v after its time", d)
		}
		// A time that has passed is now.
		m.ok(m.q.Replay(m.Context(), id, byAnn, risky(taskbox.ReplayAt(time.Now().Add(-time.Hour)))...))
		time.Sleep(5 * time.Second)
		m.wantStatus(id, "success")
		m.wantRefused(taskbox.ErrInvalid, func() error {
			return m.q.Replay(m.Context(), id, byAnn, risky(taskbox.ReplayAt(time.Time{}))...)
		})
		m.wantWhole()
	})
}

// stepper is a type with three steps of each kind in a row, of which it notes the runs.
func (m *manual) stepper(name string, fail func(step string) error) *taskbox.Type[string] {
	m.effects()
	return m.does(name, func(ctx context.Context, task *taskbox.Task[string]) error {
		for _, step := range []string{"s1", "s2", "s3"} {
			_, err := taskbox.Step(ctx, step, func(context.Context) (int, error) {
				defer m.ran.start(step)()
				return 1, fail(step)
			})
			if err != nil {
				return err
			}
			err = taskbox.StepTx(ctx, "tx of "+step, func(ctx context.Context, tx *sql.Tx) error {
				defer m.ran.start("tx of " + step)()
				return fail("tx of " + step)
			})
			if err != nil {
				return err
			}
		}
		return nil
	})
}

// A step and those that began after it are forgotten, however quick they were.
func TestQueue_Replay_FromStep(t *testing.T) {
	all := []string{"s1", "tx of s1", "s2", "tx of s2", "s3", "tx of s3"}
	for i, from := range all {
		t.Run(from, func(t *testing.T) {
			byHand(t, taskbox.Options{}, func(m *manual) {
				typ := m.stepper("steps", func(string) error { return nil })
				id := m.enqueue(typ.New(""))
				m.drain()
				m.ok(m.q.Replay(m.Context(), id, byAnn, risky(taskbox.FromStep(from))...))
				m.drain()
				if diff := gocmp.Diff(append(append([]string{}, all...), all[i:]...), m.ran.all()); diff != "" {
					t.Errorf("steps (-want +got):\n%s", diff)
				}
				m.wantWhole()
			})
		})
	}
}

// In a clock that was put back the order of the steps is that in which they began, too.
func TestQueue_Replay_FromStep_ClockBack(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		var clock wallClock
		m.q = newQueue(m.T, m.db, taskbox.Options{})
		m.q.SetClock(clock.now)
		typ := m.stepper("steps", func(step string) error {
			if step == "s2" {
				clock.jump(-time.Hour)
			}
			return nil
		})
		id := m.enqueue(typ.New(""))
		m.drain()
		m.ok(m.q.Replay(m.Context(), id, byAnn, risky(taskbox.FromStep("s2"))...))
		m.drain()
		if got := strings.Join(m.ran.all()[6:], " "); got != "s2 tx of s2 s3 tx of s3" {
			t.Errorf("again ran %q", got)
		}
	})
}

func TestQueue_Replay_FromStep_ErrNoStep(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		id := m.end("dead")
		m.wantRefused(taskbox.ErrNoStep, func() error {
			err := m.q.Replay(m.Context(), id, byAnn, taskbox.FromStep("b"), taskbox.WithPayload("new"))
			if err != nil && !strings.Contains(err.Error(), "a") {
				t.Errorf("%q doesn't name the steps that there are", err)
			}
			return err
		})
		other := m.enqueue(m.typ.New("skip"))
		m.ok(m.q.Skip(m.Context(), other, byAnn))
		m.wantRefused(taskbox.ErrNoStep, func() error { return m.q.Replay(m.Context(), other, byAnn, taskbox.FromStep("a")) })
	})
}

// Each step that fails can be passed by hand, and what follows runs.
func TestQueue_SkipStep(t *testing.T) {
	for _, step := range []string{"s1", "tx of s1", "s2", "tx of s3"} {
		t.Run(step, func(t *testing.T) {
			byHand(t, taskbox.Options{}, func(m *manual) {
				typ := m.stepper("steps", func(s string) error {
					if s == step {
						return taskbox.Permanent(errEffect)
					}
					return nil
				})
				id := m.enqueue(typ.New(""))
				m.drain()
				m.wantStatus(id, "dead_letter")
				m.ok(m.q.SkipStep(m.Context(), id, step, nil, byAnn))
				m.drain()
				m.wantStatus(id, "success")
				for _, s := range []string{"s1", "tx of s1", "s2", "tx of s2", "s3", "tx of s3"} {
					if n := m.ran.count(s); n != 1 {
						t.Errorf("%s ran %d times, want once", s, n)
					}
				}
				m.wantInt(1, `select count(*) from task_dedupe where state = 'skipped' and name = ?`, step)
				m.wantWhole()
			})
		})
	}
}

// The stand-in is what the step returns, if it fits; if not, the task is a dead letter
// again, and another stand-in helps.
func TestQueue_SkipStep_Result(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		type coupon struct {
			Code string `json:"code"`
			N    int    `json:"n"`
		}
		var got coupon
		var last error
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			got, last = taskbox.Step(ctx, "a", func(context.Context) (coupon, error) {
				return coupon{}, taskbox.Permanent(errEffect)
			})
			return last
		})
		id := f.enqueue(typ.New(""))
		f.drain()
		for _, c := range []struct {
			result any
			want   coupon
			bad    bool
		}{
			{result: "a word", bad: true},
			{result: map[string]any{"n": "seven"}, bad: true},
			{result: coupon{"C", 7}, want: coupon{"C", 7}},
			{result: json.RawMessage(`{"code":"R"}`), want: coupon{Code: "R"}},
			{result: nil},
		} {
			if err := f.q.SkipStep(f.Context(), id, "a", c.result, byAnn, risky()...); err != nil {
				t.Fatal(err)
			}
			f.drain()
			if c.bad {
				f.wantStatus(id, "dead_letter")
				if _, ok := errors.AsType[*taskbox.DecodeError](last); !ok {
					t.Errorf("with %v the error is %v, want a DecodeError", c.result, last)
				}
				continue
			}
			f.wantStatus(id, "success")
			if got != c.want {
				t.Errorf("with %v the step returns %v, want %v", c.result, got, c.want)
			}
		}
		f.wantWhole()
	})
}

func TestQueue_SkipStep_BadResult(t *testing.T) {
	byHand(t, taskbox.Options{MaxPayload: 1000}, func(m *manual) {
		id := m.end("dead")
		for name, c := range map[string]struct {
			result any
			want   error
		}{
			"channel":      {make(chan int), taskbox.ErrInvalid},
			"invalid JSON": {json.RawMessage(`{`), taskbox.ErrInvalid},
			"too large":    {strings.Repeat("x", 1000), taskbox.ErrPayloadTooLarge},
		} {
			m.wantRefused(c.want, func() error { return m.q.SkipStep(m.Context(), id, "a", c.result, byAnn) })
			_ = name
		}
		m.q = newQueue(m.T, m.db, taskbox.Options{})
		m.wantRefused(taskbox.ErrInvalid, func() error {
			return m.q.SkipStep(m.Context(), id, "a", json.RawMessage(strings.Repeat("[", 1500)+strings.Repeat("]", 1500)), byAnn)
		})
	})
}

// A step that waits for its retry can be skipped, too: it isn't a new run.
func TestQueue_SkipStep_RetryWait(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			_, err := taskbox.Step(ctx, "a", func(context.Context) (int, error) { return 0, errEffect })
			return err
		})
		id := f.enqueue(typ.New(""))
		f.drain()
		f.wantStatus(id, "retry_wait")
		if err := f.q.SkipStep(f.Context(), id, "a", 1, byAnn); err != nil {
			t.Fatal(err)
		}
		f.drain()
		f.wantTrail(id, "picked processing retry_wait step_skipped replayed picked processing success")
		f.wantInt(1, `select run from task_outbox`)
		f.wantWhole()
	})
}

// A handler that runs hears of it when its task is cancelled, whoever does it.
func TestQueue_Cancel_Running(t *testing.T) {
	for _, who := range []string{"the same queue", "another queue", "another queue, foreign pools", "another queue, a pool of one", "another queue, all workers busy",
		"the same queue, at once", "another queue, at once", "another queue, foreign pools, at once", "another queue, a pool of one, at once", "another queue, slow polls"} {
		t.Run(who, func(t *testing.T) {
			o := taskbox.Options{Workers: 2}
			if strings.Contains(who, "slow") {
				o.PollInterval = 10 * time.Second
			}
			bubble(t, o, func(f *fixture) {
				m := &manual{fixture: f, release: make(chan struct{})}
				if strings.Contains(who, "pool") {
					m.db = plainDB(f.T, f.path, "_busy_timeout=5000")
					if strings.Contains(who, "one") {
						m.db.SetMaxOpenConns(1)
					}
					m.q = newQueue(f.T, m.db, taskbox.Options{Workers: 2})
				}
				m.typ = m.does("x", m.handle)
				m.run()
				enqueues := m.fixture
				if strings.Contains(who, "at once") { // and nothing wakes the poller
					enqueues = m.again(taskbox.Options{})
				}
				ids := []int64{enqueues.enqueue(m.typ.New("run", taskbox.Group("g"), taskbox.Key("k")))}
				if strings.Contains(who, "busy") {
					ids = append(ids, m.enqueue(m.typ.New("run")), m.enqueue(m.typ.New("run")))
				}
				next := enqueues.enqueue(m.typ.New("next", taskbox.Group("g")))
				if !strings.Contains(who, "at once") {
					time.Sleep(11 * time.Second)
				}
				for m.ran.count("waits") == 0 {
					time.Sleep(time.Millisecond)
				}
				q := m.q
				if strings.Contains(who, "another") {
					q = m.again(taskbox.Options{}).q
				}
				m.ok(q.Cancel(m.Context(), ids[0], byAnn))
				at := time.Now()
				for m.ran.count(taskbox.ErrLeaseLost.Error()) == 0 && time.Since(at) < 10*time.Second {
					time.Sleep(10 * time.Millisecond)
				}
				if d := time.Since(at); d > time.Second+50*time.Millisecond {
					t.Errorf("the handler heard of it after %v, want a second at most", d)
				}
				close(m.release)
				time.Sleep(5 * time.Second)
				if got := m.trail(ids[0]); got != "picked processing cancelled" && (got != "picked cancelled" || !strings.Contains(who, "at once")) {
					t.Errorf("trail of the cancelled task: %s", got)
				}
				m.wantStatus(next, "success")
				m.wantInt(1, `select sum(cancelled) from task_stats`)
				m.wantInt(0, `select count(*) from task_dedupe where kind = 'key'`)
				m.wantWhole()
			})
		})
	}
}

// What the handler of a cancelled task returns isn't recorded.
func TestQueue_Cancel_Outcomes(t *testing.T) {
	for name, outcome := range map[string]error{"success": nil, "error": errEffect, "permanent": taskbox.Permanent(errEffect),
		"snooze": taskbox.Snooze(time.Second), "skip": taskbox.Skip("no need")} {
		t.Run(name, func(t *testing.T) {
			bubble(t, taskbox.Options{}, func(f *fixture) {
				typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
					time.Sleep(time.Minute) // and doesn't hear
					return outcome
				})
				id := f.enqueue(typ.New(""))
				f.run()
				time.Sleep(time.Second)
				if err := f.q.Cancel(f.Context(), id, byAnn); err != nil {
					t.Fatal(err)
				}
				time.Sleep(5 * time.Minute)
				f.wantTrail(id, "picked processing cancelled")
				f.wantStatus(id, "cancelled")
				f.wantInt(0, `select sum(success + retried + dead + skipped) from task_stats`)
				f.wantWhole()
			})
		})
	}
}

// A task that is cancelled and replayed while its handler runs on is run anew, and the
// old handler's outcome doesn't end it.
func TestQueue_Cancel_Replay(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var r record
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			defer r.start(fmt.Sprint("attempt ", task.Attempt))()
			time.Sleep(time.Minute) // and doesn't hear
			if task.Attempt == 1 {
				return taskbox.Permanent(errEffect)
			}
			return nil
		})
		id := f.enqueue(typ.New(""))
		f.run()
		time.Sleep(time.Second)
		err := errors.Join(f.q.Cancel(f.Context(), id, byAnn), f.q.Replay(f.Context(), id, byAnn, risky()...))
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(5 * time.Minute)
		f.wantTrail(id, "picked processing cancelled replayed picked processing success")
		f.wantWhole()
	})
}

// A replayed task of a group waits for the one that runs, in whatever way that goes on.
func TestQueue_Replay_Group(t *testing.T) {
	for _, c := range []struct {
		name string
		end  error // of the one that runs
		o    []taskbox.ManualOption
	}{
		{"success", nil, nil},
		{"permanent", taskbox.Permanent(errEffect), nil},
		{"skip", taskbox.Skip("no need"), nil},
		{"retry", errEffect, nil},
		{"snooze", taskbox.Snooze(time.Minute), nil},
		{"success, replay for later", nil, []taskbox.ManualOption{taskbox.ReplayAt(time.Date(2000, 1, 1, 0, 5, 0, 0, time.UTC))}},
		{"retry, replay for later", errEffect, []taskbox.ManualOption{taskbox.ReplayAt(time.Date(2000, 1, 1, 0, 5, 0, 0, time.UTC))}},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, taskbox.Options{}, func(f *fixture) {
				var r record
				typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
					defer r.start("any")()
					defer r.start(task.Payload)()
					time.Sleep(time.Minute)
					if task.Payload == "first" && task.Attempt == 1 {
						return taskbox.Permanent(errEffect)
					}
					if task.Payload == "second" && r.count("second") == 1 {
						return c.end
					}
					return nil
				})
				first := f.enqueue(typ.New("first", taskbox.Group("g")))
				second := f.enqueue(typ.New("second", taskbox.Group("g")))
				third := f.enqueue(typ.New("third", taskbox.Group("g")))
				f.run()
				time.Sleep(90 * time.Second)
				f.wantStatus(first, "dead_letter")
				f.wantStatus(second, "processing")
				if err := f.q.Replay(f.Context(), first, byAnn, c.o...); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Second)
				if r.count("first") != 1 {
					t.Error("the replayed task doesn't wait for the one of its group that runs")
				}
				time.Sleep(20 * time.Minute)
				synctest.Wait()
				f.wantStatus(first, "success")
				f.wantInt(0, `select count(*) from task_outbox where finished_at is null`)
				f.wantInt(1, `select finished_at > 0 from task_outbox where id = ?`, third)
				if n := r.atOnce("any"); n != 1 {
					t.Errorf("%d of the group ran at once", n)
				}
				f.wantWhole()
			})
		})
	}
}

// The group goes on, too, when the process of the task that runs dies.
func TestQueue_Replay_Group_Lost(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		first := m.enqueue(m.typ.New("dead", taskbox.Group("g")))
		m.drain()
		second := m.enqueue(m.typ.New("second", taskbox.Group("g")))
		m.exec(`update task_outbox set status = 'processing', attempt = 1, fence = 1, owner = 'gone', lease_until = 1 where id = ?`, second)
		m.ok(m.q.Replay(m.Context(), first, byAnn, taskbox.WithPayload("first")))
		m.run()
		time.Sleep(10 * time.Minute)
		m.wantStatus(first, "success")
		m.wantStatus(second, "success")
	})
}

// Each operation that ends a task lets its group go on.
func TestQueue_ByHand_Group(t *testing.T) {
	for _, op := range manualOps {
		if op.after != "skipped" && op.after != "cancelled" {
			continue
		}
		for _, state := range []string{"pending", "scheduled", "retry_wait"} {
			t.Run(op.name+"/"+state, func(t *testing.T) {
				byHand(t, taskbox.Options{}, func(m *manual) {
					payload, o := "", []taskbox.EnqueueOption{taskbox.Group("g")}
					switch state {
					case "scheduled":
						o = append(o, taskbox.Delay(100*time.Hour))
					case "retry_wait":
						payload = "retry"
					}
					first := m.enqueue(m.typ.New(payload, o...))
					second := m.enqueue(m.typ.New("second", taskbox.Group("g")))
					if state != "pending" {
						m.drain()
						m.wantInt(1, `select blocked from task_outbox where id = ?`, second)
					}
					m.ok(op.do(m, first, byAnn))
					m.drain()
					m.wantStatus(second, "success")
					m.wantWhole()
				})
			})
		}
	}
}

// A blocked task that is skipped or cancelled isn't in anybody's way.
func TestQueue_ByHand_Blocked(t *testing.T) {
	for _, op := range manualOps {
		if op.after != "skipped" && op.after != "cancelled" {
			continue
		}
		byHand(t, taskbox.Options{}, func(m *manual) {
			m.enqueue(m.typ.New("run", taskbox.Group("g")))
			second := m.enqueue(m.typ.New("second", taskbox.Group("g")))
			third := m.enqueue(m.typ.New("third", taskbox.Group("g")))
			m.run()
			time.Sleep(time.Second)
			m.ok(op.do(m, second, byAnn))
			close(m.release)
			time.Sleep(time.Second)
			m.wantStatus(second, op.after)
			m.wantStatus(third, "success")
			m.wantInt(0, `select sum(blocked) from task_outbox`)
			// It is replayed like others.
			m.ok(m.q.Replay(m.Context(), second, byAnn))
			time.Sleep(time.Second)
			m.wantStatus(second, "success")
			m.wantWhole()
		})
	}
}

func TestQueue_RunNow(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		m.run()
		far := m.enqueue(m.typ.New("far", taskbox.Delay(1000*time.Hour)))
		retry := m.enqueue(m.typ.New("retry"))
		time.Sleep(2 * time.Second)
		for _, id := range []int64{far, retry} {
			m.ok(m.q.RunNow(m.Context(), id, byAnn))
		}
		time.Sleep(2 * time.Second)
		m.wantTrail(far, "run_now picked processing success")
		m.wantTrail(retry, "picked processing retry_wait run_now picked processing retry_wait")
		m.wantInt(2, `select retry_count from task_outbox where id = ?`, retry)
		m.wantWhole()
	})
}

// A dead letter that is resolved doesn't count as open, and stays one.
func TestQueue_Resolve(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		first, second := m.end("dead"), m.end("dead")
		dead := func() int64 {
			s, err := m.q.Stats(m.Context())
			m.ok(err)
			if len(s.Types) != 1 || s.Types[0].DeadLetters != s.DeadLetters {
				t.Errorf("dead letters by type: %+v", s.Types)
			}
			return s.DeadLetters
		}
		before := dead()
		m.ok(m.q.Resolve(m.Context(), first, "refunded by hand", byAnn))
		m.wantStatus(first, "dead_letter")
		if after := dead(); before != 2 || after != 1 {
			t.Errorf("%d dead letters, and %d after one was resolved, want 2 and 1", before, after)
		}
		open, err := m.q.List(m.Context(), taskbox.Filter{Status: "dead_letter", Open: true})
		m.ok(err)
		all, err := m.q.List(m.Context(), taskbox.Filter{Status: "dead_letter"})
		m.ok(err)
		if len(open) != 1 || open[0].ID != second || len(all) != 2 || all[1].ResolvedAs != "refunded by hand" {
			t.Errorf("open %+v, all %+v", open, all)
		}
		for _, as := range []string{"", "a\nb", strings.Repeat("x", 201)} {
			m.wantRefused(taskbox.ErrInvalid, func() error { return m.q.Resolve(m.Context(), second, as, byAnn) })
		}
		// When it fails anew it is open anew.
		m.ok(m.q.Replay(m.Context(), first, byAnn))
		m.drain()
		if n := dead(); n != 2 {
			t.Errorf("%d dead letters after a replay that failed, want 2", n)
		}
		m.wantWhole()
	})
}
