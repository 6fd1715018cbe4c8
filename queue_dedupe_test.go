package taskbox_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

// A keyed fixture has two types whose tasks end as their payload says, and of which one
// keeps the keys of its dead letters.
type keyed struct {
	*fixture
	typ, keeps *taskbox.Type[string]
	release    chan struct{} // ends the tasks whose payload is run
}

func newKeyed(f *fixture) *keyed {
	k := &keyed{fixture: f, release: make(chan struct{})}
	handler := func(ctx context.Context, task *taskbox.Task[string]) error {
		switch task.Payload {
		case "dead":
			return taskbox.Permanent(errEffect)
		case "retry":
			return errEffect
		case "skip":
			return taskbox.Skip("no need")
		case "run":
			<-k.release
		}
		return nil
	}
	k.typ = f.does("x", handler)
	k.keeps = f.does("keeps", handler, taskbox.TypeOptions{KeepDeadKeys: true})
	return k
}

func (k *keyed) ok(err error) {
	k.Helper()
	if err != nil {
		k.Fatal(err)
	}
}

// keyStates are the states of a task with the key k, and whether the key is taken then.
var keyStates = []struct {
	name  string
	taken bool
	live  bool // the task hasn't ended
	reach func(*keyed) (id int64)
}{
	{"pending", true, true, func(k *keyed) int64 { return k.enqueue(k.typ.New("", taskbox.Key("k"))) }},
	{"scheduled", true, true, func(k *keyed) int64 {
		return k.enqueue(k.typ.New("", taskbox.Key("k"), taskbox.Delay(time.Hour)))
	}},
	{"running", true, true, func(k *keyed) int64 {
		id := k.enqueue(k.typ.New("run", taskbox.Key("k")))
		k.run()
		k.Cleanup(func() { close(k.release) })
		time.Sleep(time.Second)
		return id
	}},
	{"retry_wait", true, true, func(k *keyed) int64 { return k.ran("retry", k.typ) }},
	{"success", true, false, func(k *keyed) int64 { return k.ran("", k.typ) }},
	{"success, replayed and dead", true, false, func(k *keyed) int64 {
		id := k.ran("", k.typ)
		k.ok(k.q.Replay(k.Context(), id, byAnn, risky(taskbox.WithPayload("dead"))...))
		k.drain()
		return id
	}},
	{"dead_letter", false, false, func(k *keyed) int64 { return k.ran("dead", k.typ) }},
	{"dead_letter, replayed and success", true, false, func(k *keyed) int64 {
		id := k.ran("dead", k.typ)
		k.ok(k.q.Replay(k.Context(), id, byAnn, taskbox.WithPayload("")))
		k.drain()
		return id
	}},
	{"dead_letter, replayed", true, true, func(k *keyed) int64 {
		id := k.ran("dead", k.typ)
		k.ok(k.q.Replay(k.Context(), id, byAnn))
		return id
	}},
	{"dead_letter with KeepDeadKeys", true, false, func(k *keyed) int64 { return k.ran("dead", k.keeps) }},
	{"dead_letter with KeepDeadKeys, resolved", true, false, func(k *keyed) int64 {
		id := k.ran("dead", k.keeps)
		k.ok(k.q.Resolve(k.Context(), id, "by phone", byAnn))
		return id
	}},
	{"dead_letter with KeepDeadKeys that can't be decoded", true, false, func(k *keyed) int64 {
		k.exec(`insert into task_outbox (event_type, payload, dedupe_key) values ('keeps', '7', 'k')`)
		k.drain()
		return k.int(`select max(id) from task_outbox where dedupe_key = 'k'`)
	}},
	{"dead_letter with KeepDeadKeys, lost three times", true, false, func(k *keyed) int64 {
		id := k.enqueue(k.keeps.New("", taskbox.Key("k")))
		k.exec(`update task_outbox set lost_count = 2, status = 'processing', attempt = 3, fence = 3, owner = 'gone', lease_until = 1 where id = ?`, id)
		stop := k.run()
		time.Sleep(5 * time.Minute)
		k.ok(stop())
		return id
	}},
	{"dead_letter with KeepDeadKeys, skipped by hand", false, false, func(k *keyed) int64 {
		id := k.ran("dead", k.keeps)
		k.ok(k.q.Skip(k.Context(), id, byAnn))
		return id
	}},
	{"dead_letter with KeepDeadKeys, replayed and cancelled", false, false, func(k *keyed) int64 {
		id := k.ran("dead", k.keeps)
		k.ok(k.q.Replay(k.Context(), id, byAnn))
		k.ok(k.q.Cancel(k.Context(), id, byAnn))
		return id
	}},
	{"success with KeepDeadKeys, replayed, dead and skipped by hand", true, false, func(k *keyed) int64 {
		id := k.ran("", k.keeps)
		k.ok(k.q.Replay(k.Context(), id, byAnn, risky(taskbox.WithPayload("dead"))...))
		k.drain()
		k.ok(k.q.Skip(k.Context(), id, byAnn))
		return id
	}},
	{"success, replayed and cancelled", true, false, func(k *keyed) int64 {
		id := k.ran("", k.typ)
		k.ok(k.q.Replay(k.Context(), id, byAnn, risky()...))
		k.ok(k.q.Cancel(k.Context(), id, byAnn))
		return id
	}},
	{"skipped", false, false, func(k *keyed) int64 { return k.ran("skip", k.typ) }},
	{"skipped by hand", false, false, func(k *keyed) int64 {
		id := k.enqueue(k.typ.New("", taskbox.Key("k")))
		k.ok(k.q.Skip(k.Context(), id, byAnn))
		return id
	}},
	{"expired", false, false, func(k *keyed) int64 {
		id := k.enqueue(k.typ.New("", taskbox.Key("k"), taskbox.ExpiresIn(time.Second)))
		time.Sleep(time.Minute)
		k.drain()
		return id
	}},
	{"cancelled", false, false, func(k *keyed) int64 {
		id := k.enqueue(k.typ.New("", taskbox.Key("k")))
		k.ok(k.q.Cancel(k.Context(), id, byAnn))
		return id
	}},
	{"success, pruned", true, false, func(k *keyed) int64 {
		id := k.ran("", k.typ)
		k.prunes(id)
		return id
	}},
	{"dead_letter, pruned", false, false, func(k *keyed) int64 {
		id := k.ran("dead", k.typ)
		k.prunes(id)
		return id
	}},
	{"dead_letter with KeepDeadKeys, pruned", true, false, func(k *keyed) int64 {
		id := k.ran("dead", k.keeps)
		k.prunes(id)
		return id
	}},
}

