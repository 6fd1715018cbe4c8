package taskbox_test

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/taskbox-go/taskbox"
)

var modelOps = flag.Int("model.ops", 0, "operations of TestModel; 0: TASKBOX_MODEL_OPS, or else 200,000, with -short 20,000, with -race a twentieth of that")

func howManyOps(t *testing.T) int {
	n := *modelOps
	if text := os.Getenv("TASKBOX_MODEL_OPS"); n == 0 && text != "" {
		var err error
		if n, err = strconv.Atoi(text); err != nil {
			t.Fatal(err)
		}
	}
	if n > 0 {
		return n
	}
	n = 200_000
	if testing.Short() {
		n = 20_000
	}
	if raced() {
		n /= 20 // SQLite is twenty times slower then
	}
	return n
}

// TestModel holds random operations against the model in model_test.go. It runs in parts that
// are independent of each other, each with its own kind of pool.
func TestModel(t *testing.T) {
	seed, n := seedOf(t), howManyOps(t)
	pools := []struct {
		name string
		open func(*testing.T) *sql.DB
	}{
		{"memory", func(t *testing.T) *sql.DB { return closing(t)(taskbox.OpenDB(":memory:")) }},
		{"file", func(t *testing.T) *sql.DB { return fileDB(t, t.TempDir()+"/t.db") }},
		{"memory, a foreign pool of one", func(t *testing.T) *sql.DB {
			db := closing(t)(sql.Open("sqlite", ":memory:"))
			db.SetMaxOpenConns(1)
			return db
		}},
		{"file, a foreign pool", func(t *testing.T) *sql.DB { return plainDB(t, t.TempDir()+"/t.db", "_busy_timeout=5000") }},
	}
	for i, pool := range pools {
		t.Run(pool.name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				m := newModel(t, pool.open(t), seed+uint64(i))
				for m.ops < n/len(pools) && !t.Failed() {
					m.step()
				}
				m.drainAll()
				m.checkAll()
				m.report()
			})
		})
	}
}

// model drives a queue and the reference side by side.
type model struct {
	*fixture
	seed  uint64
	rng   *rand.Rand
	ops   int
	kinds map[string]int
	types map[string]*taskbox.Type[int]
	ids   []int64 // the tasks that operations are about, the newest last
	dead  string  // the identity of a process that has died
	look  *sql.Stmt
	tries int // crashes, for the owners' names

	mu  sync.Mutex // handlers run beside each other
	ref *ref       // mu
	bad []error    // what handlers have found wrong; mu
}

// modelWindow is how many tasks the operations choose from: few, so that each is met
// in all kinds of states.
const modelWindow = 120

func newModel(t *testing.T, db *sql.DB, seed uint64) *model {
	m := &model{fixture: &fixture{T: t, db: db}, seed: seed, rng: rand.New(rand.NewPCG(seed, 1)), kinds: map[string]int{}, types: map[string]*taskbox.Type[int]{}}
	m.ref = &ref{tasks: map[int64]*refTask{}, alive: map[int64]*refTask{}, live: map[string]int64{}, taken: map[string]refKept{}, paused: map[string]time.Time{}, onces: map[string]bool{}}
	m.q = newQueue(t, db, taskbox.Options{})
	m.exec(`create table effects (task integer not null, name text not null)`)
	m.exec(`create index effects_by_task on effects (task, name)`)
	for _, name := range []string{"plain", "keeps", "parks"} {
		o := taskbox.TypeOptions{KeepDeadKeys: keepsDeadKeys(name)}
		if parks(name) {
			o.InDoubt = taskbox.Park
		}
		typ := taskbox.NewType[int](name, o)
		typ.Handle(m.q, m.handle)
		m.types[name] = typ
	}
	var err error
	if m.look, err = db.PrepareContext(t.Context(), modelLookSQL); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { m.look.Close() })
	m.dead = m.deadIdentity()
	return m
}

