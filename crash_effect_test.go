//go:build unix

package taskbox_test

import (
	"bufio"
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

// effectOrder is what a process of these tests is to do.
type effectOrder struct {
	Do    string // bank, point, key, serve
	Path  string // of the database
	Point string // where the process kills itself, or empty
	Seed  uint64
	Park  bool
}

const effectEnv = "TASKBOX_TEST_EFFECT"

// TestEffectProcess is the main function of the processes that the tests below start.
func TestEffectProcess(t *testing.T) {
	text := os.Getenv(effectEnv)
	if text == "" {
		t.Skip("it is for processes that other tests start")
	}
	var o effectOrder
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		t.Fatal(err)
	}
	p := &effectProcess{order: o, T: t, rng: rand.New(rand.NewPCG(o.Seed, 1))}
	p.db = closing(t)(taskbox.OpenDB(dsn(o.Path, "_synchronous=OFF")))
	p.q = newQueue(t, p.db, taskbox.Options{Logger: slog.New(slog.DiscardHandler), PollInterval: 10 * time.Millisecond})
	map[string]func(){"bank": p.bank, "point": p.point, "key": p.key, "serve": p.serve}[o.Do]()
}

// effectCommand starts such a process. What it prints for us begins with a +.
func effectCommand(t *testing.T, o effectOrder) *exec.Cmd {
	t.Helper()
	text, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestEffectProcess$", "-test.count=1", "-test.timeout=2m")
	cmd.Env = append(os.Environ(), effectEnv+"="+string(text))
	return cmd
}

// runEffect runs such a process to its end and returns what it has printed, and
// whether it has killed itself.
func runEffect(t *testing.T, o effectOrder) (lines []string, killed bool) {
	t.Helper()
	out, err := effectCommand(t, o).CombinedOutput()
	for line := range bytes.Lines(out) {
		if text, ok := strings.CutPrefix(string(line), "+"); ok {
			lines = append(lines, strings.TrimSpace(text))
		}
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		if status := exit.Sys().(syscall.WaitStatus); status.Signaled() && status.Signal() == syscall.SIGKILL {
			return lines, true
		}
	}
	if err != nil {
		t.Fatalf("%+v: %v\n%s", o, err, out)
	}
	return lines, false
}

type effectProcess struct {
	*testing.T
	order effectOrder
	db    *sql.DB
	q     *taskbox.Queue
	mu    sync.Mutex
	rng   *rand.Rand // mu
}

func (p *effectProcess) random(n int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rng.IntN(n)
}

