package taskbox

import (
	"time"
)

// SetClock replaces the queue's wall clock. It must be called before the queue is used.
func (q *Queue) SetClock(now func() time.Time) { q.clock = now }

// TraceOf is what [Traceparent] takes from a header.
var TraceOf = traceOf

// SchemaVersion is the version that this library writes.
var SchemaVersion = schemaVersion

// Judge is what happens with a handler's error on the worker's goroutine, where a
// panic would end the process.
func (q *Queue) Judge(err error) (event string) {
	h := &held{id: 1, attempt: 1, typ: &taskType{opts: TypeOptions{Schedule: DefaultSchedule()}}}
	return q.outcomeOf(h, err, q.now()).event
}
