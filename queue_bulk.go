package taskbox

import (
	"cmp"
	"context"
	"crypto/rand"
	"database/sql"
	"fmt"
	"time"
)

// An Operation is what can be done to many tasks at once.
type Operation string

// The operations in bulk: each is the method of the same name, for each task.
const (
	DoReplay  Operation = "replay"
	DoSkip    Operation = "skip"
	DoCancel  Operation = "cancel"
	DoRunNow  Operation = "run_now"
	DoResolve Operation = "resolve"
)

// An Action is an operation and what it needs beside.
type Action struct {
	Do Operation `json:"do"`
	// As is how the dead letters were dealt with, for [DoResolve] only.
	As string `json:"as,omitempty"`
}

// fn is the operation on one task.
func (a Action) fn() (func(*manual) error, error) {
	fns := map[Operation]func(*manual) error{
		DoReplay: (*manual).replay, DoSkip: (*manual).skip, DoCancel: (*manual).cancel,
		DoRunNow: (*manual).runNow, DoResolve: resolveAs(a.As),
	}
	switch {
	case fns[a.Do] == nil:
		return nil, fmt.Errorf("%w: the operation is %.40q, want replay, skip, cancel, run_now or resolve", ErrInvalid, a.Do)
	case a.Do == DoResolve:
		return fns[a.Do], validName("resolution", a.As, maxNameLength)
	case a.As != "":
		return nil, fmt.Errorf("%w: Action.As is for resolve, the operation is %s", ErrInvalid, a.Do)
	}
	return fns[a.Do], nil
}

// runs tells whether the tasks are run afterwards.
func (a Action) runs() bool { return a.Do == DoReplay || a.Do == DoRunNow }

// A Plan is an operation on many tasks, as they stood when it was made. It can be
// shown, kept as JSON and applied by another process on the same file.
type Plan struct {
	ID     string        `json:"id"`
	Action Action        `json:"action"`
	At     time.Time     `json:"at"`
	Tasks  []PlannedTask `json:"tasks"` // the oldest first
	// The number of tasks by what they have in common. Those that haven't failed are
	// in the error group "".
	ByType    map[string]int      `json:"by_type"`
	ByStatus  map[string]int      `json:"by_status"`
	ByGroup   map[string]int      `json:"by_error_group"`
	ByVerdict map[VerdictKind]int `json:"by_verdict"`
}

// A PlannedTask is a task as it stood when the plan was made.
type PlannedTask struct {
	ID         int64       `json:"id"`
	Version    int64       `json:"version"`
	Type       string      `json:"type"`
	Status     string      `json:"status"`
	ErrorGroup string      `json:"error_group,omitempty"`
	Verdict    VerdictKind `json:"verdict"`
}

const (
	// maxPlan is the most tasks in a plan.
	maxPlan = 100_000
	// planChunk is how many tasks are read in one snapshot.
	planChunk = 500
)

func newPlanID() string { return rand.Text() }

// Plan selects the tasks for an operation in bulk and says what they are; nothing is
// changed until [Queue.Apply]. Filter.Limit is the most tasks to take, the oldest
// first: 0 takes all. A filter that selects more than 100,000 tasks is [ErrInvalid].
// Tasks that change while the plan is made are left out.
func (q *Queue) Plan(ctx context.Context, f Filter, a Action) (Plan, error) {
	p := Plan{
		ID: newPlanID(), Action: a, At: time.UnixMilli(q.now()).UTC(), Tasks: []PlannedTask{},
		ByType: map[string]int{}, ByStatus: map[string]int{}, ByGroup: map[string]int{}, ByVerdict: map[VerdictKind]int{},
	}
	_, err := a.fn()
	var found []PlannedTask
	if err == nil {
		found, err = q.selectTasks(ctx, f)
	}
	for len(found) > 0 && err == nil {
		n := min(len(found), planChunk)
		err = q.addToPlan(ctx, &p, found[:n])
		found = found[n:]
	}
	if err != nil {
		return Plan{}, fmt.Errorf("plan %s: %w", a.Do, explainBusy(err))
	}
	return p, nil
}

func (q *Queue) selectTasks(ctx context.Context, f Filter) ([]PlannedTask, error) {
	if f.Limit < 0 || f.Limit > maxPlan {
		return nil, fmt.Errorf("%w: the limit is %d, want 1 to %d, or 0 for all", ErrInvalid, f.Limit, maxPlan)
	}
	where, args := f.where()
	rows, err := q.db.QueryContext(ctx, `
select id, version from main.task_outbox`+where+` order by id limit ?`, append(args, cmp.Or(f.Limit, maxPlan+1))...)
	if err != nil {
		return nil, err
	}
	found, err := scanPlanned(rows)
	if err == nil && len(found) > maxPlan {
		return nil, fmt.Errorf("%w: the filter selects more than %d tasks; narrow it, or set Limit and go on with another plan", ErrInvalid, maxPlan)
	}
	return found, err
}

// scanPlanned reads ids and versions and closes the rows.
func scanPlanned(rows *sql.Rows) (ts []PlannedTask, err error) {
	defer rows.Close()
	for rows.Next() {
		var t PlannedTask
		if err := rows.Scan(&t.ID, &t.Version); err != nil {
			return nil, err
		}
		ts = append(ts, t)
	}
	return ts, rows.Err()
}

func (q *Queue) addToPlan(ctx context.Context, p *Plan, found []PlannedTask) error {
	ids, versions := make([]int64, len(found)), map[int64]int64{}
	for i, t := range found {
		ids[i], versions[t.ID] = t.ID, t.Version
	}
	fs, err := q.factsOf(ctx, ids)
	if err != nil {
		return err
	}
	for _, f := range fs {
		if f.Version == versions[f.ID] { // else it has changed since it was selected
			f.Verdict = f.verdict().Kind
			p.add(f.PlannedTask)
		}
	}
	return nil
}

func (p *Plan) add(t PlannedTask) {
	p.Tasks = append(p.Tasks, t)
	p.ByType[t.Type]++
	p.ByStatus[t.Status]++
	p.ByGroup[t.ErrorGroup]++
	p.ByVerdict[t.Verdict]++
}

// check finds what is wrong with a plan that may have come from outside.
func (p *Plan) check() error {
	if p.ID == "" || len(p.ID) > maxNameLength {
		return fmt.Errorf("%w: the plan has no id; plans are made by Queue.Plan", ErrInvalid)
	}
	if len(p.Tasks) > maxPlan {
		return fmt.Errorf("%w: the plan has %d tasks, at most %d are allowed", ErrInvalid, len(p.Tasks), maxPlan)
	}
	seen := make(map[int64]bool, len(p.Tasks))
	for _, t := range p.Tasks {
		if seen[t.ID] {
			return fmt.Errorf("%w: the plan has task %d twice", ErrInvalid, t.ID)
		}
		seen[t.ID] = true
	}
	return nil
}
