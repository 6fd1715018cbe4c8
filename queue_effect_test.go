package taskbox_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

var errEffect = errors.New("the effect failed")

// does registers a type whose tasks run fn.
func (f *fixture) does(name string, fn func(context.Context, *taskbox.Task[string]) error, o ...taskbox.TypeOptions) *taskbox.Type[string] {
	typ := taskbox.NewType[string](name, o...)
	typ.Handle(f.q, fn)
	return typ
}

// later lets the time of all retries pass and runs what is due.
func (f *fixture) later() {
	f.Helper()
	time.Sleep(2 * time.Hour)
	f.drain()
}

// effects makes a table that counts effects by name, and returns what adds to it.
func (f *fixture) effects() func(context.Context, *sql.Tx, string) error {
	f.exec(`create table if not exists effects (name text not null)`)
	return func(ctx context.Context, tx *sql.Tx, name string) error {
		_, err := tx.ExecContext(ctx, `insert into effects (name) values (?)`, name)
		return err
	}
}

func (f *fixture) wantEffects(want ...string) {
	f.Helper()
	got := f.rows(`select name from effects order by name`)
	if diff := gocmp.Diff(want, got); diff != "" {
		f.Errorf("effects (-want +got):\n%s", diff)
	}
}

// wantSteps compares the names, states and results of a task's steps.
func (f *fixture) wantSteps(id int64, want ...string) {
	f.Helper()
	steps, err := f.q.Steps(f.Context(), id)
	if err != nil {
		f.Fatal(err)
	}
	var got []string
	for _, s := range steps {
		got = append(got, strings.TrimSpace(fmt.Sprintf("%s %s %d %s%s", s.Name, s.State, s.Attempt, s.Result, s.Error)))
	}
	if diff := gocmp.Diff(want, got); diff != "" {
		f.Errorf("steps of task %d (-want +got):\n%s", id, diff)
	}
}

// wantWhole checks what holds for every task at any moment: its trail is numbered
// without a gap up to its version, and the minutes' figures add up to the trail.
func (f *fixture) wantWhole() {
	f.Helper()
	if bad := f.rows(`select id, version, (select group_concat(seq || ' ' || event) from task_audit where task_id = id) from task_outbox
		where version <> (select count(*) from task_audit where task_id = id)
		or version <> (select coalesce(max(seq), 0) from task_audit where task_id = id)`); bad != nil {
		f.Errorf("tasks whose trail isn't numbered up to their version: %q", bad)
	}
	if bad := f.rows(`select dedupe_key, count(*) from task_outbox where dedupe_key is not null and finished_at is null group by 1 having count(*) > 1`); bad != nil {
		f.Errorf("keys with more than one living task: %q", bad)
	}
	for column, event := range map[string]string{"picked": "picked", "success": "success", "retried": "retry_wait",
		"dead": "dead_letter", "skipped": "skipped", "cancelled": "cancelled", "released": "interrupted"} {
		got := f.int(`select coalesce(sum(`+column+`), 0) from task_stats`) - map[bool]int64{
			true: f.int(`select count(*) from task_audit where event = 'scheduled' and attempt > 0`)}[event == "interrupted"]
		if want := f.int(`select count(*) from task_audit where event = ?`, event); got != want {
			f.Errorf("task_stats has %d %s, the trails have %d", got, column, want)
		}
	}
}

