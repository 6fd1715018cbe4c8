package taskbox_test

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/taskbox-go/taskbox"
)

// checkInvariants reports what can't be true of any file, whatever happened to it: at
// any moment, since each transaction of the queue leaves it whole.
func checkInvariants(t testing.TB, db *sql.DB) {
	t.Helper()
	c := &checker{TB: t, tasks: map[int64]*checkedTask{}}
	tx, err := db.BeginTx(context.Background(), &sql.TxOptions{ReadOnly: true}) // one snapshot
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	c.readTasks(tx)
	c.walkTrails(tx)
	c.checkRows()
	c.checkGroups()
	c.checkStats(tx)
	var ok string
	if err := tx.QueryRow(`pragma quick_check`).Scan(&ok); err != nil || ok != "ok" {
		t.Errorf("quick_check: %s %v", ok, err)
	}
	if c.wrong > maxWrong {
		t.Errorf("and %d more", c.wrong-maxWrong)
	}
}

type checker struct {
	testing.TB
	tasks map[int64]*checkedTask
	ids   []int64
	wrong int
}

// checkedTask is a row and what its trail adds up to.
type checkedTask struct {
	id                                             int64
	typ, status, group, lastError                  string
	attempt, fence, version, lost, retries, due    int64
	owned, leased, finished, blocked               bool
	finishedAt                                     int64
	state                                          string
	events                                         []string
	nAttempt, nFence, nLost, nRetries, at, firstAt int64
}

const maxWrong = 20

func (c *checker) errorf(format string, args ...any) {
	c.Helper()
	if c.wrong++; c.wrong <= maxWrong {
		c.Errorf(format, args...)
	}
}

func (c *checker) query(tx *sql.Tx, query string, row func(*sql.Rows) error) {
	c.Helper()
	rows, err := tx.Query(query)
	if err != nil {
		c.Fatalf("%s: %v", query, err)
	}
	defer rows.Close()
	for rows.Next() {
		if err := row(rows); err != nil {
			c.Fatalf("%s: %v", query, err)
		}
	}
	if err := rows.Err(); err != nil {
		c.Fatalf("%s: %v", query, err)
	}
}

func (c *checker) readTasks(tx *sql.Tx) {
	c.query(tx, `select id, event_type, status, coalesce(group_key, ''), coalesce(last_error, ''),
		attempt, fence, version, lost_count, retry_count, next_run_at,
		owner is not null, lease_until is not null, finished_at is not null, blocked = 1, coalesce(finished_at, 0)
		from task_outbox order by id`, func(rows *sql.Rows) error {
		k := new(checkedTask)
		err := rows.Scan(&k.id, &k.typ, &k.status, &k.group, &k.lastError, &k.attempt, &k.fence, &k.version, &k.lost, &k.retries, &k.due,
			&k.owned, &k.leased, &k.finished, &k.blocked, &k.finishedAt)
		c.tasks[k.id] = k
		c.ids = append(c.ids, k.id)
		return err
	})
}

// legal lists what may follow on a trail, and the state that it leads to.
var legal = map[string]map[string]string{
	"pending":    {"picked": "picked", "scheduled": "scheduled", "skipped": "skipped"},
	"scheduled":  {"queued": "pending"},
	"retry_wait": {"queued": "pending"},
	"picked":     {"processing": "processing", "failed": "failed", "interrupted": "pending", "lost": "lost"},
	"processing": {"success": "success", "retry_wait": "retry_wait", "failed": "failed", "scheduled": "scheduled",
		"skipped": "skipped", "interrupted": "pending", "lost": "lost"},
	"failed": {"dead_letter": "dead_letter"},
	"lost":   {"dead_letter": "dead_letter", "picked": "picked", "skipped": "skipped"},
}

