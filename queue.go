// Package taskbox is a task queue that lives inside a Go program and inside that
// program's own SQLite file.
//
// A task is a durable unit of work; its type names its handler, its payload is JSON.
// An application enqueues tasks in its own transaction; a poller claims those that
// are due under a lease and runs each as an attempt on one of its workers. An
// attempt that fails is retried in tiers until the task succeeds or becomes a dead
// letter. Everything that happens to a task is on its trail.
package taskbox

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"
	"unicode"
	"unicode/utf8"
)

// Defaults of [Options] and [TypeOptions].
const (
	DefaultWorkers    = 16
	DefaultLease      = 30 * time.Second
	DefaultGrace      = 10 * time.Second
	DefaultTimeout    = time.Minute
	DefaultMaxPayload = 1 << 20
	DefaultKeepDone   = 7 * 24 * time.Hour
	DefaultKeepAudit  = 365 * 24 * time.Hour
)

const (
	maxNameLength = 200
	maxKeyLength  = 500
	maxWorkers    = 10_000
	minLease      = time.Second
)

// Options configure a [Queue]. The zero value is usable.
type Options struct {
	// Workers is how many handlers run at once in this process. 0: [DefaultWorkers].
	Workers int
	// Schedule says how long to wait before each retry, for types that don't say it
	// themselves. nil: [DefaultSchedule], 30 s, 2 min, 10 min and 1 h.
	Schedule Schedule
	// MaxAttempts is how often a task may fail before it is a dead letter, for types
	// and tasks that don't say it themselves. 0: as often as Schedule has retries, and
	// once more. Beyond the schedule's end its last wait is repeated.
	MaxAttempts int
	// Lease is how long a process may be silent before another takes its tasks over.
	// It is renewed every sixth of that. 0: [DefaultLease]; at least 1 s. All
	// processes on one file should have the same.
	Lease time.Duration
	// Grace is how long handlers may go on after Run was told to stop, before their
	// contexts are cancelled. 0: [DefaultGrace]; negative: they are cancelled at once.
	Grace time.Duration
	// PollInterval is how often an idle poller looks into the file. 0: on Linux the
	// poller is woken by the file's changes and looks once a second besides;
	// elsewhere it looks every 100 ms. Enqueues of this process are seen at once
	// everywhere.
	PollInterval time.Duration
	// MaxPayload is the largest payload, in bytes of JSON. 0: [DefaultMaxPayload].
	MaxPayload int
	// Classify says whether an error of a handler is worth a retry, before the
	// built-in table is asked. nil, or [Unclassified]: the built-in table decides.
	Classify func(error) Class
	// KeepDone is how long tasks that ended as success, skipped or cancelled stay.
	// 0: [DefaultKeepDone]; negative: for good.
	KeepDone time.Duration
	// KeepDead is how long dead letters stay. 0: until a person decides.
	KeepDead time.Duration
	// KeepAudit is how long the record of manual operations outlives its task.
	// 0: [DefaultKeepAudit]; negative: for good.
	KeepAudit time.Duration
	// Logger receives one record for each transition of a task: at level Debug for
	// the usual ones, Warn for retries and losses, Error for dead letters. Its keys
	// are task, type, trace and, where they apply, attempt, cause, error, class and
	// next. Payloads are never logged. nil: [slog.Default].
	Logger *slog.Logger
}

func (o Options) withDefaults() Options {
	o.Workers = cmp.Or(o.Workers, DefaultWorkers)
	if o.Schedule == nil {
		o.Schedule = DefaultSchedule()
	}
	o.Lease = cmp.Or(o.Lease, DefaultLease)
	o.Grace = max(0, cmp.Or(o.Grace, DefaultGrace))
	o.MaxPayload = cmp.Or(o.MaxPayload, DefaultMaxPayload)
	o.KeepDone = cmp.Or(o.KeepDone, DefaultKeepDone)
	o.KeepAudit = cmp.Or(o.KeepAudit, DefaultKeepAudit)
	if o.Logger == nil {
		o.Logger = slog.Default()
	}
	return o
}