// In a retry and in a replay a step that is done isn't run.
func TestStep(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var ran, second atomic.Int32
		var results []string
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			s, err := taskbox.Step(ctx, "first", func(context.Context) (string, error) {
				return fmt.Sprintf("result %d", ran.Add(1)), nil
			})
			results = append(results, s)
			if err != nil {
				return err
			}
			_, err = taskbox.Step(ctx, "second", func(context.Context) (int, error) {
				if second.Add(1) < 3 {
					return 0, errEffect
				}
				return 7, nil
			})
			return err
		})
		id := f.enqueue(typ.New(""))
		f.drain()
		f.wantSteps(id, `first done 1 "result 1"`, "second failed 1 the effect failed")
		f.later()
		f.later()
		f.wantStatus(id, "success")
		f.wantSteps(id, `first done 1 "result 1"`, "second done 3 7")
		if err := f.q.Replay(f.Context(), id, byAnn, risky()...); err != nil {
			t.Fatal(err)
		}
		f.drain()
		f.wantStatus(id, "success")
		if diff := gocmp.Diff([]string{"result 1", "result 1", "result 1", "result 1"}, results); diff != "" || ran.Load() != 1 || second.Load() != 3 {
			t.Errorf("first ran %d times, second %d, want 1 and 3; results (-want +got):\n%s", ran.Load(), second.Load(), diff)
		}
		f.wantWhole()
	})
}

// stepResult is what steps of a test return.
type stepResult struct {
	Name  string         `json:"name"`
	List  []int64        `json:"list"`
	Map   map[string]any `json:"map"`
	Ptr   *stepResult    `json:"ptr,omitempty"`
	When  time.Time      `json:"when"`
	Bytes []byte         `json:"bytes"`
}

// keepsResult runs a step in two attempts and returns what each got.
func keepsResult[R any](t *testing.T, r R) (first, second R) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			got, err := taskbox.Step(ctx, "a", func(context.Context) (R, error) { return r, nil })
			if task.Attempt == 1 {
				first = got
				return errors.Join(err, errEffect)
			}
			second = got
			return err
		})
		id := f.enqueue(typ.New(""))
		f.drain()
		f.later()
		f.wantStatus(id, "success")
		f.wantWhole()
	})
	return first, second
}

func TestStep_Result(t *testing.T) {
	check := func(name string, first, second any) {
		t.Helper()
		if diff := gocmp.Diff(first, second); diff != "" {
			t.Errorf("%s: the kept result differs (-first +second):\n%s", name, diff)
		}
	}
	a, b := keepsResult(t, stepResult{Name: "ü\u2028<&>\x00\"", List: []int64{1<<63 - 1, -1 << 63}, Map: map[string]any{"k": nil},
		Ptr: &stepResult{}, When: time.Unix(1, 2).UTC(), Bytes: []byte{0, 255}})
	check("struct", a, b)
	c, d := keepsResult[*stepResult](t, nil)
	check("nil pointer", c, d)
	e, g := keepsResult[any](t, nil)
	check("nil", e, g)
	h, i := keepsResult(t, struct{}{})
	check("nothing", h, i)
	j, k := keepsResult(t, json.RawMessage(`{"a":[1,2]}`))
	check("raw", string(j), string(k))
	l, m := keepsResult(t, int64(1<<53+1))
	check("large int", l, m)
}

// A result that can't be kept is told at once, and nobody runs the effect again by a
// retry: the task is a dead letter.
func TestStep_ResultErr(t *testing.T) {
	type loop struct{ Next any }
	var l loop
	l.Next = &l
	for _, c := range []struct {
		name   string
		result any
		want   error
	}{
		{"channel", make(chan int), taskbox.ErrInvalid},
		{"function", func() {}, taskbox.ErrInvalid},
		{"cycle", &l, taskbox.ErrInvalid},
		{"bad raw JSON", json.RawMessage(`{`), taskbox.ErrInvalid},
		{"too deep for SQLite", json.RawMessage(strings.Repeat("[", 1500) + strings.Repeat("]", 1500)), taskbox.ErrInvalid},
		{"too large", strings.Repeat("x", 1000), taskbox.ErrPayloadTooLarge},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, taskbox.Options{MaxPayload: 1000, Schedule: taskbox.DefaultSchedule()}, func(f *fixture) {
				if c.name == "too deep for SQLite" {
					f.q = newQueue(f.T, f.db, taskbox.Options{MaxPayload: 10_000})
				}
				var ran int
				var got error
				typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
					_, got = taskbox.Step(ctx, "a", func(context.Context) (any, error) { ran++; return c.result, nil })
					return got
				})
				id := f.enqueue(typ.New(""))
				f.drain()
				f.later()
				wantErr(t, got, c.want)
				f.wantStatus(id, "dead_letter")
				if ran != 1 {
					t.Errorf("the step ran %d times, want once", ran)
				}
				f.wantWhole()
			})
		})
	}
}

