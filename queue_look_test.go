package taskbox_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/taskbox-go/taskbox"
)

func TestQueue_Get(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		start := time.Now().UTC()
		id := m.enqueue(m.typ.New("dead", taskbox.Key("k"), taskbox.Group("g"), taskbox.TraceID("t"), taskbox.Priority(-3),
			taskbox.MaxAttempts(4), taskbox.Delay(time.Minute), taskbox.ExpiresIn(time.Hour)))
		want := taskbox.TaskInfo{
			ID: id, Type: "x", Status: "scheduled", Payload: json.RawMessage(`"dead"`), Priority: -3, Key: "k", Group: "g", TraceID: "t",
			MaxAttempts: 4, Run: 1, CreatedAt: start, UpdatedAt: start, NextRunAt: start.Add(time.Minute), ExpiresAt: start.Add(time.Hour),
		}
		others := cmpopts.IgnoreFields(taskbox.TaskInfo{}, "ErrorGroup") // which has its own tests
		compare := func() {
			t.Helper()
			got, err := m.q.Get(m.Context(), id)
			m.ok(err)
			if diff := gocmp.Diff(want, got, others); diff != "" {
				t.Errorf("Get (-want +got):\n%s", diff)
			}
			list, err := m.q.List(m.Context(), taskbox.Filter{})
			m.ok(err)
			if diff := gocmp.Diff([]taskbox.TaskInfo{want}, list, others); diff != "" {
				t.Errorf("List (-want +got):\n%s", diff)
			}
		}
		compare()
		time.Sleep(2 * time.Minute)
		m.drain()
		want.Status, want.Attempt, want.Version, want.LastError = "dead_letter", 1, 5, "the effect failed"
		want.UpdatedAt, want.FinishedAt = time.Now().UTC(), time.Now().UTC()
		compare()
		m.ok(m.q.Resolve(m.Context(), id, "by phone", byAnn))
		want.Version, want.ResolvedAs = 6, "by phone"
		compare()
		m.ok(m.q.Replay(m.Context(), id, byAnn))
		want.Status, want.Run, want.Version, want.ResolvedAs, want.LastError = "pending", 2, 7, "", ""
		want.NextRunAt, want.FinishedAt, want.ExpiresAt = time.Now().UTC(), time.Time{}, time.Time{}
		compare()
	})
}

func TestQueue_List(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		other := taskbox.NewType[string]("other")
		a := m.enqueue(m.typ.New("dead", taskbox.Key("k"), taskbox.TraceID("t1")))
		m.drain()
		b := m.enqueue(m.typ.New("", taskbox.Key("k"), taskbox.TraceID("t1"), taskbox.Group("g")))
		c := m.enqueue(other.New("", taskbox.Group("g"), taskbox.TraceID("t2")))
		d := m.enqueue(m.typ.New("dead"))
		m.drain()
		m.ok(m.q.Resolve(m.Context(), d, "by phone", byAnn))
		for _, x := range []struct {
			f    taskbox.Filter
			want []int64
		}{
			{taskbox.Filter{}, []int64{d, c, b, a}},
			{taskbox.Filter{Limit: 2}, []int64{d, c}},
			{taskbox.Filter{Limit: 2, Before: c}, []int64{b, a}},
			{taskbox.Filter{Limit: 10_000}, []int64{d, c, b, a}},
			{taskbox.Filter{Status: "dead_letter"}, []int64{d, a}},
			{taskbox.Filter{Status: "dead_letter", Open: true}, []int64{a}},
			{taskbox.Filter{Type: "other"}, []int64{c}},
			{taskbox.Filter{Key: "k"}, []int64{b, a}},
			{taskbox.Filter{Key: "k", Status: "success"}, []int64{b}},
			{taskbox.Filter{Group: "g"}, []int64{c, b}},
			{taskbox.Filter{TraceID: "t1"}, []int64{b, a}},
			{taskbox.Filter{Error: "effect"}, []int64{d, a}},
			{taskbox.Filter{Error: "' or 1=1 --"}, nil},
			{taskbox.Filter{Status: "nonsense"}, nil},
			{taskbox.Filter{Before: 1}, nil},
		} {
			is, err := m.q.List(m.Context(), x.f)
			m.ok(err)
			var got []int64
			for _, i := range is {
				got = append(got, i.ID)
			}
			if diff := gocmp.Diff(x.want, got); diff != "" {
				t.Errorf("%+v (-want +got):\n%s", x.f, diff)
			}
		}
		for _, limit := range []int{-1, 10_001} {
			_, err := m.q.List(m.Context(), taskbox.Filter{Limit: limit})
			wantErr(t, err, taskbox.ErrInvalid)
		}
	})
}