// deadIdentity is what a poller of a process that doesn't exist any more has left.
func (m *model) deadIdentity() string {
	stop := m.run()
	m.enqueueOne("plain", 0, &refTask{})
	time.Sleep(10 * time.Second)
	text := m.one(`select value from task_meta where key like 'poller:%'`)
	if err := stop(); err != nil {
		m.Fatal(err)
	}
	m.verify(m.ids[0])
	var id map[string]any
	if err := json.Unmarshal([]byte(text), &id); err != nil {
		m.Fatal(err)
	}
	id["pid"] = 1 << 30 // beyond what the kernel gives
	b, err := json.Marshal(id)
	if err != nil {
		m.Fatal(err)
	}
	return string(b)
}

// chance tells whether something of so many in a hundred happens.
func (m *model) chance(percent int) bool { return m.rng.IntN(100) < percent }

// step does one random operation, and looks.
func (m *model) step() {
	weights := []struct {
		n    int
		name string
		do   func()
	}{
		{22, "enqueue", m.enqueueRandom}, {14, "replay", m.replay}, {8, "edit", m.edit}, {5, "skip", m.skip}, {9, "skip step", m.skipStep},
		{6, "run now", m.runNow}, {5, "cancel", m.cancel}, {6, "resolve", m.resolve}, {8, "crash", m.crash}, {1, "pause", m.pause},
		{3, "drain", m.drainSome}, {1, "sleep", m.sleep},
	}
	total := 0
	for _, w := range weights {
		total += w.n
	}
	n, before := m.rng.IntN(total), m.ops
	for _, w := range weights {
		if n -= w.n; n < 0 {
			m.kinds[w.name]++
			m.ops++
			w.do()
			break
		}
	}
	if m.ops/10_000 != before/10_000 {
		m.checkAll()
	}
}

func (m *model) report() {
	m.Logf("%d operations: %v; %d tasks, in the end %q", m.ops, m.kinds, len(m.ref.tasks),
		m.rows(`select status, count(*) from task_outbox group by status`))
}

func (m *model) enqueueRandom() {
	t := &refTask{max: m.rng.IntN(5)}
	var o []taskbox.EnqueueOption
	if m.chance(40) {
		t.key = fmt.Sprint("k", m.rng.IntN(modelWindow))
		if m.chance(50) {
			t.window = time.Duration(1+m.rng.IntN(600)) * time.Minute
			o = append(o, taskbox.KeyFor(t.key, t.window))
		} else {
			o = append(o, taskbox.Key(t.key))
		}
	}
	if m.chance(25) {
		t.group = fmt.Sprint("g", m.rng.IntN(8))
		o = append(o, taskbox.Group(t.group))
	}
	if t.max > 0 {
		o = append(o, taskbox.MaxAttempts(t.max))
	}
	delay := 0
	if m.chance(15) {
		delay = 1 + m.rng.IntN(3600)
	}
	m.enqueueOne([]string{"plain", "keeps", "parks"}[m.rng.IntN(3)], delay, t, o...)
}

// enqueueOne enqueues a task and holds the receipt against the model.
func (m *model) enqueueOne(typ string, delay int, t *refTask, o ...taskbox.EnqueueOption) {
	t.typ, t.payload, t.status = typ, m.rng.IntN(1000), "pending"
	if delay > 0 {
		t.status, t.delayed = "scheduled", true
		o = append(o, taskbox.Delay(time.Duration(delay)*time.Second))
	}
	var holder int64
	if t.key != "" {
		holder = m.ref.holder(t.key, time.Now())
	}
	m.mu.Lock() // a poller may run it at once
	defer m.mu.Unlock()
	r, err := m.q.Enqueue(m.Context(), m.db, m.types[typ].New(t.payload, o...))
	switch {
	case err != nil:
		m.Fatal(err)
	case r.Duplicate != (holder != 0) || holder != 0 && r.ID != holder:
		m.errorf("enqueue with the key %q: %+v, want the holder %d; its records: %q", t.key, r, holder, m.rows(`select * from task_dedupe where name = ?`, t.key))
	case r.Duplicate:
		return
	}
	t.id = r.ID
	m.ref.add(t)
	m.ids = append(m.ids, t.id)
	if len(m.ids) > modelWindow {
		m.ids = m.ids[1:]
	}
}

// errorf reports with what one needs to see it again.
func (m *model) errorf(format string, args ...any) {
	m.Helper()
	m.Errorf("operation %d: %s", m.ops, fmt.Sprintf(format, args...))
}