// ran enqueues a task with the key k and runs it.
func (k *keyed) ran(payload string, typ *taskbox.Type[string]) int64 {
	k.Helper()
	id := k.enqueue(typ.New(payload, taskbox.Key("k")))
	k.drain()
	return id
}

// prunes lets the time of retention pass.
func (k *keyed) prunes(id int64) {
	k.Helper()
	time.Sleep(2 * time.Minute)
	stop := k.run()
	time.Sleep(2 * time.Minute)
	k.ok(stop())
	k.wantInt(0, `select count(*) from task_outbox where id = ?`, id)
}

// keyInserts are the ways to enqueue a task with the key k.
var keyInserts = []struct {
	name   string
	insert func(*keyed)
}{
	{"Enqueue", func(k *keyed) { k.receive(k.q.Enqueue(k.Context(), k.db, k.typ.New("2", taskbox.Key("k")))) }},
	{"Enqueue in a transaction", func(k *keyed) {
		tx := k.begin()
		r, err := k.q.Enqueue(k.Context(), tx, k.typ.New("2", taskbox.Key("k")))
		k.ok(tx.Commit())
		k.receive(r, err)
	}},
	{"EnqueueMany", func(k *keyed) {
		rs, err := k.q.EnqueueMany(k.Context(), k.db, k.typ.New("2", taskbox.Key("k")), k.typ.New("2", taskbox.Key("k")))
		k.receive(rs[0], err)
		if !rs[1].Duplicate || rs[1].ID != rs[0].ID {
			k.Errorf("a key twice in one EnqueueMany: %+v", rs)
		}
	}},
	{"KeyFor", func(k *keyed) {
		k.receive(k.q.Enqueue(k.Context(), k.db, k.typ.New("2", taskbox.KeyFor("k", time.Hour))))
	}},
	{"other type", func(k *keyed) { k.receive(k.q.Enqueue(k.Context(), k.db, k.keeps.New("2", taskbox.Key("k")))) }},
	{"insert", plainInsert("insert")},
	{"insert or ignore", plainInsert("insert or ignore")},
	{"insert or replace", plainInsert("insert or replace")},
	{"replace", plainInsert("replace")},
	{"insert or abort", plainInsert("insert or abort")},
	{"insert or fail", plainInsert("insert or fail")},
	{"insert or rollback", plainInsert("insert or rollback")},
	{"insert from select", func(k *keyed) {
		k.exec(`insert into task_outbox (event_type, payload, dedupe_key) select 'x', '"2"', 'k' union all select 'x', '"2"', 'k'`)
	}},
}

