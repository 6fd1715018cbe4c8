package main

import (
	"context"
	"database/sql"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	// showEvery is how often the screen moves: several times a second looks alive.
	showEvery = 150 * time.Millisecond
	// showAfter is how long a task may be between two states before it is shown
	// there: most attempts are over by then and take one line.
	showAfter = 100 * time.Millisecond
)

// live prints the trails as they move: one line for what a task has done since its
// last line, and one that says why where something went wrong. The queue's log tells
// which tasks have moved; what they did is read from the view task_trail.
type live struct {
	db    *sql.DB
	std   stdio
	paint painter
	start time.Time

	mu    sync.Mutex
	moved map[int64]bool // tasks with news; mu

	// Those of the printing goroutine.
	shown  map[int64]int64 // by task: the last event that was printed
	newest int64           // the newest task that was met
}

func newLive(db *sql.DB, std stdio) *live {
	return &live{
		db: db, std: std, paint: painterFor(std.out), start: time.Now(),
		moved: map[int64]bool{}, shown: map[int64]int64{},
	}
}

// skipOld makes the tasks that there are no news, until they move.
func (l *live) skipOld(ctx context.Context) error {
	return l.db.QueryRowContext(ctx, `select coalesce(max(id), 0) from task_outbox`).Scan(&l.newest)
}

// run prints until ctx ends, and then the rest.
func (l *live) run(ctx context.Context) error {
	tick := time.NewTicker(showEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return l.show(context.WithoutCancel(ctx), 0)
		case <-tick.C:
			if err := l.show(context.WithoutCancel(ctx), showAfter); err != nil {
				return err
			}
		}
	}
}

// news is what a task has done since it was last shown.
type news struct {
	task   int64
	typ    string
	born   time.Time
	events []event
}

func (n news) last() event { return n.events[len(n.events)-1] }

// show prints the news in the order in which they happened; what is younger than
// patience and on its way waits for the next time.
func (l *live) show(ctx context.Context, patience time.Duration) error {
	if err := l.meetNew(ctx); err != nil {
		return err
	}
	var all []news
	for _, task := range l.takeMoved() {
		n, err := l.read(ctx, task)
		switch {
		case err != nil:
			return err
		case len(n.events) == 0:
		case n.onItsWay() && time.Since(n.last().at) < patience:
			l.move(task)
		default:
			l.shown[task] = n.last().seq
			all = append(all, n.lines()...)
		}
	}
	slices.SortStableFunc(all, func(a, b news) int { return a.last().at.Compare(b.last().at) })
	for _, n := range all {
		l.print(n)
	}
	return nil
}

// onItsWay tells whether the task is about to be somewhere else.
func (n news) onItsWay() bool { return n.last().onItsWay() }

func (e event) onItsWay() bool {
	switch e.name {
	case "created", "queued", "picked", "processing", "failed":
		return true
	}
	return false
}

// lines cuts the news where the task came to rest: one line has one attempt.
func (n news) lines() []news {
	var all []news
	from := 0
	for i, e := range n.events {
		if !e.onItsWay() || i == len(n.events)-1 {
			line := n
			line.events = n.events[from : i+1]
			all = append(all, line)
			from = i + 1
		}
	}
	return all
}

// meetNew finds tasks that the poller hasn't touched yet.
func (l *live) meetNew(ctx context.Context) error {
	rows, err := l.db.QueryContext(ctx, `select id from task_outbox where id > ?`, l.newest)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var id int64
		if err := rows.Scan(&id); err != nil {
			return err
		}
		l.newest = max(l.newest, id)
		l.move(id)
	}
	return rows.Err()
}

func (l *live) move(task int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.moved[task] = true
}

func (l *live) takeMoved() []int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	tasks := slices.Sorted(maps.Keys(l.moved))
	clear(l.moved)
	return tasks
}

func (l *live) read(ctx context.Context, task int64) (news, error) {
	n := news{task: task}
	var born int64
	err := l.db.QueryRowContext(ctx, `select event_type, created_at from task_outbox where id = ?`, task).Scan(&n.typ, &born)
	if err == sql.ErrNoRows {
		return n, nil // pruned
	}
	if err != nil {
		return n, err
	}
	n.born = time.UnixMilli(born)
	after, ok := l.shown[task]
	if !ok {
		after = beforeTrail
	}
	n.events, err = readTrail(ctx, l.db, task, after)
	// What an earlier run has seen isn't news.
	n.events = slices.DeleteFunc(n.events, func(e event) bool { return e.at.Before(l.start) })
	return n, err
}

// print writes a task's news: the time since the start, the task, its way.
func (l *live) print(n news) {
	var way []string
	if first := n.events[0].name; first != "created" && first != "queued" {
		way = append(way, "…") // it goes on from an earlier line
	}
	why := ""
	for _, e := range n.events {
		way = append(way, l.paint.event(e.name, e.name))
		// The cause of a dead letter is that of the failure before it.
		if w := e.why(); why == "" || w != "" && e.name != "dead_letter" {
			why = w
		}
	}
	last := n.last()
	head := fmt.Sprintf("%6.1fs  #%-4d %-14s ", last.at.Sub(l.start).Seconds(), n.task, n.typ)
	line := head + strings.Join(way, " → ")
	if last.name == "success" {
		line += l.paint.paint(dim, "  "+n.effort())
	}
	fmt.Fprintln(l.std.out, line)
	if why != "" {
		why = fmt.Sprintf("attempt %d: %s", last.attempt, why)
		fmt.Fprintln(l.std.out, strings.Repeat(" ", len(head))+l.paint.paint(dim, why))
	}
}

// effort is what a success took.
func (n news) effort() string {
	took := "in " + brief(n.last().at.Sub(n.born))
	if a := n.last().attempt; a > 1 {
		took = fmt.Sprintf("attempt %d, %s", a, took)
	}
	return took
}

// logger is what the queue logs to: records about a task are news, others that
// matter are printed.
func (l *live) logger() *slog.Logger { return slog.New(newsHandler{l}) }

// newsHandler implements slog.Handler.
type newsHandler struct{ live *live }

func (newsHandler) Enabled(context.Context, slog.Level) bool { return true }

func (h newsHandler) Handle(_ context.Context, r slog.Record) error {
	var task int64
	text := r.Message
	r.Attrs(func(a slog.Attr) bool {
		if a.Key == "task" && a.Value.Kind() == slog.KindInt64 {
			task = a.Value.Int64()
		}
		text += fmt.Sprintf(" %s=%v", a.Key, a.Value)
		return true
	})
	switch {
	case task != 0:
		h.live.move(task)
	case r.Level >= slog.LevelWarn:
		fmt.Fprintln(h.live.std.err, text)
	}
	return nil
}

func (h newsHandler) WithAttrs([]slog.Attr) slog.Handler { return h }
func (h newsHandler) WithGroup(string) slog.Handler      { return h }