func (m *model) pick() *refTask { return m.ref.tasks[m.ids[m.rng.IntN(len(m.ids))]] }

// did compares the error of an operation with the model's, and looks at the task.
func (m *model) did(op string, t *refTask, got, want error) {
	m.Helper()
	if (got == nil) != (want == nil) || want != nil && !errors.Is(got, want) {
		m.errorf("%s of task %d, which is %s (held %v): got error %v, want %v; its trail: %s", op, t.id, t.status, t.held, got, want, m.trail(t.id))
	}
	m.verify(t.id)
}

// versioned sometimes adds the version that the caller has seen, sometimes a wrong one.
func (m *model) versioned(t *refTask, o ...taskbox.ManualOption) (os []taskbox.ManualOption, stale bool) {
	if m.chance(80) {
		return o, false
	}
	v, stale := m.int(`select version from task_outbox where id = ?`, t.id), m.chance(50)
	if stale {
		v -= 1 + m.rng.Int64N(3)
	}
	return append(o, taskbox.IfVersion(v)), stale
}

// byHand does an operation unless it is to fail for its version.
func (m *model) byHand(op string, do func(t *refTask, o []taskbox.ManualOption) error, want func(t *refTask) error, o ...taskbox.ManualOption) {
	t := m.pick()
	os, stale := m.versioned(t, o...)
	got := do(t, os)
	if stale {
		m.did(op, t, got, taskbox.ErrConflict)
		return
	}
	m.did(op, t, got, want(t))
}

func (m *model) replay() {
	var payload *int
	var at time.Time
	var o []taskbox.ManualOption
	if m.chance(30) {
		payload = new(int)
		*payload = m.rng.IntN(1000)
		o = append(o, taskbox.WithPayload(*payload))
	}
	if m.chance(15) {
		at = time.Now().Add(time.Duration(m.rng.IntN(7200)-600) * time.Second)
		o = append(o, taskbox.ReplayAt(at))
	}
	var from string
	m.byHand("replay", func(t *refTask, o []taskbox.ManualOption) error {
		if m.chance(25) {
			from = m.someStep(t)
			o = append(o, taskbox.FromStep(from))
		}
		return m.q.Replay(m.Context(), t.id, byAnn, risky(o...)...)
	}, func(t *refTask) error { return m.ref.replay(t, payload, from, at, time.Now()) }, o...)
}

// someStep is mostly one that the task has begun.
func (m *model) someStep(t *refTask) string {
	if len(t.order) == 0 || m.chance(10) {
		return modelSteps[m.rng.IntN(len(modelSteps))]
	}
	return t.order[m.rng.IntN(len(t.order))]
}

func (m *model) edit() {
	payload := m.rng.IntN(1000)
	m.byHand("edit", func(t *refTask, o []taskbox.ManualOption) error {
		return m.q.Edit(m.Context(), t.id, payload, byAnn, o...)
	},
		func(t *refTask) error { return m.ref.edit(t, payload) })
}

func (m *model) skip() {
	m.byHand("skip", func(t *refTask, o []taskbox.ManualOption) error { return m.q.Skip(m.Context(), t.id, byAnn, o...) },
		func(t *refTask) error { return m.ref.skip(t, time.Now()) })
}

func (m *model) cancel() {
	m.byHand("cancel", func(t *refTask, o []taskbox.ManualOption) error { return m.q.Cancel(m.Context(), t.id, byAnn, o...) },
		func(t *refTask) error { return m.ref.cancel(t, time.Now()) })
}

func (m *model) skipStep() {
	var step string
	result := -1 - m.rng.IntN(1000)
	m.byHand("skip step", func(t *refTask, o []taskbox.ManualOption) error {
		step = m.someStep(t)
		return m.q.SkipStep(m.Context(), t.id, step, result, byAnn, risky(o...)...)
	}, func(t *refTask) error { return m.ref.skipStep(t, step, result, time.Now()) })
}

func (m *model) runNow() {
	m.byHand("run now", func(t *refTask, o []taskbox.ManualOption) error { return m.q.RunNow(m.Context(), t.id, byAnn, o...) },
		func(t *refTask) error { return m.ref.runNow(t) })
}

