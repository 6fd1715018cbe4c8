package taskbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxBatch bounds a turn's outcomes and its claims: at a few microseconds each
	// the write lock is held for a few milliseconds at most.
	maxBatch = 256
	// markAfter is how long an attempt runs before it is recorded as processing
	// while it runs; a shorter one is recorded when it ends.
	markAfter = 50 * time.Millisecond
	// waitCap bounds every timer, because a wall clock may be set and a machine may
	// sleep: after each the clock is read again.
	waitCap = 30 * time.Second
	// stuckAfter is how long a handler may go on after its context was cancelled at
	// the end of the grace period, before its task is given back without it.
	stuckAfter = 2 * time.Second
)

// A poller runs the tasks of one queue: one writer loop, which is the goroutine of
// run and the only writer, and the workers that it starts.
type poller struct {
	q        *Queue
	owner    string // random for each start
	log      *slog.Logger
	waker    *waker
	unwatch  func()       // ends what watch began
	drain    bool         // return when nothing is due
	bubble   bool         // inside testing/synctest
	watching atomic.Bool  // the file's changes wake the loop
	wrote    atomic.Int64 // when our last transaction ended, Unix ns

	// ctx is the parent of the handlers' contexts. It outlives Run's by the grace period.
	ctx    context.Context
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup

	// The loop's own.
	conn       *sql.Conn // pinned, where the pool is large enough
	look       *sql.Stmt
	foreign    *sql.Stmt // PRAGMA data_version; nil without a pinned connection
	sight      sight
	claimable  bool // the last look or turn saw due tasks and there was room
	rotation   int  // which type is served first
	suspects   []*held
	lastStart  time.Time // of a suspect
	suspected  int       // how many there were when the last came
	markAt     time.Time // zero: nothing to mark
	beatAt     time.Time
	lastBeat   time.Time
	noticeAt   time.Time
	noticed    int64 // PRAGMA data_version when tasks were last compared
	pruneAt    time.Time
	pruner     pruner
	observed   map[string]observation // other owners' leases
	tide       tide
	trouble    trouble
	clock      clockReading
	registered bool      // our entry is in task_meta
	rebase     bool      // retries may be planned by a clock that was put back since
	doubt      bool      // a commit failed, and no heartbeat has looked since what it left
	stopAt     time.Time // when the grace period ends; zero: not stopping

	mu         sync.Mutex
	closed     bool             // Run has returned; mu
	held       map[int64]*held  // claimed and not yet settled; mu
	slots      map[string]*slot // by type; mu
	order      []*slot          // the same, for taking turns; mu
	next       int              // index into order; mu
	running    int              // workers busy; mu
	lastFinish time.Time        // of a worker; mu
	outcomes   []outcome        // to be settled; mu
	requests   []*request       // to be written for handlers; mu
	over       bool             // nobody serves requests any more; mu
}

// Run claims and runs tasks until ctx is cancelled. Then it claims no more, gives
// back what hasn't started, lets handlers go on for [Options.Grace], cancels their
// contexts with the cause [ErrStopping], and returns nil when all has ended and is
// recorded. Handlers that don't return even then are left behind: their tasks are
// given back, and the error is [ErrStuck]. Giving back costs no attempt.
//
// Trouble with the file doesn't end Run: it keeps the outcomes that it couldn't
// write, logs the trouble once, and goes on when it can. Only one Run or Drain of a
// Queue may be active: [ErrRunning].
func (q *Queue) Run(ctx context.Context) error { return q.run(ctx, false) }

// Drain runs everything that is due, and what becomes due meanwhile, to its end and
// returns nil; or, when ctx is cancelled, as Run does, with the cause of ctx. It is
// made for tests: enqueue, drain, look.
func (q *Queue) Drain(ctx context.Context) error { return q.run(ctx, true) }

func (q *Queue) run(ctx context.Context, drain bool) error {
	if !q.running.CompareAndSwap(false, true) {
		return ErrRunning
	}
	defer q.running.Store(false)
	p := newPoller(ctx, q, drain)
	q.hint.Store(p.waker)
	defer q.hint.Store(nil)
	p.unwatch = p.watch()
	err := p.loop(ctx)
	if drain && err == nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func newPoller(ctx context.Context, q *Queue, drain bool) *poller {
	p := &poller{
		rebase: true,
		q:      q, owner: newOwner(), log: q.opts.Logger, waker: newWaker(), drain: drain, bubble: inBubble(),
		held: map[int64]*held{}, slots: map[string]*slot{}, observed: map[string]observation{},
		pruner: pruner{q: q},
	}
	p.ctx, p.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	p.beatAt = time.Now()
	p.tide.rested = p.beatAt
	if !drain {
		p.pruneAt = p.beatAt.Add(time.Second)
	}
	return p
}

// loop is the life of the poller.
func (p *poller) loop(ctx context.Context) error {
	defer p.release()
	done := ctx.Done()
	for {
		if done != nil && ctx.Err() != nil {
			done = nil
			p.stop()
		}
		err := p.step()
		if err != nil {
			p.rest(done, err)
		}
		if end, err := p.ended(); end {
			return err
		}
		switch {
		case err != nil:
		case p.idle():
			p.wait(done)
		default:
			p.giveWay(done)
		}
	}
}

// step does what is to be done now: a turn if there is anything to write.
func (p *poller) step() error {
	if err := p.open(); err != nil {
		return err
	}
	if passed(p.beatAt, time.Now()) {
		if err := p.q.checkFile(); err != nil {
			return err
		}
	}
	p.watchClock()
	p.noticeOthers()
	if !p.mustWrite() && p.room() > 0 && !p.stopping() {
		if err := p.lookAround(); err != nil {
			return err
		}
	}
	if p.mustWrite() || p.claimable {
		if err := p.turn(); err != nil {
			return err
		}
	}
	if err := p.prune(); err != nil {
		return err
	}
	p.trouble.over(p.log)
	return nil
}

// mustWrite tells whether a turn is due whatever the queue holds.
func (p *poller) mustWrite() bool {
	now := time.Now()
	p.mu.Lock()
	outcomes := len(p.outcomes)+len(p.requests) > 0
	p.mu.Unlock()
	return outcomes || passed(p.beatAt, now) || passed(p.markAt, now) || p.canStartSuspect(now)
}

func (p *poller) closedNow() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.closed
}

