package main

import (
	"cmp"
	"context"
	"database/sql"
	"encoding/json"
	"regexp"
	"time"
)

// beforeTrail comes before the first event of any trail.
const beforeTrail = -2

// An event is a row of the view task_trail.
type event struct {
	seq     int64
	name    string
	at      time.Time
	attempt int64
	detail  eventDetail
}

// eventDetail is what the column detail says, where it says it.
type eventDetail struct {
	Cause string `json:"cause"`
	Error string `json:"error"`
	Next  int64  `json:"next_run_at"` // Unix ms
}

// readTrail returns the events of a task after one that is known.
func readTrail(ctx context.Context, db *sql.DB, task, after int64) ([]event, error) {
	rows, err := db.QueryContext(ctx, `
select seq, event, at, coalesce(attempt, 0), coalesce(detail, '{}')
from task_trail where task_id = ? and seq > ? order by seq`, task, after)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	var es []event
	for rows.Next() {
		var e event
		var at int64
		var detail string
		if err := rows.Scan(&e.seq, &e.name, &at, &e.attempt, &detail); err != nil {
			return nil, err
		}
		if err := json.Unmarshal([]byte(detail), &e.detail); err != nil {
			return nil, err
		}
		e.at = time.UnixMilli(at)
		es = append(es, e)
	}
	return es, rows.Err()
}

// why says in one line what led to the event, or nothing where it needs no reason.
func (e event) why() string {
	text := shorten(cmp.Or(e.detail.Error, e.detail.Cause))
	switch {
	case e.detail.Error != "" && e.detail.Cause != "":
		text += " (" + e.detail.Cause + ")"
	case e.detail.Next != 0:
		text += "; again in " + brief(time.UnixMilli(e.detail.Next).Sub(e.at))
	}
	return text
}

// localHost is the beginning of each of the demo's URLs.
var localHost = regexp.MustCompile(`http://127\.0\.0\.1:\d+`)

// shorten makes an error fit a line of a terminal.
func shorten(text string) string { return clip(localHost.ReplaceAllString(text, ""), 120) }