// More than a page: each task once, in order.
func TestQueue_List_Pages(t *testing.T) {
	f := open(t, taskbox.Options{})
	f.exec(`insert into task_outbox (event_type, payload)
		with recursive n(i) as (select 1 union all select i + 1 from n where i < 257) select 'x', i from n`)
	var got []int64
	for f2 := (taskbox.Filter{}); ; f2.Before = got[len(got)-1] {
		is, err := f.q.List(t.Context(), f2)
		if err != nil {
			t.Fatal(err)
		}
		if len(is) == 0 {
			break
		}
		for _, i := range is {
			got = append(got, i.ID)
		}
	}
	for i, id := range got {
		if id != int64(257-i) {
			t.Fatalf("place %d has task %d", i, id)
		}
	}
	if len(got) != 257 {
		t.Errorf("%d tasks, want 257", len(got))
	}
}

func TestQueue_Trail(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		id := m.end("dead")
		m.ok(m.q.Replay(m.Context(), id, byAnn, taskbox.WithPayload("")))
		m.drain()
		es, err := m.q.Trail(m.Context(), id)
		m.ok(err)
		var got []string
		for i, e := range es {
			if e.TaskID != id || e.Seq != int64(i-1) || e.At.IsZero() || (e.Event == "picked") != (e.Owner != "") || (e.Actor != "") != (e.Reason != "") {
				t.Errorf("event %d: %+v", i, e)
			}
			got = append(got, strings.TrimSpace(fmt.Sprintf("%s %d %s", e.Event, e.Attempt, e.Actor)))
		}
		want := []string{"created 0", "queued 0", "picked 1", "processing 1", "failed 1", "dead_letter 1", "edited 0 ann", "replayed 0 ann",
			"picked 2", "processing 2", "success 2"}
		if diff := gocmp.Diff(want, got); diff != "" {
			t.Errorf("trail (-want +got):\n%s", diff)
		}
	})
}

// Of a pruned task what people did is left, for a year.
func TestQueue_Trail_Retention(t *testing.T) {
	synctestWithClock(t, taskbox.Options{}, func(m *manual, clock *wallClock) {
		m.run()
		id := m.enqueue(m.typ.New("dead"))
		other := m.enqueue(m.typ.New(""))
		time.Sleep(time.Second)
		m.ok(m.q.Replay(m.Context(), id, byAnn, taskbox.WithPayload("")))
		m.ok(m.q.Pause(m.Context(), "y", time.Time{}, byAnn))
		time.Sleep(time.Second)
		clock.jump(8 * 24 * time.Hour)
		time.Sleep(3 * time.Minute)
		m.wantInt(0, `select count(*) from task_outbox`)
		m.wantInt(0, `select count(*) from task_dedupe`)
		m.wantInt(0, `select count(*) from task_audit where actor is null`)
		es, err := m.q.Trail(m.Context(), id)
		m.ok(err)
		if len(es) != 2 || es[0].Event != "edited" || es[1].Event != "replayed" || !strings.Contains(string(es[0].Detail), "old_payload") {
			t.Errorf("after the pruning the trail is %+v, want what was done by hand", es)
		}
		_, err = m.q.Trail(m.Context(), other)
		wantErr(t, err, taskbox.ErrNotFound)
		clock.jump(356 * 24 * time.Hour) // 364 days
		time.Sleep(3 * time.Minute)
		m.wantInt(3, `select count(*) from task_audit`)
		clock.jump(2 * 24 * time.Hour)
		time.Sleep(3 * time.Minute)
		m.wantInt(0, `select count(*) from task_audit`)
		_, err = m.q.Trail(m.Context(), id)
		wantErr(t, err, taskbox.ErrNotFound)
	})
}

