package taskbox

import (
	"context"
	"database/sql"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// A gate is a first-come-first-served lock in front of SQLite's write lock, which has
// no queue: whoever finds it taken sleeps and tries again, and a loop that takes it
// without a pause starves everybody else. There is one gate for each database opened
// by [OpenDB].
//
// It is a courtesy between the connections of one pool; SQLite's own lock stays the
// truth. Reads never stand in line. Who has waited for busy_timeout goes on without
// the gate, and SQLite, asked once, says whether the database is busy: a goroutine
// that holds a transaction and writes on a second connection gets SQLITE_BUSY after
// busy_timeout, as it would without a gate. Only who comes first in line late, and then
// finds that another process has the lock, waits longer: up to twice busy_timeout.
type gate struct {
	commits atomic.Uint64 // committed write transactions

	mu        sync.Mutex
	held      bool            // mu
	line      []chan struct{} // mu; closed by the hand-over
	listeners []*func()       // mu; replaced, never changed in place
}

// acquire takes the gate, in the order of the calls, and reports whether it has it.
// It hasn't when that took longer than timeout, or when ctx ended, which is the error.
func (g *gate) acquire(ctx context.Context, timeout time.Duration) (bool, error) {
	g.mu.Lock()
	if !g.held {
		g.held = true
		g.mu.Unlock()
		return true, nil
	}
	if timeout <= 0 {
		g.mu.Unlock()
		return false, nil
	}
	turn := make(chan struct{})
	g.line = append(g.line, turn)
	g.mu.Unlock()

	t := time.NewTimer(timeout)
	defer t.Stop()
	select {
	case <-turn:
		return true, nil
	case <-t.C:
		return !g.leave(turn), nil
	case <-ctx.Done():
		if !g.leave(turn) {
			g.release()
		}
		return false, ctx.Err()
	}
}

// leave takes a waiter out of the line. It reports false where the gate has been
// handed to the waiter in the meantime.
func (g *gate) leave(turn chan struct{}) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	i := slices.Index(g.line, turn)
	if i < 0 {
		return false
	}
	g.line = slices.Delete(g.line, i, i+1)
	return true
}

// release hands the gate to the first in line. It isn't free in between, so that who
// releases it and wants it again stands in line as well.
func (g *gate) release() {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.line) == 0 {
		g.held = false
		return
	}
	close(g.line[0])
	g.line = slices.Delete(g.line, 0, 1)
}

// waiting is how many stand in line.
func (g *gate) waiting() int {
	g.mu.Lock()
	defer g.mu.Unlock()
	return len(g.line)
}

// listen has fn called after each commit, until stop. It is called by who commits,
// who no longer holds the gate, and must not block.
func (g *gate) listen(fn func()) (stop func()) {
	l := &fn
	g.mu.Lock()
	defer g.mu.Unlock()
	g.listeners = append(slices.Clip(g.listeners), l)
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		g.listeners = slices.DeleteFunc(slices.Clone(g.listeners), func(o *func()) bool { return o == l })
	}
}

func (g *gate) notify() {
	g.mu.Lock()
	listeners := g.listeners
	g.mu.Unlock()
	for _, fn := range listeners {
		(*fn)()
	}
}

// gateOf returns the gate of a pool that is from [OpenDB], otherwise nil.
func gateOf(db *sql.DB) *gate {
	if d, ok := db.Driver().(*gatedDriver); ok {
		return d.gate
	}
	return nil
}
