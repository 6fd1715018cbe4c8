package taskbox_test

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"flag"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

var update = flag.Bool("update", false, "write testdata/golden, and testdata/db where a file is missing")

// A fixture is a queue in a new file, and what tests ask of it.
type fixture struct {
	*testing.T
	db   *sql.DB
	q    *taskbox.Queue
	path string
}

// bubble runs fn with a queue inside a synctest bubble, where an hour takes as long
// as what happens in it.
func bubble(t *testing.T, o taskbox.Options, fn func(f *fixture)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) { fn(open(t, o)) })
}

// open opens a queue in a new file. The test's end closes it.
func open(t *testing.T, o taskbox.Options) *fixture {
	t.Helper()
	path := filepath.Join(t.TempDir(), "t.db")
	f := &fixture{T: t, path: path, db: fileDB(t, path)}
	f.q = newQueue(t, f.db, o)
	return f
}

// again opens a second pool and queue on the same file, as another process would.
func (f *fixture) again(o taskbox.Options) *fixture {
	f.Helper()
	db := fileDB(f.T, f.path)
	return &fixture{T: f.T, path: f.path, db: db, q: newQueue(f.T, db, o)}
}

func fileDB(t *testing.T, path string) *sql.DB {
	t.Helper()
	return closing(t)(taskbox.OpenDB(dsn(path, "_synchronous=OFF")))
}

// plainDB opens a pool as applications do that don't use OpenDB.
func plainDB(t *testing.T, path, params string) *sql.DB {
	t.Helper()
	return closing(t)(sql.Open("sqlite", dsn(path, "_synchronous=OFF&_pragma=journal_mode(WAL)&"+params)))
}

func dsn(path, params string) string {
	return (&url.URL{Scheme: "file", Opaque: filepath.ToSlash(path), RawQuery: params}).String()
}

func closing(t *testing.T) func(*sql.DB, error) *sql.DB {
	return func(db *sql.DB, err error) *sql.DB {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		return db
	}
}

// newQueue fills in options that make a bubble's hour cheap: an idle poller looks
// once a second instead of ten times.
func newQueue(t *testing.T, db *sql.DB, o taskbox.Options) *taskbox.Queue {
	t.Helper()
	o.PollInterval = cmp.Or(o.PollInterval, time.Second)
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	q, err := taskbox.New(t.Context(), db, o)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// run starts the poller. stop, or the test's end, ends it.
func (f *fixture) run() (stop func() error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(f.Context()))
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = f.q.Run(ctx)
	}()
	stop = func() error {
		cancel()
		<-done
		return err
	}
	f.Cleanup(func() { stop() })
	return stop
}

// drain runs what is due.
func (f *fixture) drain() {
	f.Helper()
	if err := f.q.Drain(f.Context()); err != nil {
		f.Fatalf("Drain: %v", err)
	}
}

// enqueue inserts a task by itself and returns its id.
func (f *fixture) enqueue(d taskbox.Draft) int64 {
	f.Helper()
	r, err := f.q.Enqueue(f.Context(), f.db, d)
	if err != nil {
		f.Fatal(err)
	}
	return r.ID
}

func (f *fixture) begin() *sql.Tx {
	f.Helper()
	tx, err := f.db.BeginTx(f.Context(), nil)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { tx.Rollback() })
	return tx
}

func (f *fixture) exec(query string, args ...any) {
	f.Helper()
	if _, err := f.db.ExecContext(f.Context(), query, args...); err != nil {
		f.Fatalf("%s: %v", query, err)
	}
}

// rows returns the rows of a query, their columns joined by "|".
func (f *fixture) rows(query string, args ...any) []string {
	f.Helper()
	return rowsOf(f.T, f.db, query, args...)
}

func rowsOf(t *testing.T, db *sql.DB, query string, args ...any) []string {
	t.Helper()
	rows, err := db.QueryContext(t.Context(), query, args...)
	if err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	defer rows.Close()
	cols, err := rows.Columns()
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for rows.Next() {
		texts, dest := make([]sql.NullString, len(cols)), make([]any, len(cols))
		for i := range texts {
			dest[i] = &texts[i]
		}
		if err := rows.Scan(dest...); err != nil {
			t.Fatal(err)
		}
		line := make([]string, len(cols))
		for i, s := range texts {
			line[i] = s.String
		}
		all = append(all, strings.Join(line, "|"))
	}
	if err := rows.Err(); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
	return all
}