func (m *model) resolve() {
	as := fmt.Sprint("way ", m.rng.IntN(10))
	m.byHand("resolve", func(t *refTask, o []taskbox.ManualOption) error {
		return m.q.Resolve(m.Context(), t.id, as, byAnn, o...)
	},
		func(t *refTask) error { return m.ref.resolve(t, as) })
}

// crash is a process that has claimed a task, perhaps begun a step, and died.
func (m *model) crash() {
	t := m.pick()
	until, paused := m.ref.paused[t.typ]
	if t.status != "pending" || paused && (until.IsZero() || time.Now().Before(until)) || m.ref.before(t) != nil {
		m.ops--
		return
	}
	m.tries++
	owner := fmt.Sprint("dead", m.tries)
	tx := m.begin()
	run := func(query string, args ...any) {
		m.Helper()
		if _, err := tx.Exec(query, args...); err != nil {
			m.Fatalf("%s: %v", query, err)
		}
	}
	now := time.Now().UnixMilli()
	begun := m.chance(60)
	m.ref.crash(t, begun)
	run(`update task_outbox set status = 'picked', attempt = attempt + 1, fence = fence + 1, version = version + 1, owner = ?, lease_until = ?, updated_at = ?
		where id = ?`, owner, now+30_000, now, t.id)
	run(`insert into task_audit (task_id, seq, event, at, attempt, owner) select id, version, 'picked', ?, attempt, owner from task_outbox where id = ?`, now, t.id)
	run(`insert into task_stats (minute, event_type, picked, wait_1) values (?, ?, 1, 1)
		on conflict do update set picked = picked + 1, wait_1 = wait_1 + 1`, now/60_000, t.typ)
	if begun {
		run(`update task_outbox set status = 'processing', version = version + 1 where id = ?`, t.id)
		run(`insert into task_audit (task_id, seq, event, at, attempt) select id, version, 'processing', ?, attempt from task_outbox where id = ?`, now, t.id)
		t.status = "processing"
		if s, runs := t.step("s1"); runs {
			s.state = "processing"
			if m.chance(30) {
				*s = refStep{"done", t.payload}
			}
			// A step is numbered in its task by when it first began.
			run(`insert into task_dedupe (kind, task_id, name, state, by_task, attempt, created_at, updated_at, result, seq)
				values ('step', ?1, 's1', ?2, ?1, ?3, ?4, ?4, ?5, (select coalesce(max(seq), 0) + 1 from task_dedupe where kind = 'step' and task_id = ?1))
				on conflict do update set state = excluded.state, attempt = excluded.attempt, result = excluded.result`,
				t.id, s.state, t.attempt, now, strconv.Itoa(s.result))
		}
	}
	run(`insert into task_meta (key, value) values (?, ?)`, "poller:"+owner, m.dead)
	if err := tx.Commit(); err != nil {
		m.Fatal(err)
	}
	m.verify(t.id)
}

func (m *model) pause() {
	typ := []string{"plain", "keeps", "parks"}[m.rng.IntN(3)]
	until, paused := m.ref.paused[typ]
	paused = paused && (until.IsZero() || time.Now().Before(until))
	if m.chance(60) {
		err := m.q.Resume(m.Context(), typ, byAnn)
		if want := map[bool]error{false: taskbox.ErrState}[paused]; !errors.Is(err, want) {
			m.errorf("resume %s, paused %v: %v", typ, paused, err)
		}
		delete(m.ref.paused, typ)
		return
	}
	until = time.Time{}
	if m.chance(70) {
		until = time.Now().Add(time.Duration(1+m.rng.IntN(100_000)) * 100 * time.Millisecond)
	}
	if err := m.q.Pause(m.Context(), typ, until, byAnn); err != nil {
		m.Fatal(err)
	}
	m.ref.paused[typ] = until
}

func (m *model) sleep() { time.Sleep(time.Duration(m.rng.IntN(5*3600)) * time.Second) }

// drainSome lets some time pass and runs what is due.
func (m *model) drainSome() {
	time.Sleep(time.Duration(m.rng.IntN(120_000)) * time.Millisecond)
	m.drainAll()
}

