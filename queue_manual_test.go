package taskbox_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

// byAnn is who does things by hand.
var byAnn = taskbox.By{Actor: "ann", Reason: "the test says so"}

// risky returns the options of a replay whose verdict isn't known to be safe: one of a
// success, or after an attempt that broke off.
func risky(o ...taskbox.ManualOption) []taskbox.ManualOption {
	return append(slices.Clone(o), taskbox.AcceptRisk())
}

// A manual fixture has a type whose tasks have one step and end as their payload says.
type manual struct {
	*fixture
	typ     *taskbox.Type[string]
	release chan struct{} // ends the tasks whose payload is run
	ran     record        // payloads, and the causes of cancelled contexts
}

func byHand(t *testing.T, o taskbox.Options, fn func(*manual)) {
	t.Helper()
	bubble(t, o, func(f *fixture) {
		m := &manual{fixture: f, release: make(chan struct{})}
		m.typ = f.does("x", m.handle)
		fn(m)
	})
}

func (m *manual) handle(ctx context.Context, task *taskbox.Task[string]) error {
	defer m.ran.start(task.Payload)()
	_, err := taskbox.Step(ctx, "a", func(context.Context) (string, error) {
		defer m.ran.start("step of " + task.Payload)()
		if task.Payload == "dead" {
			return "", taskbox.Permanent(errEffect)
		}
		return "result", nil
	})
	if err != nil {
		return err
	}
	switch task.Payload {
	case "retry":
		return errEffect
	case "skip":
		return taskbox.Skip("no need")
	case "run":
		defer m.ran.start("waits")()
		select {
		case <-m.release:
		case <-ctx.Done():
			defer m.ran.start(fmt.Sprint(context.Cause(ctx)))()
			return ctx.Err()
		}
	}
	return nil
}

func (m *manual) ok(err error) {
	m.Helper()
	if err != nil {
		m.Fatal(err)
	}
}

// manualStates are the states of a task.
var manualStates = []struct {
	name  string
	reach func(*manual) (id int64)
}{
	{"pending", func(m *manual) int64 { return m.enqueue(m.typ.New("")) }},
	{"plain insert", func(m *manual) int64 {
		m.exec(`insert into task_outbox (event_type, payload) values ('x', '""')`)
		return m.int(`select max(id) from task_outbox`)
	}},
	{"scheduled", func(m *manual) int64 { return m.enqueue(m.typ.New("", taskbox.Delay(time.Hour))) }},
	{"retry_wait", func(m *manual) int64 { return m.end("retry") }},
	{"running", func(m *manual) int64 {
		id := m.enqueue(m.typ.New("run"))
		m.run()
		time.Sleep(time.Second)
		m.wantStatus(id, "processing")
		return id
	}},
	{"success", func(m *manual) int64 { return m.end("") }},
	{"dead_letter", func(m *manual) int64 { return m.end("dead") }},
	{"skipped", func(m *manual) int64 { return m.end("skip") }},
	{"cancelled", func(m *manual) int64 {
		id := m.end("retry")
		m.ok(m.q.Cancel(m.Context(), id, byAnn))
		return id
	}},
}

// end enqueues a task and runs it.
func (m *manual) end(payload string) int64 {
	m.Helper()
	id := m.enqueue(m.typ.New(payload))
	m.drain()
	return id
}

// A manualOp is an operation by hand on one task.
type manualOp struct {
	name string
	do   func(m *manual, id int64, by taskbox.By, o ...taskbox.ManualOption) error
	// wrong are the states that refuse it.
	wrong map[string]error
	// events are what it leaves on the trail, and after the status that it leads to;
	// empty: the same as before.
	events []string
	after  string
}

var (
	errRunning = taskbox.ErrTaskRunning
	errState   = taskbox.ErrState
)