func (c *checker) walkTrails(tx *sql.Tx) {
	c.query(tx, `select task_id, seq, event, at, coalesce(attempt, 0) from task_audit order by task_id, seq`, func(rows *sql.Rows) error {
		var id, seq, at, attempt int64
		var event string
		if err := rows.Scan(&id, &seq, &event, &at, &attempt); err != nil {
			return err
		}
		k := c.tasks[id]
		if k == nil {
			c.errorf("task %d has a trail and no row", id)
			return nil
		}
		if wrong := k.step(seq, event, at, attempt); wrong != "" {
			c.errorf("task %d, seq %d, %s: %s; before it: %s", id, seq, event, wrong, strings.Join(k.events, " "))
		}
		k.events = append(k.events, event)
		return nil
	})
}

// step moves the task along its trail and tells what is wrong about that.
func (k *checkedTask) step(seq int64, event string, at, attempt int64) (wrong string) {
	if k.state == "" {
		k.state = "pending"
		if event == "queued" {
			k.state = "scheduled"
		}
	}
	next, ok := legal[k.state][event]
	held := k.state == "picked" || k.state == "processing"
	switch {
	case seq != int64(len(k.events))+1:
		wrong = "a gap in the numbers"
	case !ok, event == "scheduled" && !held && seq != 1:
		wrong = "it can't follow on " + k.state
	case at < k.at:
		wrong = fmt.Sprintf("it was %d ms before the event before it", k.at-at)
	}
	if event == "picked" {
		k.nAttempt++
		k.nFence++
		k.firstAt = cmp.Or(k.firstAt, at)
	}
	if (held || event == "picked") && attempt != k.nAttempt && wrong == "" {
		wrong = fmt.Sprintf("it says attempt %d, and it is %d", attempt, k.nAttempt)
	}
	if held && (next == "pending" || next == "scheduled") {
		k.nAttempt--
	}
	switch next {
	case "lost":
		k.nLost++
	case "retry_wait":
		k.nRetries++
	}
	k.state, k.at = cmp.Or(next, event), at
	return wrong
}

func (c *checker) checkRows() {
	for _, id := range c.ids {
		k := c.tasks[id]
		state := k.state
		switch {
		case state == "" && (k.status == "pending" || k.status == "scheduled"):
			state = k.status
		case state == "lost":
			state = "pending"
		}
		held := k.status == "picked" || k.status == "processing"
		ended := slices.Contains([]string{"success", "dead_letter", "skipped", "cancelled"}, k.status)
		for what, ok := range map[string]bool{
			"status is not that of the trail":                 k.status == state,
			"owner and lease are not those of the status":     k.owned == held && k.leased == held,
			"finished_at is not that of the status":           k.finished == ended,
			"version is not the number of audit rows":         k.version == int64(len(k.events)),
			"attempt is not what was picked, less given back": k.attempt == k.nAttempt,
			"fence is not the number of claims":               k.fence == k.nFence,
			"lost_count is not the number of losses":          k.lost == k.nLost,
			"retry_count is not the number of retries":        k.retries == k.nRetries,
			"a dead letter without an error":                  k.status != "dead_letter" || k.lastError != "",
			"blocked and not pending":                         !k.blocked || k.status == "pending",
		} {
			if !ok {
				c.errorf("task %d: %s: %+v", id, what, *k)
			}
		}
	}
}

// checkGroups: one at a time, in the order of their ids.
func (c *checker) checkGroups() {
	heads := map[string]int64{}   // the first that lives
	lastEnd := map[string]int64{} // when the last of those before ended
	for _, id := range c.ids {    // in their order
		k := c.tasks[id]
		if k.group == "" {
			if k.blocked {
				c.errorf("task %d is blocked and in no group", id)
			}
			continue
		}
		head, behind := heads[k.group]
		switch {
		case behind && k.owned:
			c.errorf("task %d is held while %d of the same group lives", id, head)
		case behind && k.firstAt != 0:
			c.errorf("task %d was begun while %d of the same group lives", id, head)
		case !behind && k.blocked:
			c.errorf("task %d is blocked and the first of its group", id)
		case k.firstAt != 0 && k.firstAt < lastEnd[k.group]:
			c.errorf("task %d was begun %d ms before one before it in its group had ended", id, lastEnd[k.group]-k.firstAt)
		}
		if !k.finished && !behind {
			heads[k.group] = id
		}
		lastEnd[k.group] = max(lastEnd[k.group], k.finishedAt)
	}
}