func (m *model) drainAll() {
	m.mu.Lock()
	before := slices.Collect(maps.Values(m.ref.alive))
	for _, t := range before {
		if t.held {
			m.ref.recover(t, time.Now())
		}
	}
	m.mu.Unlock()
	m.drain()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, err := range m.bad {
		m.errorf("%v", err)
	}
	for _, t := range before {
		m.verify(t.id)
		m.wantNotForgotten(t)
	}
}

// wantNotForgotten checks that what could run has been run.
func (m *model) wantNotForgotten(t *refTask) {
	m.Helper()
	until, paused := m.ref.paused[t.typ]
	if t.status == "pending" && !(paused && (until.IsZero() || time.Now().Before(until))) && m.ref.before(t) == nil {
		m.errorf("task %d is due, and Drain has left it; its row: %s", t.id, m.one(`select event_type, group_key, blocked, next_run_at, owner from task_outbox where id = ?`, t.id))
	}
}

var modelSteps = []string{"s1", "t1", "s2"}

// handle is the handler of all types. It takes the steps in order and ends at random,
// in the same way whenever the test is run with the same seed.
func (m *model) handle(ctx context.Context, task *taskbox.Task[int]) error {
	m.mu.Lock()
	defer m.mu.Unlock() // but for the calls of the library
	t := m.ref.tasks[task.ID]
	if err := m.ref.begin(t, time.Now()); err != nil {
		m.bad = append(m.bad, fmt.Errorf("task %d: %w; its trail: %s", t.id, err, strings.Join(t.events, " ")))
	}
	if task.Payload != t.payload || task.Attempt != t.attempt || task.Retry != t.retry || task.Key != t.key {
		m.bad = append(m.bad, fmt.Errorf("task %d starts as %+v, want %+v", t.id, task, t))
	}
	m.ops++
	m.kinds["attempt"]++
	a := &modelAttempt{model: m, task: task, ref: t, rng: rand.New(rand.NewPCG(m.seed, uint64(t.id)<<20|uint64(t.starts)))}
	for _, step := range []func(context.Context) (string, error){a.s1, a.t1, a.once, a.s2} {
		if how, err := step(ctx); err != nil {
			m.ref.outcome(t, how, time.Now())
			return err
		}
	}
	how, err := a.finish(ctx)
	m.ref.outcome(t, how, time.Now())
	return err
}

// A modelAttempt is one call of the handler. It holds the model's mu, but while the
// library is called.
type modelAttempt struct {
	*model
	task *taskbox.Task[int]
	ref  *refTask
	rng  *rand.Rand
}

func (a *modelAttempt) unlocked(fn func() error) error {
	a.mu.Unlock()
	defer a.mu.Lock()
	return fn()
}

func (a *modelAttempt) wrong(format string, args ...any) {
	a.bad = append(a.bad, fmt.Errorf("task %d attempt %d: %s", a.ref.id, a.ref.attempt, fmt.Sprintf(format, args...)))
}

// failure is how an effect fails, mostly not at all.
func (a *modelAttempt) failure() (how string, err error) {
	switch n := a.rng.IntN(100); {
	case n < 8:
		return "retry", errEffect
	case n < 12:
		return "dead", taskbox.Permanent(errEffect)
	}
	return "", nil
}

func (a *modelAttempt) s1(ctx context.Context) (string, error) { return a.step(ctx, "s1") }
func (a *modelAttempt) s2(ctx context.Context) (string, error) { return a.step(ctx, "s2") }

