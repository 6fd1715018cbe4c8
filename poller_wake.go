package taskbox

import (
	"bytes"
	"context"
	"database/sql"
	"runtime"
	"sync/atomic"
	"time"
)

const (
	// watchedTick is how often an idle poller looks that is woken by the file's changes.
	watchedTick = time.Second
	// blindTick is the same where nothing wakes it.
	blindTick = 100 * time.Millisecond
	// slowLooks is how many of the looks below are slowPause apart, the last ones; the
	// others are a tenth of a millisecond apart.
	slowLooks = 25
	slowPause = 2 * time.Millisecond
	// enqueueLooks is how often the poller looks when a task may be about to appear:
	// an application that enqueues in its own transaction commits it a moment later,
	// and nobody tells us.
	enqueueLooks = 240 + slowLooks
	// spinLooks are the first of these, with no pause at all: most applications
	// commit at once.
	spinLooks = 40
	// changeLooks is the same after the file was written to: a commit is visible a
	// moment, and perhaps a sync of the disk, after its last write.
	changeLooks = 20 + slowLooks
	// ownLooks is the same when it was probably us who wrote.
	ownLooks = 4
	// minPinPool is the smallest pool of which the loop takes a connection for itself.
	minPinPool = 4
)

// A waker wakes the poller's loop. It may be used from any goroutine.
type waker struct {
	c     chan struct{} // capacity 1: a wake-up while one is pending says nothing new
	eager atomic.Int32  // looks left to take in quick succession
	crowd atomic.Bool   // an application's writer is about
	// checkHeld asks for a heartbeat: a person may have ended a task that runs here.
	checkHeld atomic.Bool
}

func newWaker() *waker { return &waker{c: make(chan struct{}, 1)} }

func (w *waker) wake() {
	select {
	case w.c <- struct{}{}:
	default:
	}
}

// expectTask tells the poller that a transaction which enqueues is under way.
func (q *Queue) expectTask() {
	w := q.hint.Load()
	if w == nil || q.gate != nil { // the gate tells of each commit
		return
	}
	w.expect(enqueueLooks)
	w.crowd.Store(true)
}

// expect asks for at least n looks in quick succession.
func (w *waker) expect(n int32) {
	for {
		old := w.eager.Load()
		if old >= n || w.eager.CompareAndSwap(old, n) {
			break
		}
	}
	w.wake()
}

// wake tells the poller that a task has been committed.
func (q *Queue) wake() {
	if w := q.hint.Load(); w != nil {
		w.wake()
	}
}

// watch lets the file's changes and the gate's commits wake the loop.
func (p *poller) watch() (stop func()) {
	unlisten := func() {}
	if p.q.gate != nil {
		unlisten = p.q.gate.listen(p.waker.wake)
	}
	if p.drain || p.bubble || p.q.pool.memory || p.q.opts.PollInterval > 0 {
		return unlisten
	}
	unwatch := p.watchFile()
	return func() { unlisten(); unwatch() }
}

// fileChanged is called when somebody has written to the file; mostly it was us.
func (p *poller) fileChanged() {
	if time.Now().UnixNano()-p.wrote.Load() > int64(time.Millisecond) {
		p.waker.expect(changeLooks)
		return
	}
	p.waker.expect(ownLooks)
}

// wait sleeps until something may have happened.
func (p *poller) wait(done <-chan struct{}) {
	d := p.untilNext()
	if n := p.waker.eager.Load(); n > 0 && p.room() > 0 {
		p.waker.eager.CompareAndSwap(n, n-1)
		switch {
		case n > enqueueLooks-spinLooks:
			runtime.Gosched()
			return
		case n > slowLooks:
			p.pause()
			return
		}
		d = min(d, slowPause)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-p.waker.c:
	case <-t.C:
	case <-done:
	}
	p.sight.fresh = false
	p.tide.rested = time.Now() // long enough or not: a loop that waits isn't greedy
}