func (o Options) validate() error {
	switch {
	case o.Workers < 1 || o.Workers > maxWorkers:
		return fmt.Errorf("%w: Options.Workers is %d, want 1 to %d", ErrInvalid, o.Workers, maxWorkers)
	case o.MaxAttempts < 0:
		return fmt.Errorf("%w: Options.MaxAttempts is %d, want at least 1, or 0 for the schedule's", ErrInvalid, o.MaxAttempts)
	case o.Lease < minLease:
		return fmt.Errorf("%w: Options.Lease is %v, want at least %v", ErrInvalid, o.Lease, minLease)
	case o.PollInterval < 0:
		return fmt.Errorf("%w: Options.PollInterval is %v, want a positive duration or 0", ErrInvalid, o.PollInterval)
	case o.MaxPayload < 0:
		return fmt.Errorf("%w: Options.MaxPayload is %d bytes, want a positive number or 0", ErrInvalid, o.MaxPayload)
	case o.KeepDead < 0:
		return fmt.Errorf("%w: Options.KeepDead is %v; 0 keeps dead letters until a person decides", ErrInvalid, o.KeepDead)
	}
	return validSchedule(o.Schedule)
}

// A Queue enqueues tasks into a SQLite file and runs them. It is safe for concurrent
// use. It uses the connections of the application's pool and owns none of its own,
// so there is nothing to close.
type Queue struct {
	db    *sql.DB
	pool  poolInfo
	info  os.FileInfo // of the file when it was opened; nil in memory
	gate  *gate       // nil unless db is from [OpenDB]
	opts  Options
	stmts *stmts
	clock func() time.Time // time.Now, but for tests of clocks that jump

	mu    sync.RWMutex
	types map[string]*taskType // by name; mu

	running atomic.Bool
	// hint is set while a poller runs: it tells it that a task may be about to
	// appear (looks) or has appeared.
	hint atomic.Pointer[waker]
}

// New returns the queue in the file of db, whose tables it creates or upgrades
// first. It fails with [ErrInvalid] for bad options or for a pool that can't work
// (the error says how to open it), and with [ErrNewerSchema] for a file that a newer
// library has written. What works but is unwise is logged as a warning.
func New(ctx context.Context, db *sql.DB, o Options) (*Queue, error) {
	o = o.withDefaults()
	if err := o.validate(); err != nil {
		return nil, fmt.Errorf("open the queue: %w", err)
	}
	pool, warnings, err := checkPool(ctx, db)
	if err != nil {
		return nil, fmt.Errorf("open the queue: %w", err)
	}
	for _, w := range warnings {
		o.Logger.WarnContext(ctx, "taskbox: "+w, "file", pool.path)
	}
	q := &Queue{
		db: db, pool: pool, gate: gateOf(db), opts: o,
		stmts: &stmts{db: db, byText: map[string]*sql.Stmt{}},
		clock: time.Now, types: map[string]*taskType{},
	}
	if err := q.migrate(ctx); err != nil {
		return nil, fmt.Errorf("open the queue in %s: %w", q.file(), explainBusy(err))
	}
	if pool.path != "" {
		if q.info, err = os.Stat(pool.path); err != nil {
			return nil, fmt.Errorf("open the queue: %w", err)
		}
	}
	if err := q.stmts.prepare(ctx, insertSQL); err != nil {
		return nil, fmt.Errorf("open the queue in %s: %w", q.file(), err)
	}
	return q, nil
}

// now is the wall clock in Unix milliseconds.
func (q *Queue) now() int64 { return q.clock().UnixMilli() }

func (q *Queue) file() string { return cmp.Or(q.pool.path, "memory") }

// checkFile returns [ErrFileMoved] when the path doesn't lead to the file any more
// that was opened. It only asks for the file's identity: opening it would drop
// SQLite's locks.
func (q *Queue) checkFile() error {
	if q.info == nil {
		return nil
	}
	info, err := os.Stat(q.pool.path)
	if err != nil {
		return fmt.Errorf("%w: %w", ErrFileMoved, err)
	}
	if !os.SameFile(info, q.info) {
		return fmt.Errorf("%w: another file is at %s now", ErrFileMoved, q.pool.path)
	}
	return nil
}

// A Type is a kind of task: a name and the type of its payload. Declare it once,
// as a package variable, for the program that enqueues and the one that handles.
type Type[T any] struct {
	name string
	opts TypeOptions
}