var manualOps = []manualOp{
	{"Replay", func(m *manual, id int64, by taskbox.By, o ...taskbox.ManualOption) error {
		return m.q.Replay(m.Context(), id, by, risky(o...)...)
	}, map[string]error{"pending": errState, "plain insert": errState, "scheduled": errState, "retry_wait": errState, "running": errRunning},
		[]string{"replayed"}, "pending"},
	{"Replay with a payload", func(m *manual, id int64, by taskbox.By, o ...taskbox.ManualOption) error {
		return m.q.Replay(m.Context(), id, by, risky(append(o, taskbox.WithPayload("new"))...)...)
	}, map[string]error{"pending": errState, "plain insert": errState, "scheduled": errState, "retry_wait": errState, "running": errRunning},
		[]string{"edited", "replayed"}, "pending"},
	{"Replay at a time", func(m *manual, id int64, by taskbox.By, o ...taskbox.ManualOption) error {
		return m.q.Replay(m.Context(), id, by, risky(append(o, taskbox.ReplayAt(time.Now().Add(time.Hour)))...)...)
	}, map[string]error{"pending": errState, "plain insert": errState, "scheduled": errState, "retry_wait": errState, "running": errRunning},
		[]string{"replayed"}, "scheduled"},
	{"Replay from a step", func(m *manual, id int64, by taskbox.By, o ...taskbox.ManualOption) error {
		return m.q.Replay(m.Context(), id, by, risky(append(o, taskbox.FromStep("a"))...)...)
	}, map[string]error{"pending": errState, "plain insert": errState, "scheduled": errState, "retry_wait": errState, "running": errRunning},
		[]string{"replayed"}, "pending"},
	{"Edit", func(m *manual, id int64, by taskbox.By, o ...taskbox.ManualOption) error {
		return m.q.Edit(m.Context(), id, "new", by, o...)
	}, map[string]error{"running": errRunning}, []string{"edited"}, ""},
	{"Skip", func(m *manual, id int64, by taskbox.By, o ...taskbox.ManualOption) error {
		return m.q.Skip(m.Context(), id, by, o...)
	}, map[string]error{"running": errRunning, "success": errState, "skipped": errState, "cancelled": errState}, []string{"skipped"}, "skipped"},
	{"SkipStep", func(m *manual, id int64, by taskbox.By, o ...taskbox.ManualOption) error {
		return m.q.SkipStep(m.Context(), id, "a", "stand-in", by, risky(o...)...)
	}, map[string]error{"running": errRunning, "pending": taskbox.ErrNoStep, "plain insert": taskbox.ErrNoStep, "scheduled": taskbox.ErrNoStep},
		[]string{"step_skipped", "replayed"}, "pending"},
	{"RunNow", func(m *manual, id int64, by taskbox.By, o ...taskbox.ManualOption) error {
		return m.q.RunNow(m.Context(), id, by, o...)
	}, map[string]error{"running": errRunning, "pending": errState, "plain insert": errState, "success": errState, "dead_letter": errState,
		"skipped": errState, "cancelled": errState}, []string{"run_now"}, "pending"},
	{"Cancel", func(m *manual, id int64, by taskbox.By, o ...taskbox.ManualOption) error {
		return m.q.Cancel(m.Context(), id, by, o...)
	}, map[string]error{"success": errState, "dead_letter": errState, "skipped": errState, "cancelled": errState}, []string{"cancelled"}, "cancelled"},
	{"Resolve", func(m *manual, id int64, by taskbox.By, o ...taskbox.ManualOption) error {
		return m.q.Resolve(m.Context(), id, "refunded", by, o...)
	}, map[string]error{"running": errRunning, "pending": errState, "plain insert": errState, "scheduled": errState, "retry_wait": errState,
		"success": errState, "skipped": errState, "cancelled": errState}, []string{"resolved"}, ""},
}

// everything is what an operation that fails must leave as it was.
func (f *fixture) everything() []string {
	f.Helper()
	return slices.Concat(
		f.rows(`select * from task_outbox`), f.rows(`select * from task_audit`), f.rows(`select * from task_dedupe`),
		f.rows(`select * from task_meta where key not like 'poller:%'`), f.rows(`select * from task_stats`))
}

