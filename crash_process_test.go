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
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/taskbox-go/taskbox"
)

// asChild makes the test binary another process of a test; it holds a job as JSON.
const asChild = "TASKBOX_TEST_CHILD"

func TestMain(m *testing.M) {
	if text := os.Getenv(asChild); text != "" {
		var job job
		err := json.Unmarshal([]byte(text), &job)
		if err == nil {
			err = job.run()
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "child:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// A job is what a child process does until it ends, or gets a SIGTERM, or worse.
type job struct {
	Do        string // a key of jobs
	DB        string
	Notes     string // the file to which handlers append
	Workers   int
	Lease     time.Duration
	Grace     time.Duration
	Producers int
	Tasks     int // of each producer; 0: without end
	Hold      time.Duration
	Conns     int // of the pool; 0: OpenDB's

	db    *sql.DB
	q     *taskbox.Queue
	notes *os.File
}

var jobs = map[string]func(*job, context.Context) error{
	"shop":       (*job).shop,
	"drain":      (*job).drain,
	"drainEmpty": (*job).drainEmpty,
	"work":       (*job).work,
	"lock":       (*job).lock,
	"insert":     (*job).insert,
	"idle":       (*job).idle,
}

func (j *job) run() error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	var err error
	if j.db, err = taskbox.OpenDB(dsn(j.DB, "_synchronous=OFF")); err != nil {
		return err
	}
	defer j.db.Close()
	if j.Conns > 0 {
		j.db.SetMaxOpenConns(j.Conns)
	}
	if j.Notes != "" {
		if j.notes, err = os.OpenFile(j.Notes, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o644); err != nil {
			return err
		}
	}
	do, ok := jobs[j.Do]
	if !ok {
		return fmt.Errorf("no job %q", j.Do)
	}
	return do(j, ctx)
}

// say writes a line that the parent reads, in one piece.
func say(format string, args ...any) { fmt.Fprintf(os.Stdout, format+"\n", args...) }

// note appends a line to the notes, in one piece, so that it survives the process.
func (j *job) note(format string, args ...any) error {
	_, err := fmt.Fprintf(j.notes, format+"\n", args...)
	return err
}

// open makes the queue, and the shop's tables beside it.
func (j *job) open(ctx context.Context) (err error) {
	j.q, err = taskbox.New(ctx, j.db, taskbox.Options{Workers: j.Workers, Lease: j.Lease, Grace: j.Grace,
		Schedule: taskbox.Tiers(50 * time.Millisecond), Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelError}))})
	if err != nil {
		return err
	}
	_, err = j.db.ExecContext(ctx, `
create table if not exists orders (id integer primary key, task_id integer not null unique);
create table if not exists effects (task_id integer not null, attempt integer not null);
create index if not exists effects_task on effects (task_id)`)
	return err
}

// The types of the shop. Each handler notes its start first.
var (
	pureType = taskbox.NewType[int64]("pure")
	fileType = taskbox.NewType[int64]("effect_in_the_file")
	noteType = taskbox.NewType[int64]("effect_elsewhere")
	// slowType takes as many milliseconds as its payload says; less than 0 is poison.
	slowType = taskbox.NewType[int]("slow", taskbox.TypeOptions{Timeout: time.Hour})
	failType = taskbox.NewType[int]("fails")
	// poisonType ends its process, after as many milliseconds as its payload says.
	poisonType = taskbox.NewType[int]("poison")
	// venomType does that while it is decoded.
	venomType = taskbox.NewType[venom]("venom")
)

type venom struct{}

func (*venom) UnmarshalJSON([]byte) error {
	syscall.Kill(os.Getpid(), syscall.SIGKILL)
	select {}
}