func plainInsert(verb string) func(*keyed) {
	return func(k *keyed) {
		k.exec(verb + ` into task_outbox (event_type, payload, dedupe_key) values ('x', '"2"', 'k')`)
	}
}

// receive holds a receipt against the file.
func (k *keyed) receive(r taskbox.Receipt, err error) {
	k.Helper()
	k.ok(err)
	if r.Duplicate != (k.int(`select count(*) from task_outbox where id = ? and payload = '"2"'`, r.ID) == 0) {
		k.Errorf("%+v, and the tasks are %q", r, k.rows(`select id, payload from task_outbox`))
	}
}

// hits is how often the key k was enqueued in vain, by its holder.
func (k *keyed) hits(holder int64) int64 {
	k.Helper()
	return k.int(`select coalesce(sum(hits), 0) from task_dedupe where kind = 'duplicate' and task_id = ? and by_task = ? and name = 'k'`, holder, holder)
}

func TestKey_Matrix(t *testing.T) {
	for _, s := range keyStates {
		for _, way := range keyInserts {
			t.Run(s.name+"/"+way.name, func(t *testing.T) {
				var o taskbox.Options
				if strings.Contains(s.name, "pruned") {
					o.KeepDone, o.KeepDead = time.Minute, time.Minute
				}
				bubble(t, o, func(f *fixture) {
					k := newKeyed(f)
					id := s.reach(k)
					if !s.taken {
						k.tryInsert(false, id, way.insert)
						return
					}
					for _, way := range keyInserts { // none changes anything
						k.tryInsert(true, id, way.insert)
						if k.Failed() {
							k.Fatal(way.name)
						}
					}
				})
			})
			if s.taken {
				break
			}
		}
	}
}

// tryInsert inserts once more with the key k that the task id has, or had.
func (k *keyed) tryInsert(taken bool, id int64, insert func(*keyed)) {
	k.Helper()
	before, hits := k.int(`select count(*) from task_outbox`), k.hits(id)
	// All but the lease, which is renewed while the task runs.
	const row = `select status, version, event_type, payload, dedupe_key, key_window, next_run_at, attempt, created_at, updated_at, owner from task_outbox where id = ?`
	old := k.rows(row, id)
	insert(k)
	added := k.int(`select count(*) from task_outbox`) - before
	switch {
	case taken && added != 0:
		k.Errorf("a task was inserted although the key is taken; the key's records: %q", k.rows(`select * from task_dedupe where name = 'k'`))
	case taken && k.hits(id) <= hits:
		k.Errorf("the duplicate left no trace; the key's records: %q", k.rows(`select * from task_dedupe where name = 'k'`))
	case !taken && added != 1:
		k.Errorf("%d tasks were inserted although the key is free, want 1; the key's records: %q", added, k.rows(`select * from task_dedupe where name = 'k'`))
	case !taken && k.hits(id) != hits:
		k.Errorf("a free key left the trace of a duplicate: %q", k.rows(`select * from task_dedupe where name = 'k'`))
	}
	if diff := gocmp.Diff(old, k.rows(row, id)); diff != "" {
		k.Errorf("the insert has changed the task that had the key:\n%s", diff)
	}
	k.wantInt(0, `select count(*) from (select 1 from task_outbox where dedupe_key = 'k' and finished_at is null group by dedupe_key having count(*) > 1)`)
}