// step uses Step: a done step returns what it returned before, one in doubt is run
// again or parks the task.
func (a *modelAttempt) step(ctx context.Context, name string) (string, error) {
	s, runs := a.ref.step(name)
	doubt := s.state == "processing"
	how, fails := a.failure()
	breaks := fails == nil && a.rng.IntN(20) == 0
	if doubt && parks(a.ref.typ) {
		how, fails, breaks, runs = "dead", taskbox.ErrInDoubt, false, false
	}
	ran, got := false, 0
	err := a.unlocked(func() (err error) {
		defer func() {
			if v := recover(); v != nil {
				err = fmt.Errorf("the step broke off: %v", v) // and its record says that it had begun
			}
		}()
		got, err = taskbox.Step(ctx, name, func(context.Context) (int, error) {
			ran = true
			if breaks {
				panic("in the step")
			}
			return a.ref.payload, fails
		})
		return err
	})
	if ran != runs {
		a.wrong("step %s, %s: ran %v, want %v", name, s.state, ran, runs)
	}
	switch {
	case errors.Is(fails, taskbox.ErrInDoubt):
		if !errors.Is(err, taskbox.ErrInDoubt) {
			a.wrong("step %s in doubt: error %v", name, err)
		}
	case !runs:
		if err != nil || got != s.result {
			a.wrong("step %s is %s with %d and returned %d, %v", name, s.state, s.result, got, err)
		}
		return "", nil
	case breaks:
		s.state, how = "processing", "retry"
	case fails != nil:
		s.state = "failed"
	default:
		*s = refStep{"done", a.ref.payload}
		if err != nil || got != s.result {
			a.wrong("step %s returned %d, %v", name, got, err)
		}
	}
	return how, err
}

// t1 uses StepTx.
func (a *modelAttempt) t1(ctx context.Context) (string, error) {
	s, runs := a.ref.step("t1")
	how, fails := a.failure()
	ran := false
	err := a.unlocked(func() error {
		return taskbox.StepTx(ctx, "t1", func(ctx context.Context, tx *sql.Tx) error {
			ran = true
			if _, err := tx.ExecContext(ctx, `insert into effects values (?, 't1')`, a.task.ID); err != nil {
				return err
			}
			return fails
		})
	})
	if ran != runs {
		a.wrong("StepTx, %s: ran %v, want %v", s.state, ran, runs)
	}
	switch {
	case !runs:
		if err != nil {
			a.wrong("StepTx is %s and returned %v", s.state, err)
		}
		return "", nil
	case fails != nil:
		s.state = "failed"
	default:
		s.state = "done"
		a.ref.effects["t1"]++
		if err != nil {
			a.wrong("StepTx returned %v", err)
		}
	}
	return how, err
}

// once does one of a few things that all tasks share.
func (a *modelAttempt) once(ctx context.Context) (string, error) {
	key := fmt.Sprint("once", a.task.ID%100)
	how, fails := a.failure()
	ran := false
	err := a.unlocked(func() error {
		return taskbox.Once(ctx, key, func(ctx context.Context, tx *sql.Tx) error {
			ran = true
			if _, err := tx.ExecContext(ctx, `insert into effects values (0, ?)`, key); err != nil {
				return err
			}
			return fails
		})
	})
	if ran && a.model.ref.onces[key] && fails == nil {
		a.wrong("Once ran again for %s", key)
	}
	if err == nil {
		a.model.ref.onces[key] = true
		return "", nil
	}
	if !ran || fails == nil {
		a.wrong("Once returned %v", err)
	}
	return how, err
}

// finish ends the attempt in one of the ways that there are.
func (a *modelAttempt) finish(ctx context.Context) (string, error) {
	switch n := a.rng.IntN(100); {
	case n < 10:
		return "retry", errEffect
	case n < 18:
		return "dead", taskbox.Permanent(errEffect)
	case n < 22:
		return "snooze", taskbox.Snooze(time.Minute)
	case n < 26:
		return "skipped", taskbox.Skip("no need")
	case n < 40:
		return a.complete(ctx, n)
	}
	return "success", nil
}

func (a *modelAttempt) complete(ctx context.Context, n int) (string, error) {
	commit, fails := n < 34, n%3 == 0
	err := a.unlocked(func() error {
		tx, err := a.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := tx.ExecContext(ctx, `insert into effects values (?, 'complete')`, a.task.ID); err != nil {
			return err
		}
		if err := a.task.Complete(ctx, tx); err != nil {
			return err
		}
		if !commit {
			return tx.Rollback()
		}
		return tx.Commit()
	})
	if err != nil {
		a.wrong("Complete: %v", err)
	}
	how := "retry" // ErrNotCommitted, or the error
	if commit {
		a.ref.effects["complete"]++
		how = "success"
	}
	if fails {
		err = errEffect
	}
	return how, err
}

