//go:build unix

package taskbox_test

import (
	"bufio"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/taskbox-go/taskbox"
)

// A crash is a file, what its processes have said, and what their handlers have noted.
type crash struct {
	*testing.T
	job
	acked map[int64]int64 // tasks and their orders, of transactions that have committed
}

func newCrash(t *testing.T, workers int, lease time.Duration) *crash {
	dir := t.TempDir()
	return &crash{T: t, acked: map[int64]int64{},
		job: job{DB: filepath.Join(dir, "t.db"), Notes: filepath.Join(dir, "notes"), Workers: workers, Lease: lease}}
}

// child starts a process that does something to the file.
func (c *crash) child(do string, change ...func(*job)) *child {
	c.Helper()
	j := c.job
	j.Do = do
	for _, f := range change {
		f(&j)
	}
	return startChild(c.T, j)
}

func (c *crash) hear(lines []string) {
	for _, line := range lines {
		var task, order int64
		if n, _ := fmt.Sscanf(line, "ack %d %d", &task, &order); n == 2 {
			c.acked[task] = order
		}
		if strings.HasPrefix(line, "order: ") {
			c.Errorf("an enqueue failed: %s", line)
		}
	}
}

// A noted is a line that a handler wrote.
type noted struct {
	what          string
	task, attempt int64
	at            int64 // Unix ms
}

func (c *crash) notes() (all []noted) {
	c.Helper()
	f, err := os.Open(c.job.Notes)
	if err != nil {
		c.Fatal(err)
	}
	defer f.Close()
	for in := bufio.NewScanner(f); in.Scan(); {
		var n noted
		if _, err := fmt.Sscan(in.Text(), &n.what, &n.task, &n.attempt, &n.at); err != nil {
			c.Fatalf("the note %q: %v", in.Text(), err)
		}
		all = append(all, n)
	}
	return all
}

// fixture opens the file as a process beside the others.
func (c *crash) fixture() *fixture {
	c.Helper()
	return &fixture{T: c.T, db: fileDB(c.T, c.DB), path: c.DB}
}

// check holds the file against what was acknowledged and noted, when all has ended.
func (c *crash) check() *fixture {
	c.Helper()
	f := c.fixture()
	checkInvariants(c.T, f.db)
	f.wantInt(0, `select count(*) from task_outbox where finished_at is null or owner is not null`)
	if orphans := f.rows(`select t.id, o.id from task_outbox t full join orders o on o.task_id = t.id where t.id is null or o.id is null limit 10`); orphans != nil {
		c.Errorf("tasks without an order, or orders without a task: %q", orphans)
	}
	c.checkAcked(f)
	c.checkStarts(f)
	return f
}

func (c *crash) checkAcked(f *fixture) {
	c.Helper()
	there := map[string]bool{}
	for _, row := range f.rows(`select task_id, id from orders`) {
		there[row] = true
	}
	for task, order := range c.acked {
		if !there[fmt.Sprintf("%d|%d", task, order)] {
			c.Errorf("task %d and its order %d were committed, and are gone", task, order)
		}
	}
}