// A replay makes a task live again: with its key, or not at all.
func TestKey_Matrix_Replay(t *testing.T) {
	for _, s := range keyStates {
		if s.name == "running" || s.name == "dead_letter, pruned" || s.name == "dead_letter with KeepDeadKeys, pruned" {
			continue // the poller would run the replayed task, or prune it
		}
		t.Run(s.name, func(t *testing.T) {
			bubble(t, taskbox.Options{KeepDone: time.Minute}, func(f *fixture) {
				k := newKeyed(f)
				// The first to have the key is a dead letter, which leaves it free.
				first := k.ran("dead", k.typ)
				second := s.reach(k)
				before := k.rows(`select * from task_outbox where id = ?`, first)
				err := k.q.Replay(k.Context(), first, byAnn, risky()...)
				if s.live {
					wantErr(t, err, taskbox.ErrConflict)
					if diff := gocmp.Diff(before, k.rows(`select * from task_outbox where id = ?`, first)); diff != "" {
						t.Errorf("a replay that failed has changed the task:\n%s", diff)
					}
					return
				}
				if err != nil {
					t.Fatal(err)
				}
				// The key is the replayed task's now.
				r, err := k.q.Enqueue(k.Context(), k.db, k.typ.New("2", taskbox.Key("k")))
				if err != nil || !r.Duplicate || r.ID != first {
					t.Errorf("enqueue beside the replayed task %d: %+v %v (the other is %d)", first, r, err, second)
				}
				if k.int(`select count(*) from task_outbox where id = ? and finished_at is not null`, second) == 1 {
					wantErr(t, k.q.Replay(k.Context(), second, byAnn, risky()...), taskbox.ErrConflict)
				}
			})
		})
	}
}

// A duplicate gets the first task's id and trace, also long after its end.
func TestKey_Receipt(t *testing.T) {
	bubble(t, taskbox.Options{KeepDone: time.Minute}, func(f *fixture) {
		k := newKeyed(f)
		var got []taskbox.Receipt
		again := func() {
			r, err := f.q.Enqueue(f.Context(), f.db, k.typ.New("", taskbox.Key("k"), taskbox.TraceID("another")))
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, r)
		}
		first, err := f.q.Enqueue(f.Context(), f.db, k.typ.New("", taskbox.Key("k"), taskbox.TraceID("t1")))
		if err != nil || first.Duplicate {
			t.Fatal(first, err)
		}
		again()
		f.drain()
		again()
		k.prunes(first.ID)
		again()
		want := []taskbox.Receipt{
			{ID: first.ID, TraceID: "t1", Duplicate: true},
			{ID: first.ID, TraceID: "t1", Duplicate: true},
			{ID: first.ID, TraceID: "", Duplicate: true},
		}
		if diff := gocmp.Diff(want, got); diff != "" {
			t.Errorf("receipts (-want +got):\n%s", diff)
		}
	})
}

// A duplicate rolls back with its transaction, its trace too; and so does a first.
func TestKey_Rollback(t *testing.T) {
	f := open(t, taskbox.Options{})
	typ := taskbox.NewType[string]("x")
	tx := f.begin()
	r, err := f.q.Enqueue(t.Context(), tx, typ.New("", taskbox.Key("k")))
	if err != nil || r.Duplicate {
		t.Fatal(r, err)
	}
	tx.Rollback()
	id := f.enqueue(typ.New("", taskbox.Key("k")))
	tx = f.begin()
	if r, err := f.q.Enqueue(t.Context(), tx, typ.New("", taskbox.Key("k"))); err != nil || !r.Duplicate || r.ID != id {
		t.Fatal(r, err)
	}
	tx.Rollback()
	f.wantInt(0, `select count(*) from task_dedupe`)
	f.wantInt(1, `select count(*) from task_outbox`)
}

// Duplicates are counted by holder.
func TestKey_Duplicates_Counted(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		k := newKeyed(f)
		first := f.enqueue(k.typ.New("dead", taskbox.Key("k")))
		for range 3 {
			f.enqueue(k.typ.New("", taskbox.Key("k")))
			time.Sleep(time.Minute)
		}
		f.drain()
		second := f.enqueue(k.typ.New("", taskbox.Key("k")))
		f.drain()
		f.enqueue(k.typ.New("", taskbox.Key("k")))
		f.exec(`insert or replace into task_outbox (event_type, payload, dedupe_key) values ('x', '1', 'k')`)
		want := []string{fmt.Sprintf("%d|%d|3|120000", first, first), fmt.Sprintf("%d|%d|2|", second, second)}
		got := f.rows(`select task_id, by_task, hits, case task_id when ? then updated_at - created_at end
			from task_dedupe where kind = 'duplicate' order by task_id`, first)
		if diff := gocmp.Diff(want, got); diff != "" {
			t.Errorf("duplicates (-want +got):\n%s", diff)
		}
	})
}