func passed(t, now time.Time) bool { return !t.IsZero() && !now.Before(t) }

// idle tells whether the loop has nothing to do but wait.
func (p *poller) idle() bool { return !p.claimable && !p.mustWrite() }

func (p *poller) stopping() bool { return !p.stopAt.IsZero() }

// stop begins the graceful stop: what hasn't started goes back, what runs has the
// grace period.
func (p *poller) stop() {
	p.stopAt = time.Now().Add(p.q.opts.Grace)
	p.claimable, p.pruneAt = false, time.Time{}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.order {
		for _, h := range s.ready {
			p.giveBack(h, false, "shutdown")
		}
		s.ready = nil
	}
	for _, h := range p.suspects {
		p.giveBack(h, false, "shutdown")
	}
	p.suspects = nil
}

// ended tells whether the poller may return, and with what. While it is stopping, it
// also moves the stop along.
func (p *poller) ended() (bool, error) {
	p.mu.Lock()
	held, running, unwritten := len(p.held), p.running, len(p.outcomes)
	p.mu.Unlock()
	now := time.Now()
	switch {
	case !p.stopping():
		return p.drain && held == 0 && p.sight.fresh && !p.claimable && !p.doubt, nil
	case held+running == 0 && !p.doubt:
		return true, nil
	case now.Before(p.stopAt):
		return false, nil
	case p.ctx.Err() == nil:
		p.cancel(ErrStopping)
		return false, nil
	case now.Before(p.stopAt.Add(stuckAfter)):
		return false, nil
	case running > 0 && unwritten == 0:
		return true, p.abandon()
	case running > 0 && !p.trouble.lasting():
		return false, nil
	}
	if p.trouble.lasting() {
		if running > 0 {
			p.mu.Lock()
			p.closed = true // nobody waits for them
			p.mu.Unlock()
			return true, fmt.Errorf("%w; %d tasks couldn't be settled and will run again: %w", ErrStuck, held, p.trouble.err)
		}
		return true, fmt.Errorf("stop: %d tasks couldn't be settled and will run again: %w", held, p.trouble.err)
	}
	return false, nil
}

// abandon gives back the tasks whose handlers don't return, and names them.
func (p *poller) abandon() error {
	p.mu.Lock()
	p.closed = true
	ids := slices.Sorted(maps.Keys(p.held))
	for _, id := range ids {
		p.giveBack(p.held[id], true, "its handler ignored the shutdown")
	}
	p.mu.Unlock()
	stuck := fmt.Errorf("%w: tasks %v", ErrStuck, ids)
	for {
		err := p.turn()
		if err != nil || len(p.outcomes) == 0 {
			return errors.Join(stuck, err)
		}
	}
}

// rest waits after trouble, longer each time it stays the same.
func (p *poller) rest(done <-chan struct{}, err error) {
	// Shorter than a heartbeat: when the lock comes free, others must see that we live.
	d := min(p.trouble.met(err, p.log), p.beatEvery()/2)
	p.disconnect(err)
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-done:
	case <-t.C:
	}
}

// A trouble is why the loop can't write, told once and not each time.
type trouble struct {
	err   error
	code  int
	times int
}

const (
	firstRest = 5 * time.Millisecond
	maxRest   = 5 * time.Second
)

// met notes an error and returns how long to rest.
func (t *trouble) met(err error, log *slog.Logger) time.Duration {
	code := sqliteCode(err)
	if t.err == nil || t.code != code {
		log.Error("taskbox: the queue can't write; outcomes are kept and it tries again", "error", explainTrouble(err))
		t.times = 0
	}
	t.err, t.code, t.times = err, code, t.times+1
	return min(firstRest<<min(t.times, 20), maxRest)
}

// lasting tells whether several tries have failed.
func (t *trouble) lasting() bool { return t.err != nil && t.times >= 3 }

func (t *trouble) over(log *slog.Logger) {
	if t.err != nil {
		log.Info("taskbox: the queue can write again", "failures", t.times)
		*t = trouble{}
	}
}

// explainTrouble says what to do about what the file system or the file has.
func explainTrouble(err error) error {
	hint := map[int]string{
		8:  "the file or its folder is read-only",
		10: "the disk reports an error; look at the system's log",
		11: "the file is damaged; stop the program, run PRAGMA integrity_check and restore a backup",
		13: "the disk is full; free space outside the database",
		14: "the file can't be opened; has it been moved or have its permissions changed?",
		26: "the file isn't a SQLite database any more; restore a backup",
	}[sqliteCode(err)&0xff]
	if hint == "" {
		return explainBusy(err)
	}
	return fmt.Errorf("%s: %w", hint, err)
}
