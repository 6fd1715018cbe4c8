package taskbox_test

import (
	"context"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/taskbox-go/taskbox"
)

// A pause holds in all processes and over restarts, until somebody ends it.
func TestQueue_Pause(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		var r record
		other := m.again(taskbox.Options{})
		other.does("x", func(context.Context, *taskbox.Task[string]) error { defer r.start("other")(); return nil })
		free := m.does("free", func(context.Context, *taskbox.Task[string]) error { return nil })
		m.run()
		other.run()
		running := m.enqueue(m.typ.New("run"))
		time.Sleep(time.Second)
		if m.ran.count("run") == 0 { // the other has it; that will do as well
			m.wantStatus(running, "success")
		}
		m.ok(m.q.Pause(m.Context(), "x", time.Time{}, byAnn))
		id := m.enqueue(m.typ.New(""))
		late := m.enqueue(m.typ.New("", taskbox.Delay(time.Minute)))
		unpaused := m.enqueue(free.New(""))
		close(m.release)
		time.Sleep(time.Hour)
		m.wantStatus(running, "success") // what runs goes on
		m.wantStatus(unpaused, "success")
		m.wantStatus(id, "pending")
		m.wantStatus(late, "pending")

		restarted := m.again(taskbox.Options{})
		restarted.does("x", func(context.Context, *taskbox.Task[string]) error { return nil })
		restarted.drain()
		m.wantStatus(id, "pending")

		m.ok(restarted.q.Resume(m.Context(), "x", byAnn))
		time.Sleep(2 * time.Second)
		m.wantStatus(id, "success")
		m.wantStatus(late, "success")
		m.wantWhole()
	})
}

// An until passes by itself.
func TestQueue_Pause_Until(t *testing.T) {
	east, west := time.FixedZone("east", 5*3600+1800), time.FixedZone("west", -11*3600)
	for _, c := range []struct {
		d    time.Duration
		zone *time.Location
	}{
		{time.Millisecond, time.UTC}, {400 * time.Millisecond, time.UTC}, {900 * time.Millisecond, east}, {1500 * time.Millisecond, time.UTC},
		{time.Minute, time.UTC}, {time.Minute, east}, {time.Minute, west}, {2*time.Hour + 700*time.Millisecond, time.UTC},
	} {
		d := c.d
		t.Run(d.String()+" "+c.zone.String(), func(t *testing.T) {
			byHand(t, taskbox.Options{PollInterval: max(10*time.Millisecond, d/500)}, func(m *manual) {
				time.Sleep(300 * time.Millisecond)
				until := time.Now().Add(d).In(c.zone)
				m.ok(m.q.Pause(m.Context(), "x", until, byAnn))
				id := m.enqueue(m.typ.New(""))
				m.run()
				ps, err := m.q.Pauses(m.Context())
				m.ok(err)
				if len(ps) != 1 || !ps[0].Until.Equal(until) {
					t.Errorf("pauses: %+v, want one until %v", ps, until)
				}
				time.Sleep(d + 2*time.Second + d/250)
				if late := m.eventTime(id, "picked", 0).Sub(until); late < -time.Millisecond || late > time.Second+d/500 {
					t.Errorf("picked %v after the pause's end", late)
				}
				ps, err = m.q.Pauses(m.Context())
				m.ok(err)
				if len(ps) != 0 {
					t.Errorf("after its end there are the pauses %+v", ps)
				}
				// It has ended: there is nothing to resume.
				wantErr(t, m.q.Resume(m.Context(), "x", byAnn), taskbox.ErrState)
			})
		})
	}
}

// The last pause counts, and says who and why.
func TestQueue_Pauses(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		bob := taskbox.By{Actor: "bob", Reason: "the downstream is down"}
		until := time.Now().Add(time.Hour).UTC()
		m.ok(m.q.Pause(m.Context(), "x", until, byAnn))
		m.ok(m.q.Pause(m.Context(), "x", time.Time{}, bob))
		m.ok(m.q.Pause(m.Context(), "a type that nobody handles; with 'odd' \"letters\" ü", until, byAnn))
		want := []taskbox.Pause{
			{Type: "a type that nobody handles; with 'odd' \"letters\" ü", Actor: "ann", Reason: byAnn.Reason, Since: time.Now(), Until: until},
			{Type: "x", Actor: "bob", Reason: bob.Reason, Since: time.Now()},
		}
		got, err := m.q.Pauses(m.Context())
		m.ok(err)
		if diff := gocmp.Diff(want, got, cmpopts.EquateApproxTime(time.Millisecond)); diff != "" {
			t.Errorf("pauses (-want +got):\n%s", diff)
		}
		time.Sleep(2 * time.Hour)
		got, err = m.q.Pauses(m.Context())
		m.ok(err)
		if len(got) != 1 || got[0].Type != "x" {
			t.Errorf("pauses: %+v, want that of x", got)
		}
		m.ok(m.q.Resume(m.Context(), "x", bob))
		wantErr(t, m.q.Resume(m.Context(), "x", bob), taskbox.ErrState)
		var lines []string
		es, err := m.q.Audit(m.Context(), 10)
		m.ok(err)
		for _, e := range es {
			lines = append(lines, e.Event+" by "+e.Actor)
			if e.TaskID != 0 || e.Reason == "" || !strings.Contains(string(e.Detail), "type") {
				t.Errorf("audit: %+v", e)
			}
		}
		if diff := gocmp.Diff([]string{"resumed by bob", "paused by ann", "paused by bob", "paused by ann"}, lines); diff != "" {
			t.Errorf("audit (-want +got):\n%s", diff)
		}
	})
}

func TestQueue_Pause_Bad(t *testing.T) {
	byHand(t, taskbox.Options{}, func(m *manual) {
		for name, c := range map[string]struct {
			typ   string
			until time.Time
		}{
			"empty type":     {"", time.Time{}},
			"long type":      {strings.Repeat("x", 201), time.Time{}},
			"unprintable":    {"a\x00", time.Time{}},
			"past":           {"x", time.Now().Add(-time.Second)},
			"now":            {"x", time.Now()},
			"year 10000":     {"x", time.Date(10_000, 1, 1, 0, 0, 0, 0, time.UTC)},
			"the far future": {"x", time.Unix(1<<40, 0)},
		} {
			m.Log(name)
			m.wantRefused(taskbox.ErrInvalid, func() error { return m.q.Pause(m.Context(), c.typ, c.until, byAnn) })
		}
		m.wantRefused(taskbox.ErrInvalid, func() error { return m.q.Resume(m.Context(), "", byAnn) })
		m.wantRefused(taskbox.ErrState, func() error { return m.q.Resume(m.Context(), "x", byAnn) })
	})
}