func TestStep_Result_AtMaxPayload(t *testing.T) {
	bubble(t, taskbox.Options{MaxPayload: 1000}, func(f *fixture) {
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			_, err := taskbox.Step(ctx, "a", func(context.Context) (string, error) { return strings.Repeat("x", 998), nil })
			return err
		})
		id := f.enqueue(typ.New(""))
		f.drain()
		f.wantStatus(id, "success")
	})
}

// A step whose result type has changed since it was done can't return it.
func TestStep_DecodeError(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var ran int
		var got error
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			if task.Attempt == 1 {
				_, err := taskbox.Step(ctx, "a", func(context.Context) (string, error) { return "one", nil })
				return errors.Join(err, errEffect)
			}
			_, got = taskbox.Step(ctx, "a", func(context.Context) (int, error) { ran++; return 1, nil })
			return got
		})
		id := f.enqueue(typ.New(""))
		f.drain()
		f.later()
		f.wantStatus(id, "dead_letter")
		if _, ok := errors.AsType[*taskbox.DecodeError](got); !ok || ran != 0 {
			t.Errorf("got error %v after %d runs, want a DecodeError and none", got, ran)
		}
		f.wantSteps(id, `a done 1 "one"`)
		f.wantWhole()
	})
}

func TestStep_NameTwice(t *testing.T) {
	step := func(ctx context.Context, name string, err error) error {
		_, err2 := taskbox.Step(ctx, name, func(context.Context) (int, error) { return 1, err })
		return err2
	}
	stepTx := func(ctx context.Context, name string, err error) error {
		return taskbox.StepTx(ctx, name, func(context.Context, *sql.Tx) error { return err })
	}
	for _, c := range []struct {
		name          string
		first, second func(context.Context, string, error) error
	}{{"Step", step, step}, {"StepTx", stepTx, stepTx}, {"Step and StepTx", step, stepTx}, {"StepTx and Step", stepTx, step}} {
		for _, failure := range []error{nil, errEffect} {
			t.Run(fmt.Sprintf("%s after %v", c.name, failure), func(t *testing.T) {
				bubble(t, taskbox.Options{}, func(f *fixture) {
					var first, second, other error
					typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
						first = c.first(ctx, "a", failure)
						other = c.first(ctx, "b", nil)
						second = c.second(ctx, "a", nil)
						return second
					})
					id := f.enqueue(typ.New(""))
					f.drain()
					wantErr(t, first, failure)
					wantErr(t, other, nil)
					wantErr(t, second, taskbox.ErrInvalid)
					f.wantStatus(id, "dead_letter")
				})
			})
		}
	}
}

// wantEachErr calls Step, StepTx and Once with names of such an end: none may run anything.
func wantEachErr(t *testing.T, ctx context.Context, name string, want error) {
	t.Helper()
	limited := func() context.Context {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		t.Cleanup(cancel)
		return ctx
	}
	check := func(helper string, err error) {
		t.Helper()
		if !errors.Is(err, want) {
			t.Errorf("%s: got error %v, want %v", helper, err, want)
		}
	}
	_, err := taskbox.Step(limited(), name, func(context.Context) (int, error) { t.Error("Step ran"); return 0, nil })
	check("Step", err)
	if name != "" {
		name = "2" + name
	}
	check("StepTx", taskbox.StepTx(limited(), name, func(context.Context, *sql.Tx) error { t.Error("StepTx ran"); return nil }))
	check("Once", taskbox.Once(limited(), name, func(context.Context, *sql.Tx) error { t.Error("Once ran"); return nil }))
}

