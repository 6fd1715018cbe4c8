package taskbox

import (
	"context"
	"database/sql"
	"encoding/json"
	"strings"
	"unicode/utf8"
)

// Bounds of what an attempt leaves on the trail, in bytes.
const (
	maxErrorText = 4 << 10
	maxStackText = 8 << 10
)

// A write is one transaction of the queue's own. It collects the audit rows and the
// minute's figures on the way and writes them at its end, in few statements.
type write struct {
	ctx     context.Context
	tx      *sql.Tx
	stmts   *stmts
	now     int64
	used    map[string]*sql.Stmt
	missing []string // texts that weren't prepared; to be made good after the transaction
	audit   []auditRow
	stats   map[statsKey]*statsRow
	groups  map[string]*errorGroup // the failures, by fingerprint
}

// auditRow is a row of task_audit, and what the log says beside it.
type auditRow struct {
	h       *held
	seq     int64
	event   string
	at      int64
	attempt int
	owner   string
	detail  *detail
	by      By // who did it by hand; empty: the queue
}

// detail is the JSON in the column of the same name. Empty fields are left out.
type detail struct {
	Cause      string          `json:"cause,omitempty"`
	Error      string          `json:"error,omitempty"`
	Class      string          `json:"class,omitempty"`
	Types      []string        `json:"types,omitempty"`
	Stack      string          `json:"stack,omitempty"`
	Next       int64           `json:"next_run_at,omitempty"`
	WasHeld    string          `json:"owner,omitempty"`
	BrokeOff   bool            `json:"broke_off,omitempty"` // by a timeout or a cancellation: the effect may have happened
	Step       string          `json:"step,omitempty"`
	Result     json.RawMessage `json:"result,omitempty"`
	Before     string          `json:"before,omitempty"`
	After      string          `json:"after,omitempty"`
	OldPayload json.RawMessage `json:"old_payload,omitempty"`
	NewPayload json.RawMessage `json:"new_payload,omitempty"`
	Verdict    VerdictKind     `json:"verdict,omitempty"`
	Risk       []string        `json:"accepted_risk,omitempty"`
	Plan       string          `json:"plan,omitempty"`
	group      *errorGroup     // of a failure
	quoting    bool            // the error's text may quote the payload: not for the log
}

// begin starts a write transaction on conn and takes the lock.
func (q *Queue) begin(ctx context.Context, conn txBeginner) (*write, error) {
	tx, err := conn.BeginTx(ctx, nil)
	if err != nil {
		return nil, err
	}
	w := &write{ctx: ctx, tx: tx, stmts: q.stmts, used: map[string]*sql.Stmt{}, stats: map[statsKey]*statsRow{}}
	if _, err := w.exec(lockSQL); err != nil {
		tx.Rollback()
		return nil, err
	}
	w.now = q.now() // after the wait for the lock
	return w, nil
}

// txBeginner is a *sql.DB or a *sql.Conn.
type txBeginner interface {
	BeginTx(context.Context, *sql.TxOptions) (*sql.Tx, error)
}

func (w *write) stmt(text string) (*sql.Stmt, error) {
	if st, ok := w.used[text]; ok {
		return st, nil
	}
	var st *sql.Stmt
	var err error
	if known := w.known(text); known != nil {
		st = w.tx.StmtContext(w.ctx, known)
	} else {
		w.missing = append(w.missing, text)
		st, err = w.tx.PrepareContext(w.ctx, text)
	}
	if err == nil {
		w.used[text] = st
	}
	return st, err
}

// known is the prepared statement, if w may use it: an application's transaction may
// be of another pool on the same file.
func (w *write) known(text string) *sql.Stmt {
	if w.stmts == nil {
		return nil
	}
	return w.stmts.get(text)
}

// exec runs a statement and returns how many rows it changed.
func (w *write) exec(text string, args ...any) (int64, error) {
	st, err := w.stmt(text)
	if err != nil {
		return 0, err
	}
	res, err := st.ExecContext(w.ctx, args...)
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}

func (w *write) query(text string, args ...any) (*sql.Rows, error) {
	st, err := w.stmt(text)
	if err != nil {
		return nil, err
	}
	return st.QueryContext(w.ctx, args...)
}

