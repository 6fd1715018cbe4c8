package taskbox_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/taskbox-go/taskbox"
)

var ann = taskbox.By{Actor: "ann", Reason: "because"}

func TestQueue_Groups_Normalise(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{"", ""},
		{"order 42 not found", "order # not found"},
		{"order ord_123/45 has -1.5 items, 1,000 left", "order ord_#/# has # items, # left"},
		{"user 6f9619ff-8b86-d011-b42d-00cf4fc964ff is gone", "user # is gone"},
		{"blob deadbeef01 and 0x1F and 01ARZ3NDEKTSV4RRFFQ69G5FAV", "blob # and # and #"},
		{"mail to Ann.O+x@example.com bounced", "mail to <email> bounced"},
		{"read tcp 10.0.0.1:4000->192.168.1.20:443: connection reset by peer", "read tcp #->#: connection reset by peer"},
		{"dial tcp [::1]:8080: refused, fe80::1ff:fe23:4567:890a", "dial tcp [#]#: refused, #"},
		{`column "name" isn't there, can't go on`, `column "…" isn't there, can't go on`},
		{"no 'such thing' as `that`", "no '…' as `…`"},
		{"at 2026-01-02T03:04:05.123Z after 1h30m0.5s or 250ms or 3µs", "at # after # or # or #"},
		{"at 2026-01-02 03:04:05.1 +0000 UTC m=+0.5", "at # # # UTC m=#"},
		{`Get "https://ann:pw@api.example.com:8443/v2/orders/42?token=abc#x": EOF`, `Get "https://api.example.com:#/v#/orders/#?…": EOF`},
		{"GET http://10.0.0.9/a/b, then more", "GET http://#/a/b, then more"},
		{"several\n\tlines   of  it ", "several lines of it"},
		{"utf8 and sha256 and db-3.internal:5432 and HTTP 503", "utf# and sha# and db-#.internal:# and HTTP #"},
		{"an 'open quote and \"another", "an 'open quote and \"another"},
		{"größer als ½", "größer als ½"},
	} {
		if diff := gocmp.Diff(c.want, taskbox.Normalise(c.text)); diff != "" {
			t.Errorf("%q (-want +got):\n%s", c.text, diff)
		}
	}
}

func FuzzNormalise(f *testing.F) {
	for _, s := range []string{"order 42", `"a`, "'x'1", "http://a@b:1/2?3", "::1", "a@b", "\xff\x00", strings.Repeat("é ", 3000), "1h2m", "0x", "://", "http://"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := taskbox.Normalise(s)
		if !utf8.ValidString(got) || len(got) > 310 {
			t.Errorf("%q: got %q, want at most 310 bytes of UTF-8", s, got)
		}
		if strings.ContainsAny(got, "0123456789\n\t") {
			t.Errorf("%q: got %q, want no digits and no line breaks", s, got)
		}
		if again := taskbox.Normalise(s); again != got {
			t.Errorf("%q: got %q, then %q", s, got, again)
		}
	})
}

func BenchmarkNormalise(b *testing.B) {
	const text = `charge order 42: Post "https://api.example.com:8443/v2/orders/42?x=1": read tcp 10.0.0.1:4000->1.2.3.4:443: connection reset by peer after 30.5s`
	for b.Loop() {
		taskbox.Normalise(text)
	}
}

// owned is an error with a fingerprint of its own.
type owned struct{ text, print string }

func (e *owned) Error() string { return e.text }

func (e *owned) Fingerprint() string { return e.print } // panics for a nil pointer

// nilOwned is a nil pointer in an error, whose text can be had.
type nilOwned struct{ *owned }

func (nilOwned) Error() string { return "nil" }

func TestQueue_Groups_Fingerprint(t *testing.T) {
	same := func(typ1 string, a error, typ2 string, b error) bool {
		return taskbox.Fingerprint(typ1, a) == taskbox.Fingerprint(typ2, b)
	}
	plain := errors.New
	for _, c := range []struct {
		name       string
		typ1, typ2 string
		a, b       error
		want       bool
	}{
		{"numbers", "a", "a", plain("order 1"), plain("order 22"), true},
		{"texts", "a", "a", plain("order"), plain("offer"), false},
		{"types of task", "a", "b", plain("order"), plain("order"), false},
		{"types of error", "a", "a", plain("order"), fmt.Errorf("%w", plain("order")), false},
		{"classes", "a", "a", plain("order"), taskbox.Permanent(plain("order")), false},
		{"own", "a", "a", &owned{"x", "card"}, fmt.Errorf("y: %w", &owned{"z", "card"}), true},
		{"own, other", "a", "a", &owned{"x", "card"}, &owned{"x", "bank"}, false},
		{"own, empty", "a", "a", &owned{"x 1", ""}, &owned{"x 2", ""}, true},
		{"own, panics", "a", "a", nilOwned{}, nilOwned{}, true},
	} {
		if got := same(c.typ1, c.a, c.typ2, c.b); got != c.want {
			t.Errorf("%s: same group: %v, want %v", c.name, got, c.want)
		}
	}
}

