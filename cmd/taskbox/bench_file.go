package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/taskbox-go/taskbox"
	_ "modernc.org/sqlite"
)

// The values of PRAGMA synchronous.
const (
	normal = "normal"
	full   = "full"
)

// A poolKind is how an application may open its file.
type poolKind struct {
	name string
	open func(dsn string) (*sql.DB, error)
}

var (
	openDBPool = poolKind{"OpenDB's pool", taskbox.OpenDB}
	// foreignPool knows nothing of the queue.
	foreignPool = poolKind{"own pool", func(dsn string) (*sql.DB, error) {
		return sql.Open("sqlite", dsn+"&_pragma=busy_timeout(5000)&_pragma=journal_mode(wal)")
	}}
)

func benchDSN(path, synchronous string) string {
	p := (&url.URL{Path: filepath.ToSlash(path)}).EscapedPath()
	if filepath.VolumeName(path) != "" {
		p = "/" + p
	}
	return "file:" + p + "?_pragma=synchronous(" + synchronous + ")"
}

// benchJob is the payload of the bench's tasks.
type benchJob struct {
	N int `json:"n"`
}

const benchType = "bench_job"

var benchJobs = taskbox.NewType[benchJob](benchType)

// A rig is a file with a queue whose handler counts.
type rig struct {
	path    string
	db      *sql.DB
	q       *taskbox.Queue
	started atomic.Int64 // handlers called
	first   atomic.Int64 // Unix ns of the first call
	onStart func()       // called by each handler, unless nil; set before run
}

// rigs numbers the files.
var rigs atomic.Int64

// newRig makes a queue in a new file. The caller closes it.
func (b *bench) newRig(ctx context.Context, pool poolKind, synchronous string, workers int) (*rig, error) {
	r := &rig{path: filepath.Join(b.dir, fmt.Sprintf("%d.db", rigs.Add(1)))}
	var err error
	if r.db, err = pool.open(benchDSN(r.path, synchronous)); err != nil {
		return nil, err
	}
	if err := r.setUp(ctx, workers); err != nil {
		r.close()
		return nil, err
	}
	return r, nil
}

func (r *rig) setUp(ctx context.Context, workers int) error {
	var err error
	r.q, err = taskbox.New(ctx, r.db, taskbox.Options{Workers: workers, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	benchJobs.Handle(r.q, r.handle)
	_, err = r.db.ExecContext(ctx, benchOrdersSQL)
	return err
}

func (r *rig) handle(context.Context, *taskbox.Task[benchJob]) error {
	if r.started.Add(1) == 1 {
		r.first.Store(time.Now().UnixNano())
	}
	if r.onStart != nil {
		r.onStart()
	}
	return nil
}

// close removes the file too.
func (r *rig) close() {
	r.db.Close()
	for _, suffix := range []string{"", "-wal", "-shm"} {
		os.Remove(r.path + suffix)
	}
}

// during runs the queue while fn runs, and returns its error or Run's.
func (r *rig) during(ctx context.Context, fn func() error) error {
	runCtx, cancel := context.WithCancel(ctx)
	ended := make(chan error, 1) // so that Run can return before anybody listens
	go func() { ended <- r.q.Run(runCtx) }()
	err := fn()
	cancel()
	return errors.Join(err, <-ended)
}

// waitDone waits until n tasks have been run and recorded.
func (r *rig) waitDone(ctx context.Context, n int) error {
	tick := time.NewTicker(500 * time.Microsecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		if r.started.Load() < int64(n) {
			continue
		}
		s, err := r.q.Stats(ctx)
		if err != nil || s.Running == 0 && s.QueueLength == 0 {
			return err
		}
	}
}

// SQL that fills a file. The bench is the one place under cmd that has any: what it
// compares the queue with is SQL.
const (
	benchOrdersSQL = `create table bench_orders (id integer primary key, total integer not null)`

	orderSQL = `insert into bench_orders (total) values (?)`

	plainInsertSQL = `insert into task_outbox(event_type, payload) values (?, ?)`

	// Of the statements with a ? each adds that many tasks.
	backlogSQL = `
with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)
insert into main.task_outbox (event_type, payload) select '` + benchType + `', json_object('n', i) from n`

	scheduledSQL = `
with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)
insert into main.task_outbox (event_type, payload, status, next_run_at)
select '` + benchType + `', json_object('n', i), 'scheduled', (unixepoch() + 86400 + i) * 1000 from n`

	finishedSQL = `
with recursive n(i) as (select 1 union all select i + 1 from n where i < ?)
insert into main.task_outbox (event_type, payload, status, attempt, fence, version, finished_at)
select '` + benchType + `', json_object('n', i), 'success', 1, 1, 3, unixepoch() * 1000 from n`

	finishedTrailSQL = `
insert into main.task_audit (task_id, seq, event, at, attempt)
select t.id, e.column1, e.column2, t.finished_at, 1
from main.task_outbox t, (values (1, 'picked'), (2, 'processing'), (3, 'success')) e
where t.status = 'success' order by t.id`

	emptyWALSQL = `pragma wal_checkpoint(truncate)`
)

// fill runs a statement that adds tasks, and empties the WAL.
func (r *rig) fill(ctx context.Context, n int, text string) error {
	if _, err := r.db.ExecContext(ctx, text, n); err != nil {
		return err
	}
	return r.emptyWAL(ctx)
}

// fillHistory adds finished tasks with their trails.
func (r *rig) fillHistory(ctx context.Context, n int) error {
	if err := r.fill(ctx, n, finishedSQL); err != nil {
		return err
	}
	if _, err := r.db.ExecContext(ctx, finishedTrailSQL); err != nil {
		return err
	}
	return r.emptyWAL(ctx)
}

func (r *rig) emptyWAL(ctx context.Context) error {
	var busy, log, moved int
	err := r.db.QueryRowContext(ctx, emptyWALSQL).Scan(&busy, &log, &moved)
	if err == nil && busy != 0 {
		err = errors.New("the WAL can't be emptied: something reads or writes the file")
	}
	return err
}