// die is kill -9.
func die() {
	syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

// A transfer is the payload of the bank's tasks.
type transfer struct {
	N, From, To, Amount int
}

const (
	accounts = 10
	balance  = 1000
	// bankSQL makes a bank whose accounts' sum must never change.
	bankSQL = `
create table accounts (id integer primary key, balance integer not null);
create table moves (n integer not null, how text not null);
`
)

// move is the effect that must happen exactly once: it can't be seen from the accounts
// alone that it has happened, so it is counted besides.
func (p *effectProcess) move(ctx context.Context, tx *sql.Tx, how string, m transfer) error {
	for _, s := range []struct {
		query string
		args  []any
	}{
		{`update accounts set balance = balance - ? where id = ?`, []any{m.Amount, m.From}},
		{`insert into moves (n, how) values (?, ?)`, []any{m.N, how}},
		{`update accounts set balance = balance + ? where id = ?`, []any{m.Amount, m.To}},
	} {
		if _, err := tx.ExecContext(ctx, s.query, s.args...); err != nil {
			return err
		}
		p.perhapsDie()
	}
	return nil
}

// perhapsDie ends the process at one of a thousand calls.
func (p *effectProcess) perhapsDie() {
	if p.random(1000) == 0 {
		die()
	}
}

// slowdown is how much slower SQLite is with the race detector.
func slowdown() int { return map[bool]int{false: 1, true: 10}[raced()] }

var bankTypes = map[string]*taskbox.Type[transfer]{
	"StepTx":   taskbox.NewType[transfer]("StepTx"),
	"Once":     taskbox.NewType[transfer]("Once"),
	"Complete": taskbox.NewType[transfer]("Complete"),
}

// bank transfers until all is done, unless it is killed: at a random moment, or at a
// place where it hurts.
func (p *effectProcess) bank() {
	dieSoon := sync.OnceFunc(func() { time.AfterFunc(time.Duration(p.random(80+20*slowdown()))*time.Millisecond, die) })
	if p.random(5) == 0 {
		dieSoon() // while the process starts, perhaps
	}
	for how, typ := range bankTypes {
		typ.Handle(p.q, func(ctx context.Context, task *taskbox.Task[transfer]) error {
			dieSoon()
			defer p.perhapsDie()
			do := func(ctx context.Context, tx *sql.Tx) error { return p.move(ctx, tx, how, task.Payload) }
			switch how {
			case "StepTx":
				return taskbox.StepTx(ctx, "move", do)
			case "Once":
				return taskbox.Once(ctx, fmt.Sprint("move:", task.Payload.N), do)
			}
			tx, err := p.db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer tx.Rollback()
			if err := errors.Join(do(ctx, tx), task.Complete(ctx, tx)); err != nil {
				return err
			}
			p.perhapsDie()
			return tx.Commit()
		})
	}
	if err := p.q.Drain(p.Context()); err != nil {
		p.Fatal(err)
	}
}

// A bank whose processes are killed again and again loses no money and makes none.
func TestCrash_Bank(t *testing.T) {
	seed := seedOf(t)
	f := open(t, taskbox.Options{})
	f.exec(bankSQL)
	for i := range accounts {
		f.exec(`insert into accounts values (?, ?)`, i, balance)
	}
	rng := rand.New(rand.NewPCG(seed, 2))
	var ds []taskbox.Draft
	transfers := 600 / slowdown()
	for n := range transfers {
		m := transfer{N: n, From: rng.IntN(accounts), To: rng.IntN(accounts), Amount: rng.IntN(50)}
		for _, how := range []string{"StepTx", "Once", "Complete"} {
			ds = append(ds, bankTypes[how].New(m, taskbox.Priority(rng.IntN(3))))
		}
		if n%3 == 0 { // another task that wants the same
			ds = append(ds, bankTypes["Once"].New(m))
		}
	}
	if _, err := f.q.EnqueueMany(t.Context(), f.db, ds...); err != nil {
		t.Fatal(err)
	}
	kills := 0
	for round := uint64(0); ; round++ {
		_, killed := runEffect(t, effectOrder{Do: "bank", Path: f.path, Seed: seed + round})
		f.wantInt(accounts*balance, `select sum(balance) from accounts`)
		f.wantInt(0, `select count(*) from (select 1 from moves group by n, how having count(*) > 1)`)
		if killed {
			kills++
		}
		if f.int(`select count(*) from task_outbox where finished_at is null`) == 0 {
			// Whoever was lost three times is for a person.
			dead := f.rows(`select id from task_outbox where status = 'dead_letter'`)
			for _, id := range dead {
				n, _ := strconv.ParseInt(id, 10, 64)
				if err := f.q.Replay(t.Context(), n, byAnn, risky()...); err != nil {
					t.Fatal(err)
				}
			}
			if len(dead) == 0 {
				break
			}
		}
		if round > 500 {
			t.Fatalf("after %d kills there are still %s tasks", kills, f.one(`select count(*) from task_outbox where finished_at is null`))
		}
	}
	t.Logf("%d kills; %d tasks were lost while they ran", kills, f.int(`select count(*) from task_audit where event = 'lost'`))
	f.wantInt(int64(len(ds)), `select count(*) from task_outbox where status = 'success'`)
	f.wantInt(int64(3*transfers), `select count(*) from moves`)
	f.wantInt(0, `select count(*) from (select task_id from task_audit where event = 'success' group by task_id having count(*) > 1)`)
	f.wantInt(0, `select count(*) from task_outbox where version <> (select count(*) from task_audit where task_id = id)`)
	if kills < 2 {
		t.Errorf("only %d kills", kills)
	}
}

// point runs a task with one effect by the helper in the payload, and dies at the point
// that it was ordered to.
func (p *effectProcess) point() {
	at := func(point string) {
		if point == p.order.Point {
			die()
		}
	}
	typ := taskbox.NewType[string]("point", taskbox.TypeOptions{InDoubt: map[bool]taskbox.InDoubt{true: taskbox.Park}[p.order.Park]})
	typ.Handle(p.q, func(ctx context.Context, task *taskbox.Task[string]) error {
		inTx := func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `insert into moves (n, how) values (?, ?)`, task.ID, task.IdempotencyKey("a"))
			at("in the transaction")
			return err
		}
		at("before")
		err := p.effect(ctx, task, inTx, at)
		at("after")
		return err
	})
	if err := p.q.Drain(p.Context()); err != nil {
		p.Fatal(err)
	}
}