// checkStats compares the minutes' sums with the trails.
func (c *checker) checkStats(tx *sql.Tx) {
	c.query(tx, `
with events as (
	select t.event_type, a.event, a.attempt, a.detail ->> 'cause' as cause
	from task_audit a join task_outbox t on t.id = a.task_id
), counted as (
	select event_type, sum(event = 'picked') as picked, sum(event = 'success') as success, sum(event = 'retry_wait') as retried,
		sum(event = 'dead_letter') as dead, sum(event = 'lost') - sum(event = 'dead_letter' and cause like 'lost %') as lost,
		sum(event = 'skipped') as skipped
	from events group by event_type
), summed as (
	select event_type, sum(picked) as picked, sum(success) as success, sum(retried) as retried, sum(dead) as dead,
		sum(lost) as lost, sum(skipped) as skipped,
		sum(wait_1 + wait_5 + wait_10 + wait_50 + wait_100 + wait_500 + wait_1000 + wait_5000 + wait_30000 + wait_120000 + wait_600000 + wait_inf) as waits
	from task_stats group by event_type
)
select coalesce(c.event_type, s.event_type), format('picked %d success %d retried %d dead %d lost %d skipped %d', c.picked, c.success, c.retried, c.dead, c.lost, c.skipped),
	format('picked %d success %d retried %d dead %d lost %d skipped %d', s.picked, s.success, s.retried, s.dead, s.lost, s.skipped),
	coalesce(s.picked, 0), coalesce(s.waits, 0)
from counted c full join summed s using (event_type)`, func(rows *sql.Rows) error {
		var typ, counted, summed string
		var picked, waits int64
		if err := rows.Scan(&typ, &counted, &summed, &picked, &waits); err != nil {
			return err
		}
		const nothing = "picked 0 success 0 retried 0 dead 0 lost 0 skipped 0"
		if counted != summed && !(counted == nothing && summed == "picked 0 success 0 retried 0 dead 0 lost 0 skipped 0") {
			c.errorf("task_stats of %s: %s; its trails: %s", typ, summed, counted)
		}
		if picked != waits {
			c.errorf("task_stats of %s: %d waits for %d claims", typ, waits, picked)
		}
		return nil
	})
}

var errFlaky = errors.New("a flaky downstream")

// seedOf is the seed of a random test: TASKBOX_SEED, to see a failure again, or a new one.
func seedOf(t *testing.T) uint64 {
	t.Helper()
	seed := rand.Uint64() >> 16
	if text := os.Getenv("TASKBOX_SEED"); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("TASKBOX_SEED=%d", seed)
	return seed
}

// raced tells whether the race detector is on, which makes SQLite ten times slower.
var raced = sync.OnceValue(func() bool {
	info, _ := debug.ReadBuildInfo()
	return info != nil && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
})

// A sim is a random life of some queues on one file.
type sim struct {
	*testing.T
	rng    *rand.Rand
	db     *sql.DB // without faults: to enqueue and to look
	path   string
	nodes  []*node
	sure   bool           // nobody ever loses a lease: no task runs twice at once
	wanted map[int64]bool // the numbers of what was committed
	number int64

	mu      sync.Mutex
	calls   map[int64]int    // of the handler, by task; mu
	nils    map[int64]int    // of these, those that returned nil; mu
	running map[int64]bool   // mu
	groups  map[string]int64 // the task that runs; mu
}

// A node is what another process would be.
type node struct {
	*fixture
	stop func() error // nil while it doesn't run
}

// simPayload numbers a task, whose handler's behaviour follows from that.
type simPayload struct {
	N     int64
	Due   int64 // Unix ms
	Group string
	Quick bool // it succeeds at once
}

var simTypes = []*taskbox.Type[simPayload]{
	taskbox.NewType[simPayload]("a"),
	taskbox.NewType[simPayload]("b", taskbox.TypeOptions{Concurrency: 2, Schedule: taskbox.Tiers(time.Second, 3*time.Second)}),
	taskbox.NewType[simPayload]("c", taskbox.TypeOptions{Timeout: 800 * time.Millisecond, MaxAttempts: 2}),
}