// Each operation in each state: it is done with its audit rows, or nothing is.
func TestQueue_ByHand_States(t *testing.T) {
	for _, op := range manualOps {
		for _, s := range manualStates {
			t.Run(op.name+"/"+s.name, func(t *testing.T) {
				byHand(t, taskbox.Options{}, func(m *manual) {
					id := s.reach(m)
					if want := op.wrong[s.name]; want != nil {
						m.wantRefused(want, func() error { return op.do(m, id, byAnn) })
						return
					}
					m.wantDone(op, id)
				})
			})
		}
	}
}

// wantRefused runs an operation that must fail and change nothing.
func (m *manual) wantRefused(want error, op func() error) {
	m.Helper()
	before := m.everything()
	err := op()
	wantErr(m.T, err, want)
	if diff := gocmp.Diff(before, m.everything()); diff != "" {
		m.Errorf("an operation that failed with %v has changed (-before +after):\n%s", err, diff)
	}
}

// wantDone runs an operation that must succeed, and looks at what it has left.
func (m *manual) wantDone(op manualOp, id int64) {
	m.Helper()
	const rest = `select event_type, coalesce(dedupe_key, ''), coalesce(group_key, ''), trace_id, created_at, attempt, fence, priority from task_outbox where id = ?`
	before, version, status := m.one(rest, id), m.int(`select version from task_outbox where id = ?`, id), m.status(id)
	time.Sleep(time.Second)
	m.ok(op.do(m, id, byAnn))
	got := m.rows(`select event, actor, reason, at, coalesce(attempt, '') from task_audit where task_id = ? and seq > ? order by seq`, id, version)
	var want []string
	for _, e := range op.events {
		want = append(want, fmt.Sprintf("%s|ann|the test says so|%d|", e, time.Now().UnixMilli()))
	}
	if diff := gocmp.Diff(want, got); diff != "" {
		m.Errorf("on the trail (-want +got):\n%s", diff)
	}
	if op.after == "" {
		op.after = status
	}
	m.wantStatus(id, op.after)
	if after := m.one(rest, id); after != before {
		m.Errorf("the task has changed:\n got %s\nwant %s", after, before)
	}
	m.wantInt(time.Now().UnixMilli(), `select updated_at from task_outbox where id = ?`, id)
	live := map[string]int64{"pending": 1, "scheduled": 1, "retry_wait": 1}[op.after]
	m.wantInt(live, `select finished_at is null and owner is null and lease_until is null from task_outbox where id = ?`, id)
	m.wantWhole()
	close(m.release)
	if live == 1 { // it runs like any other
		time.Sleep(3 * time.Hour)
		m.drainOrRun()
		m.wantInt(1, `select finished_at is not null or status = 'retry_wait' from task_outbox where id = ?`, id)
		m.wantInt(1, `select attempt > 0 from task_outbox where id = ?`, id)
		m.wantWhole()
	}
}

// drainOrRun lets the poller that runs already do the work, or runs one.
func (m *manual) drainOrRun() {
	m.Helper()
	if err := m.q.Drain(m.Context()); err != nil && !errors.Is(err, taskbox.ErrRunning) {
		m.Fatal(err)
	}
}

func TestQueue_ByHand_ErrActorRequired(t *testing.T) {
	for _, by := range []taskbox.By{{}, {Actor: "ann"}, {Reason: "because"}, {Actor: "a\nb", Reason: "because"},
		{Actor: strings.Repeat("a", 201), Reason: "because"}, {Actor: "ann", Reason: strings.Repeat("r", 4097)}} {
		byHand(t, taskbox.Options{}, func(m *manual) {
			id := m.end("dead")
			m.ok(m.q.Pause(m.Context(), "paused", time.Time{}, byAnn))
			for _, op := range manualOps {
				m.wantRefused(taskbox.ErrActorRequired, func() error { return op.do(m, id, by) })
				m.wantRefused(taskbox.ErrActorRequired, func() error { return op.do(m, 99, by) })
			}
			m.wantRefused(taskbox.ErrActorRequired, func() error { return m.q.Pause(m.Context(), "x", time.Time{}, by) })
			m.wantRefused(taskbox.ErrActorRequired, func() error { return m.q.Resume(m.Context(), "paused", by) })
		})
	}
}