// failing handles a type whose tasks fail with the text that is their payload, for
// good; those with an empty one succeed.
func failing(f *fixture, name string) *taskbox.Type[string] {
	typ := taskbox.NewType[string](name)
	typ.Handle(f.q, func(_ context.Context, t *taskbox.Task[string]) error {
		if t.Payload == "" {
			return nil
		}
		return taskbox.Permanent(errors.New(t.Payload))
	})
	return typ
}

func (f *fixture) groups(filter taskbox.GroupFilter) []taskbox.ErrorGroup {
	f.Helper()
	gs, err := f.q.Groups(f.Context(), filter)
	if err != nil {
		f.Fatal(err)
	}
	return gs
}

func TestQueue_Groups_Counts(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		a := failing(f, "a")
		first := time.Now().UTC().Truncate(time.Millisecond)
		for _, after := range []time.Duration{0, 5 * 24 * time.Hour, 22 * time.Hour, 3*time.Hour + 30*time.Minute, 30 * time.Minute} {
			time.Sleep(after)
			f.enqueue(a.New(fmt.Sprintf("order %d is odd", after)))
			f.drain()
		}
		last := f.enqueue(a.New("another"))
		f.drain()
		now := time.Now().UTC().Truncate(time.Millisecond)
		want := []taskbox.ErrorGroup{{
			Type: "a", Class: "permanent", Message: "another", Hour: 1, Day: 1, Week: 1, Total: 1, Open: 1,
			SampleTask: last, FirstSeen: now, LastSeen: now,
		}, {
			Type: "a", Class: "permanent", Message: "order # is odd", Hour: 2, Day: 3, Week: 5, Total: 5, Open: 5,
			SampleTask: last - 1, FirstSeen: first, LastSeen: now,
		}}
		got := f.groups(taskbox.GroupFilter{Type: "a"})
		for i := range got {
			if info, err := f.q.Get(f.Context(), got[i].SampleTask); err != nil || info.ErrorGroup != got[i].Fingerprint {
				f.Errorf("the sample's group is %q, %v, want %q", info.ErrorGroup, err, got[i].Fingerprint)
			}
			got[i].Fingerprint = ""
		}
		byText := func(a, b taskbox.ErrorGroup) bool { return a.Message < b.Message }
		if diff := gocmp.Diff(want, sorted(got, byText), cmpopts.EquateApproxTime(20*time.Millisecond)); diff != "" {
			f.Errorf("groups (-want +got):\n%s", diff)
		}
		time.Sleep(time.Hour + time.Minute)
		if g := f.groups(taskbox.GroupFilter{})[0]; g.Hour != 0 || g.Day == 0 {
			f.Errorf("an hour later: %d in the last hour, %d in the last day, want none and some", g.Hour, g.Day)
		}
		if gs := f.groups(taskbox.GroupFilter{Since: time.Now()}); len(gs) != 0 {
			f.Errorf("groups that failed since now: %v", gs)
		}
	})
}

func sorted[T any](s []T, less func(a, b T) bool) []T {
	for i := range s {
		for j := i; j > 0 && less(s[j], s[j-1]); j-- {
			s[j], s[j-1] = s[j-1], s[j]
		}
	}
	return s
}

func TestQueue_Groups_Retries(t *testing.T) {
	bubble(t, taskbox.Options{MaxAttempts: 3}, func(f *fixture) {
		typ := taskbox.NewType[int]("a")
		typ.Handle(f.q, func(context.Context, *taskbox.Task[int]) error { return errors.New("busy") })
		f.enqueue(typ.New(1))
		f.run()
		time.Sleep(time.Hour)
		g := f.groups(taskbox.GroupFilter{})[0]
		if g.Total != 3 || g.Open != 1 || g.Class != "unclassified" {
			f.Errorf("got total %d, open %d, class %s; want 3, 1, unclassified", g.Total, g.Open, g.Class)
		}
	})
}