func (j *job) handleAll() {
	pureType.Handle(j.q, func(_ context.Context, t *taskbox.Task[int64]) error {
		err := j.start(t.ID, t.Attempt)
		time.Sleep(time.Duration(t.ID%7) * time.Millisecond)
		return err
	})
	fileType.Handle(j.q, func(ctx context.Context, t *taskbox.Task[int64]) error {
		if err := j.start(t.ID, t.Attempt); err != nil {
			return err
		}
		_, err := j.db.ExecContext(ctx, `insert into effects(task_id, attempt) values (?, ?)`, t.ID, t.Attempt)
		return err
	})
	noteType.Handle(j.q, func(_ context.Context, t *taskbox.Task[int64]) error {
		if err := j.start(t.ID, t.Attempt); err != nil {
			return err
		}
		return j.note("effect %d %d %d", t.ID, t.Attempt, time.Now().UnixMilli())
	})
	slowType.Handle(j.q, func(ctx context.Context, t *taskbox.Task[int]) error {
		if err := j.start(t.ID, t.Attempt); err != nil {
			return err
		}
		if t.Payload < 0 {
			syscall.Kill(os.Getpid(), syscall.SIGKILL)
		}
		select {
		case <-ctx.Done():
			say("ended %d %v", t.ID, context.Cause(ctx))
			return ctx.Err()
		case <-time.After(time.Duration(t.Payload) * time.Millisecond):
			say("done %d", t.ID)
			return nil
		}
	})
	failType.Handle(j.q, func(context.Context, *taskbox.Task[int]) error { return errFlaky })
	poisonType.Handle(j.q, func(_ context.Context, t *taskbox.Task[int]) error {
		if err := j.start(t.ID, t.Attempt); err != nil {
			return err
		}
		time.Sleep(time.Duration(t.Payload) * time.Millisecond)
		if t.ID%2 == 0 {
			os.Exit(3)
		}
		syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {}
	})
	venomType.Handle(j.q, func(context.Context, *taskbox.Task[venom]) error { return nil })
}

func (j *job) start(id int64, attempt int) error {
	return j.note("start %d %d %d", id, attempt, time.Now().UnixMilli())
}

// shop enqueues, each task with its order, and runs the tasks.
func (j *job) shop(ctx context.Context) error {
	if err := j.open(ctx); err != nil {
		return err
	}
	j.handleAll()
	say("ready")
	var wg sync.WaitGroup
	for range j.Producers {
		wg.Go(func() {
			for n := 0; (j.Tasks == 0 || n < j.Tasks) && ctx.Err() == nil; n++ {
				if err := j.order(ctx); err != nil && ctx.Err() == nil {
					say("order: %v", err)
				}
			}
		})
	}
	defer wg.Wait()
	if j.Tasks == 0 {
		return j.q.Run(ctx)
	}
	go func() { wg.Wait(); say("enqueued") }()
	return j.runUntilEmpty(ctx, wg.Wait)
}

func (j *job) order(ctx context.Context) error {
	tx, err := j.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	n := rand.IntN(12)
	var opts []taskbox.EnqueueOption
	if n == 0 {
		opts = append(opts, taskbox.Group(fmt.Sprint("g", rand.IntN(3))))
	}
	r, err := j.q.Enqueue(ctx, tx, []*taskbox.Type[int64]{pureType, fileType, noteType}[n%3].New(1, opts...))
	if err != nil {
		return err
	}
	res, err := tx.ExecContext(ctx, `insert into orders(task_id) values (?)`, r.ID)
	if err != nil {
		return err
	}
	id, err := res.LastInsertId()
	if err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	say("ack %d %d", r.ID, id)
	return nil
}

