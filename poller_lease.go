package taskbox

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"time"
)

const (
	// beatsPerLease is how often a lease is renewed while it lasts.
	beatsPerLease = 6
	// quietBeats is how many heartbeats a lease must stand unchanged, on our monotonic
	// clock, before its end by the wall clock is believed.
	quietBeats = 2
	// maxLost is how often a task may take its process down.
	maxLost = 3
	// suspectGap is the time between the starts of two tasks that were running when
	// their process died: if one of them kills this one too, it is known which.
	suspectGap = 10 * time.Millisecond
	// suspectWindow is the time in which all of them are to have started.
	suspectWindow = 500 * time.Millisecond
	// maxRecovered bounds the tasks of a dead owner that one turn takes over.
	maxRecovered = 256
)

// newOwner names a poller: 128 random bits, since a host name or a process id may
// come again.
func newOwner() string { return rand.Text() }

func (p *poller) beatEvery() time.Duration { return p.q.opts.Lease / beatsPerLease }

// observation is since when another owner's lease has stood as it stands.
type observation struct {
	lease int64
	since time.Time
}

// heldRow is a claim as the file has it.
type heldRow struct {
	id, fence int64
	owner     string
	lease     int64
}

const (
	heldSQL = `
select id, owner, fence, coalesce(lease_until, 0) from main.task_outbox where owner is not null`

	renewSQL = `
update main.task_outbox set lease_until = ? where owner = ?`

	recoverSQL = `
select id, version, fence, attempt, lost_count, status = 'picked', event_type, trace_id, coalesce(group_key, ''),
	coalesce(dedupe_key, '')
from main.task_outbox where owner = ?1 and (?2 = 0 or id = ?2) limit ?3`

	takeOverSQL = `
update main.task_outbox
set status = ?, version = ?, updated_at = ?, finished_at = ?, attempt = attempt - ?,
	lost_count = lost_count + ?, last_error = coalesce(?, last_error), owner = null, lease_until = null
where id = ? and owner = ? and fence = ?`

	rebaseRetrySQL = `
update main.task_outbox set next_run_at = ?1 + (next_run_at - updated_at), updated_at = ?1
where id in (
	select id from main.task_outbox
	where status = 'retry_wait' and next_run_at > ?1 and updated_at > ?1 + 1000 limit 500)`

	// rebaseSnoozedSQL knows a snoozed task by its having been claimed before.
	rebaseSnoozedSQL = `
update main.task_outbox set next_run_at = ?1 + (next_run_at - updated_at), updated_at = ?1
where id in (
	select id from main.task_outbox
	where status = 'scheduled' and fence > 0 and next_run_at > ?1 and updated_at > ?1 + 1000 limit 500)`
)

// keepAlive is the heartbeat: it renews our leases, finds those that we have lost,
// and takes over the tasks of owners that are dead.
func (t *turn) keepAlive() error {
	if !t.beat {
		return nil
	}
	if err := t.rebaseRetries(); err != nil {
		return err
	}
	if err := t.registerPoller(); err != nil {
		return err
	}
	rows, err := t.heldRows()
	if err != nil {
		return err
	}
	if t.waited > t.p.beatEvery()/2 || time.Since(t.p.lastBeat) > t.p.beatEvery()*3/2 {
		// While nobody could write, or we weren't there to see it, nobody was silent.
		clear(t.p.observed)
	}
	orphans := t.compare(rows)
	for _, id := range orphans {
		if err := t.recoverOwn(id); err != nil {
			return err
		}
	}
	if len(rows) > 0 {
		if _, err := t.exec(renewSQL, t.now+t.p.q.opts.Lease.Milliseconds(), t.p.owner); err != nil {
			return err
		}
	}
	return t.recoverDead(rows)
}

func (t *turn) heldRows() ([]heldRow, error) {
	rows, err := t.query(heldSQL)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var hs []heldRow
	for rows.Next() {
		var h heldRow
		if err := rows.Scan(&h.id, &h.owner, &h.fence, &h.lease); err != nil {
			return nil, err
		}
		hs = append(hs, h)
	}
	return hs, rows.Err()
}

