package taskbox

import (
	"context"
	"time"
)

// SQLite has no queue for its write lock: a loop that takes it again at once starves
// everybody else. With a pool of [OpenDB]'s the gate is that queue. With any other,
// the loop is polite for as long as others write: measured, one application
// transaction a millisecond then takes 1 to 2 ms at its 99th percentile instead of 134.
const (
	politeFor   = 100 * time.Millisecond
	politeBatch = 32
	politePause = time.Millisecond
	// gateBatch bounds a turn while others wait at the gate.
	gateBatch = 64
)

// tide is whether other writers are about.
type tide struct {
	until   time.Time // polite until then
	version int64     // PRAGMA data_version at the last turn
	commits uint64    // through the gate, at the last turn
	own     uint64    // commits of this loop since then
}

// batch is how many outcomes and claims the next turn may write.
func (p *poller) batch() int {
	switch {
	case p.polite():
		return politeBatch
	case p.q.gate != nil && p.q.gate.waiting() > 0:
		return gateBatch
	}
	return maxBatch
}

func (p *poller) polite() bool { return time.Now().Before(p.tide.until) }

// giveWay leaves the lock to others between two turns, if there are others.
func (p *poller) giveWay(done <-chan struct{}) {
	if p.othersWrote() {
		p.tide.until = time.Now().Add(politeFor)
	}
	if p.polite() {
		t := time.NewTimer(politePause)
		defer t.Stop()
		select {
		case <-t.C:
		case <-done:
		}
	}
}

// othersWrote tells whether anybody has written, or is about to, who doesn't stand in
// line at the gate.
func (p *poller) othersWrote() bool {
	crowd := p.waker.crowd.Swap(false)
	if p.foreign == nil {
		return crowd
	}
	before := p.tide
	if err := p.foreign.QueryRowContext(context.Background()).Scan(&p.tide.version); err != nil {
		return crowd // the next turn will meet the error and tell it
	}
	if g := p.q.gate; g != nil {
		p.tide.commits, p.tide.own = g.commits.Load(), 0
		return p.tide.version != before.version && p.tide.commits == before.commits+before.own
	}
	return crowd || before.version != 0 && p.tide.version != before.version
}

const (
	pruneEvery = time.Minute
	// pruneAgain is the pause between two steps of one walk.
	pruneAgain = 50 * time.Millisecond
)

// prune takes one small step of pruning, when it is time for one.
func (p *poller) prune() error {
	if !passed(p.pruneAt, time.Now()) {
		return nil
	}
	p.pruneAt = time.Now().Add(pruneEvery)
	end, err := p.pruner.step(context.Background(), p.source())
	if err == nil && !end {
		p.pruneAt = time.Now().Add(pruneAgain)
	}
	return err
}
