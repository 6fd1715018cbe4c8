package taskbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// Tx is what [Queue.Enqueue] inserts through: the application's transaction
// (*sql.Tx, or what wraps one: sqlx, bun, sqlc's DBTX …), or a *sql.DB or
// *sql.Conn where the insert is to be a transaction of its own.
type Tx interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
}

// lockSQL takes SQLite's write lock, or waits for it, and changes nothing. It makes
// a transaction an immediate one, whatever the pool's _txlock says.
const lockSQL = `update main.task_meta set value = value where key = ''`

// busyTries is how often a transaction is run again as a whole when the write lock
// can't be had. Each try waits for the pool's busy_timeout, so that this is about a
// minute where that has its usual 5 s.
const busyTries = 12

// Tx runs fn in an immediate transaction: it takes the write lock first, so that
// nothing which fn reads can change before it writes. It commits when fn returns nil
// and rolls back otherwise. When the lock can't be had, all of it is run again, fn
// too, so fn must have no effect outside the transaction. Cancelling ctx rolls back.
func (q *Queue) Tx(ctx context.Context, fn func(context.Context, *sql.Tx) error) error {
	for try := 1; ; try++ {
		err := q.tryTx(ctx, fn)
		if !isBusy(err) {
			return err
		}
		if try == busyTries {
			return explainBusy(err)
		}
		if err := sleep(ctx, time.Duration(try)*time.Millisecond); err != nil {
			return err
		}
	}
}

func (q *Queue) tryTx(ctx context.Context, fn func(context.Context, *sql.Tx) error) error {
	q.expectTask()
	tx, err := q.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // does nothing after a commit
	if err := takeLock(ctx, tx); err != nil {
		return err
	}
	if err := fn(ctx, tx); err != nil {
		return err
	}
	if err := tx.Commit(); err != nil {
		if errors.Is(err, sql.ErrTxDone) && ctx.Err() != nil {
			return ctx.Err() // database/sql has rolled back because of it
		}
		return err
	}
	q.wake()
	return nil
}

// takeLock makes tx a write transaction. A file without our tables has no table to
// touch: there the first write takes the lock, and nothing has been read before.
func takeLock(ctx context.Context, tx *sql.Tx) error {
	_, err := tx.ExecContext(ctx, lockSQL)
	if err != nil && strings.Contains(err.Error(), "no such table") {
		return nil
	}
	return err
}

func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return nil
	}
}

// probeSQL always fails and never changes anything; its error tells whether a
// transaction is open on the connection.
const probeSQL = `vacuum into null`

// transactional is what a transaction has and a pool or a connection hasn't.
type transactional interface {
	Commit() error
	Rollback() error
}

// connection is a *sql.Conn, or what embeds one.
type connection interface {
	Raw(func(driverConn any) error) error
}

// checkAlive returns [ErrTxLost] when tx is a transaction that SQLite has ended by
// itself: database/sql doesn't notice, and what is written next commits alone.
// See https://sqlite.org/lang_transaction.html, "Response To Errors Within A
// Transaction". Outside any transaction one task may be inserted, but several only
// on a *sql.Conn: what else there is may use another connection for each.
func checkAlive(ctx context.Context, tx Tx, tasks int) error {
	inside, err := insideTx(ctx, tx)
	if err != nil || inside {
		return err
	}
	if _, ok := tx.(transactional); ok {
		return ErrTxLost
	}
	if _, ok := tx.(connection); ok || tasks == 1 {
		return nil
	}
	return fmt.Errorf("%w: %T isn't in a transaction; begin one, or pass the *sql.DB", ErrInvalid, tx)
}

// insideTx tells whether a transaction is open on the connection of tx.
func insideTx(ctx context.Context, tx Tx) (bool, error) {
	_, err := tx.ExecContext(ctx, probeSQL)
	switch {
	case err == nil:
		return false, errors.New("the probe for a live transaction didn't fail; is this SQLite?")
	case strings.Contains(err.Error(), "within a transaction"):
		return true, nil
	case strings.Contains(err.Error(), "non-text filename"):
		return false, nil
	}
	return false, err
}

// explainBusy says what to do where SQLite says only that the database is locked.
func explainBusy(err error) error {
	switch code := sqliteCode(err); {
	case code == 517:
		return fmt.Errorf("%w: another connection has committed since this transaction first read; "+
			"roll back and run the whole transaction again, or use Queue.Tx, which begins with the write lock and does that: %w", ErrBusy, err)
	case code&0xff == 5 || code&0xff == 6:
		return fmt.Errorf("%w: another transaction holds the write lock; set busy_timeout on every connection, "+
			"begin with _txlock=immediate or Queue.Tx, and keep transactions short: %w", ErrBusy, err)
	}
	return err
}

// stmts keeps the statements of a queue prepared. database/sql prepares each again
// on every connection that it meets, once.
type stmts struct {
	db     *sql.DB
	mu     sync.Mutex
	byText map[string]*sql.Stmt // mu
}

// get returns the prepared statement, or nil where it hasn't been prepared yet: that
// takes a connection, which whoever holds a transaction in a pool of one must not ask for.
func (s *stmts) get(text string) *sql.Stmt {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.byText[text]
}

// prepare makes the statements ready for get. No transaction may be held.
func (s *stmts) prepare(ctx context.Context, texts ...string) error {
	for _, text := range texts {
		if s.get(text) != nil {
			continue
		}
		st, err := s.db.PrepareContext(ctx, text)
		if err != nil {
			return fmt.Errorf("prepare %.60q: %w", strings.TrimSpace(text), err)
		}
		s.mu.Lock()
		if old := s.byText[text]; old != nil {
			st.Close() // another goroutine was quicker
		} else {
			s.byText[text] = st
		}
		s.mu.Unlock()
	}
	return nil
}

func isNoRows(err error) bool { return errors.Is(err, sql.ErrNoRows) }