func newSim(t *testing.T, rng *rand.Rand) *sim {
	s := &sim{T: t, rng: rng, sure: true, path: t.TempDir() + "/sim.db", wanted: map[int64]bool{},
		calls: map[int64]int{}, nils: map[int64]int{}, running: map[int64]bool{}, groups: map[string]int64{}}
	s.db = fileDB(t, s.path)
	return s
}

// addNode makes a queue on a pool. Not every node runs every type.
func (s *sim) addNode(db *sql.DB) {
	n := &node{fixture: &fixture{T: s.T, db: db, path: s.path}}
	n.q = newQueue(s.T, db, taskbox.Options{Workers: 1 + s.rng.IntN(8), Lease: time.Duration(2+s.rng.IntN(8)) * time.Second,
		Schedule: taskbox.Tiers(time.Second, 5*time.Second, 20*time.Second), Grace: time.Duration(s.rng.IntN(2000)) * time.Millisecond})
	for i, typ := range simTypes {
		if i == 0 || len(s.nodes) == 0 || s.rng.IntN(3) > 0 {
			typ.Handle(n.q, s.handle)
		}
	}
	s.nodes = append(s.nodes, n)
}

func (s *sim) handle(ctx context.Context, task *taskbox.Task[simPayload]) (err error) {
	n := s.enter(task)
	defer func() {
		if v := recover(); v != nil {
			s.leave(task, false)
			panic(v)
		}
		s.leave(task, err == nil)
	}()
	if task.Payload.Quick {
		return nil
	}
	rng := rand.New(rand.NewPCG(uint64(task.Payload.N), uint64(n)))
	if err := s.work(ctx, rng); err != nil {
		return err
	}
	switch rng.IntN(24) {
	case 0, 1, 2:
		return errFlaky
	case 3:
		return taskbox.Permanent(errFlaky)
	case 4:
		return taskbox.Snooze(time.Duration(rng.IntN(3000)) * time.Millisecond)
	case 5:
		return taskbox.Skip("nothing to do")
	case 6:
		return taskbox.RetryAfter(errFlaky, time.Duration(rng.IntN(3000))*time.Millisecond)
	case 7:
		panic("a handler's mistake")
	}
	return nil
}

// work takes no time, some, or more than is allowed.
func (s *sim) work(ctx context.Context, rng *rand.Rand) error {
	var d time.Duration
	switch rng.IntN(6) {
	case 0:
		d = time.Duration(rng.IntN(100)) * time.Millisecond
	case 1:
		d = time.Duration(rng.IntN(1500)) * time.Millisecond
	case 2:
		d = time.Duration(rng.IntN(10)) * time.Millisecond
	}
	if d == 0 {
		return nil
	}
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// enter returns how often the task has been called before.
func (s *sim) enter(task *taskbox.Task[simPayload]) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if now := time.Now().UnixMilli(); now < task.Payload.Due {
		s.Errorf("task %d was begun %d ms before it was due", task.ID, task.Payload.Due-now)
	}
	if s.sure && s.running[task.ID] {
		s.Errorf("task %d runs twice at once", task.ID)
	}
	if g := task.Group; g != "" {
		if other := s.groups[g]; s.sure && other != 0 {
			s.Errorf("tasks %d and %d of one group run at once", other, task.ID)
		}
		s.groups[g] = task.ID
	}
	s.running[task.ID] = true
	s.calls[task.ID]++
	return s.calls[task.ID] - 1
}

func (s *sim) leave(task *taskbox.Task[simPayload], good bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.running, task.ID)
	delete(s.groups, task.Group)
	if good {
		s.nils[task.ID]++
	}
}