// compare holds the file's claims of ours against those in memory. What only memory
// has was taken from us; what only the file has came in with a commit in doubt, and
// nobody is running it.
func (t *turn) compare(rows []heldRow) (orphans []int64) {
	p := t.p
	fences := map[int64]int64{}
	for _, r := range rows {
		if r.owner == p.owner {
			fences[r.id] = r.fence
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for id, h := range p.held {
		if fence, ok := fences[id]; (!ok || fence != h.fence) && !h.ended && !t.completed(h) {
			t.gone = append(t.gone, h)
		}
		delete(fences, id)
	}
	for id := range fences {
		orphans = append(orphans, id)
	}
	return orphans
}

// completed tells whether the task isn't held any more because its handler has
// completed it. Where that can't be read, the next heartbeat asks again.
func (t *turn) completed(h *held) bool {
	if !h.completed {
		return false
	}
	s, err := t.standing(h.id)
	return err != nil || s.status == "success" && s.fence == h.fence
}

// loseAll cancels the handlers of tasks that aren't ours any more.
func (p *poller) loseAll(hs []*held) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, h := range hs {
		if h.gone {
			continue
		}
		h.gone = true
		p.log.Warn("taskbox: lease lost", "task", h.id, "type", h.typ.name, "attempt", h.attempt, "trace", h.traceID)
		if h.cancel != nil {
			h.cancel(ErrLeaseLost)
		}
		p.dropReady(h)
	}
}

// dropReady forgets a task that hasn't been started. The caller holds mu.
func (p *poller) dropReady(h *held) {
	s := p.slotOf(h.typ)
	is := func(o *held) bool { return o == h }
	if slices.ContainsFunc(s.ready, is) || slices.ContainsFunc(p.suspects, is) {
		s.ready = slices.DeleteFunc(s.ready, is)
		p.suspects = slices.DeleteFunc(p.suspects, is)
		p.forget(h)
		s.held--
	}
}

// recoverDead takes over what dead owners hold. The file's word that a lease has
// ended isn't enough, since clocks jump: see quietBeats.
func (t *turn) recoverDead(rows []heldRow) error {
	leases := map[string]int64{}
	for _, r := range rows {
		if r.owner != t.p.owner {
			leases[r.owner] = max(leases[r.owner], r.lease)
		}
	}
	ids, err := t.identities()
	if err != nil {
		return err
	}
	for owner, lease := range leases {
		if !ids[owner].gone() && !t.p.silent(owner, lease, t.now) {
			continue
		}
		if err := t.recoverFrom(owner); err != nil {
			return err
		}
	}
	for owner := range t.p.observed {
		if _, ok := leases[owner]; !ok {
			delete(t.p.observed, owner)
		}
	}
	return t.forgetPollers(ids, leases)
}

// silent tells whether an owner has let its lease run out. A lease that a clock has
// put far into the future is judged by our own clock alone.
func (p *poller) silent(owner string, lease, now int64) bool {
	o, ok := p.observed[owner]
	if !ok || o.lease != lease {
		p.observed[owner] = observation{lease, time.Now()}
		return false
	}
	quiet := time.Since(o.since)
	return lease < now && quiet >= quietBeats*p.beatEvery() || quiet >= p.q.opts.Lease+quietBeats*p.beatEvery()
}

func (t *turn) recoverFrom(owner string) error {
	hs, picked, err := t.recoverable(owner, 0)
	if err != nil {
		return err
	}
	for i, h := range hs {
		if err := t.recoverTask(h, owner, picked[i]); err != nil {
			return err
		}
	}
	t.unfinished = t.unfinished || len(hs) == maxRecovered
	return nil
}

// recoverable reads what an owner holds: one task, or with id 0 the first of all.
func (t *turn) recoverable(owner string, id int64) (hs []*held, picked []bool, err error) {
	rows, err := t.query(recoverSQL, owner, id, maxRecovered)
	if err != nil {
		return nil, nil, err
	}
	defer rows.Close()
	for rows.Next() {
		h, notStarted := &held{typ: new(taskType)}, false
		if err := rows.Scan(&h.id, &h.version, &h.fence, &h.attempt, &h.lost, &notStarted, &h.typ.name, &h.traceID, &h.group, &h.key); err != nil {
			return nil, nil, err
		}
		hs, picked = append(hs, h), append(picked, notStarted)
	}
	return hs, picked, rows.Err()
}

// recoverTask makes a lost task due again, or a dead letter when it has taken its
// process down too often. A task that had been lost before is recorded as processing
// before it starts, so that one found as picked is known to be innocent.
func (t *turn) recoverTask(h *held, owner string, picked bool) error {
	switch {
	case picked && h.lost > 0:
		t.record(h, "interrupted", t.now, &detail{Cause: "its process ended before it was started", WasHeld: owner})
		t.count(h.typ.name).released++
		return t.takeOver(h, owner, "pending", 1, 0, nil)
	case h.lost+1 < maxLost:
		t.record(h, "lost", t.now, &detail{Cause: "its process ended or was silent for too long", WasHeld: owner})
		t.count(h.typ.name).lost++
		if err := t.takeOver(h, owner, "pending", 0, 1, nil); err != nil {
			return err
		}
		return t.failLost(h)
	}
	cause := fmt.Sprintf("lost %d times", maxLost)
	t.record(h, "lost", t.now, &detail{Cause: "its process ended or was silent for too long", WasHeld: owner})
	t.record(h, "dead_letter", t.now, &detail{Cause: cause})
	t.count(h.typ.name).dead++
	if err := t.takeOver(h, owner, "dead_letter", 0, 1, cause); err != nil {
		return err
	}
	if typ := t.p.q.typeOf(h.typ.name); typ != nil {
		h.typ = typ // otherwise nobody here knows its options
	}
	if err := t.keepKey(h, "dead_letter"); err != nil {
		return err
	}
	if err := t.failLost(h); err != nil {
		return err
	}
	return t.unblock(h.group)
}

func (t *turn) takeOver(h *held, owner, status string, free, lost int, lastError any) error {
	var finished any
	if status == "dead_letter" {
		finished = t.now
	}
	n, err := t.exec(takeOverSQL, status, h.version, t.now, finished, free, lost, lastError, h.id, owner, h.fence)
	if err == nil && n != 1 {
		err = fmt.Errorf("take task %d over from %s: it changed under the write lock", h.id, owner)
	}
	if err != nil {
		return err
	}
	return t.unblock(h.group)
}

// recoverOwn gives back a claim of ours that nobody runs.
func (t *turn) recoverOwn(id int64) error {
	hs, _, err := t.recoverable(t.p.owner, id)
	if err != nil || len(hs) == 0 {
		return err
	}
	t.record(hs[0], "interrupted", t.now, &detail{Cause: "claimed by a commit whose answer was lost"})
	t.count(hs[0].typ.name).released++
	return t.takeOver(hs[0], t.p.owner, "pending", 1, 0, nil)
}

// canStartSuspect tells whether the first of the suspects may start: one at a time,
// a little apart, and one that was lost twice only while nothing else runs here.
func (p *poller) canStartSuspect(now time.Time) bool {
	if len(p.suspects) == 0 || p.stopping() {
		return false
	}
	if p.suspects[0].lost >= maxLost-1 {
		return p.quiet()
	}
	running, worst := p.runningSuspects()
	return running == 0 || worst < maxLost-1 && !now.Before(p.lastStart.Add(suspectGap))
}

// quiet tells whether nothing runs here or is about to.
func (p *poller) quiet() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, s := range p.order {
		if len(s.ready) > 0 {
			return false
		}
	}
	return p.running == 0
}