// Unknown ids, and why they may be unknown.
func TestQueue_ByHand_ErrNotFound(t *testing.T) {
	byHand(t, taskbox.Options{KeepDone: time.Minute}, func(m *manual) {
		pruned := m.end("")
		stop := m.run()
		time.Sleep(5 * time.Minute)
		m.ok(stop())
		tx := m.begin()
		r, err := m.q.Enqueue(m.Context(), tx, m.typ.New(""))
		m.ok(err)
		tx.Rollback()
		for _, c := range []struct {
			name string
			id   int64
			text string
		}{
			{"pruned", pruned, "deleted"},
			{"rolled back", r.ID, "never committed"},
			{"of the future", 1 << 62, "never committed"},
			{"another file", 99, m.path},
			{"zero", 0, ""},
			{"negative", -1, ""},
		} {
			for _, op := range manualOps {
				m.wantRefused(taskbox.ErrNotFound, func() error {
					err := op.do(m, c.id, byAnn)
					if err != nil && !strings.Contains(err.Error(), c.text) {
						m.Errorf("%s, %s: %q doesn't say %q", op.name, c.name, err, c.text)
					}
					return err
				})
			}
			_, err := m.q.Get(m.Context(), c.id)
			if err != nil && c.id < 1 && strings.Contains(err.Error(), "there was a task with this id") {
				m.Errorf("%s: %v", c.name, err)
			}
			_, err = m.q.Get(m.Context(), c.id)
			wantErr(t, err, taskbox.ErrNotFound)
			_, err = m.q.Trail(m.Context(), c.id)
			wantErr(t, err, taskbox.ErrNotFound)
			_, err = m.q.Steps(m.Context(), c.id)
			wantErr(t, err, taskbox.ErrNotFound)
		}
	})
}

// Two people: the second is told what the first has done.
func TestQueue_ByHand_ErrConflict(t *testing.T) {
	bob := taskbox.By{Actor: "bob", Reason: "was quicker"}
	for _, c := range []struct {
		name  string
		state string
		first func(*manual, int64) error
		text  []string
	}{
		{"Edit", "dead_letter", func(m *manual, id int64) error { return m.q.Edit(m.Context(), id, "by bob", bob) }, []string{"edited", "bob"}},
		{"Replay", "dead_letter", func(m *manual, id int64) error { return m.q.Replay(m.Context(), id, bob) }, []string{"replayed", "bob"}},
		{"Replay with a payload", "dead_letter", func(m *manual, id int64) error {
			return m.q.Replay(m.Context(), id, bob, taskbox.WithPayload("dead"))
		}, []string{"edited", "bob"}},
		{"Resolve", "dead_letter", func(m *manual, id int64) error { return m.q.Resolve(m.Context(), id, "by phone", bob) }, []string{"resolved", "bob"}},
		{"Skip", "retry_wait", func(m *manual, id int64) error { return m.q.Skip(m.Context(), id, bob) }, []string{"skipped", "bob"}},
		{"Cancel", "scheduled", func(m *manual, id int64) error { return m.q.Cancel(m.Context(), id, bob) }, []string{"cancelled", "bob"}},
		{"RunNow", "scheduled", func(m *manual, id int64) error { return m.q.RunNow(m.Context(), id, bob) }, []string{"run_now", "bob"}},
		{"SkipStep", "dead_letter", func(m *manual, id int64) error { return m.q.SkipStep(m.Context(), id, "a", nil, bob) }, []string{"step_skipped", "bob"}},
		{"the queue", "retry_wait", func(m *manual, id int64) error { m.later(); return nil }, []string{"queued", "the queue"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			byHand(t, taskbox.Options{}, func(m *manual) {
				id := manualStates[slices.IndexFunc(manualStates, func(s struct {
					name  string
					reach func(*manual) int64
				}) bool {
					return s.name == c.state
				})].reach(m)
				i, err := m.q.Get(m.Context(), id)
				m.ok(err)
				m.ok(c.first(m, id))
				for _, op := range manualOps {
					m.wantRefused(taskbox.ErrConflict, func() error {
						err := op.do(m, id, byAnn, taskbox.IfVersion(i.Version))
						for _, part := range append(c.text, fmt.Sprint(i.Version), time.Now().UTC().Format("2006-01-02")) {
							if err != nil && !strings.Contains(err.Error(), part) {
								m.Errorf("%s: %q doesn't say %q", op.name, err, part)
							}
						}
						return err
					})
					m.wantRefused(taskbox.ErrConflict, func() error { return op.do(m, id, byAnn, taskbox.IfVersion(i.Version+100)) })
				}
			})
		})
	}
}