func TestStep_NotAHandler(t *testing.T) {
	wantEachErr(t, t.Context(), "a", taskbox.ErrInvalid)
}

func TestStep_BadName(t *testing.T) {
	for _, name := range []string{"", strings.Repeat("x", 501), "a\x00", "a\nb", "\xff"} {
		bubble(t, taskbox.Options{}, func(f *fixture) {
			typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
				wantEachErr(f.T, ctx, name, taskbox.ErrInvalid)
				return nil
			})
			f.enqueue(typ.New(""))
			f.drain()
			f.wantInt(0, `select count(*) from task_dedupe`)
		})
	}
}

// Steps of one attempt may run at the same time.
func TestStep_Parallel(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		effect := f.effects()
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			errs := make([]error, 20)
			var wg sync.WaitGroup
			for i := range errs {
				name := fmt.Sprintf("s%02d", i)
				wg.Go(func() {
					if i%2 == 0 {
						_, errs[i] = taskbox.Step(ctx, name, func(context.Context) (int, error) { time.Sleep(time.Second); return i, nil })
						return
					}
					errs[i] = taskbox.StepTx(ctx, name, func(ctx context.Context, tx *sql.Tx) error { return effect(ctx, tx, name) })
				})
			}
			wg.Wait()
			if task.Attempt == 1 {
				errs = append(errs, errEffect)
			}
			return errors.Join(errs...)
		})
		id := f.enqueue(typ.New(""))
		f.drain()
		f.later()
		f.wantStatus(id, "success")
		f.wantInt(20, `select count(*) from task_dedupe where kind = 'step' and state = 'done' and attempt = 1`)
		f.wantInt(10, `select count(*) from effects`)
		f.wantWhole()
	})
}

// What has ended can't record steps any more, whoever still calls them.
func TestStep_AfterTheEnd(t *testing.T) {
	for _, c := range []struct {
		name    string
		stopped bool
	}{{"while the poller runs", false}, {"after Run has returned", true}} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, taskbox.Options{}, func(f *fixture) {
				f.effects()
				var kept context.Context
				typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
					kept = ctx
					return nil
				})
				id := f.enqueue(typ.New(""))
				stop := f.run()
				time.Sleep(time.Second)
				f.wantStatus(id, "success")
				if c.stopped {
					if err := stop(); err != nil {
						t.Fatal(err)
					}
				}
				wantEachErr(f.T, kept, "cancelled", context.Canceled)
				wantEachErr(f.T, context.WithoutCancel(kept), "a", taskbox.ErrLeaseLost)
				f.wantInt(0, `select count(*) from task_dedupe`)
				f.wantTrail(id, "picked processing success")
				f.wantWhole()
			})
		})
	}
}

// A step in doubt runs again with the same key, and the trail says so; or its task is
// parked.
func TestStep_InDoubt(t *testing.T) {
	for _, c := range []struct {
		name string
		// breaks ends the step in the first attempt in a way that leaves it in doubt.
		breaks func(ctx context.Context) error
		again  string // the trail of a task that runs it again
		parked string
	}{
		{"panic", func(context.Context) error { panic("in the step") },
			"picked processing retry_wait queued picked in_doubt processing success",
			"picked processing retry_wait queued picked processing failed dead_letter"},
		{"timeout", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
			"picked processing retry_wait queued picked in_doubt processing success",
			"picked processing retry_wait queued picked processing failed dead_letter"},
		{"timeout that the step hides", func(ctx context.Context) error { <-ctx.Done(); return errEffect },
			"picked processing retry_wait queued picked in_doubt processing success",
			"picked processing retry_wait queued picked processing failed dead_letter"},
	} {
		t.Run(c.name, func(t *testing.T) {
			for _, mode := range []taskbox.InDoubt{taskbox.RunAgain, taskbox.Park} {
				bubble(t, taskbox.Options{}, func(f *fixture) {
					var keys []string
					var last error
					typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
						_, err := taskbox.Step(ctx, "a", func(ctx context.Context) (string, error) {
							keys = append(keys, task.IdempotencyKey("a"))
							if task.Attempt == 1 {
								return "", c.breaks(ctx)
							}
							return "ok", nil
						})
						last = err
						return err
					}, taskbox.TypeOptions{InDoubt: mode, Timeout: time.Second})
					id := f.enqueue(typ.New(""))
					f.drain()
					f.wantInt(1, `select count(*) from task_dedupe where kind = 'step' and state = 'processing' and attempt = 1`)
					f.later()
					f.wantWhole()
					if mode == taskbox.Park {
						f.wantTrail(id, c.parked)
						wantErr(t, last, taskbox.ErrInDoubt)
						if len(keys) != 1 {
							t.Errorf("the step ran %d times, want once", len(keys))
						}
						return
					}
					f.wantTrail(id, c.again)
					if len(keys) != 2 || keys[0] != keys[1] {
						t.Errorf("the step ran with the keys %q, want twice the same", keys)
					}
					if got := f.one(`select attempt, detail ->> 'cause' from task_audit where event = 'in_doubt'`); got != "2|step a had begun in attempt 1; it runs again" {
						t.Errorf("in_doubt on the trail: %s", got)
					}
				})
			}
		})
	}
}