// draft makes a random task.
func (s *sim) draft() taskbox.Draft {
	s.number++
	p := simPayload{N: s.number}
	var opts []taskbox.EnqueueOption
	if s.rng.IntN(4) == 0 {
		d := time.Duration(s.rng.IntN(20_000)) * time.Millisecond
		p.Due = time.Now().Add(d).UnixMilli()
		opts = append(opts, taskbox.Delay(d))
	}
	if s.rng.IntN(3) == 0 {
		p.Group = fmt.Sprint("g", s.rng.IntN(6))
		opts = append(opts, taskbox.Group(p.Group))
	}
	if s.rng.IntN(6) == 0 {
		opts = append(opts, taskbox.Key(fmt.Sprint("k", s.rng.IntN(20))))
	}
	if s.rng.IntN(10) == 0 {
		opts = append(opts, taskbox.ExpiresIn(time.Duration(1+s.rng.IntN(8000))*time.Millisecond))
	}
	if s.rng.IntN(5) == 0 {
		opts = append(opts, taskbox.Priority(s.rng.IntN(7)-3))
	}
	return simTypes[s.rng.IntN(len(simTypes))].New(p, opts...)
}

// enqueue inserts some tasks in one transaction, which may be rolled back.
func (s *sim) enqueue() {
	q := s.nodes[s.rng.IntN(len(s.nodes))].q
	tx, err := s.db.BeginTx(s.Context(), nil)
	if err != nil {
		s.Fatal(err)
	}
	defer tx.Rollback()
	first := s.number + 1
	var added []int64
	for range 1 + s.rng.IntN(12) {
		if s.rng.IntN(5) == 0 {
			s.number++
			now := time.Now().UnixMilli()
			due := now + int64(s.rng.IntN(2)*s.rng.IntN(9000))
			payload, _ := json.Marshal(simPayload{N: s.number, Due: due})
			// The columns' defaults read the real clock.
			if _, err := tx.Exec(`insert into task_outbox(event_type, payload, next_run_at, created_at, updated_at) values ('a', ?, ?, ?, ?)`,
				string(payload), due, now, now); err != nil {
				s.Fatal(err)
			}
			added = append(added, s.number)
			continue
		}
		r, err := q.Enqueue(s.Context(), tx, s.draft())
		if err != nil {
			s.Fatal(err)
		}
		if !r.Duplicate {
			added = append(added, s.number)
		}
	}
	if s.rng.IntN(8) == 0 {
		return // rolled back
	}
	if err := tx.Commit(); err != nil {
		s.Fatalf("tasks from %d: %v", first, err)
	}
	for _, n := range added {
		s.wanted[n] = true
	}
}

// flood inserts many tasks that take no time.
func (s *sim) flood() {
	var ds []taskbox.Draft
	for range 50 + s.rng.IntN(300) {
		s.number++
		s.wanted[s.number] = true
		ds = append(ds, simTypes[s.rng.IntN(2)].New(simPayload{N: s.number, Quick: true}))
	}
	if _, err := s.nodes[0].q.EnqueueMany(s.Context(), s.db, ds...); err != nil {
		s.Fatal(err)
	}
}

// act does one random thing.
func (s *sim) act() {
	if s.rng.IntN(40) == 0 {
		s.flood()
	}
	switch n := s.nodes[s.rng.IntN(len(s.nodes))]; s.rng.IntN(8) {
	case 0:
		s.start(n)
	case 1:
		s.halt(n)
	case 2:
		checkInvariants(s.T, s.db)
	case 3, 4:
		time.Sleep(time.Duration(s.rng.IntN(2000)) * time.Millisecond)
	default:
		s.enqueue()
	}
}

func (s *sim) start(n *node) {
	if n.stop == nil {
		n.stop = n.run()
	}
}

func (s *sim) halt(n *node) {
	if n.stop == nil {
		return
	}
	if err := n.stop(); err != nil && s.sure {
		s.Errorf("Run: %v", err)
	}
	n.stop = nil
}

// finish lets all tasks come to their end.
func (s *sim) finish() {
	for _, n := range s.nodes {
		s.start(n)
	}
	left := func() string {
		return strings.Join(rowsOf(s.T, s.db, `select id, event_type, status, coalesce(group_key, ''), blocked, coalesce(owner, '') from task_outbox where finished_at is null limit 10`), "; ")
	}
	for range 120 {
		time.Sleep(5 * time.Second)
		if left() == "" {
			break
		}
	}
	for _, n := range s.nodes {
		s.halt(n)
	}
	if l := left(); l != "" {
		s.Errorf("after ten minutes: %s", l)
	}
	checkInvariants(s.T, s.db)
	s.compare()
}