func (j *job) untilEmpty(ctx context.Context) error {
	for {
		var left int
		if err := j.db.QueryRowContext(ctx, `select count(*) from task_outbox where finished_at is null`).Scan(&left); err != nil || left == 0 {
			return err
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// drain runs what is there to its end.
func (j *job) drain(ctx context.Context) error {
	if err := j.open(ctx); err != nil {
		return err
	}
	j.handleAll()
	return j.runUntilEmpty(ctx, func() {})
}

func (j *job) runUntilEmpty(ctx context.Context, first func()) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	run := make(chan error)
	go func() { run <- j.q.Run(ctx) }()
	first()
	err := j.untilEmpty(ctx)
	cancel()
	return errors.Join(err, <-run)
}

// drainEmpty does the same with tasks of which there are many, and that do nothing.
func (j *job) drainEmpty(ctx context.Context) error {
	if err := j.open(ctx); err != nil {
		return err
	}
	taskbox.NewType[int]("empty").Handle(j.q, func(context.Context, *taskbox.Task[int]) error { return nil })
	return j.q.Drain(ctx)
}

// work runs tasks until it is stopped.
func (j *job) work(ctx context.Context) error {
	if err := j.open(ctx); err != nil {
		return err
	}
	j.handleAll()
	say("ready")
	return j.q.Run(ctx)
}

// lock holds the write lock for a while.
func (j *job) lock(ctx context.Context) error {
	tx, err := j.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	say("locked")
	time.Sleep(j.Hold)
	return tx.Commit()
}

// insert makes a plain INSERT every 20 ms, and says when one failed and at the end how
// long the longest took.
func (j *job) insert(ctx context.Context) error {
	db, err := sql.Open("sqlite", dsn(j.DB, "_synchronous=OFF&_pragma=busy_timeout(5000)"))
	if err != nil {
		return err
	}
	defer db.Close()
	var longest time.Duration
	n := 0
	for say("ready"); ctx.Err() == nil; n++ {
		begin := time.Now()
		if _, err := db.Exec(`insert into task_outbox(event_type, payload) values ('from_elsewhere', '1')`); err != nil {
			say("failed %v", err)
		}
		longest = max(longest, time.Since(begin))
		time.Sleep(20 * time.Millisecond)
	}
	say("inserted %d %v", n, longest)
	return nil
}

// idle runs the queue and says how much CPU time it took per second.
func (j *job) idle(ctx context.Context) error {
	if err := j.open(ctx); err != nil {
		return err
	}
	j.handleAll()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	run := make(chan error)
	go func() { run <- j.q.Run(ctx) }()
	time.Sleep(time.Second)
	if j.Grace > 0 {
		cancel() // a handler goes on
	}
	before := cpuTime()
	time.Sleep(j.Hold)
	say("cpu %d", (cpuTime() - before).Milliseconds())
	cancel()
	if j.Grace > 0 {
		return nil
	}
	return <-run
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// A child is a process that does a job.
type child struct {
	t     *testing.T
	cmd   *exec.Cmd
	lines chan string // what it says; closed at its end
	errs  bytes.Buffer
	done  chan struct{}
	err   error // of Wait, when done is closed
}

func startChild(t *testing.T, j job) *child {
	t.Helper()
	text, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	c := &child{t: t, cmd: exec.Command(os.Args[0]), done: make(chan struct{}),
		lines: make(chan string, 1<<16)} // so that it never waits for us
	c.cmd.Env = append(os.Environ(), asChild+"="+string(text))
	c.cmd.Stderr = &c.errs
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go c.read(out)
	t.Cleanup(func() {
		c.cmd.Process.Kill()
		c.cmd.Process.Signal(syscall.SIGCONT)
		c.rest()
	})
	return c
}

func (c *child) read(out io.Reader) {
	for in := bufio.NewScanner(out); in.Scan(); {
		c.lines <- in.Text()
	}
	c.err = c.cmd.Wait()
	close(c.done)
	close(c.lines)
}

// rest returns what it says from now to its end.
func (c *child) rest() (lines []string) {
	for line := range c.lines {
		lines = append(lines, line)
	}
	<-c.done
	if strings.Contains(c.errs.String(), "DATA RACE") {
		c.t.Errorf("a child has a data race:\n%s", c.errs.String())
	}
	return lines
}

func (c *child) ended() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

// until returns what it says until a line that begins with prefix, that one included.
func (c *child) until(prefix string) (lines []string) {
	c.t.Helper()
	timeout := time.After(60 * time.Second)
	for {
		select {
		case line, ok := <-c.lines:
			if !ok {
				<-c.done
				c.t.Fatalf("the child ended (%v) before it said %q; it said %q and\n%s", c.err, prefix, lines, c.errs.String())
			}
			lines = append(lines, line)
			if strings.HasPrefix(line, prefix) {
				return lines
			}
		case <-timeout:
			c.t.Fatalf("the child doesn't say %q; it said %q and\n%s", prefix, lines, c.errs.String())
		}
	}
}

func (c *child) signal(s os.Signal) {
	c.t.Helper()
	if err := c.cmd.Process.Signal(s); err != nil {
		c.t.Fatal(err)
	}
}

// kill ends it as kill -9 does and returns what it had said.
func (c *child) kill() []string {
	c.t.Helper()
	c.signal(os.Kill)
	return c.rest()
}

// end waits for a good end and returns what it said.
func (c *child) end() []string {
	c.t.Helper()
	lines := c.rest()
	if c.err != nil {
		c.t.Errorf("the child ended with %v:\n%s", c.err, c.errs.String())
	}
	return lines
}
