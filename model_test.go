package taskbox_test

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	"github.com/taskbox-go/taskbox"
)

// The reference model: what a task is after each operation, in as few words as
// possible. It knows nothing of the library but its promises. The test that holds the
// file against it is in model_run_test.go.

// A refTask is a task of the model.
type refTask struct {
	id                 int64
	typ, key, group    string
	window             time.Duration // of the key; 0: for good
	max                int           // failures that make a dead letter
	payload            int
	status             string
	run, attempt, lost int
	retry              int // retries in this run
	resolved           string
	held               bool // by a dead process
	started            bool // the handler
	handler            int  // calls that haven't returned
	wins               int  // successes in this run
	steps              map[string]*refStep
	order              []string // of the steps' first beginnings
	effects            map[string]int
	events             []string // since the last look
	starts             int      // of the handler, ever
	delayed            bool     // it was enqueued for later
}

// A refStep is what is known of a step: processing, done, failed or skipped.
type refStep struct {
	state  string
	result int
}

func (t *refTask) ended() bool {
	return slices.Contains([]string{"success", "dead_letter", "skipped", "cancelled"}, t.status)
}

// A ref is the model.
type ref struct {
	tasks  map[int64]*refTask
	alive  map[int64]*refTask // those that haven't ended
	live   map[string]int64   // key → living task
	taken  map[string]refKept // key → the end that keeps it taken
	paused map[string]time.Time
	onces  map[string]bool
}

type refKept struct {
	by    int64
	done  bool      // a success; else a dead letter of a type that keeps their keys
	until time.Time // zero: for good
}

// holder is the task because of which a key can't be enqueued, or 0.
func (r *ref) holder(key string, now time.Time) int64 {
	if k := r.taken[key]; r.live[key] == 0 && (k.until.IsZero() || now.Before(k.until)) {
		return k.by
	}
	return r.live[key]
}

func (r *ref) add(t *refTask) {
	t.run, t.steps, t.effects = 1, map[string]*refStep{}, map[string]int{}
	r.tasks[t.id], r.alive[t.id] = t, t
	if t.key != "" {
		r.live[t.key] = t.id
	}
}

// note puts a change on the trail.
func (t *refTask) note(status string, events ...string) {
	t.status, t.events = status, append(t.events, events...)
}

// end is a final state, however it was reached.
func (r *ref) end(t *refTask, status string, now time.Time) {
	t.status, t.held = status, false
	delete(r.alive, t.id)
	if status == "success" {
		t.wins++
	}
	if t.key == "" {
		return
	}
	if r.live[t.key] == t.id {
		delete(r.live, t.key)
	}
	old, has := r.taken[t.key]
	has = has && (old.until.IsZero() || now.Before(old.until))
	switch {
	case status == "success" || status == "dead_letter" && keepsDeadKeys(t.typ) && !(has && old.done):
		k := refKept{by: t.id, done: status == "success"}
		if t.window > 0 {
			k.until = now.Add(t.window)
		}
		if has && old.done && (old.until.IsZero() || !k.until.IsZero() && old.until.After(k.until)) {
			k.until = old.until // never shorter
		}
		r.taken[t.key] = k
	case has && !old.done && old.by == t.id:
		delete(r.taken, t.key)
	}
}

// revive makes a task due again by hand; a run is a replay.
func (r *ref) revive(t *refTask, at time.Time, now time.Time) error {
	if t.ended() {
		if t.key != "" && r.live[t.key] != 0 {
			return taskbox.ErrConflict
		}
		t.run, t.wins = t.run+1, 0
		r.alive[t.id] = t
		if t.key != "" {
			r.live[t.key] = t.id
		}
	}
	t.retry, t.lost, t.resolved = 0, 0, ""
	for _, s := range t.steps {
		if s.state == "processing" {
			s.state = "failed" // a person has decided about it
		}
	}
	t.note("pending", "replayed")
	if at.After(now) {
		t.status = "scheduled"
	}
	return nil
}

// replay, edit, … are the operations by hand.
func (r *ref) replay(t *refTask, payload *int, from string, at, now time.Time) error {
	before := len(t.events)
	switch {
	case t.held:
		return taskbox.ErrTaskRunning
	case !t.ended():
		return taskbox.ErrState
	case from != "" && t.steps[from] == nil:
		return taskbox.ErrNoStep
	}
	if payload != nil {
		t.events = append(t.events, "edited")
	}
	if err := r.revive(t, at, now); err != nil {
		t.events = t.events[:before]
		return err
	}
	if payload != nil {
		t.payload = *payload
	}
	if i := slices.Index(t.order, from); i >= 0 {
		for _, name := range t.order[i:] {
			delete(t.steps, name)
		}
		t.order = t.order[:i]
	}
	return nil
}

