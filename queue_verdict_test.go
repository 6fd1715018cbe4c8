package taskbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

// A script says what a task does in each attempt.
type script []string

// scripted handles a type whose payload says what each attempt does: words joined by
// blanks, done in order.
func scripted(f *fixture, o ...taskbox.TypeOptions) *taskbox.Type[script] {
	typ := taskbox.NewType[script]("scripted", o...)
	typ.Handle(f.q, func(ctx context.Context, t *taskbox.Task[script]) error {
		for word := range strings.FieldsSeq(t.Payload[min(t.Attempt, len(t.Payload))-1]) {
			if err := act(ctx, word); err != nil {
				return err
			}
		}
		return nil
	})
	return typ
}

func act(ctx context.Context, word string) error {
	what, name, _ := strings.Cut(word, ":")
	step := func(err error) error {
		_, err = taskbox.Step(ctx, name, func(ctx context.Context) (int, error) {
			if err == context.DeadlineExceeded {
				<-ctx.Done()
			}
			return 1, err
		})
		return err
	}
	switch what {
	case "step":
		return step(nil)
	case "badstep":
		return step(errors.New("no"))
	case "eofstep":
		return step(fmt.Errorf("answer: %w", io.ErrUnexpectedEOF))
	case "slowstep":
		return step(context.DeadlineExceeded)
	case "once":
		return taskbox.Once(ctx, name, func(context.Context, *sql.Tx) error { return nil })
	case "fail":
		return errors.New("bad")
	case "die":
		return taskbox.Permanent(errors.New("bad"))
	case "skip":
		return taskbox.Skip("no need")
	case "panic":
		panic("oh")
	case "slow":
		<-ctx.Done()
		return ctx.Err()
	}
	panic("unknown word " + word)
}

func (f *fixture) verdict(id int64) taskbox.Verdict {
	f.Helper()
	v, err := f.q.Verdict(f.Context(), id)
	if err != nil {
		f.Fatal(err)
	}
	return v
}

const outside = "the handler's effects outside Step, StepTx and Once are idempotent"

func TestQueue_Verdict_Attempts(t *testing.T) {
	for _, c := range []struct {
		name   string
		script script
		kind   taskbox.VerdictKind
		reason string
		conds  int
	}{
		{"success", script{"step:a"}, taskbox.Unsafe, "it has succeeded", 0},
		{"error, no step", script{"die"}, taskbox.SafeIf, "returned, without success, from one attempt", 1},
		{"errors", script{"fail", "fail", "die"}, taskbox.SafeIf, "from 3 attempts", 1},
		{"panic", script{"panic", "die"}, taskbox.SafeIf, "from 2 attempts", 1},
		{"skip", script{"skip"}, taskbox.SafeIf, "from one attempt", 1},
		{"error after a step", script{"step:a die"}, taskbox.SafeIf, "step a is done and won't run again", 1},
		{"failed step", script{"step:a badstep:b", "die"}, taskbox.SafeIf, "step a is done", 2},
		{"once", script{"once:a slow", "die"}, taskbox.SafeIf, "Once that won't run again: 1", 1},
		{"timeout, no step", script{"slow", "die"}, taskbox.Unknown, "attempt 1 ended with a timeout", 0},
		{"timeout after a step", script{"step:a slow", "die"}, taskbox.SafeIf, "while no recorded step was under way", 1},
		{"timeout in a step", script{"slowstep:a", "die"}, taskbox.Unknown, "step a had begun in attempt 1 and broke off", 0},
		{"timeout in a step, then done", script{"slowstep:a", "step:a die"}, taskbox.SafeIf, "step a is done", 1},
		{"timeout in a step, then failed", script{"slowstep:a", "badstep:a", "die"}, taskbox.Unknown, "step a may have been under way", 0},
		{"broken connection in a step", script{"eofstep:a", "die"}, taskbox.Unknown, "step a may have been under way", 0},
		{"failed step, then timeout", script{"step:b badstep:a", "slow", "die"}, taskbox.SafeIf, "attempt 2 ended with a timeout", 2},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, taskbox.Options{}, func(f *fixture) {
				id := f.enqueue(scripted(f, taskbox.TypeOptions{Timeout: time.Second}).New(c.script))
				f.run()
				time.Sleep(3 * time.Hour)
				v := f.verdict(id)
				if v.Kind != c.kind || !strings.Contains(strings.Join(v.Reasons, "\n"), c.reason) || len(v.Conditions) != c.conds {
					f.Errorf("got %+v, want %s, %q and %d conditions; its trail: %s", v, c.kind, c.reason, c.conds, f.trail(id))
				}
				if c.conds > 0 && !slices.Contains(v.Conditions, outside) {
					f.Errorf("conditions: %q", v.Conditions)
				}
			})
		})
	}
}