func TestQueue_ResolveGroup(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		a := failing(f, "a")
		for i := range 120 {
			f.enqueue(a.New(fmt.Sprintf("order %d", i)))
		}
		other := f.enqueue(a.New("else"))
		f.drain()
		fp := f.one(`select error_group from task_outbox where id = 1`)
		n, err := f.q.ResolveGroup(f.Context(), fp, "fixed in v2", ann)
		if err != nil || n != 120 {
			f.Fatalf("ResolveGroup: %d, %v; want 120", n, err)
		}
		f.wantInt(120, `select count(*) from task_audit where event = 'resolved' and actor = 'ann'`)
		f.wantInt(120, `select detail ->> '$.done' from task_audit where task_id = 0 and event = 'group_resolved'`)
		f.wantInt(1, `select count(*) from task_outbox where status = 'dead_letter' and resolved_as is null and id = ?`, other)
		g := f.groups(taskbox.GroupFilter{Fingerprint: fp})[0]
		if g.Open != 0 || g.ResolvedBy != "ann" || g.ResolvedAs != "fixed in v2" || g.ResolvedAt.IsZero() || g.Regressed {
			f.Errorf("after it was resolved: %+v", g)
		}
		if gs := f.groups(taskbox.GroupFilter{Unresolved: true}); len(gs) != 1 || gs[0].Fingerprint == fp {
			f.Errorf("unresolved: %+v", gs)
		}
		if gs := f.groups(taskbox.GroupFilter{Open: true}); len(gs) != 1 || gs[0].Fingerprint == fp {
			f.Errorf("open: %+v", gs)
		}
		f.enqueue(a.New("order 500"))
		f.drain()
		if g := f.groups(taskbox.GroupFilter{Fingerprint: fp, Unresolved: true})[0]; !g.Regressed || g.Open != 1 {
			f.Errorf("after it came back: %+v", g)
		}
		if n, err := f.q.ResolveGroup(f.Context(), fp, "again", ann); n != 1 || err != nil {
			f.Errorf("ResolveGroup again: %d, %v; want 1", n, err)
		}
		if g := f.groups(taskbox.GroupFilter{Fingerprint: fp})[0]; g.Regressed {
			f.Errorf("after it was resolved again: %+v", g)
		}
	})
}

func TestQueue_Groups_BadInput(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		for _, limit := range []int{-1, 10_001} {
			_, err := f.q.Groups(f.Context(), taskbox.GroupFilter{Limit: limit})
			wantErr(f, err, taskbox.ErrInvalid)
		}
		_, err := f.q.ResolveGroup(f.Context(), "none", "fixed", ann)
		wantErr(f, err, taskbox.ErrNoGroup)
		_, err = f.q.ResolveGroup(f.Context(), "none", "", ann)
		wantErr(f, err, taskbox.ErrInvalid)
		_, err = f.q.ResolveGroup(f.Context(), "none", "fixed", taskbox.By{})
		wantErr(f, err, taskbox.ErrActorRequired)
		f.wantInt(0, `select count(*) from task_audit`)
	})
}

// The counts of the last hour, day and week are read by key, the open dead letters
// from a partial index, so that neither grows with the history.
func TestQueue_Groups_Plan(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		plan := strings.Join(f.rows("explain query plan "+taskbox.GroupsSQL, 1, 1, 1, "", "", 0, false, false, 10), "\n")
		for _, want := range []string{"task_dead_group (error_group=?)", "PRIMARY KEY (fingerprint=? AND span=? AND at>?)", "task_error_seen"} {
			if !strings.Contains(plan, want) {
				f.Errorf("the plan has no %q:\n%s", want, plan)
			}
		}
	})
}

func TestQueue_Groups_Pruned(t *testing.T) {
	bubble(t, taskbox.Options{KeepAudit: 40 * 24 * time.Hour}, func(f *fixture) {
		a := failing(f, "a")
		f.enqueue(a.New("order 1"))
		f.drain()
		f.exec(`insert into task_error_count select fingerprint, span, at - 31 * 24 * 60 - 60, n from task_error_count`)
		f.exec(`insert into task_error select 'old', event_type, class, message, 0, 0, 0, 1, null, null, null, null from task_error`)
		f.run()
		time.Sleep(6 * time.Hour)
		f.wantInt(0, `select count(*) from task_error_count where span = 1`)
		f.wantInt(1, `select count(*) from task_error_count where span = 60`)
		f.wantInt(1, `select count(*) from task_error`)
	})
}
