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
	politeBatch = 40
	// politePause outlasts the first sleep of SQLite's waiters, 1 ms: who finds the lock
	// taken has it at the second try.
	politePause = 2 * time.Millisecond
	// gatherPause is the same when others pass the gate one after the other: a turn for
	// every two of their tasks costs them and us more than it gains.
	gatherPause = time.Millisecond
	gatherFrom  = 2
	// gateBatch bounds a turn while others pass the gate: with it they wait for about
	// half a millisecond.
	gateBatch = 48
	// crowdTurns is for how many turns in a row somebody else in this process must
	// have a connection before it is taken for a writer that waits for the lock.
	crowdTurns = 3
	// breathAfter is how long the loop may take the lock again and again before it
	// rests for breath. SQLite's waiters sleep for up to 100 ms between two tries, and
	// give up after busy_timeout, usually 5 s: so none of another process goes away
	// with nothing.
	breathAfter = 1500 * time.Millisecond
	breath      = 120 * time.Millisecond
)

// tide is whether other writers are about.
type tide struct {
	until   time.Time // polite until then, or in small turns behind the gate
	version int64     // PRAGMA data_version at the last turn
	commits uint64    // through the gate, at the last turn
	own     uint64    // commits of this loop since then
	passed  uint64    // commits of others through the gate between the last two turns
	foreign bool      // they don't stand in line at the gate
	busy    int       // turns in a row that found others with a connection
	rested  time.Time // when the lock was last left alone for a while
}

// batch is how many outcomes and claims the next turn may write.
func (p *poller) batch() int {
	switch {
	case !time.Now().Before(p.tide.until):
		return maxBatch
	case p.q.gate != nil && !p.tide.foreign:
		return gateBatch
	}
	return politeBatch
}

// giveWay leaves the lock to others between two turns, if there are others.
func (p *poller) giveWay(done <-chan struct{}) {
	now := time.Now()
	if p.othersWrote() {
		p.tide.until = now.Add(politeFor)
	}
	switch {
	case p.batch() == politeBatch:
		p.leave(politePause, done)
	case p.tide.passed >= gatherFrom:
		p.leave(gatherPause, done)
	case now.Sub(p.tide.rested) > breathAfter:
		p.leave(breath, done)
	}
}

// leave leaves the lock alone for a while.
func (p *poller) leave(d time.Duration, done <-chan struct{}) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-done:
	}
	p.tide.rested = time.Now()
}

// othersWrote tells whether anybody else has written, or seems about to.
func (p *poller) othersWrote() bool {
	crowd := p.waker.crowd.Swap(false)
	if p.foreign == nil {
		return crowd
	}
	before := p.tide
	if err := p.foreign.QueryRowContext(context.Background()).Scan(&p.tide.version); err != nil {
		return crowd // the next turn will meet the error and tell it
	}
	wrote := before.version != 0 && p.tide.version != before.version
	if g := p.q.gate; g != nil {
		p.tide.commits, p.tide.own = g.commits.Load(), 0
		p.tide.passed = p.tide.commits - before.commits - before.own
		passed := p.tide.passed != 0
		// Who doesn't stand in line at the gate is another process.
		p.tide.foreign = wrote && !passed
		return wrote || passed || g.waiting() > 0
	}
	return wrote || crowd || p.crowded()
}

// crowded tells whether others in this process have been holding a connection for
// some turns: perhaps they wait for the lock, and SQLite tells nobody.
func (p *poller) crowded() bool {
	if p.q.db.Stats().InUse <= 1 {
		p.tide.busy = 0
		return false
	}
	p.tide.busy++
	return p.tide.busy >= crowdTurns
}

// noticeEvery is how often a commit of somebody else's makes the loop look whether the
// tasks that run here are still ours: a person may have cancelled one.
const noticeEvery = 250 * time.Millisecond

// noticeOthers brings the heartbeat forward when somebody may have ended a task that
// runs here.
func (p *poller) noticeOthers() {
	asked := p.waker.checkHeld.Swap(false)
	now := time.Now()
	if !asked && (now.Before(p.noticeAt) || !p.busy()) {
		return
	}
	p.noticeAt = now.Add(noticeEvery)
	if asked || p.foreign == nil && now.Sub(p.lastBeat) > 2*noticeEvery {
		p.beatAt = now
		return
	}
	var version int64
	if p.foreign == nil || p.foreign.QueryRowContext(context.Background()).Scan(&version) != nil {
		return // the next turn will meet the error and tell it
	}
	if version != p.noticed { // the first time too: it may have been before
		p.beatAt = now
	}
	p.noticed = version
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
	end, err := p.pruner.step(context.Background(), p.reader(), p.source())
	if err == nil && !end {
		p.pruneAt = time.Now().Add(pruneAgain)
	}
	return err
}