// checkStarts: what has succeeded isn't started again, and each attempt is started once.
func (c *crash) checkStarts(f *fixture) {
	c.Helper()
	type end struct{ attempt, at, picked int64 }
	ends := map[int64]end{}
	for _, row := range f.rows(`select task_id, max(attempt) filter (where event = 'success'), max(at) filter (where event = 'success'),
		count(*) filter (where event = 'picked') from task_audit group by task_id`) {
		var id int64
		var e end
		if _, err := fmt.Sscanf(strings.ReplaceAll(row, "||", "|0|0"), "%d|%d|%d|%d", &id, &e.attempt, &e.at, &e.picked); err != nil {
			e = end{} // it hasn't succeeded
		}
		ends[id] = e
	}
	seen := map[noted]int{}
	effects := map[int64]int{}
	for _, n := range c.notes() {
		e := ends[n.task]
		if e.at != 0 && (n.at > e.at+1 || n.attempt > e.attempt) {
			c.Errorf("task %d: %s of attempt %d, %d ms after the success of attempt %d", n.task, n.what, n.attempt, n.at-e.at, e.attempt)
		}
		if n.what == "effect" {
			effects[n.task]++
		}
		n.at = 0
		if seen[n]++; seen[n] == 2 {
			c.Errorf("task %d: attempt %d has two notes %q", n.task, n.attempt, n.what)
		}
	}
	for _, row := range f.rows(`select t.id from task_outbox t where event_type = 'effect_elsewhere' and status = 'success'`) {
		var id int64
		fmt.Sscan(row, &id)
		if effects[id] == 0 {
			c.Errorf("task %d is a success, and its effect isn't there", id)
		}
	}
	if bad := f.rows(`select t.id from task_outbox t where event_type = 'effect_in_the_file' and status = 'success'
		and not exists (select 1 from effects where task_id = t.id)`); bad != nil {
		c.Errorf("successes without their effect: %q", bad)
	}
}

// A process is killed in the middle of its work, again and again. Nothing is lost, and
// nothing that has succeeded runs again.
func TestCrash_Kill(t *testing.T) {
	c := newCrash(t, 8, 5*time.Second)
	for n := range 50 {
		p := c.child("shop", func(j *job) { j.Producers = 2 })
		wait := 5 + rand.IntN(46)
		if n%5 == 4 {
			wait = rand.IntN(300) // while it starts
		} else {
			c.hear(p.until("ready"))
		}
		time.Sleep(time.Duration(wait) * time.Millisecond)
		c.hear(p.kill())
	}
	c.hear(c.child("drain").end())
	f := c.check()
	c.Logf("%d acknowledged; %s", len(c.acked), strings.Join(f.rows(`select status, count(*), sum(lost_count) from task_outbox group by 1`), ", "))
	if len(c.acked) < 100 {
		c.Errorf("%d tasks are too few for this test", len(c.acked))
	}
	if dead := f.rows(`select t.id, lost_count from task_outbox t where status = 'dead_letter' and last_error <> 'lost 3 times'`); dead != nil {
		c.Errorf("dead letters: %q", dead)
	}
}

// What was running when its process died runs again as soon as the next one starts.
func TestCrash_ResumeTime(t *testing.T) {
	for _, workers := range []int{4, 16, 64, 600} {
		t.Run(fmt.Sprint(workers), func(t *testing.T) {
			c := newCrash(t, workers, 30*time.Second)
			f := c.fixture()
			f.q = newQueue(t, f.db, taskbox.Options{})
			var ds []taskbox.Draft
			for range workers {
				ds = append(ds, slowType.New(60_000))
			}
			if _, err := f.q.EnqueueMany(t.Context(), f.db, ds...); err != nil {
				t.Fatal(err)
			}
			p := c.child("work")
			f.eventually(int64(workers), `select count(*) from task_outbox where status = 'processing'`)
			p.kill()
			c.child("work").until("ready")
			ready := time.Now()
			f.eventually(int64(workers), `select count(*) from task_outbox where status = 'processing' and attempt = 2`)
			d := time.Since(ready)
			t.Logf("%d tasks resumed within %v", workers, d.Round(time.Millisecond))
			if d > 5*time.Second {
				t.Errorf("%d tasks took %v to resume, want about a second", workers, d)
			}
			checkInvariants(t, f.db)
		})
	}
}