func (p *effectProcess) effect(ctx context.Context, task *taskbox.Task[string], inTx func(context.Context, *sql.Tx) error, at func(string)) error {
	switch task.Payload {
	case "StepTx":
		return taskbox.StepTx(ctx, "a", inTx)
	case "Once":
		return taskbox.Once(ctx, "a", inTx)
	case "Complete":
		tx, err := p.db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if err := errors.Join(inTx(ctx, tx), task.Complete(ctx, tx)); err != nil {
			return err
		}
		at("before the commit")
		return tx.Commit()
	}
	_, err := taskbox.Step(ctx, "a", func(ctx context.Context) (int, error) {
		at("begun")
		_, err := p.db.ExecContext(ctx, `insert into moves (n, how) values (?, ?)`, task.ID, task.IdempotencyKey("a"))
		at("happened")
		return 1, err
	})
	return err
}

// Each helper against each point of a crash: what the README's table says.
func TestCrash_Points(t *testing.T) {
	for _, c := range []struct {
		helper, point string
		effects       int64
		doubt         bool // on the trail, or parked
	}{
		{"Step", "before", 1, false},
		{"Step", "begun", 1, true},
		{"Step", "happened", 2, true},
		{"Step", "after", 1, false},
		{"StepTx", "before", 1, false},
		{"StepTx", "in the transaction", 1, false},
		{"StepTx", "after", 1, false},
		{"Once", "before", 1, false},
		{"Once", "in the transaction", 1, false},
		{"Once", "after", 1, false},
		{"Complete", "before", 1, false},
		{"Complete", "in the transaction", 1, false},
		{"Complete", "before the commit", 1, false},
		{"Complete", "after", 1, false},
	} {
		for _, park := range []bool{false, true} {
			if park && c.helper != "Step" {
				continue
			}
			t.Run(fmt.Sprintf("%s/%s/park %v", c.helper, c.point, park), func(t *testing.T) {
				f := open(t, taskbox.Options{})
				f.exec(bankSQL)
				id := f.enqueue(taskbox.NewType[string]("point").New(c.helper))
				o := effectOrder{Do: "point", Path: f.path, Point: c.point, Park: park}
				if _, killed := runEffect(t, o); !killed {
					t.Fatal("the process hasn't died")
				}
				f.wantInt(0, `select count(*) from task_audit where event in ('retry_wait', 'failed')`)
				o.Point = ""
				runEffect(t, o)
				if park && c.doubt {
					f.parked(id, o)
					return
				}
				f.wantStatus(id, "success")
				f.wantInt(c.effects, `select count(*) from moves`)
				f.wantInt(1, `select count(distinct how) from moves`) // the same key each time
				f.wantInt(map[bool]int64{true: 1}[c.doubt], `select count(*) from task_audit where event = 'in_doubt'`)
				f.wantInt(1, `select count(*) from task_audit where event = 'success'`)
				f.wantInt(0, `select count(*) from task_outbox where version <> (select count(*) from task_audit where task_id = id)`)
			})
		}
	}
}