// compare holds the file against what was enqueued and what the handlers did.
func (s *sim) compare() {
	rows, err := s.db.Query(`select id, status, payload ->> 'N', (select count(*) from task_audit where task_id = id and event = 'success') from task_outbox`)
	if err != nil {
		s.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, number int64
		var successes int
		var status string
		if err := rows.Scan(&id, &status, &number, &successes); err != nil {
			s.Fatal(err)
		}
		if !s.wanted[number] {
			s.Errorf("task %d, number %d, was rolled back or a duplicate, and is there", id, number)
		}
		delete(s.wanted, number)
		good := 0
		if status == "success" {
			good = 1
		}
		if successes != good || s.nils[id] < good || s.sure && s.nils[id] > good {
			s.Errorf("task %d is %s, has %d successes on its trail, and %d handlers returned nil", id, status, successes, s.nils[id])
		}
	}
	if len(s.wanted) > 0 {
		s.Errorf("%d tasks are gone: %v", len(s.wanted), s.wanted)
	}
}

// Several queues on one file, in all ways of enqueuing, failing, stopping and starting.
func TestSimulation(t *testing.T) {
	seed := seedOf(t)
	for round := range uint64(6) {
		t.Run(fmt.Sprint(round), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newSim(t, rand.New(rand.NewPCG(seed, round)))
				for range 1 + s.rng.IntN(3) {
					s.addNode(s.pool())
				}
				for range 60 {
					s.act()
				}
				s.finish()
			})
		})
	}
}

// pool opens one of the kinds of pools that applications have.
func (s *sim) pool() *sql.DB {
	if s.rng.IntN(3) == 0 {
		return fileDB(s.T, s.path)
	}
	db := plainDB(s.T, s.path, []string{"_pragma=busy_timeout(5000)", "_pragma=busy_timeout(5000)&_txlock=immediate"}[s.rng.IntN(2)])
	db.SetMaxOpenConns([]int{1, 2, 3, 10}[s.rng.IntN(4)])
	return db
}

// An application's transaction holds the write lock for longer than a lease lasts, and
// than busy_timeout, while handlers end. No outcome is lost, and nothing runs twice.
func TestQueue_Run_LockHeld(t *testing.T) {
	for name, pool := range map[string]func(t *testing.T, path string) *sql.DB{
		"OpenDB":  fileDB,
		"foreign": func(t *testing.T, path string) *sql.DB { return plainDB(t, path, "_pragma=busy_timeout(5000)") },
		"foreign, of one": func(t *testing.T, path string) *sql.DB {
			db := plainDB(t, path, "_pragma=busy_timeout(5000)")
			db.SetMaxOpenConns(1)
			return db
		},
		"foreign, short timeout": func(t *testing.T, path string) *sql.DB { return plainDB(t, path, "_pragma=busy_timeout(100)") },
	} {
		for _, lease := range []time.Duration{2 * time.Second, 30 * time.Second} {
			t.Run(fmt.Sprint(name, ", lease ", lease), func(t *testing.T) {
				t.Parallel()
				lockHeld(t, pool, lease)
			})
		}
	}
}