// modelLookSQL reads a task with what is new on its trail.
const modelLookSQL = `
select status, version, run, attempt, retry_count, lost_count, payload, coalesce(resolved_as, ''), next_run_at,
	finished_at is null, owner is null, lease_until is null,
	(select count(*) from task_audit where task_id = t.id), (select max(seq) from task_audit where task_id = t.id),
	(select count(*) from effects where task = t.id and name = 't1'), (select count(*) from effects where task = t.id and name = 'complete'),
	coalesce((select group_concat(event, ' ') from (select event from task_audit where task_id = t.id and seq > version - ? order by seq)), '')
from task_outbox as t where id = ?`

// verify holds a task in the file against the model. The caller holds mu where
// handlers run.
func (m *model) verify(id int64) {
	m.Helper()
	t := m.ref.tasks[id]
	var g struct {
		status, resolved, events                         string
		version, run, attempt, retry, lost, payload, due int
		alive, unowned, unleased                         bool
		count, last                                      sql.NullInt64
		t1, complete                                     int
	}
	// On the trail are, beside what the model knows, queued, processing and in_doubt.
	err := m.look.QueryRowContext(m.Context(), 4*len(t.events)+2, id).Scan(&g.status, &g.version, &g.run, &g.attempt, &g.retry, &g.lost, &g.payload, &g.resolved, &g.due,
		&g.alive, &g.unowned, &g.unleased, &g.count, &g.last, &g.t1, &g.complete, &g.events)
	if err != nil {
		m.Fatalf("task %d: %v", id, err)
	}
	if int64(g.version) != g.count.Int64 || g.count != g.last && g.count.Int64 != 0 {
		m.errorf("task %d has version %d, and %d rows up to %d on its trail", id, g.version, g.count.Int64, g.last.Int64)
	}
	if g.status == "pending" && (t.status == "scheduled" || t.status == "retry_wait") && int64(g.due) <= time.Now().UnixMilli() {
		t.status = "pending" // it has become due
	}
	got := fmt.Sprintln(g.status, g.run, g.attempt, g.retry, g.lost, g.payload, g.resolved, g.alive, g.unowned, g.unleased, g.t1, g.complete)
	want := fmt.Sprintln(t.status, t.run, t.attempt, t.retry, t.lost, t.payload, t.resolved, !t.ended(), !t.held, !t.held, t.effects["t1"], t.effects["complete"])
	if !t.ended() || t.status != "dead_letter" {
		got, want = strings.TrimSpace(got), strings.TrimSpace(want)
	}
	if got != want {
		m.errorf("task %d is\n got %s\nwant %s\nstatus run attempt retry lost payload resolved alive unowned unleased effects; its trail: %s", id, got, want, m.trail(id))
	}
	if t.wins > 1 {
		m.errorf("task %d has succeeded %d times in one run", id, t.wins)
	}
	m.verifyEvents(t, strings.Fields(g.events))
	t.events = t.events[:0]
}

// verifyEvents compares the end of a trail with what the model expects there.
func (m *model) verifyEvents(t *refTask, got []string) {
	m.Helper()
	got = slices.DeleteFunc(got, func(e string) bool { return e == "queued" || e == "processing" || e == "in_doubt" })
	if len(got) < len(t.events) || !slices.Equal(got[len(got)-len(t.events):], t.events) {
		m.errorf("task %d: the trail's end is %q, want %q", t.id, got, t.events)
	}
}