// The traces of duplicates go with the task that they name.
func TestKey_Duplicates_Pruned(t *testing.T) {
	bubble(t, taskbox.Options{KeepDone: time.Minute}, func(f *fixture) {
		k := newKeyed(f)
		id := f.enqueue(k.typ.New("", taskbox.KeyFor("k", time.Hour)))
		f.enqueue(k.typ.New("", taskbox.Key("k")))
		f.drain()
		k.prunes(id)
		f.wantInt(0, `select count(*) from task_dedupe where kind = 'duplicate'`)
		// One that comes after the holder was pruned goes with the record of its key.
		f.enqueue(k.typ.New("", taskbox.Key("k")))
		f.wantInt(1, `select count(*) from task_dedupe where kind = 'duplicate'`)
		time.Sleep(2 * time.Hour)
		f.run()
		time.Sleep(5 * time.Minute)
		f.wantInt(0, `select count(*) from task_dedupe where kind = 'key'`)
		f.wantInt(0, `select count(*) from task_dedupe where kind = 'duplicate'`)
	})
}

func TestKeyFor(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		k := newKeyed(f)
		insert := func(plain bool) (id int64, added bool) {
			before := f.int(`select count(*) from task_outbox`)
			if plain {
				// SQLite's clock isn't the bubble's.
				f.exec(`insert into task_outbox (event_type, payload, dedupe_key, key_window, created_at, next_run_at) values ('x', '""', 'k', 3600000, ?1, ?1)`,
					time.Now().UnixMilli())
			} else {
				f.enqueue(k.typ.New("", taskbox.KeyFor("k", time.Hour)))
			}
			return f.int(`select max(id) from task_outbox`), f.int(`select count(*) from task_outbox`) > before
		}
		for _, plain := range []bool{false, true, false} {
			id, added := insert(plain)
			if !added {
				t.Fatalf("the key isn't free before task %d", id)
			}
			// While it lives its key is taken, however long that is.
			for range 3 {
				time.Sleep(40 * time.Minute)
				if _, added := insert(plain); added {
					t.Fatal("the key is free while its task lives")
				}
			}
			f.drain()
			f.wantStatus(id, "success")
			ended := time.Now()
			time.Sleep(time.Hour - time.Millisecond)
			if _, added := insert(plain); added {
				t.Errorf("plain %v: the key is free %v after the success, want 1 h", plain, time.Since(ended))
			}
			time.Sleep(time.Millisecond)
		}
		f.wantWhole()
	})
}

// The window of a replayed task begins again with its next success.
func TestKeyFor_Replay(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		k := newKeyed(f)
		id := f.enqueue(k.typ.New("", taskbox.KeyFor("k", time.Hour)))
		f.drain()
		time.Sleep(50 * time.Minute)
		if err := f.q.Replay(f.Context(), id, byAnn, risky()...); err != nil {
			t.Fatal(err)
		}
		f.drain()
		time.Sleep(50 * time.Minute)
		k.tryInsert(true, id, func(k *keyed) { k.enqueue(k.typ.New("2", taskbox.Key("k"))) })
		time.Sleep(10 * time.Minute)
		k.tryInsert(false, id, func(k *keyed) { k.enqueue(k.typ.New("2", taskbox.Key("k"))) })
		f.drain() // the new one, whose key is taken for good
		time.Sleep(365 * 24 * time.Hour)
		k.tryInsert(true, id+1, func(k *keyed) { k.enqueue(k.typ.New("2", taskbox.KeyFor("k", time.Minute))) })
	})
}

// No window shortens one that is for good: an older task that is replayed after a newer one
// has succeeded leaves the newer one's key taken.
func TestKeyFor_AfterKey(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		k := newKeyed(f)
		first := f.enqueue(k.typ.New("dead", taskbox.KeyFor("k", time.Hour)))
		f.drain()
		k.ran("", k.typ)
		k.ok(f.q.Replay(f.Context(), first, byAnn, risky(taskbox.WithPayload(""))...))
		f.drain()
		f.wantStatus(first, "success")
		time.Sleep(2 * time.Hour)
		if r, err := f.q.Enqueue(f.Context(), f.db, k.typ.New("2", taskbox.Key("k"))); err != nil || !r.Duplicate {
			t.Errorf("the key of a success is free again: %+v %v", r, err)
		}
	})
}