// cautious tells whether nothing else is to be claimed: a task that was lost twice has
// its last chance, or waits for it. If it is lost again, nothing else can have been why.
func (p *poller) cautious() bool {
	if len(p.suspects) > 0 && p.suspects[0].lost >= maxLost-1 {
		return true
	}
	_, worst := p.runningSuspects()
	return worst >= maxLost-1
}

func (p *poller) runningSuspects() (n, worst int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, h := range p.held {
		if h.lost > 0 && h.started != 0 && !h.ended {
			n, worst = n+1, max(worst, h.lost)
		}
	}
	return n, worst
}

// suspectAt is when to ask again whether a suspect may start.
func (p *poller) suspectAt() time.Time {
	if len(p.suspects) == 0 || p.suspects[0].lost >= maxLost-1 {
		return time.Time{} // it waits for the others' end
	}
	if _, worst := p.runningSuspects(); worst >= maxLost-1 {
		return time.Time{}
	}
	return p.lastStart.Add(suspectGap)
}

// startSuspects records the next suspects as processing; they start after the commit.
// Even their payloads are decoded after it, since that may be what kills the process.
func (t *turn) startSuspects() error {
	if !t.p.canStartSuspect(time.Now()) {
		return nil
	}
	t.suspects = t.p.nextSuspects()
	t.marks = append(t.marks, t.suspects...)
	return t.mark(t.suspects, t.p.owner)
}