// legalModel lists what may follow on a trail, by hand too, and the state that it leads to.
var legalModel = map[string]map[string]string{
	"pending": {"picked": "picked", "skipped": "skipped", "cancelled": "cancelled", "edited": "pending", "step_skipped": "passed"},
	"scheduled": {"queued": "pending", "run_now": "pending", "skipped": "skipped", "cancelled": "cancelled", "edited": "scheduled",
		"step_skipped": "passed"},
	"retry_wait": {"queued": "pending", "run_now": "pending", "skipped": "skipped", "cancelled": "cancelled", "edited": "retry_wait",
		"step_skipped": "passed"},
	"picked": {"processing": "processing", "interrupted": "pending", "lost": "lost", "cancelled": "cancelled", "in_doubt": "picked"},
	"processing": {"success": "success", "retry_wait": "retry_wait", "failed": "failed", "scheduled": "scheduled", "skipped": "skipped",
		"interrupted": "pending", "lost": "lost", "cancelled": "cancelled", "in_doubt": "processing"},
	"failed":      {"dead_letter": "dead_letter"},
	"lost":        {"dead_letter": "dead_letter", "picked": "picked", "cancelled": "cancelled", "skipped": "skipped", "edited": "lost", "step_skipped": "passed"},
	"passed":      {"replayed": "revived"},
	"revived":     {"picked": "picked", "queued": "pending", "skipped": "skipped", "cancelled": "cancelled", "edited": "revived", "step_skipped": "passed", "run_now": "pending"},
	"success":     {"replayed": "revived", "edited": "success", "step_skipped": "passed"},
	"dead_letter": {"replayed": "revived", "edited": "dead_letter", "step_skipped": "passed", "skipped": "skipped", "resolved": "dead_letter"},
	"skipped":     {"replayed": "revived", "edited": "skipped", "step_skipped": "passed"},
	"cancelled":   {"replayed": "revived", "edited": "cancelled", "step_skipped": "passed"},
}

// checkAll looks at all there is: each trail is legal, the records of the steps and
// the figures are right, and of each key one task lives.
func (m *model) checkAll() {
	m.Helper()
	m.wantWhole()
	m.checkTrails()
	for key, id := range m.ref.live {
		if n := m.int(`select count(*) from task_outbox where dedupe_key = ? and finished_at is null and id = ?`, key, id); n != 1 {
			m.errorf("the key %s isn't the living task %d's", key, id)
		}
	}
	m.wantInt(int64(len(m.ref.live)), `select count(*) from task_outbox where dedupe_key is not null and finished_at is null`)
	m.wantInt(int64(len(m.ref.onces)), `select count(*) from task_dedupe where kind = 'once' and state = 'done'`)
	m.wantInt(int64(len(m.ref.onces)), `select count(distinct name) from effects where task = 0`)
	m.wantInt(int64(len(m.ref.onces)), `select count(*) from effects where task = 0`)
	got := map[string]int{}
	for _, line := range m.rows(`select task_id, name, state from task_dedupe where kind = 'step'`) {
		got[line]++
	}
	n := 0
	for id, t := range m.ref.tasks {
		for name, s := range t.steps {
			if n++; got[fmt.Sprintf("%d|%s|%s", id, name, s.state)] != 1 {
				m.errorf("the step %s of task %d isn't %s: %q", name, id, s.state, m.rows(`select name, state from task_dedupe where kind = 'step' and task_id = ?`, id))
			}
		}
	}
	if n != len(got) {
		m.errorf("%d steps are recorded, want %d", len(got), n)
	}
}

func (m *model) checkTrails() {
	m.Helper()
	task, state, seq := "", "", 0
	for _, line := range m.rows(`select task_id, seq, event, (select status from task_outbox where id = task_id), (select max(seq) from task_audit as a where a.task_id = o.task_id)
		from task_audit as o where task_id > 0 order by task_id, seq`) {
		f := strings.Split(line, "|")
		if f[0] != task {
			id, err := strconv.ParseInt(f[0], 10, 64)
			if err != nil {
				m.Fatal(err)
			}
			task, state, seq = f[0], map[bool]string{false: "pending", true: "scheduled"}[m.ref.tasks[id].delayed], 0
		}
		seq++
		next, ok := legalModel[state][f[2]]
		if f[1] != strconv.Itoa(seq) || !ok {
			m.errorf("task %s: %s follows on %s as number %s, want %d", task, f[2], state, f[1], seq)
			next = f[2]
		}
		state = next
		if f[1] != f[4] {
			continue
		}
		if want := map[string]string{"lost": "pending", "revived": "pending", "passed": ""}[state]; f[3] != state && f[3] != want && !(state == "revived" && f[3] == "scheduled") {
			m.errorf("task %s is %s, and its trail leads to %s", task, f[3], state)
		}
	}
}