// parked looks at a task whose step is in doubt, and decides.
func (f *fixture) parked(id int64, o effectOrder) {
	f.Helper()
	f.wantStatus(id, "dead_letter")
	if got := f.one(`select last_error from task_outbox where id = ?`, id); !strings.Contains(got, taskbox.ErrInDoubt.Error()) || !strings.Contains(got, "attempt 1") {
		f.Errorf("the error of the parked task is %q", got)
	}
	f.wantSteps(id, "a processing 1")
	before := f.int(`select count(*) from moves`)
	if err := f.q.SkipStep(f.Context(), id, "a", 7, byAnn, risky()...); err != nil {
		f.Fatal(err)
	}
	runEffect(f.T, o)
	f.wantStatus(id, "success")
	f.wantInt(before, `select count(*) from moves`)
	f.wantSteps(id, "a skipped 1 7")
}

// key enqueues one key from many goroutines when its input ends, and prints the id of
// each task that is no duplicate.
func (p *effectProcess) key() {
	typ := taskbox.NewType[string]("key")
	fmt.Println("+ready")
	io.Copy(io.Discard, os.Stdin)
	var wg sync.WaitGroup
	var duplicates atomic.Int32
	for range 16 {
		wg.Go(func() {
			for range 20 {
				r, err := p.q.Enqueue(p.Context(), p.db, typ.New("", taskbox.Key("k")))
				switch {
				case err != nil:
					p.Error(err)
				case !r.Duplicate:
					fmt.Printf("+first %d\n", r.ID)
				default:
					duplicates.Add(1)
				}
			}
		})
	}
	wg.Wait()
	fmt.Printf("+duplicates %d\n", duplicates.Load())
}

func TestKey_Processes(t *testing.T) {
	f := open(t, taskbox.Options{})
	var inputs []io.Closer
	var outputs []*bufio.Scanner
	var cmds []*exec.Cmd
	for range 2 {
		c := startEffect(t, effectOrder{Do: "key", Path: f.path})
		c.want("ready")
		inputs, outputs, cmds = append(inputs, c.in), append(outputs, c.out), append(cmds, c.cmd)
	}
	for _, in := range inputs {
		in.Close()
	}
	firsts, duplicates := 0, 0
	for i, out := range outputs {
		for out.Scan() {
			if strings.HasPrefix(out.Text(), "+first") {
				firsts++
			}
			if n, ok := strings.CutPrefix(out.Text(), "+duplicates "); ok {
				d, _ := strconv.Atoi(n)
				duplicates += d
			}
		}
		if err := cmds[i].Wait(); err != nil {
			t.Error(err)
		}
	}
	if firsts != 1 || duplicates != 639 {
		t.Errorf("%d tasks and %d duplicates, want 1 and 639", firsts, duplicates)
	}
	f.wantInt(1, `select count(*) from task_outbox`)
	f.wantInt(639, `select hits from task_dedupe where kind = 'duplicate'`)
}

// An effectChild is a process that we talk with.
type effectChild struct {
	*testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Scanner
}

func startEffect(t *testing.T, o effectOrder) *effectChild {
	t.Helper()
	cmd := effectCommand(t, o)
	in, err := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err := errors.Join(err, err2, cmd.Start()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill() })
	return &effectChild{T: t, cmd: cmd, in: in, out: bufio.NewScanner(out)}
}

// want waits for a line.
func (c *effectChild) want(line string) {
	c.Helper()
	var seen []string
	for c.out.Scan() {
		seen = append(seen, c.out.Text())
		if c.out.Text() == "+"+line {
			return
		}
	}
	c.Fatalf("the process ended without the line %q: %q", line, seen)
}