func (r *ref) edit(t *refTask, payload int) error {
	if t.held {
		return taskbox.ErrTaskRunning
	}
	t.payload = payload
	t.note(t.status, "edited")
	return nil
}

func (r *ref) skip(t *refTask, now time.Time) error {
	if t.held {
		return taskbox.ErrTaskRunning
	}
	if t.ended() && t.status != "dead_letter" {
		return taskbox.ErrState
	}
	t.note("skipped", "skipped")
	r.end(t, "skipped", now)
	return nil
}

func (r *ref) cancel(t *refTask, now time.Time) error {
	if t.ended() {
		return taskbox.ErrState
	}
	t.note("cancelled", "cancelled")
	r.end(t, "cancelled", now)
	return nil
}

func (r *ref) skipStep(t *refTask, name string, result int, now time.Time) error {
	switch {
	case t.held:
		return taskbox.ErrTaskRunning
	case t.steps[name] == nil:
		return taskbox.ErrNoStep
	case t.ended() && t.key != "" && r.live[t.key] != 0:
		return taskbox.ErrConflict
	}
	*t.steps[name] = refStep{"skipped", result}
	t.events = append(t.events, "step_skipped")
	return r.revive(t, time.Time{}, now)
}

func (r *ref) runNow(t *refTask) error {
	switch {
	case t.held:
		return taskbox.ErrTaskRunning
	case t.status != "scheduled" && t.status != "retry_wait":
		return taskbox.ErrState
	}
	t.note("pending", "run_now")
	return nil
}

func (r *ref) resolve(t *refTask, as string) error {
	switch {
	case t.held:
		return taskbox.ErrTaskRunning
	case t.status != "dead_letter":
		return taskbox.ErrState
	}
	t.resolved = as
	t.note(t.status, "resolved")
	return nil
}

// crash is a process that has claimed the task and died; begun: it had called the
// handler.
func (r *ref) crash(t *refTask, begun bool) {
	t.held, t.started = true, begun
	t.attempt++
	t.note("picked", "picked")
}

// recover is what a poller does about it at its start.
func (r *ref) recover(t *refTask, now time.Time) {
	t.held = false
	switch {
	case !t.started && t.lost > 0:
		t.attempt--
		t.note("pending", "interrupted")
	case t.lost+1 < 3:
		t.lost++
		t.note("pending", "lost")
	default:
		t.lost++
		t.note("dead_letter", "lost", "dead_letter")
		r.end(t, "dead_letter", now)
	}
}

// begin is the start of the handler. It may start only what waits for it.
func (r *ref) begin(t *refTask, now time.Time) error {
	t.starts++
	t.attempt++
	if t.handler++; t.handler > 1 {
		return fmt.Errorf("%d handlers at once", t.handler)
	}
	until, paused := r.paused[t.typ]
	switch {
	case t.ended() || t.held:
		return fmt.Errorf("started when it was %s", t.status)
	case paused && (until.IsZero() || now.Before(until)):
		return fmt.Errorf("started although %s is paused until %v", t.typ, until)
	}
	if o := r.before(t); o != nil {
		return fmt.Errorf("started although task %d of its group is %s", o.id, o.status)
	}
	t.note("picked", "picked")
	return nil
}

// before is the task of a group behind which another has to wait, or nil.
func (r *ref) before(t *refTask) *refTask {
	if t.group == "" {
		return nil
	}
	for _, o := range r.alive {
		if o.group == t.group && o != t && (o.id < t.id || o.held || o.handler > 0) {
			return o
		}
	}
	return nil
}

// outcome is the end of the handler: success, retry, dead, snooze or skipped.
func (r *ref) outcome(t *refTask, how string, now time.Time) {
	t.handler--
	if how == "retry" && t.retry+1 >= cmp.Or(t.max, 5) {
		how = "dead"
	}
	switch how {
	case "dead":
		t.note("dead_letter", "failed", "dead_letter")
		r.end(t, "dead_letter", now)
	case "retry":
		t.retry++
		t.note("retry_wait", "retry_wait")
	case "snooze":
		t.attempt--
		t.note("scheduled", "scheduled")
	default:
		t.note(how, how)
		r.end(t, how, now)
	}
}

// step begins a step and tells whether it is to be run.
func (t *refTask) step(name string) (s *refStep, runs bool) {
	s = t.steps[name]
	if s == nil {
		s = &refStep{}
		t.steps[name] = s
		t.order = append(t.order, name)
	}
	return s, s.state != "done" && s.state != "skipped"
}

// parks tells whether a step in doubt parks a task of the type.
func parks(typ string) bool { return typ == "parks" }

func keepsDeadKeys(typ string) bool { return typ == "keeps" }