// eventually waits until a query counts n.
func (f *fixture) eventually(n int64, query string, args ...any) {
	f.Helper()
	for end := time.Now().Add(40 * time.Second); f.int(query, args...) != n; {
		if time.Now().After(end) {
			f.Fatalf("%s: still %d, want %d", query, f.int(query, args...), n)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// Two processes enqueue and run, each task once.
func TestCrash_TwoProcesses(t *testing.T) {
	tasks := 20_000
	if raced() {
		tasks = 3_200
	}
	c := newCrash(t, 16, 30*time.Second)
	var ps []*child
	for range 2 {
		ps = append(ps, c.child("shop", func(j *job) { j.Producers, j.Tasks = 16, tasks/32 }))
	}
	for _, p := range ps {
		c.hear(p.end())
	}
	f := c.check()
	f.wantInt(int64(tasks), `select count(*) from task_outbox where status = 'success' and attempt = 1 and lost_count = 0`)
	f.wantInt(int64(tasks), `select count(*) from task_audit where event = 'success'`)
	f.wantInt(int64(tasks), `select sum(event = 'picked') - sum(event = 'interrupted') from task_audit`)
	f.wantInt(2, `select count(distinct owner) from task_audit where event = 'picked'`)
	if n := len(c.acked); n != tasks {
		t.Errorf("%d tasks were acknowledged, want %d", n, tasks)
	}
	if again := f.int(`select count(*) from task_audit where event = 'interrupted'`); again > int64(tasks/20) {
		t.Errorf("%d of %d claims were given back", again, tasks)
	}
}

// A task that takes its process down is a dead letter after the third time; those that
// were running beside it aren't.
func TestCrash_Poison(t *testing.T) {
	for _, tt := range []struct {
		name            string
		workers         int
		poisons         []int // how many ms each lives
		innocents, long int
	}{
		{"at once", 8, []int{0}, 40, 8},
		{"after a while", 8, []int{300}, 40, 8},
		{"many workers", 64, []int{20}, 300, 64},
		{"one worker", 1, []int{10}, 5, 2},
		{"several", 8, []int{0, 0, 0, 0, 0}, 120, 24},
		{"several, slow ones", 8, []int{200, 200, 200, 200, 200}, 120, 24},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCrash(t, tt.workers, 30*time.Second)
			f := c.fixture()
			f.q = newQueue(t, f.db, taskbox.Options{})
			n := tt.innocents + tt.long
			for i := range n {
				d := slowType.New(1)
				if i%(n/tt.long) == 0 {
					d = slowType.New(400)
				}
				f.enqueue(d)
				if i%(n/len(tt.poisons)) == n/len(tt.poisons)/2 && i*len(tt.poisons)/n < len(tt.poisons) {
					f.enqueue(poisonType.New(tt.poisons[i*len(tt.poisons)/n]))
				}
			}
			crashes := 0
			for crashes = range 20 * len(tt.poisons) {
				p := c.child("drain")
				p.rest()
				if p.err == nil {
					break
				}
			}
			t.Logf("%d crashes", crashes)
			if want := 3 * len(tt.poisons); crashes > want {
				t.Errorf("%d crashes, want %d", crashes, want)
			}
			f.wantInt(int64(n), `select count(*) from task_outbox where event_type = 'slow' and status = 'success'`)
			f.wantInt(int64(len(tt.poisons)), `select count(*) from task_outbox where event_type = 'poison' and status = 'dead_letter' and last_error = 'lost 3 times' and attempt = 3`)
			f.wantInt(int64(len(tt.poisons)), `select count(*) from task_audit where event = 'dead_letter' and detail ->> 'cause' = 'lost 3 times'`)
			checkInvariants(t, f.db)
			c.checkStarts(f)
		})
	}
}

// A task that takes long isn't taken for the poison, however often a new one comes and
// ends the process beside it.
func TestCrash_PoisonBesideALongTask(t *testing.T) {
	c := newCrash(t, 8, 30*time.Second)
	f := c.fixture()
	f.q = newQueue(t, f.db, taskbox.Options{})
	long := f.enqueue(slowType.New(2000))
	const poisons = 4
	added, fence := 0, int64(0)
	for range 5 * poisons {
		p := c.child("drain")
		for added < poisons && !p.ended() {
			// The row may still be as the last process left it.
			if row := f.one(`select max(fence) from task_outbox where id = ? and status = 'processing' and fence > ?`, long, fence); row != "" {
				f.enqueue(slowType.New(-1))
				added++
				fence = f.int(`select fence from task_outbox where id = ?`, long)
			}
			time.Sleep(5 * time.Millisecond)
		}
		p.rest()
		if p.err == nil {
			break
		}
	}
	f.wantInt(int64(added), `select count(*) from task_outbox where payload = '-1' and status = 'dead_letter' and last_error = 'lost 3 times'`)
	f.wantStatus(long, "success")
	checkInvariants(t, f.db)
}

// A payload whose decoding takes the process down is no crash loop either.
func TestCrash_PoisonInTheDecoder(t *testing.T) {
	c := newCrash(t, 8, 30*time.Second)
	f := c.fixture()
	f.q = newQueue(t, f.db, taskbox.Options{})
	for range 20 {
		f.enqueue(slowType.New(5))
	}
	id := f.enqueue(venomType.New(venom{}))
	crashes := 0
	for crashes = range 10 {
		p := c.child("drain")
		p.rest()
		if p.err == nil {
			break
		}
	}
	if crashes != 3 {
		t.Errorf("%d crashes, want 3", crashes)
	}
	f.wantStatus(id, "dead_letter")
	f.wantInt(20, `select count(*) from task_outbox where status = 'success'`)
	checkInvariants(t, f.db)
}

// A process that stood still for longer than its lease finds its task taken.
func TestCrash_Stopped(t *testing.T) {
	c := newCrash(t, 4, time.Second)
	f := c.fixture()
	f.q = newQueue(t, f.db, taskbox.Options{})
	p := c.child("work")
	p.until("ready")
	id := f.enqueue(slowType.New(4000))
	f.eventually(1, `select count(*) from task_outbox where status = 'processing'`)
	zombie := f.one(`select owner from task_outbox where id = ?`, id)
	p.signal(syscall.SIGSTOP)
	// It may hold the write lock just now; then nobody can do anything.
	if _, err := f.db.Exec(`update task_meta set value = value`); err != nil {
		t.Skipf("it was stopped inside a transaction: %v", err)
	}
	other := c.child("work")
	f.eventually(1, `select count(*) from task_outbox where status = 'processing' and owner <> ?`, zombie)
	p.signal(syscall.SIGCONT)
	lines := p.until(fmt.Sprintf("ended %d ", id))
	if last := lines[len(lines)-1]; !strings.Contains(last, taskbox.ErrLeaseLost.Error()) {
		t.Errorf("the first handler's ctx: %s, want ErrLeaseLost", last)
	}
	f.eventually(1, `select count(*) from task_outbox where status = 'success'`)
	// It goes on with other tasks.
	other.signal(syscall.SIGTERM)
	other.end()
	f.enqueue(slowType.New(1))
	f.eventually(2, `select count(*) from task_outbox where status = 'success'`)
	p.signal(syscall.SIGTERM)
	p.end()
	f.wantTrail(id, "picked processing lost picked processing success")
	f.wantInt(1, `select count(*) from task_audit where task_id = ? and event = 'success' and attempt = 2`, id)
	checkInvariants(t, f.db)
}

// A process that is told to stop finishes or gives back all that it has, at no cost.
func TestCrash_Terminated(t *testing.T) {
	c := newCrash(t, 8, 5*time.Second)
	for n := range 10 {
		p := c.child("shop", func(j *job) { j.Producers, j.Grace = 2, []time.Duration{-1, 10 * time.Millisecond, time.Second}[n%3] })
		c.hear(p.until("ready"))
		time.Sleep(time.Duration(5+rand.IntN(100)) * time.Millisecond)
		p.signal(syscall.SIGTERM)
		c.hear(p.end())
		f := c.fixture()
		checkInvariants(t, f.db)
		f.wantInt(0, `select count(*) from task_outbox where owner is not null or status in ('picked', 'processing')`)
		f.wantInt(0, `select count(*) from task_meta where key like 'poller:%'`)
		f.db.Close()
	}
	c.hear(c.child("drain").end())
	f := c.fixture()
	checkInvariants(t, f.db)
	c.checkAcked(f)
	f.wantInt(0, `select count(*) from task_outbox where status <> 'success' or attempt <> 1 or lost_count <> 0 or retry_count <> 0`)
	t.Logf("%d tasks, %d given back", len(c.acked), f.int(`select count(*) from task_audit where event = 'interrupted'`))
}

// Another process holds the write lock for longer than the leases last. Whoever gets it
// first afterwards must not take the others for dead.
func TestCrash_LockedByAnother(t *testing.T) {
	const tasks = 6
	c := newCrash(t, tasks/2, 2*time.Second)
	f := c.fixture()
	f.q = newQueue(t, f.db, taskbox.Options{})
	for range tasks {
		f.enqueue(slowType.New(5000))
	}
	var ps []*child
	for range 3 { // one of them has nothing to do but to look at the others' leases
		ps = append(ps, c.child("work"))
	}
	f.eventually(tasks, `select count(*) from task_outbox where status = 'processing'`)
	time.Sleep(time.Second) // each has seen the others' leases
	l := c.child("lock", func(j *job) { j.Hold = 8 * time.Second })
	l.until("locked")
	l.end()
	f.eventually(tasks, `select count(*) from task_outbox where status = 'success'`)
	for _, p := range ps {
		p.signal(syscall.SIGTERM)
		p.end()
	}
	f.wantInt(0, `select count(*) from task_audit where event in ('lost', 'interrupted', 'failed', 'retry_wait')`)
	f.wantInt(tasks, `select count(*) from task_audit where event = 'picked'`)
	checkInvariants(t, f.db)
	c.checkStarts(f)
}

// A queue that has nothing to do does nothing.
func TestCrash_IdleCPU(t *testing.T) {
	const most = 100 // ms of CPU time in 2 s
	insert := func(f *fixture, n int, columns string, args ...any) {
		for range n {
			f.exec(`insert into task_outbox(event_type, payload`+columns, args...)
		}
	}
	far := time.Now().Add(time.Hour).UnixMilli()
	for _, tt := range []struct {
		name  string
		grace time.Duration
		setUp func(f *fixture)
	}{
		{"empty", 0, func(f *fixture) {}},
		{"no room", 0, func(f *fixture) { insert(f, 50, `) values ('slow', '20000')`) }},
		{"types without handlers", 0, func(f *fixture) {
			for i := range 30 {
				insert(f, 10, `) values (?, '1')`, fmt.Sprint("unknown ", i))
			}
		}},
		{"scheduled", 0, func(f *fixture) { insert(f, 500, `, next_run_at) values ('slow', '1', ?)`, far) }},
		{"scheduled in the far future", 0, func(f *fixture) {
			for _, at := range []int64{1<<63 - 1, 1 << 62, 1 << 53} {
				insert(f, 1, `, next_run_at) values ('slow', '1', ?)`, at)
			}
		}},
		{"retries of types without handlers", 0, func(f *fixture) {
			insert(f, 50, `, status, next_run_at) values ('unknown', '1', 'retry_wait', ?)`, far)
		}},
		{"blocked", 0, func(f *fixture) {
			insert(f, 1, `, group_key, next_run_at) values ('slow', '1', 'g', ?)`, far)
			insert(f, 50, `, group_key) values ('slow', '1', 'g')`)
		}},
		{"blocked by a type without a handler", 0, func(f *fixture) {
			insert(f, 1, `, group_key) values ('unknown', '1', 'g')`)
			insert(f, 50, `, group_key) values ('slow', '1', 'g')`)
		}},
		{"suspects wait", 0, func(f *fixture) {
			insert(f, 6, `, lost_count) values ('slow', '20000', 2)`)
		}},
		{"suspects wait for room", 0, func(f *fixture) {
			insert(f, 10, `, lost_count) values ('slow', '20000', 1)`)
		}},
		{"stopping", 10 * time.Second, func(f *fixture) {
			insert(f, 2, `) values ('slow', '20000')`)
			insert(f, 5, `, next_run_at) values ('slow', '1', ?)`, time.Now().Add(2*time.Second).UnixMilli())
			insert(f, 5, `) values ('unknown', '1')`)
		}},
		{"held by another", 0, func(f *fixture) {
			insert(f, 5, `, status, owner, lease_until) values ('slow', '1', 'processing', 'somebody', ?)`, far)
		}},
		{"processing by nobody", 0, func(f *fixture) {
			insert(f, 5, `, status) values ('slow', '1', 'processing')`)
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			c := newCrash(t, 4, 30*time.Second)
			f := c.fixture()
			f.q = newQueue(t, f.db, taskbox.Options{})
			tt.setUp(f)
			p := c.child("idle", func(j *job) { j.Hold, j.Grace = 2*time.Second, tt.grace })
			lines := p.until("cpu ")
			var ms int
			if _, err := fmt.Sscanf(lines[len(lines)-1], "cpu %d", &ms); err != nil {
				t.Fatal(err)
			}
			if ms > most {
				t.Errorf("%d ms of CPU time in 2 s, want less than %d", ms, most)
			}
			t.Logf("%d ms", ms)
		})
	}
}

// Rows that nobody should have written: they may stay where they are, but no others do.
func TestCrash_MadRows(t *testing.T) {
	const maxInt, minInt = "9223372036854775807", "-9223372036854775808"
	set := func(typ, set string) []string {
		return []string{
			fmt.Sprintf(`insert into task_outbox(event_type, payload) values ('%s', '1'), ('%[1]s', '1'), ('%[1]s', '1')`, typ),
			fmt.Sprintf(`update task_outbox set %s where event_type = '%s'`, set, typ),
		}
	}
	for name, stmts := range map[string][]string{
		"processing by nobody":       set("slow", `status = 'processing'`),
		"picked by nobody":           set("slow", `status = 'picked', lease_until = 1`),
		"pending and owned":          set("slow", `owner = 'x', lease_until = 1`),
		"owned without a lease":      set("slow", `owner = 'x'`),
		"processing without a lease": set("slow", `owner = 'x', status = 'processing'`),
		"scheduled and owned":        set("slow", `owner = 'x', lease_until = 1, status = 'scheduled', next_run_at = 1`),
		"a lease for ever":           set("slow", `owner = 'x', status = 'picked', lease_until = `+maxInt),
		"a lease from the big bang":  set("slow", `owner = 'x', status = 'picked', lease_until = `+minInt),
		"due for ever":               set("slow", `next_run_at = `+minInt),
		"never due":                  set("slow", `next_run_at = `+maxInt),
		"scheduled for the big bang": set("slow", `status = 'scheduled', next_run_at = `+minInt),
		"created at the big bang":    set("slow", `created_at = `+minInt+`, next_run_at = `+minInt),
		"created long ago":           set("slow", `created_at = -8000000000000000000, next_run_at = 0`),
		"due long ago":               set("slow", `created_at = -9000000000000000000, next_run_at = -8000000000000000000`),
		"created at the end of time": set("slow", `created_at = `+maxInt),
		"highest priority":           set("slow", `priority = `+maxInt),
		"lowest priority":            set("slow", `priority = `+minInt),
		"many retries":               set("fails", `retry_count = `+maxInt),
		"many retries and attempts":  set("fails", `retry_count = 5000000000000, max_attempts = `+maxInt),
		"negative retries":           set("fails", `retry_count = `+minInt),
		"least attempts":             set("slow", `attempt = `+minInt),
		"lowest version":             set("slow", `version = `+minInt),
		"lost very often":            set("slow", `lost_count = `+maxInt),
		"lost very often, and owned": set("slow", `lost_count = `+maxInt+`, owner = 'x', lease_until = 1, status = 'picked'`),
		"lost less than never":       set("slow", `lost_count = `+minInt),
		"expired at the big bang":    set("slow", `expires_at = `+minInt),
		"blocked by nobody":          set("slow", `blocked = 1`),
		"blocked twice":              set("slow", `blocked = 2`),
		"success and owned":          set("slow", `status = 'success', owner = 'x', lease_until = 1, finished_at = 1`),
		"success and not finished":   set("slow", `status = 'success'`),
		"pending and finished":       set("slow", `finished_at = 1`),
		"no trace":                   set("slow", `trace_id = ''`),
		"a strange type":             set("slow", `event_type = char(39, 34, 0x202e, 0x1f600, 10) || x'00' || event_type`),
		"a type that isn't UTF-8":    set("slow", `event_type = cast(x'ff00fe' as text)`),
		"a payload with a NUL":       set("slow", `payload = '1' || char(0) || '2'`),
		"a payload that isn't UTF-8": set("slow", `payload = cast(x'22ff22' as text)`),
		"a large payload":            set("slow", `payload = '"' || hex(zeroblob(1000000)) || '"'`),
		"a deep payload":             set("slow", `payload = replace(hex(zeroblob(450)), '0', '[') || replace(hex(zeroblob(450)), '0', ']')`),
		"strange keys":               set("slow", `dedupe_key = 'k' || char(0) || id, group_key = cast(x'ff' as text)`),
		"strange pollers":            {`insert into task_meta(key, value) values ('poller:', ''), ('poller:x', 'no JSON'), ('poller:y', '{"pid": -1}'), ('poller:z', '[]'), ('poller:' || char(0), '{"pid": 1e99}')`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := newCrash(t, 4, time.Second)
			f := c.fixture()
			f.q = newQueue(t, f.db, taskbox.Options{})
			for _, stmt := range stmts {
				f.exec(stmt)
			}
			wants := func(n int64) {
				t.Helper()
				for range 3 {
					f.enqueue(pureType.New(1))
				}
				for end := time.Now().Add(5 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
					if f.int(`select count(*) from task_outbox where event_type = 'pure' and status = 'success'`) == n {
						return
					}
				}
				t.Errorf("the others don't run: %q; the mad ones: %q", f.rows(`select * from task_outbox where event_type = 'pure' limit 1`), f.rows(`select * from task_outbox where event_type <> 'pure' limit 1`))
			}
			p := c.child("work")
			wants(3)
			time.Sleep(1500 * time.Millisecond)
			wants(6)
			if t.Failed() {
				p.signal(os.Kill)
			}
			p.signal(syscall.SIGTERM)
			p.rest()
			if p.err != nil && !t.Failed() {
				t.Errorf("it ended with %v: %s", p.err, p.errs.String())
			}
			if cpu := p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime(); cpu > 1200*time.Millisecond {
				t.Errorf("it took %v of CPU time", cpu)
			}
			if t.Failed() {
				t.Logf("%.800s", p.errs.String())
			}
		})
	}
}