// An error that the step itself returns is no doubt.
func TestStep_Error_IsNoDoubt(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			_, err := taskbox.Step(ctx, "a", func(context.Context) (int, error) {
				if task.Attempt == 1 {
					return 0, errEffect
				}
				return 1, nil
			})
			return err
		}, taskbox.TypeOptions{InDoubt: taskbox.Park})
		id := f.enqueue(typ.New(""))
		f.drain()
		f.wantSteps(id, "a failed 1 the effect failed")
		f.later()
		f.wantTrail(id, "picked processing retry_wait queued picked processing success")
		f.wantSteps(id, "a done 2 1")
	})
}

// A parked task goes on in each of the ways that its error names.
func TestStep_Park_Decided(t *testing.T) {
	for _, c := range []struct {
		name   string
		decide func(*fixture, int64) error
		ran    int
		result string
	}{
		{"skip the step", func(f *fixture, id int64) error {
			return f.q.SkipStep(f.Context(), id, "a", "by hand", byAnn, risky()...)
		}, 1, "by hand"},
		{"replay the task", func(f *fixture, id int64) error {
			return f.q.Replay(f.Context(), id, byAnn, risky()...)
		}, 2, "ok"},
		{"replay from the step", func(f *fixture, id int64) error {
			return f.q.Replay(f.Context(), id, byAnn, risky(taskbox.FromStep("a"))...)
		}, 2, "ok"},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, taskbox.Options{}, func(f *fixture) {
				ran, result := 0, ""
				typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) (err error) {
					result, err = taskbox.Step(ctx, "a", func(ctx context.Context) (string, error) {
						if ran++; ran == 1 {
							panic("in the step")
						}
						return "ok", nil
					})
					return err
				}, taskbox.TypeOptions{InDoubt: taskbox.Park})
				id := f.enqueue(typ.New(""))
				f.drain()
				f.later()
				f.wantStatus(id, "dead_letter")
				if err := c.decide(f, id); err != nil {
					t.Fatal(err)
				}
				f.later()
				f.wantStatus(id, "success")
				if ran != c.ran || result != c.result {
					t.Errorf("the step ran %d times and returned %q, want %d and %q", ran, result, c.ran, c.result)
				}
				f.wantWhole()
			})
		})
	}
}