// one returns the only row of a query.
func (f *fixture) one(query string, args ...any) string {
	f.Helper()
	all := f.rows(query, args...)
	if len(all) != 1 {
		f.Fatalf("%s: %d rows, want one: %q", query, len(all), all)
	}
	return all[0]
}

func (f *fixture) int(query string, args ...any) int64 {
	f.Helper()
	n, err := strconv.ParseInt(f.one(query, args...), 10, 64)
	if err != nil {
		f.Fatalf("%s: %v", query, err)
	}
	return n
}

func (f *fixture) status(id int64) string {
	f.Helper()
	return f.one(`select status from task_outbox where id = ?`, id)
}

// trail returns the events on a task's trail, after created and queued or scheduled.
func (f *fixture) trail(id int64) string {
	f.Helper()
	return strings.Join(f.rows(`select event from task_trail where task_id = ? and seq > 0`, id), " ")
}

// wholeTrail is trail with what the view makes up from the row itself.
func (f *fixture) wholeTrail(id int64) string {
	f.Helper()
	return strings.Join(f.rows(`select event from task_trail where task_id = ?`, id), " ")
}

// eventTime is when an event of a task happened the n-th time, from 0.
func (f *fixture) eventTime(id int64, event string, n int) time.Time {
	f.Helper()
	all := f.rows(`select at from task_trail where task_id = ? and event = ? order by seq`, id, event)
	if n >= len(all) {
		f.Fatalf("task %d has %d events %s, want more than %d: %s", id, len(all), event, n, f.trail(id))
	}
	ms, err := strconv.ParseInt(all[n], 10, 64)
	if err != nil {
		f.Fatal(err)
	}
	return time.UnixMilli(ms)
}

func (f *fixture) wantTrail(id int64, want string) {
	f.Helper()
	if got := f.trail(id); got != want {
		f.Errorf("trail of task %d:\n got %s\nwant %s", id, got, want)
	}
}

func (f *fixture) wantStatus(id int64, want string) {
	f.Helper()
	if got := f.status(id); got != want {
		f.Errorf("task %d is %s, want %s; its trail: %s", id, got, want, f.trail(id))
	}
}

// wantInt compares what a query counts.
func (f *fixture) wantInt(want int64, query string, args ...any) {
	f.Helper()
	if got := f.int(query, args...); got != want {
		f.Errorf("%s: got %d, want %d", query, got, want)
	}
}

func wantErr(t testing.TB, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("got error %v, want %v", err, want)
	}
}

// near tells whether d is within 10 % of want, and a little for the rounding.
func near(d, want time.Duration) bool {
	return (d - want).Abs() <= want/10+2*time.Millisecond
}

// golden compares text with testdata/golden/name.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", "golden", name)
	if *update {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(got), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v; run the test with -update", err)
	}
	if diff := gocmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("%s (-want +got; -update writes it):\n%s", path, diff)
	}
}

// A wallClock is a clock that can be set while it runs.
type wallClock struct{ offset atomic.Int64 }

func (c *wallClock) now() time.Time       { return time.Now().Add(time.Duration(c.offset.Load())) }
func (c *wallClock) jump(d time.Duration) { c.offset.Add(int64(d)) }

// A record counts the starts of handlers, by whatever the test calls them.
type record struct {
	mu    sync.Mutex
	names []string
	now   map[string]int
	most  map[string]int
}

// start notes a start; the function that it returns notes the end.
func (r *record) start(name string) (end func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.now == nil {
		r.now, r.most = map[string]int{}, map[string]int{}
	}
	r.names = append(r.names, name)
	r.now[name]++
	r.most[name] = max(r.most[name], r.now[name])
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.now[name]--
	}
}

func (r *record) all() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.names)
}

func (r *record) count(name string) (n int) {
	for _, s := range r.all() {
		if s == name {
			n++
		}
	}
	return n
}

// atOnce is how many of a name ran at the same time.
func (r *record) atOnce(name string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.most[name]
}