// synctestWithClock is byHand with a clock that can be set.
func synctestWithClock(t *testing.T, o taskbox.Options, fn func(*manual, *wallClock)) {
	t.Helper()
	byHand(t, o, func(m *manual) {
		var clock wallClock
		m.q = newQueue(m.T, m.db, o)
		m.q.SetClock(clock.now)
		m.typ = m.does("x", m.handle)
		fn(m, &clock)
	})
}

// A task that people have dealt with is kept with its rows as long as it lives.
func TestQueue_Audit_KeptWithTheTask(t *testing.T) {
	synctestWithClock(t, taskbox.Options{}, func(m *manual, clock *wallClock) {
		m.run()
		id := m.enqueue(m.typ.New("dead"))
		time.Sleep(time.Second)
		m.ok(m.q.Resolve(m.Context(), id, "by phone", byAnn))
		clock.jump(2 * 365 * 24 * time.Hour)
		time.Sleep(3 * time.Minute)
		m.wantTrail(id, "picked processing failed dead_letter resolved")
		m.wantSteps(id, "a failed 1 the effect failed")
	})
}

func TestQueue_Audit(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		id := m.end("dead")
		m.ok(m.q.Edit(m.Context(), id, "dead", byAnn))
		time.Sleep(time.Second)
		m.ok(m.q.Replay(m.Context(), id, byAnn, taskbox.WithPayload("")))
		m.drain()
		lines := func(limit int) (ls []string) {
			es, err := m.q.Audit(m.Context(), limit)
			m.ok(err)
			for _, e := range es {
				ls = append(ls, fmt.Sprintf("%d %s %s %s", e.TaskID, e.Event, e.Actor, e.Reason))
			}
			return ls
		}
		want := []string{"1 replayed ann the test says so", "1 edited ann the test says so", "1 edited ann the test says so"}
		if diff := gocmp.Diff(want, lines(100)); diff != "" {
			t.Errorf("audit (-want +got):\n%s", diff)
		}
		if diff := gocmp.Diff(want[:2], lines(2)); diff != "" {
			t.Errorf("the last two (-want +got):\n%s", diff)
		}
		for _, limit := range []int{-1, 0, 10_001} {
			_, err := m.q.Audit(m.Context(), limit)
			wantErr(t, err, taskbox.ErrInvalid)
		}
	})
}

// The audit table takes no changes, from anybody; nor a deletion while there is a task.
func TestQueue_Audit_AppendOnly(t *testing.T) {
	byHand(t, taskbox.Options{KeepDone: time.Minute}, func(m *manual) {
		id := m.end("dead")
		m.ok(m.q.Replay(m.Context(), id, byAnn, taskbox.WithPayload("")))
		m.drain()
		m.ok(m.q.Pause(m.Context(), "y", time.Time{}, byAnn))
		before := m.rows(`select * from task_audit`)
		for _, query := range []string{
			`update task_audit set event = 'nothing'`,
			`update task_audit set actor = 'eve' where actor = 'ann'`,
			`update task_audit set reason = null`,
			`update or ignore task_audit set seq = seq + 100`,
			`update or replace task_audit set task_id = 0`,
			`delete from task_audit`,
			`delete from task_audit where actor is not null`,
			`delete from task_audit where task_id = 1 and seq = 1`,
			`insert into task_audit (task_id, seq, event, at) values (1, 1, 'nothing', 1) on conflict do update set event = 'nothing'`,
		} {
			if _, err := m.db.Exec(query); err == nil {
				t.Errorf("%s: no error", query)
			}
			if diff := gocmp.Diff(before, m.rows(`select * from task_audit`)); diff != "" {
				t.Fatalf("%s (-before +after):\n%s", query, diff)
			}
		}
	})
}