// nextSuspects are those that start together: one, or, where there are so many that
// one after the other would take longer than suspectWindow, a few.
func (p *poller) nextSuspects() []*held {
	if p.suspects[0].lost >= maxLost-1 {
		return slices.Clone(p.suspects[:1])
	}
	n := 1 + p.suspected/int(suspectWindow/suspectGap)
	for i, h := range p.suspects {
		if i == n || h.lost >= maxLost-1 {
			return slices.Clone(p.suspects[:i])
		}
	}
	return slices.Clone(p.suspects)
}

// rebaseRetries moves retries and snoozes that were planned by a clock which has been
// put back since: what was to happen in ten minutes is to happen in ten minutes. What
// was enqueued for a time is left to the wall clock.
func (t *turn) rebaseRetries() error {
	if !t.p.rebase {
		return nil
	}
	left := int64(0)
	for _, query := range []string{rebaseRetrySQL, rebaseSnoozedSQL} {
		n, err := t.exec(query, t.now)
		if err != nil {
			return err
		}
		left += n
	}
	t.rebased = left == 0
	return nil
}

// A clockReading holds the wall clock against the monotonic one.
type clockReading struct {
	wall int64
	mono time.Time
}

// watchClock notices that the wall clock was put back by a second or more.
func (p *poller) watchClock() {
	now := clockReading{p.q.now(), time.Now()}
	if p.clock.wall != 0 {
		drift := now.wall - p.clock.wall - now.mono.Sub(p.clock.mono).Milliseconds()
		if drift < -1000 {
			p.log.Warn("taskbox: the clock was put back", "by", time.Duration(-drift)*time.Millisecond)
			p.rebase, p.beatAt = true, time.Now()
		}
	}
	p.clock = now
}

const (
	putPollerSQL = `
insert into main.task_meta (key, value) values (?, ?)
on conflict (key) do update set value = excluded.value`

	pollersSQL = `select key, value from main.task_meta where key >= 'poller:' and key < 'poller;'`

	dropPollerSQL = `delete from main.task_meta where key = ?`
)

const pollerPrefix = "poller:"

// registerPoller writes who we are, once, so that a later start on the same machine
// can tell at once that we are gone.
func (t *turn) registerPoller() error {
	if t.p.registered {
		return nil
	}
	value, err := json.Marshal(t.p.q.identify(t.now))
	if err == nil {
		_, err = t.exec(putPollerSQL, pollerPrefix+t.p.owner, string(value))
	}
	t.registered = err == nil
	return err
}

func (t *turn) identities() (map[string]identity, error) {
	rows, err := t.query(pollersSQL)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	ids := map[string]identity{}
	for rows.Next() {
		var key, value string
		if err := rows.Scan(&key, &value); err != nil {
			return nil, err
		}
		var id identity
		_ = json.Unmarshal([]byte(value), &id) // an entry that can't be read is nobody we know
		ids[key[len(pollerPrefix):]] = id
	}
	return ids, rows.Err()
}

// forgetPollers deletes the entries of the dead that hold nothing any more.
func (t *turn) forgetPollers(ids map[string]identity, leases map[string]int64) error {
	for owner, id := range ids {
		if _, holds := leases[owner]; holds || owner == t.p.owner || !id.gone() {
			continue
		}
		if _, err := t.exec(dropPollerSQL, pollerPrefix+owner); err != nil {
			return err
		}
	}
	return nil
}

// retire deletes our entry at the end. If that fails, the next start finds us gone.
func (p *poller) retire() {
	if !p.registered || p.closedNow() {
		return
	}
	if _, err := p.reader().ExecContext(context.Background(), dropPollerSQL, pollerPrefix+p.owner); err != nil {
		p.log.Debug("taskbox: the poller's entry stays", "owner", p.owner, "error", err)
	}
}