// Records of keys whose window has passed are deleted, also from a queue where nothing
// else is to be pruned.
func TestKeyFor_Pruned(t *testing.T) {
	for name, keep := range map[string]time.Duration{"with its task": time.Hour, "tasks stay for good": -1} {
		t.Run(name, func(t *testing.T) {
			bubble(t, taskbox.Options{KeepDone: keep}, func(f *fixture) {
				k := newKeyed(f)
				f.run()
				f.enqueue(k.typ.New("", taskbox.KeyFor("k", time.Minute)))
				f.enqueue(k.typ.New("", taskbox.Key("for good")))
				time.Sleep(30 * time.Second)
				f.wantInt(2, `select count(*) from task_dedupe where kind = 'key'`)
				time.Sleep(90 * time.Minute)
				if got := f.rows(`select name from task_dedupe where kind = 'key'`); !slices.Equal(got, []string{"for good"}) {
					t.Errorf("records of keys: %q, want the one for good", got)
				}
			})
		})
	}
}

func TestKey_Bad(t *testing.T) {
	f := open(t, taskbox.Options{})
	typ := taskbox.NewType[string]("x")
	for name, o := range map[string]taskbox.EnqueueOption{
		"empty": taskbox.Key(""), "too long": taskbox.Key(strings.Repeat("k", 501)), "unprintable": taskbox.Key("a\nb"), "no UTF-8": taskbox.Key("\xff"),
		"window 0": taskbox.KeyFor("k", 0), "window -1": taskbox.KeyFor("k", -1), "KeyFor empty": taskbox.KeyFor("", time.Hour),
	} {
		_, err := f.q.Enqueue(t.Context(), f.db, typ.New("", o))
		if err == nil {
			t.Errorf("%s: no error", name)
		}
		wantErr(t, err, taskbox.ErrInvalid)
	}
	f.wantInt(0, `select count(*) from task_outbox`)
}

// An attempt that was cancelled and fails late doesn't take the key of its successor.
func TestKey_LateOutcome(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		k := newKeyed(f)
		first := f.enqueue(k.typ.New("run", taskbox.Key("k")))
		f.run()
		time.Sleep(time.Second)
		k.ok(f.q.Cancel(f.Context(), first, byAnn))
		second := f.enqueue(k.typ.New("dead", taskbox.Key("k")))
		if second == first {
			t.Fatal("a cancelled task has kept its key")
		}
		close(k.release)
		synctest.Wait()
		time.Sleep(time.Second)
		f.wantStatus(first, "cancelled")
		f.wantStatus(second, "dead_letter")
		f.wantInt(0, `select count(*) from task_dedupe where kind = 'key'`)
		f.wantWhole()
	})
}

// Of many that enqueue one key at the same time one is first.
func TestKey_Concurrent(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		other := f.again(taskbox.Options{})
		var mu sync.Mutex
		ids := map[int64]int{}
		k := newKeyed(f)
		f.run()
		var wg sync.WaitGroup
		for i := range 16 {
			wg.Go(func() {
				for range 20 {
					g := []*fixture{f, other}[i%2]
					r, err := g.q.Enqueue(f.Context(), g.db, k.typ.New("", taskbox.Key("k")))
					if err != nil {
						t.Error(err)
					}
					mu.Lock()
					ids[r.ID] += map[bool]int{true: 0, false: 1}[r.Duplicate]
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		time.Sleep(time.Minute)
		if diff := gocmp.Diff(map[int64]int{1: 1}, ids); diff != "" {
			t.Errorf("tasks by receipts that are no duplicates (-want +got):\n%s", diff)
		}
		f.wantInt(1, `select count(*) from task_outbox`)
		f.wantInt(319, `select hits from task_dedupe where kind = 'duplicate'`)
		f.wantWhole()
	})
}

// A plain insert with a window that no calendar has doesn't stall the queue.
func TestKeyFor_PlainInsert_Overflow(t *testing.T) {
	for _, window := range []string{"9223372036854775807", "-9223372036854775808", "-1", "0"} {
		bubble(t, taskbox.Options{}, func(f *fixture) {
			k := newKeyed(f)
			_, err := f.db.Exec(`insert into task_outbox (event_type, payload, dedupe_key, key_window) values ('x', '""', 'k', ` + window + `)`)
			id := f.enqueue(k.typ.New(""))
			f.run()
			time.Sleep(10 * time.Minute)
			f.wantStatus(id, "success")
			if err == nil { // it may also be refused
				f.wantInt(2, `select count(*) from task_outbox where status = 'success'`)
			}
		})
	}
}
