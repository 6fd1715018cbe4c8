package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/taskbox-go/taskbox"
)

// maxDeadShown bounds the list of dead letters; the number is told in any case.
const maxDeadShown = 8

// summary prints the five figures and what to try next.
func (d *demo) summary(ctx context.Context) error {
	s, err := d.q.Stats(ctx)
	if err != nil {
		return err
	}
	fmt.Fprintln(d.std.out)
	d.figure("queue length", fmt.Sprint(s.QueueLength), "due, and waiting for a worker"+alsoWaiting(s))
	d.figure("average wait", brief(s.AverageWait), "from due to picked, last five minutes")
	d.figure("failure rate", fmt.Sprintf("%.0f %%", 100*s.FailureRate), "of the attempts of the last five minutes")
	d.figure("dead letters", fmt.Sprint(s.DeadLetters), "given up; a person decides")
	if err := d.deadLetters(ctx, s.DeadLetters); err != nil {
		return err
	}
	task, err := d.oneTrail(ctx)
	d.next(task)
	return err
}

func (d *demo) figure(name, value, what string) {
	p := d.live.paint
	fmt.Fprintf(d.std.out, "%-13s %s  %s\n", name, p.paint(bold, fmt.Sprintf("%8s", value)), p.paint(dim, what))
}

func alsoWaiting(s taskbox.Stats) string {
	if s.RetryWait == 0 {
		return ""
	}
	return fmt.Sprintf("; %d more for a retry", s.RetryWait)
}

// deadLetters says which there are and why, the latest first.
func (d *demo) deadLetters(ctx context.Context, total int64) error {
	rows, err := d.db.QueryContext(ctx, `
select id, event_type, payload, coalesce(last_error, ''), (
	select coalesce(detail ->> '$.cause', '') from task_audit
	where task_id = id and event = 'dead_letter' order by seq desc limit 1)
from task_outbox
where status = 'dead_letter' order by finished_at desc limit ?`, maxDeadShown)
	if err != nil {
		return err
	}
	defer rows.Close()
	for rows.Next() {
		var id int64
		var typ, payload, why, cause string
		if err := rows.Scan(&id, &typ, &payload, &why, &cause); err != nil {
			return err
		}
		total--
		fmt.Fprintf(d.std.out, "  #%-4d %s%s, %s: %s\n", id, typ, forOrder(payload), cause, d.live.paint.event("failed", shorten(why)))
	}
	if total > 0 {
		fmt.Fprintf(d.std.out, "  … and %d more\n", total)
	}
	return rows.Err()
}

func forOrder(payload string) string {
	var t orderTask
	if json.Unmarshal([]byte(payload), &t) != nil || t.OrderID == 0 {
		return ""
	}
	return fmt.Sprintf(" for order %d", t.OrderID)
}

// oneTrail prints the trail that teaches most: a task that failed often and then
// succeeded, or else a dead letter, or else any; it returns the task.
func (d *demo) oneTrail(ctx context.Context) (task int64, err error) {
	var typ, payload, trace string
	err = d.db.QueryRowContext(ctx, `
select id, event_type, payload, trace_id from task_outbox
order by status = 'success' and retry_count > 0 desc, status = 'dead_letter' desc,
	retry_count desc, finished_at is not null desc, id desc
limit 1`).Scan(&task, &typ, &payload, &trace)
	if errors.Is(err, sql.ErrNoRows) {
		fmt.Fprintln(d.std.out, "one trail     none: there was no order")
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	events, err := readTrail(ctx, d.db, task, beforeTrail)
	fmt.Fprintf(d.std.out, "\none whole trail: task #%d, %s%s, trace %s\n", task, typ, forOrder(payload), trace)
	for i := range events {
		d.trailLine(&events[i], events[max(0, i-1)].at)
	}
	return task, err
}

func (d *demo) trailLine(e *event, before time.Time) {
	attempt := ""
	if e.attempt > 0 && e.name != "queued" { // which is between two
		attempt = fmt.Sprintf("attempt %d", e.attempt)
	}
	p := d.live.paint
	line := fmt.Sprintf("  %s %9s  %s %-9s  %s", e.at.Format("15:04:05.000"), "+"+brief(e.at.Sub(before)),
		p.event(e.name, fmt.Sprintf("%-11s", e.name)), attempt, p.paint(dim, e.why()))
	fmt.Fprintln(d.std.out, strings.TrimRight(line, " "))
}

// next says what to try now.
func (d *demo) next(task int64) {
	w, self := d.std.err, programName()
	fmt.Fprintln(w, "\nNext:")
	if !d.cfg.keep {
		fmt.Fprintf(w, "  keep the file, and order yourself:\n    %s demo -db shop.db -addr 127.0.0.1:8080\n", self)
		fmt.Fprintf(w, "    curl -d '%s' http://127.0.0.1:8080/orders\n    curl http://127.0.0.1:8080/orders/1\n", sampleOrder)
		fmt.Fprintln(w, "  while it runs, ask the file itself:\n    sqlite3 shop.db 'select * from task_trail where task_id = 1'")
		return
	}
	file := shellQuote(d.cfg.db)
	fmt.Fprintf(w, "  the trail, from the file:\n    sqlite3 -box %s 'select time, event, attempt, detail from task_trail where task_id = %d'\n", file, task)
	fmt.Fprintf(w, "  a task from the shell; the next run does it:\n    sqlite3 %s \"insert into task_outbox(event_type, payload) values ('receipt_mail', '{\\\"order_id\\\": 1}')\"\n", file)
	fmt.Fprintf(w, "  go on where this run stopped, and order yourself:\n    %s demo -db %s -addr 127.0.0.1:8080\n", self, file)
	fmt.Fprintf(w, "    curl -d '%s' http://127.0.0.1:8080/orders\n", sampleOrder)
}

// programName is how the user has called us.
func programName() string {
	if strings.Contains(os.Args[0], "go-build") {
		return "go run ./cmd/taskbox"
	}
	return "taskbox"
}