// serve runs tasks until its input ends, and tells what they do.
func (p *effectProcess) serve() {
	typ := taskbox.NewType[string]("serve")
	typ.Handle(p.q, func(ctx context.Context, task *taskbox.Task[string]) error {
		fmt.Printf("+runs %s\n", task.Payload)
		if task.Payload == "hang" {
			<-ctx.Done()
			fmt.Printf("+cause %v\n", context.Cause(ctx))
			return ctx.Err()
		}
		code, err := taskbox.Step(ctx, "a", func(context.Context) (string, error) {
			if task.Payload == "bad" {
				return "", taskbox.Permanent(errEffect)
			}
			return "ran", nil
		})
		if err == nil {
			fmt.Printf("+code %s\n", code)
		}
		return err
	})
	ctx, stop := context.WithCancel(p.Context())
	go func() {
		io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	if err := p.q.Run(ctx); err != nil {
		p.Fatal(err)
	}
}

// What a person does in one process reaches the tasks that run in another.
func TestQueue_ByHand_Processes(t *testing.T) {
	f := open(t, taskbox.Options{})
	typ := taskbox.NewType[string]("serve")
	c := startEffect(t, effectOrder{Do: "serve", Path: f.path})
	// insist repeats an operation until the task's attempt is in the file.
	insist := func(op func() error) {
		t.Helper()
		deadline := time.Now().Add(30 * time.Second)
		for {
			err := op()
			if err == nil {
				return
			}
			if !errors.Is(err, taskbox.ErrTaskRunning) && !errors.Is(err, taskbox.ErrState) && !errors.Is(err, taskbox.ErrNoStep) || time.Now().After(deadline) {
				t.Fatal(err)
			}
		}
	}

	hang := f.enqueue(typ.New("hang"))
	c.want("runs hang")
	start := time.Now()
	if err := f.q.Cancel(t.Context(), hang, byAnn); err != nil {
		t.Fatal(err)
	}
	c.want("cause " + taskbox.ErrLeaseLost.Error())
	if d := time.Since(start); d > 2*time.Second {
		t.Errorf("the handler in the other process heard of the cancellation after %v, want about a second at most", d)
	}

	bad := f.enqueue(typ.New("bad"))
	c.want("runs bad")
	insist(func() error { return f.q.SkipStep(t.Context(), bad, "a", "stand-in", byAnn) })
	c.want("code stand-in")

	later := f.enqueue(typ.New("later", taskbox.Delay(time.Hour)))
	insist(func() error { return f.q.RunNow(t.Context(), later, byAnn) })
	c.want("code ran")

	insist(func() error {
		return f.q.Replay(t.Context(), later, byAnn, risky(taskbox.WithPayload("again"), taskbox.FromStep("a"))...)
	})
	c.want("runs again")
	c.want("code ran")

	if err := f.q.Pause(t.Context(), "serve", time.Time{}, byAnn); err != nil {
		t.Fatal(err)
	}
	paused := f.enqueue(typ.New("paused"))
	skipped := f.enqueue(typ.New("skipped"))
	if err := f.q.Skip(t.Context(), skipped, byAnn); err != nil {
		t.Fatal(err)
	}
	f.wantStatus(paused, "pending")
	if err := f.q.Resume(t.Context(), "serve", byAnn); err != nil {
		t.Fatal(err)
	}
	c.want("runs paused")

	c.in.Close()
	for c.out.Scan() {
		if strings.Contains(c.out.Text(), "skipped") {
			t.Errorf("the skipped task: %s", c.out.Text())
		}
	}
	if err := c.cmd.Wait(); err != nil {
		t.Error(err)
	}
	got := f.rows(`select status from task_outbox order by id`)
	if diff := gocmp.Diff([]string{"cancelled", "success", "success", "success", "skipped"}, got); diff != "" {
		t.Errorf("in the end (-want +got):\n%s", diff)
	}
	f.wantWhole()
}