func (w *write) queryRow(text string, args []any, dest ...any) error {
	st, err := w.stmt(text)
	if err != nil {
		return err
	}
	return st.QueryRowContext(w.ctx, args...).Scan(dest...)
}

// record notes an event of a task; its row goes in with the others at the end.
func (w *write) record(h *held, event string, at int64, d *detail) {
	h.version++
	w.audit = append(w.audit, auditRow{h: h, seq: h.version, event: event, at: at, attempt: h.attempt, detail: d})
}

// commit writes what was collected and commits. After an error the caller calls
// abort: all is rolled back, or in doubt.
func (w *write) commit() error {
	if err := w.writeAudit(); err != nil {
		return err
	}
	if err := w.writeStats(); err != nil {
		return err
	}
	return w.tx.Commit()
}

// abort rolls back and takes the tasks in memory back to where they were.
func (w *write) abort() {
	w.tx.Rollback()
	for _, r := range w.audit {
		r.h.version--
	}
}

// Most rows have nothing to say beyond what happened when; binding five values
// instead of nine saves a drain a twentieth of its time.
var (
	insertPlainAudit = newBatch(`
insert or fail into main.task_audit (task_id, seq, event, at, attempt)
values `, "(?, ?, ?, ?, ?)", "")

	insertFullAudit = newBatch(`
insert or fail into main.task_audit (task_id, seq, event, at, attempt, owner, detail, actor, reason)
values `, "(?, ?, ?, ?, ?, ?, ?, ?, ?)", "")
)

func (w *write) writeAudit() error {
	var plain, full []*auditRow
	for i := range w.audit {
		if r := &w.audit[i]; r.owner == "" && r.detail == nil && r.by == (By{}) {
			plain = append(plain, r)
		} else {
			full = append(full, r)
		}
	}
	if err := w.insertAudit(insertPlainAudit, plain, (*auditRow).plain); err != nil {
		return err
	}
	return w.insertAudit(insertFullAudit, full, (*auditRow).full)
}

func (w *write) insertAudit(b *batch, rows []*auditRow, values func(*auditRow, []any) ([]any, error)) error {
	args := make([]any, 0, 9*b.largest())
	return inBatches(rows, func(part []*auditRow) (err error) {
		args = args[:0]
		for _, r := range part {
			if args, err = values(r, args); err != nil {
				return err
			}
		}
		_, err = w.exec(b.text(len(part)), args...)
		return err
	})
}

func (r *auditRow) plain(args []any) ([]any, error) {
	return append(args, r.h.id, r.seq, r.event, r.at, orNull(r.attempt)), nil
}

func (r *auditRow) full(args []any) ([]any, error) {
	args, _ = r.plain(args)
	text, err := r.detail.text()
	return append(args, orNull(r.owner), text, orNull(r.by.Actor), orNull(r.by.Reason)), err
}

func (d *detail) text() (any, error) {
	if d == nil {
		return nil, nil
	}
	b, err := json.Marshal(d)
	return string(b), err
}

// clip shortens text to at most n bytes and makes it valid UTF-8.
func clip(s string, n int) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}

// batchSizes are the numbers of rows that one statement takes. Few sizes mean few
// prepared statements; a batch of 64 costs a third less a row than 64 statements.
var batchSizes = [...]int{64, 16, 4, 1}

// A batch is a statement over many rows, with one text for each size. It says OR FAIL:
// with the usual ABORT, SQLite copies each page into a temporary file first, to take
// back a part of the statement, and we take back all of the transaction anyway.
type batch struct{ texts [len(batchSizes)]string }

func newBatch(head, row, tail string) *batch {
	b := new(batch)
	for i, n := range batchSizes {
		b.texts[i] = head + strings.Repeat(row+", ", n-1) + row + tail
	}
	return b
}

func (b *batch) largest() int { return batchSizes[0] }

func (b *batch) text(rows int) string {
	for i, n := range batchSizes {
		if n == rows {
			return b.texts[i]
		}
	}
	panic("taskbox: no statement for a batch of this size")
}

// inBatches calls fn with the items in pieces of the batch sizes, largest first.
func inBatches[T any](items []T, fn func([]T) error) error {
	for _, n := range batchSizes {
		for len(items) >= n {
			if err := fn(items[:n]); err != nil {
				return err
			}
			items = items[n:]
		}
	}
	return nil
}
