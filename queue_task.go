package taskbox

import (
	"cmp"
	"context"
	"encoding/json"
	"runtime/debug"
	"time"
)

// A Task is one attempt at a task, as its handler sees it.
type Task[T any] struct {
	h       *held
	ID      int64
	Type    string
	Payload T
	// Attempt counts the executions of the task, from 1. What was given back at a
	// shutdown or put off by [Snooze] doesn't count.
	Attempt int
	// Retry is how many retries led to this attempt: 0 for the first.
	Retry int
	// Key and Group are what it was enqueued with, or empty.
	Key, Group string
	// TraceID follows the task through logs, trail and the tasks that it enqueues.
	TraceID string
	// ParentID is the task whose handler enqueued this one, or 0.
	ParentID  int64
	CreatedAt time.Time
}

// held is a task that this process has claimed. What isn't marked otherwise is
// written before its worker starts and constant from then on.
type held struct {
	id, fence int64
	version   int64 // the writer loop
	typ       *taskType
	payload   string
	attempt   int
	retry     int
	lost      int
	max       int // max_attempts of the task, or 0
	due       int64
	created   int64
	expires   int64
	priorDue  int64 // next_run_at as it stands in the row
	key       string
	group     string
	traceID   string
	parentID  int64

	picked  int64                   // Unix ms
	claimed time.Time               // by the monotonic clock
	began   time.Time               // the same, of its handler; the poller's mu
	started int64                   // Unix ms, 0 before; the poller's mu
	marked  bool                    // recorded as processing; the writer loop
	cancel  context.CancelCauseFunc // set while it runs; the poller's mu
	ended   bool                    // its outcome waits to be settled; the poller's mu
	gone    bool                    // its lease is lost, and that was told; the poller's mu
	// completed tells that the handler ended it in a transaction of the
	// application's, which may have been rolled back; the poller's mu.
	completed bool
	steps     map[string]bool // used in this attempt; the poller's mu
	p         *poller
}

// heldKey is the context key of the *held that a handler's context belongs to.
type heldKey struct{}

// decode binds the task's payload to its handler. A panic while decoding is an error
// of the payload like any other.
func (h *held) decode() (call func(context.Context) error, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &DecodeError{Type: h.typ.name, Err: &PanicError{Value: v, Stack: debug.Stack()}}
		}
	}()
	return h.typ.bind(h)
}

// binder returns the function that decodes a payload for fn.
func binder[T any](name string, fn func(context.Context, *Task[T]) error) func(*held) (func(context.Context) error, error) {
	return func(h *held) (func(context.Context) error, error) {
		t := &Task[T]{
			h: h, ID: h.id, Type: name, Attempt: h.attempt, Retry: h.retry, Key: h.key, Group: h.group,
			TraceID: h.traceID, ParentID: h.parentID, CreatedAt: time.UnixMilli(h.created),
		}
		if err := json.Unmarshal([]byte(h.payload), &t.Payload); err != nil {
			return nil, &DecodeError{Type: name, Err: err}
		}
		return func(ctx context.Context) error { return fn(ctx, t) }, nil
	}
}

// maxTiers bounds the search for a schedule's last wait.
const maxTiers = 10_000

// nextWait returns how long the task waits before its next attempt, or false when it
// has failed as often as it may.
func (h *held) nextWait(v verdict) (time.Duration, bool) {
	retry, limit := h.retry+1, cmp.Or(h.max, h.typ.opts.MaxAttempts)
	if limit > 0 && retry >= limit {
		return 0, false
	}
	s := h.typ.opts.Schedule
	d, ok := nextDelay(s, retry, h.id, int64(h.attempt), v.after)
	for tier := min(retry-1, maxTiers); !ok && limit > 0 && tier > 0; tier-- {
		// MaxAttempts goes beyond the schedule: its last wait is repeated.
		d, ok = nextDelay(s, tier, h.id, int64(h.attempt), v.after)
	}
	return d, ok
}