// Other processes insert by plain SQL while one or two drain a backlog as fast as they can.
func TestCrash_InsertBesideABacklog(t *testing.T) {
	for _, tt := range []struct {
		name             string
		processes, conns int
	}{
		{"one process", 1, 0},
		{"two processes", 2, 0},
		{"two processes with pools of one", 2, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tasks := 100_000
			if raced() {
				tasks = 6_000
			}
			c := newCrash(t, 16, 30*time.Second)
			f := c.fixture()
			f.q = newQueue(t, f.db, taskbox.Options{})
			f.exec(`insert into task_outbox(event_type, payload) with recursive n(i) as (select 1 union all select i + 1 from n limit ?) select 'empty', i from n`, tasks)
			begin := time.Now()
			var ps []*child
			for range tt.processes {
				ps = append(ps, c.child("drainEmpty", func(j *job) { j.Conns = tt.conns }))
			}
			in := c.child("insert")
			for _, p := range ps {
				p.end()
			}
			d := time.Since(begin)
			in.signal(syscall.SIGTERM)
			lines := in.end()
			for _, line := range lines {
				if strings.HasPrefix(line, "failed") {
					t.Error(line)
				}
			}
			t.Logf("%v; %.0f tasks/s", lines, float64(tasks)/d.Seconds())
			f.wantInt(int64(tasks), `select count(*) from task_outbox where status = 'success' and event_type = 'empty'`)
		})
	}
}