// With the right version each operation is done, and once only.
func TestQueue_ByHand_IfVersion(t *testing.T) {
	for _, op := range manualOps {
		byHand(t, taskbox.Options{}, func(m *manual) {
			state := "dead"
			if op.wrong["dead_letter"] != nil {
				state = "retry"
			}
			id := m.end(state)
			i, err := m.q.Get(m.Context(), id)
			m.ok(err)
			m.ok(op.do(m, id, byAnn, taskbox.IfVersion(i.Version)))
			m.wantRefused(taskbox.ErrConflict, func() error { return op.do(m, id, byAnn, taskbox.IfVersion(i.Version)) })
		})
	}
}

// Of many people who do the same with the same version one succeeds.
func TestQueue_ByHand_Race(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		id := m.end("dead")
		other := m.again(taskbox.Options{})
		i, err := m.q.Get(m.Context(), id)
		m.ok(err)
		errs := make(chan error)
		for n := range 16 {
			q := []*taskbox.Queue{m.q, other.q}[n%2]
			go func() {
				errs <- q.Replay(m.Context(), id, taskbox.By{Actor: fmt.Sprint("person ", n), Reason: "r"}, taskbox.IfVersion(i.Version))
			}()
		}
		done := 0
		for range 16 {
			if err := <-errs; err == nil {
				done++
			} else {
				wantErr(t, err, taskbox.ErrConflict)
			}
		}
		if done != 1 {
			t.Errorf("%d of them succeeded, want one", done)
		}
		m.wantInt(1, `select count(*) from task_audit where event = 'replayed'`)
		m.wantInt(2, `select run from task_outbox`)
		m.wantWhole()
	})
}

// What was done by hand is in the file when the method returns, and on the trail with
// all that it said.
func TestQueue_ByHand_Details(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		id := m.end("dead")
		m.ok(m.q.Edit(m.Context(), id, "dead", byAnn))
		m.ok(m.q.Resolve(m.Context(), id, "by phone", byAnn))
		m.ok(m.q.Replay(m.Context(), id, byAnn, taskbox.WithPayload("dead"), taskbox.ReplayAt(time.Now().Add(time.Hour))))
		m.ok(m.q.RunNow(m.Context(), id, byAnn))
		m.drain()
		m.ok(m.q.SkipStep(m.Context(), id, "a", map[string]int{"n": 1}, byAnn))
		m.ok(m.q.Cancel(m.Context(), id, byAnn))
		es, err := m.q.Trail(m.Context(), id)
		m.ok(err)
		var got []string
		for _, e := range es {
			if e.Actor == "" {
				continue
			}
			var d map[string]any
			m.ok(json.Unmarshal(e.Detail, &d))
			line := e.Event
			for _, key := range []string{"before", "after", "old_payload", "new_payload", "step", "result", "cause"} {
				if v, ok := d[key]; ok {
					line += fmt.Sprintf(" %s=%v", key, v)
				}
			}
			if d["next_run_at"] != nil {
				line += " at a time"
			}
			got = append(got, line)
		}
		want := []string{
			"edited old_payload=dead new_payload=dead",
			"resolved cause=by phone",
			"edited old_payload=dead new_payload=dead",
			"replayed before=dead_letter after=scheduled at a time",
			"run_now before=scheduled after=pending",
			"step_skipped step=a result=map[n:1]",
			"replayed before=dead_letter after=pending",
			"cancelled before=pending after=cancelled",
		}
		if diff := gocmp.Diff(want, got); diff != "" {
			t.Errorf("by hand (-want +got):\n%s", diff)
		}
		m.wantInt(3, `select run from task_outbox where id = ?`, id)
	})
}