// A key for a header is the same in all attempts and runs of a task, and differs
// between tasks and steps.
func TestTask_IdempotencyKey(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		keys := map[int64][]string{}
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			keys[task.ID] = append(keys[task.ID], task.IdempotencyKey("a")+" "+task.IdempotencyKey("b"))
			if task.Attempt == 1 {
				return errEffect
			}
			return nil
		}, taskbox.TypeOptions{Concurrency: 1})
		all := map[string]int64{}
		for _, id := range []int64{f.enqueue(typ.New("")), f.enqueue(typ.New("", taskbox.TraceID("t"))), f.enqueue(typ.New("", taskbox.TraceID("t")))} {
			f.drain()
			f.later()
			for _, o := range []taskbox.ManualOption{taskbox.ReplayAt(time.Now().Add(time.Hour)), taskbox.WithPayload("other")} {
				if err := f.q.Replay(f.Context(), id, byAnn, risky(o)...); err != nil {
					t.Fatal(err)
				}
				f.later()
			}
			if n := len(keys[id]); n != 4 {
				t.Fatalf("task %d ran %d times, want 4", id, n)
			}
			for _, k := range keys[id] {
				if k != keys[id][0] {
					t.Errorf("task %d has the keys %q, want always the same", id, keys[id])
				}
			}
			for _, k := range strings.Fields(keys[id][0]) {
				if !regexp.MustCompile(`^[0-9a-f]{32}$`).MatchString(k) {
					t.Errorf("the key %q isn't fit for a header", k)
				}
				if other, ok := all[k]; ok {
					t.Errorf("tasks %d and %d share the key %s", id, other, k)
				}
				all[k] = id
			}
		}
	})
}

// The kinds of pools that the documentation allows.
func TestStep_Pools(t *testing.T) {
	for name, openPool := range map[string]func(*testing.T, string) *sql.DB{
		"OpenDB":        fileDB,
		"OpenDB memory": func(t *testing.T, _ string) *sql.DB { return closing(t)(taskbox.OpenDB(":memory:")) },
		"foreign":       func(t *testing.T, path string) *sql.DB { return plainDB(t, path, "_busy_timeout=5000") },
		"foreign immediate": func(t *testing.T, path string) *sql.DB {
			return plainDB(t, path, "_busy_timeout=5000&_txlock=immediate")
		},
		"foreign of one": func(t *testing.T, path string) *sql.DB {
			db := plainDB(t, path, "_busy_timeout=5000")
			db.SetMaxOpenConns(1)
			return db
		},
		"foreign of two": func(t *testing.T, path string) *sql.DB {
			db := plainDB(t, path, "_busy_timeout=5000")
			db.SetMaxOpenConns(2)
			return db
		},
		"foreign memory": func(t *testing.T, _ string) *sql.DB {
			db := closing(t)(sql.Open("sqlite", ":memory:"))
			db.SetMaxOpenConns(1)
			return db
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := &fixture{T: t}
				f.db = openPool(t, t.TempDir()+"/t.db")
				f.q = newQueue(t, f.db, taskbox.Options{})
				f.tryAllEffects()
			})
		})
	}
}

// tryAllEffects has 20 tasks use a step of each kind and complete in their own
// transaction, the first time in vain.
func (f *fixture) tryAllEffects() {
	effect := f.effects()
	typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
		name, err := taskbox.Step(ctx, "step", func(context.Context) (string, error) { return "of " + task.Payload, nil })
		if err == nil {
			err = taskbox.StepTx(ctx, "tx", func(ctx context.Context, tx *sql.Tx) error { return effect(ctx, tx, "StepTx "+name) })
		}
		if err == nil {
			err = taskbox.Once(ctx, "for all", func(ctx context.Context, tx *sql.Tx) error { return effect(ctx, tx, "Once") })
		}
		if err == nil && task.Attempt == 1 {
			err = errEffect
		}
		if err != nil {
			return err
		}
		return f.completes(ctx, task, func(tx *sql.Tx) error { return effect(ctx, tx, "Complete "+name) })
	})
	want := []string{"Once"}
	for _, kind := range []string{"Complete", "StepTx"} {
		for i := range 20 {
			want = append(want, fmt.Sprintf("%s of %02d", kind, i))
		}
	}
	want[0], want = want[1], append(append([]string{}, want[1:21]...), append([]string{"Once"}, want[21:]...)...)
	for i := range 20 {
		f.enqueue(typ.New(fmt.Sprintf("%02d", i)))
	}
	f.run()
	time.Sleep(10 * time.Minute)
	synctest.Wait()
	f.wantInt(20, `select count(*) from task_outbox where status = 'success' and attempt = 2`)
	f.wantEffects(want...)
	f.wantWhole()
}