// untilNext is the time to the next thing that the loop knows of.
func (p *poller) untilNext() time.Duration {
	d := waitCap
	if !p.stopping() && p.room() > 0 {
		d = p.tick()
		if p.sight.next != 0 {
			// In milliseconds: a time thousands of years away overflows a Duration.
			ms := max(0, p.sight.next-p.q.now())
			d = time.Duration(min(ms, d.Milliseconds())) * time.Millisecond
		}
	}
	if !p.stopping() && p.busy() {
		d = min(d, 2*noticeEvery) // whoever cancels a task here is heard within a second
	}
	for _, t := range []time.Time{p.beatAt, p.markAt, p.suspectAt(), p.stopStep(), p.pruneAt} {
		if !t.IsZero() {
			d = min(d, time.Until(t))
		}
	}
	return max(d, 0)
}

// busy tells whether tasks are held here, which a person may end elsewhere.
func (p *poller) busy() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.held) > 0
}

// stopStep is when the stop goes a step further by itself.
func (p *poller) stopStep() time.Time {
	switch {
	case !p.stopping():
		return time.Time{}
	case p.ctx.Err() == nil:
		return p.stopAt
	}
	return p.stopAt.Add(stuckAfter)
}

func (p *poller) tick() time.Duration {
	switch {
	case p.q.opts.PollInterval > 0:
		return p.q.opts.PollInterval
	case p.watching.Load():
		return watchedTick
	}
	return blindTick
}

// inBubble tells whether we run inside testing/synctest, where time stands still
// while a goroutine waits for the operating system.
func inBubble() bool {
	var buf [128]byte
	head, _, _ := bytes.Cut(buf[:runtime.Stack(buf[:], false)], []byte("\n"))
	return bytes.Contains(head, []byte("synctest bubble"))
}

// pause lets a very short time pass between two looks.
func (p *poller) pause() {
	if p.bubble {
		time.Sleep(100 * time.Microsecond)
		return
	}
	shortPause()
}

// open makes the loop's connection and statements ready. Where the pool is large
// enough one connection is pinned: it keeps its page cache, and sees by
// PRAGMA data_version that others have written.
func (p *poller) open() error {
	if p.look != nil {
		return nil
	}
	ctx := context.Background()
	if err := p.q.stmts.prepare(ctx, insertSQL, lookSQL); err != nil {
		return err
	}
	if n := p.q.db.Stats().MaxOpenConnections; n > 0 && n < minPinPool {
		p.look = p.q.stmts.get(lookSQL)
		return nil
	}
	conn, err := p.q.db.Conn(ctx)
	if err != nil {
		return err
	}
	p.conn = conn
	if p.foreign, err = conn.PrepareContext(ctx, "pragma main.data_version"); err == nil {
		p.look, err = conn.PrepareContext(ctx, lookSQL)
	}
	if err != nil {
		p.closeConn()
	}
	return err
}

// querier is a *sql.DB or a *sql.Conn.
type querier interface {
	Tx
	QueryContext(context.Context, string, ...any) (*sql.Rows, error)
}

// reader is what the loop's single statements go through: never the rest of the pool
// where it has a connection, since the application may be keeping that.
func (p *poller) reader() querier {
	if p.conn != nil {
		return p.conn
	}
	return p.q.db
}

// prepareFor bounds the wait for a connection to prepare statements on; without one
// they are run as text.
const prepareFor = 50 * time.Millisecond

func (p *poller) prepare(texts []string) error {
	ctx, cancel := context.WithTimeout(context.Background(), prepareFor)
	defer cancel()
	if err := p.q.stmts.prepare(ctx, texts...); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

// source is what the loop's transactions begin on.
func (p *poller) source() txBeginner {
	if p.conn != nil {
		return p.conn
	}
	return p.q.db
}

// disconnect drops a connection that has given an error other than a busy file: the
// next step takes a fresh one.
func (p *poller) disconnect(err error) {
	if !isBusy(err) {
		p.closeConn()
	}
}

func (p *poller) closeConn() {
	for _, st := range []*sql.Stmt{p.foreign, p.look} {
		if st != nil && p.conn != nil {
			st.Close()
		}
	}
	if p.conn != nil {
		p.conn.Close()
	}
	p.conn, p.foreign, p.look = nil, nil, nil
}

// release ends what the poller has begun.
func (p *poller) release() {
	p.unwatch()
	p.cancel(context.Canceled)
	p.refuse()
	p.retire()
	p.closeConn()
	if !p.closedNow() {
		p.wg.Wait()
	}
}