// A payload that can't be is refused before anything is changed.
func TestQueue_Edit_BadPayload(t *testing.T) {
	deep := json.RawMessage(strings.Repeat("[", 1500) + strings.Repeat("]", 1500))
	for _, c := range []struct {
		name    string
		typ     string // whose task it is
		payload any
		want    error // nil: it is taken
	}{
		{"invalid JSON", "x", json.RawMessage(`{"a":`), taskbox.ErrInvalid},
		{"empty JSON", "x", json.RawMessage(``), taskbox.ErrInvalid},
		{"channel", "x", make(chan int), taskbox.ErrInvalid},
		{"another type", "x", 7, taskbox.ErrInvalid},
		{"another type as JSON", "x", json.RawMessage(`{"a":1}`), taskbox.ErrInvalid},
		{"too large", "x", strings.Repeat("x", 10_001), taskbox.ErrPayloadTooLarge},
		{"too deep", "unknown here", deep, taskbox.ErrInvalid},
		{"not known here", "unknown here", 7, nil},
		{"object", "unknown here", json.RawMessage(` { "a" : [ 1 , 9007199254740993 ] } `), nil},
	} {
		for _, replay := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/replay %v", c.name, replay), func(t *testing.T) {
				byHand(t, taskbox.Options{MaxPayload: 10_000}, func(m *manual) {
					id := m.end("dead")
					m.exec(`update task_outbox set event_type = ? where id = ?`, c.typ, id)
					do := func() error {
						if replay {
							return m.q.Replay(m.Context(), id, byAnn, risky(taskbox.WithPayload(c.payload))...)
						}
						return m.q.Edit(m.Context(), id, c.payload, byAnn)
					}
					if c.want != nil {
						m.wantRefused(c.want, do)
						return
					}
					m.ok(do())
					want, err := json.Marshal(c.payload)
					m.ok(err)
					if got := m.one(`select payload from task_outbox where id = ?`, id); got != string(want) {
						t.Errorf("the payload is %s, want %s", got, want)
					}
				})
			})
		}
	}
}

// Each old payload is kept as a revision, as it was.
func TestQueue_Edit_Revisions(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		payloads := []string{`{"n":9007199254740993,"s":"<&>\u2028ü"}`, `[1e400, -0, 1.50]`, `null`, `" spaced  out "`, `{"k":1,"k":2}`}
		m.exec(`insert into task_outbox (event_type, payload, next_run_at) values ('unknown here', ?, 1 << 50)`, payloads[0])
		for _, p := range payloads[1:] {
			m.ok(m.q.Edit(m.Context(), 1, json.RawMessage(p), byAnn))
		}
		m.ok(m.q.Edit(m.Context(), 1, json.RawMessage(`0`), byAnn))
		same := func(a, b string) bool { return m.int(`select json(?) = json(?)`, a, b) == 1 }
		got := m.rows(`select detail -> 'old_payload' from task_audit where event = 'edited' order by seq`)
		for i, p := range payloads {
			var decoded, want any
			errs := errors.Join(json.Unmarshal([]byte(got[i]), &decoded), json.Unmarshal([]byte(p), &want))
			if !same(got[i], p) && (errs != nil || !gocmp.Equal(decoded, want)) {
				t.Errorf("revision %d is %s, want %s", i+1, got[i], p)
			}
		}
		m.wantWhole()
	})
}