func lockHeld(t *testing.T, pool func(t *testing.T, path string) *sql.DB, lease time.Duration) {
	const tasks = 8
	path := t.TempDir() + "/t.db"
	o := taskbox.Options{Workers: tasks / 2, Lease: lease, Schedule: taskbox.Tiers(100 * time.Millisecond)}
	f := &fixture{T: t, db: pool(t, path), path: path}
	f.q = newQueue(t, f.db, o)
	other := &fixture{T: t, db: pool(t, path), path: path}
	other.q = newQueue(t, other.db, o)
	typ := taskbox.NewType[int]("x")
	for _, g := range []*fixture{f, other} {
		typ.Handle(g.q, func(_ context.Context, task *taskbox.Task[int]) error {
			if task.Retry > 0 {
				return nil
			}
			time.Sleep(time.Duration(1500+500*task.Payload) * time.Millisecond)
			if task.Payload%2 == 1 {
				return errFlaky
			}
			return nil
		})
	}
	for i := range tasks {
		f.enqueue(typ.New(i))
	}
	f.run()
	other.run()
	for f.int(`select count(*) from task_outbox where status = 'processing'`) < tasks {
		time.Sleep(10 * time.Millisecond)
	}
	time.Sleep(700 * time.Millisecond) // they see each other's leases
	tx := f.begin()
	if _, err := tx.Exec(`create table app(a)`); err != nil {
		t.Fatal(err)
	}
	time.Sleep(8 * time.Second)
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(20 * time.Second); f.int(`select count(*) from task_outbox where status = 'success'`) < tasks && time.Now().Before(end); {
		time.Sleep(20 * time.Millisecond)
	}
	f.wantInt(tasks, `select count(*) from task_outbox where status = 'success' and lost_count = 0 and attempt = 2 - id % 2`)
	f.wantInt(0, `select count(*) from task_audit where event in ('lost', 'interrupted', 'failed')`)
	f.wantInt(tasks+tasks/2, `select count(*) from task_audit where event = 'picked'`)
	checkInvariants(t, f.db)
}

// Applications write beside a backlog that drains as fast as it can, through pools of any
// kind and from another connection. Nobody gets SQLITE_BUSY.
func TestQueue_Run_WritersBesideABacklog(t *testing.T) {
	usual := func(t *testing.T, path string) *sql.DB {
		return plainDB(t, path, "_pragma=busy_timeout(5000)&_txlock=immediate")
	}
	for _, tt := range []struct {
		name    string
		pool    func(t *testing.T, path string) *sql.DB
		writers int
		tasks   int // for a few seconds
	}{
		{"OpenDB, one writer", fileDB, 1, 150_000},
		{"OpenDB, eight writers", fileDB, 8, 80_000},
		{"foreign, one writer", usual, 1, 40_000},
		{"foreign, eight writers", usual, 8, 40_000},
		{"foreign, of one, one writer", func(t *testing.T, path string) *sql.DB {
			db := usual(t, path)
			db.SetMaxOpenConns(1)
			return db
		}, 1, 150_000},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if raced() {
				tt.tasks /= 15
			}
			writersBesideABacklog(t, tt.pool, tt.tasks, tt.writers)
		})
	}
}

func writersBesideABacklog(t *testing.T, pool func(t *testing.T, path string) *sql.DB, tasks, writers int) {
	path := t.TempDir() + "/t.db"
	f := &fixture{T: t, db: pool(t, path), path: path}
	f.q = newQueue(t, f.db, taskbox.Options{})
	f.exec(`create table app(a)`)
	f.exec(`insert into task_outbox(event_type, payload) with recursive n(i) as (select 1 union all select i + 1 from n limit ?) select 'x', i from n`, tasks)
	taskbox.NewType[int]("x").Handle(f.q, func(context.Context, *taskbox.Task[int]) error { return nil })
	elsewhere := plainDB(t, path, "_pragma=busy_timeout(5000)") // as another process would
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	write := func(name string, pause time.Duration, db *sql.DB) {
		wg.Go(func() {
			n, longest := 0, time.Duration(0)
			for ; ctx.Err() == nil; n++ {
				begin := time.Now()
				if _, err := db.Exec(`insert into app values (1)`); err != nil {
					t.Errorf("%s: after %v: %v", name, time.Since(begin), err)
				}
				longest = max(longest, time.Since(begin))
				time.Sleep(pause)
			}
			t.Logf("%s: %d writes, the longest took %v", name, n, longest.Round(time.Millisecond))
		})
	}
	for i := range writers {
		write(fmt.Sprint("writer ", i), time.Millisecond, f.db)
	}
	write("elsewhere", 20*time.Millisecond, elsewhere)
	begin := time.Now()
	f.drain()
	d := time.Since(begin)
	cancel()
	wg.Wait()
	t.Logf("%d tasks in %v, %.0f/s", tasks, d.Round(time.Millisecond), float64(tasks)/d.Seconds())
	f.wantInt(int64(tasks), `select count(*) from task_outbox where status = 'success' and attempt = 1`)
}