func TestQueue_Verdict_NeverCalled(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		typ := scripted(f)
		waiting := f.enqueue(typ.New(script{"die"}, taskbox.Delay(time.Hour)))
		f.exec(`insert into task_outbox (event_type, payload) values ('scripted', '{}')`)
		undecodable := f.int(`select max(id) from task_outbox`)
		f.drain()
		if err := f.q.Cancel(f.Context(), waiting, ann); err != nil {
			f.Fatal(err)
		}
		for id, reason := range map[int64]string{waiting: "its handler was never called", undecodable: "its payload couldn't be decoded, so its handler was never called"} {
			if diff := gocmp.Diff(taskbox.Verdict{Kind: taskbox.Safe, Reasons: []string{reason}}, f.verdict(id)); diff != "" {
				f.Errorf("task %d (-want +got):\n%s", id, diff)
			}
			if err := f.q.Replay(f.Context(), id, ann); err != nil {
				f.Errorf("Replay: %v", err)
			}
		}
	})
}

func TestQueue_Verdict_Lost(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		id := f.enqueue(taskbox.NewType[script]("elsewhere").New(script{}))
		for i := range 3 {
			f.exec(`update task_outbox set status = 'processing', owner = 'x', lease_until = 1, attempt = attempt + 1, version = version + 1 where id = ?`, id)
			f.exec(`insert into task_audit (task_id, seq, event, at, attempt) select id, version, 'picked', created_at, attempt from task_outbox where id = ?`, id)
			if i == 0 {
				if v := f.verdict(id); v.Kind != taskbox.Unknown || v.Reasons[0] != "it is running now" {
					f.Errorf("while it runs: %+v", v)
				}
			}
			stop := f.run()
			time.Sleep(2 * time.Minute)
			stop()
		}
		f.wantStatus(id, "dead_letter")
		v := f.verdict(id)
		if v.Kind != taskbox.Unknown || len(v.Reasons) != 3 || !strings.Contains(v.Reasons[0], "attempt 1 was lost with its process") {
			f.Errorf("got %+v; its trail: %s", v, f.trail(id))
		}
		g := f.groups(taskbox.GroupFilter{Type: "elsewhere"})
		if len(g) != 1 || g[0].Class != "lost" || g[0].Total != 3 || g[0].Open != 1 {
			f.Errorf("groups: %+v", g)
		}
	})
}

func TestQueue_Verdict_Cancelled(t *testing.T) {
	bubble(t, taskbox.Options{Grace: -1}, func(f *fixture) {
		typ := scripted(f)
		byHand, shutdown := f.enqueue(typ.New(script{"slow"})), f.enqueue(typ.New(script{"slow"}))
		stop := f.run()
		time.Sleep(time.Second)
		if err := f.q.Cancel(f.Context(), byHand, ann); err != nil {
			f.Fatal(err)
		}
		time.Sleep(time.Second)
		stop()
		for id, want := range map[int64]string{byHand: "was cancelled by hand", shutdown: "was cancelled at a shutdown"} {
			if v := f.verdict(id); v.Kind != taskbox.Unknown || !strings.Contains(v.Reasons[0], want) {
				f.Errorf("got %+v, want unknown: %s; its trail: %s", v, want, f.trail(id))
			}
		}
	})
}

func TestQueue_Verdict_Key(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		typ := scripted(f)
		first := f.enqueue(typ.New(script{"die"}, taskbox.Key("k")))
		f.drain()
		time.Sleep(time.Second)
		second := f.enqueue(typ.New(script{"step:a"}, taskbox.Key("k")))
		f.drain()
		want := taskbox.Verdict{Kind: taskbox.Unsafe, Reasons: []string{fmt.Sprintf("task %d with the same key has succeeded since", second)}}
		if diff := gocmp.Diff(want, f.verdict(first)); diff != "" {
			f.Errorf("(-want +got):\n%s", diff)
		}
	})
}

func TestQueue_Verdict_ErrNotFound(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		_, err := f.q.Verdict(f.Context(), 99)
		wantErr(f, err, taskbox.ErrNotFound)
	})
}

func TestQueue_Replay_AcceptRisk(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		typ := scripted(f)
		id := f.enqueue(typ.New(script{"step:a"}))
		f.drain()
		err := f.q.Replay(f.Context(), id, ann)
		wantErr(f, err, taskbox.ErrRisk)
		if err == nil || !strings.Contains(err.Error(), "it is unsafe: it has succeeded") {
			f.Errorf("the error has no reasons: %v", err)
		}
		f.wantStatus(id, "success")
		f.wantInt(0, `select count(*) from task_audit where actor is not null`)
		if err := f.q.Replay(f.Context(), id, ann, taskbox.AcceptRisk()); err != nil {
			f.Fatal(err)
		}
		got := f.one(`select detail ->> '$.verdict', detail ->> '$.accepted_risk[0]' from task_audit where event = 'replayed'`)
		if !strings.HasPrefix(got, "unsafe|it has succeeded, at ") {
			f.Errorf("the audit row says %q", got)
		}
	})
}

func TestQueue_Replay_SafeIf(t *testing.T) {
	bubble(t, taskbox.Options{}, func(f *fixture) {
		id := f.enqueue(scripted(f).New(script{"die", "step:a"}))
		f.drain()
		if err := f.q.Replay(f.Context(), id, ann, taskbox.AcceptRisk()); err != nil {
			f.Fatal(err)
		}
		f.wantInt(1, `select detail ->> '$.verdict' = 'safe_if' and detail ->> '$.accepted_risk' is null from task_audit where event = 'replayed'`)
		f.drain()
		f.wantStatus(id, "success")
	})
}