// TypeOptions configure how the tasks of a [Type] run. The zero value is usable.
type TypeOptions struct {
	// Timeout is how long an attempt may take before its context is cancelled.
	// 0: [DefaultTimeout]; negative: no limit.
	Timeout time.Duration
	// Concurrency is how many handlers of the type run at once in one process.
	// 0: as many as there are workers.
	Concurrency int
	// Schedule is the wait before each retry. nil: the queue's.
	Schedule Schedule
	// MaxAttempts is how often a task may fail before it is a dead letter. 0: the
	// queue's, or, where the type has a Schedule, what that has.
	MaxAttempts int
	// InDoubt says what to do about a step that broke off. 0: [RunAgain].
	InDoubt InDoubt
	// KeepDeadKeys keeps the key of a dead letter taken, so that the task can't be
	// enqueued again beside it. The default lets a new one in.
	KeepDeadKeys bool
}

// NewType declares a task type. The name is what the column event_type holds: 1 to
// 200 bytes of printable text. A bad name or option is reported by [Type.Handle],
// which panics, and by [Queue.Enqueue].
func NewType[T any](name string, o ...TypeOptions) *Type[T] {
	t := &Type[T]{name: name}
	if len(o) > 0 {
		t.opts = o[0]
	}
	return t
}

// Name returns the type's name.
func (t *Type[T]) Name() string { return t.name }

// Handle registers the function that runs the type's tasks in q. A nil error ends
// the task as a success; any other is classified: see [Permanent], [Retryable],
// [RetryAfter], [Snooze] and [Skip]. The context carries the task, its deadline, and
// is cancelled with [ErrLeaseLost] or [ErrStopping] as its cause.
//
// Handle panics when the type is registered already or when its name or an option
// is bad: these are mistakes of the program, and it had better not start.
func (t *Type[T]) Handle(q *Queue, fn func(context.Context, *Task[T]) error) {
	if fn == nil {
		panic(fmt.Sprintf("taskbox: Handle(%q): the handler is nil", t.name))
	}
	e := &taskType{name: t.name, opts: t.opts, bind: binder(t.name, fn)}
	if err := q.register(e); err != nil {
		panic(fmt.Sprintf("taskbox: Handle(%q): %v", t.name, err))
	}
}

// taskType is a registered type, its payload type erased.
type taskType struct {
	name string
	opts TypeOptions
	// bind decodes the task's payload and returns the call of its handler.
	bind func(*held) (func(context.Context) error, error)
}

func (q *Queue) register(e *taskType) error {
	if err := validName("type", e.name, maxNameLength); err != nil {
		return err
	}
	if err := e.applyDefaults(q.opts); err != nil {
		return err
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	if _, ok := q.types[e.name]; ok {
		return fmt.Errorf("%w: the type is registered twice", ErrInvalid)
	}
	q.types[e.name] = e
	return nil
}

func (e *taskType) applyDefaults(o Options) error {
	if e.opts.Concurrency < 0 {
		return fmt.Errorf("%w: TypeOptions.Concurrency is %d, want at least 1, or 0 for the queue's workers", ErrInvalid, e.opts.Concurrency)
	}
	if e.opts.MaxAttempts < 0 {
		return fmt.Errorf("%w: TypeOptions.MaxAttempts is %d, want at least 1, or 0 for the queue's", ErrInvalid, e.opts.MaxAttempts)
	}
	if e.opts.Schedule == nil {
		e.opts.Schedule = o.Schedule
		e.opts.MaxAttempts = cmp.Or(e.opts.MaxAttempts, o.MaxAttempts)
	}
	e.opts.Timeout = cmp.Or(e.opts.Timeout, DefaultTimeout)
	e.opts.Concurrency = min(cmp.Or(e.opts.Concurrency, o.Workers), o.Workers)
	return validSchedule(e.opts.Schedule)
}

// validName reports what is wrong with a name that people will see in lists, logs
// and URLs.
func validName(what, s string, limit int) error {
	switch {
	case s == "":
		return fmt.Errorf("%w: the %s is empty", ErrInvalid, what)
	case len(s) > limit:
		return fmt.Errorf("%w: the %s has %d bytes, at most %d are allowed: %.40q…", ErrInvalid, what, len(s), limit, s)
	case !utf8.ValidString(s):
		return fmt.Errorf("%w: the %s isn't valid UTF-8: %.40q", ErrInvalid, what, s)
	}
	for _, r := range s {
		if !unicode.IsPrint(r) {
			return fmt.Errorf("%w: the %s has the unprintable character %U", ErrInvalid, what, r)
		}
	}
	return nil
}