// completes writes and completes the task in one transaction, and commits.
func (f *fixture) completes(ctx context.Context, task *taskbox.Task[string], write func(*sql.Tx) error) error {
	tx, err := f.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := write(tx); err != nil {
		return err
	}
	if err := task.Complete(ctx, tx); err != nil {
		return err
	}
	return tx.Commit()
}

// What has happened is known, also when the attempt's time was over by then.
func TestStep_AfterTheTimeout(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		var ran int
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			_, err := taskbox.Step(ctx, "a", func(context.Context) (int, error) {
				ran++
				time.Sleep(10 * time.Second) // and doesn't hear
				return 7, nil
			})
			if err == nil {
				err = ctx.Err()
			}
			return err
		}, taskbox.TypeOptions{Timeout: time.Second, InDoubt: taskbox.Park})
		id := f.enqueue(typ.New(""))
		f.drain()
		f.wantSteps(id, "a done 1 7")
		f.later()
		f.wantTrail(id, "picked processing retry_wait queued picked processing success")
		if ran != 1 {
			t.Errorf("the step ran %d times, want once", ran)
		}
	})
}

// The same at a shutdown: who ends within the time that is left for that has its
// result recorded, and the next start doesn't run the step again.
func TestStep_AtTheShutdown(t *testing.T) {
	for _, d := range []time.Duration{500 * time.Millisecond, 1500 * time.Millisecond} {
		t.Run(fmt.Sprintf("%v of a grace of 1 s", d), func(t *testing.T) {
			bubble(t, taskbox.Options{Grace: time.Second}, func(f *fixture) {
				var ran int
				typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
					_, err := taskbox.Step(ctx, "a", func(context.Context) (int, error) {
						if ran++; ran == 1 {
							time.Sleep(time.Minute + d) // and doesn't hear
						}
						return 7, nil
					})
					return err
				}, taskbox.TypeOptions{Timeout: time.Hour, InDoubt: taskbox.Park})
				id := f.enqueue(typ.New(""))
				stop := f.run()
				time.Sleep(time.Minute)
				if err := stop(); err != nil {
					t.Fatal(err)
				}
				f.wantSteps(id, "a done 1 7")
				f.drain()
				f.wantStatus(id, "success")
				if ran != 1 {
					t.Errorf("the step ran %d times, want once", ran)
				}
				f.wantWhole()
			})
		})
	}
}

// An application that holds the write lock for long delays steps, and breaks none.
func TestStep_LockHeldForLong(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		f.db = plainDB(f.T, f.path, "_busy_timeout=5000&_txlock=immediate")
		f.q = newQueue(f.T, f.db, taskbox.Options{})
		effect := f.effects()
		started, locked := make(chan struct{}), make(chan struct{})
		var ran atomic.Int32
		typ := f.does("x", func(ctx context.Context, task *taskbox.Task[string]) error {
			_, err := taskbox.Step(ctx, "a", func(context.Context) (int, error) {
				ran.Add(1)
				close(started)
				<-locked
				return 7, nil
			})
			if err != nil {
				return err
			}
			return taskbox.StepTx(ctx, "b", func(ctx context.Context, tx *sql.Tx) error { return effect(ctx, tx, "b") })
		})
		id := f.enqueue(typ.New(""))
		f.run()
		<-started
		tx := f.begin()
		close(locked)
		time.Sleep(40 * time.Second)
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(20 * time.Second)
		f.wantTrail(id, "picked processing success")
		f.wantEffects("b")
		if n := ran.Load(); n != 1 {
			t.Errorf("the step ran %d times, want once", n)
		}
	})
}
