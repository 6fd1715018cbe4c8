package taskbox

import (
	"context"
	"database/sql/driver"
	"fmt"
	"strconv"
	"strings"
	"time"

	"modernc.org/sqlite"
)

// gatedDriver is what tells a pool of ours from others.
type gatedDriver struct {
	driver.Driver // modernc's
	gate          *gate
}

// gatedConnector opens modernc's connections and puts the gate in front of them.
type gatedConnector struct {
	driver.Connector // modernc's
	driver           *gatedDriver
	immediate        bool // transactions begin with the write lock
}

func (c *gatedConnector) Driver() driver.Driver { return c.driver }

func (c *gatedConnector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	inner, ok := conn.(sqliteConn)
	if !ok {
		conn.Close()
		return nil, fmt.Errorf("%T lacks methods that it had in v1.62.0; use that version, or one that this library was tested with", conn)
	}
	return &gatedConn{sqliteConn: inner, gate: c.driver.gate, immediate: c.immediate}, nil
}

// sqliteConn is all that a connection of modernc's can do: what database/sql looks
// for, and what applications reach through [sql.Conn.Raw].
type sqliteConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.Pinger
	driver.SessionResetter
	driver.Validator

	Exec(query string, args []driver.Value) (driver.Result, error)
	Query(query string, args []driver.Value) (driver.Rows, error)

	ColumnInfo(query string) ([]sqlite.ColumnInfo, error)
	Deserialize(buf []byte) error
	FileControlDataVersion(dbName string) (uint32, error)
	FileControlPersistWAL(dbName string, mode int) (int, error)
	IsReadOnly(schema string) (bool, error)
	NewBackup(dstURI string) (*sqlite.Backup, error)
	NewRestore(srcURI string) (*sqlite.Backup, error)
	RegisterAuthorizer(fn sqlite.AuthorizerFn) error
	RegisterCommitHook(fn sqlite.CommitHookFn)
	RegisterPreUpdateHook(fn sqlite.PreUpdateHookFn)
	RegisterRollbackHook(fn sqlite.RollbackHookFn)
	Serialize() ([]byte, error)
	Status(op sqlite.DBStatusOp, reset bool) (current, high int, err error)
}

// gatedConn is a connection that stands in line before it writes. Like every
// driver.Conn it is used by one goroutine at a time.
type gatedConn struct {
	sqliteConn
	gate      *gate
	immediate bool
	holds     bool // the gate
	inTx      bool // in a transaction of BeginTx
	inText    bool // in a transaction that a BEGIN or a SAVEPOINT as text has opened
}

// Unwrap returns modernc's connection. [sqlite.Limit] looks for it.
func (c *gatedConn) Unwrap() driver.Conn { return c.sqliteConn }

func (c *gatedConn) Close() error {
	defer c.release()
	return c.sqliteConn.Close()
}

// IsValid is asked when the connection goes back to the pool. Whoever left a
// transaction open there, begun as text, doesn't keep the gate.
func (c *gatedConn) IsValid() bool {
	c.release()
	return c.sqliteConn.IsValid()
}

func (c *gatedConn) ResetSession(ctx context.Context) error {
	c.release()
	return c.sqliteConn.ResetSession(ctx)
}

func (c *gatedConn) release() {
	if c.holds {
		c.holds = false
		c.gate.release()
	}
}

// finish releases the gate and tells of a commit. The commit counts before the next
// in line can make its own.
func (c *gatedConn) finish(committed bool) {
	if committed {
		c.gate.commits.Add(1)
	}
	c.release()
	if committed {
		c.gate.notify()
	}
}

func (c *gatedConn) Begin() (driver.Tx, error) {
	return c.BeginTx(context.Background(), driver.TxOptions{})
}

func (c *gatedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	begin := func() (driver.Tx, error) { return c.sqliteConn.BeginTx(ctx, opts) }
	var tx driver.Tx
	var err error
	gated := !opts.ReadOnly && c.immediate && !c.busy()
	if gated {
		tx, err = inLine(ctx, c, begin)
	} else {
		tx, err = begin()
	}
	if err != nil {
		if gated {
			c.release()
		}
		return nil, err
	}
	c.inTx = true
	return &gatedTx{Tx: tx, c: c, write: !opts.ReadOnly}, nil
}

// busy tells whether the connection is past the gate, or past asking for it.
func (c *gatedConn) busy() bool { return c.holds || c.inTx || c.inText }

type gatedTx struct {
	driver.Tx
	c     *gatedConn
	write bool
}

func (t *gatedTx) Commit() error {
	err := t.Tx.Commit() // rolls back when it fails
	t.end(err == nil && t.write)
	return err
}

func (t *gatedTx) Rollback() error {
	err := t.Tx.Rollback()
	t.end(false)
	return err
}

func (t *gatedTx) end(committed bool) {
	t.c.inTx, t.c.inText = false, false
	t.c.finish(committed)
}

// inLine runs call with the gate held, or, after busy_timeout, without it. It doesn't
// release it.
func inLine[T any](ctx context.Context, c *gatedConn, call func() (T, error)) (T, error) {
	var none T
	if held, _ := c.gate.acquire(ctx, 0); held {
		c.holds = true
		return call()
	}
	// Asked for only now, since the free gate is the usual case and anybody may set
	// the pragma.
	timeout, err := c.busyTimeout()
	if err != nil {
		return none, err
	}
	held, err := c.gate.acquire(ctx, time.Duration(timeout)*time.Millisecond)
	if err != nil {
		return none, err
	}
	c.holds = held
	if held || timeout <= 0 {
		return call()
	}
	// SQLite's part of the wait is over too.
	if err := c.setBusyTimeout(0); err != nil {
		return none, err
	}
	defer c.setBusyTimeout(timeout) // touches no file, so that it can't fail
	return call()
}

func (c *gatedConn) busyTimeout() (int64, error) {
	rows, err := c.sqliteConn.QueryContext(context.Background(), "pragma busy_timeout", nil)
	if err != nil {
		return 0, err
	}
	defer rows.Close()
	row := make([]driver.Value, 1)
	if err := rows.Next(row); err != nil {
		return 0, err
	}
	ms, _ := row[0].(int64)
	return ms, nil
}

func (c *gatedConn) setBusyTimeout(ms int64) error {
	_, err := c.sqliteConn.ExecContext(context.Background(), "pragma busy_timeout = "+strconv.FormatInt(ms, 10), nil)
	return err
}

func (c *gatedConn) Exec(query string, args []driver.Value) (driver.Result, error) {
	return c.ExecContext(context.Background(), query, namedValues(args))
}

func (c *gatedConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	if c.inTx {
		return c.sqliteConn.ExecContext(ctx, query, args)
	}
	return c.exec(ctx, statementOf(query), func() (driver.Result, error) {
		return c.sqliteConn.ExecContext(ctx, query, args)
	})
}

func (c *gatedConn) Query(query string, args []driver.Value) (driver.Rows, error) {
	return c.QueryContext(context.Background(), query, namedValues(args))
}

func (c *gatedConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	if c.inTx {
		return c.sqliteConn.QueryContext(ctx, query, args)
	}
	return c.query(ctx, statementOf(query), func() (driver.Rows, error) {
		return c.sqliteConn.QueryContext(ctx, query, args)
	})
}

func (c *gatedConn) Prepare(query string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), query)
}

func (c *gatedConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	st, err := c.sqliteConn.PrepareContext(ctx, query)
	if err != nil {
		return nil, err
	}
	s := statementOf(query)
	inner, ok := st.(sqliteStmt)
	if !ok || s == (statement{}) {
		return st, nil
	}
	return &gatedStmt{sqliteStmt: inner, c: c, s: s}, nil
}

// sqliteStmt is all that a statement of modernc's can do.
type sqliteStmt interface {
	driver.Stmt
	driver.StmtExecContext
	driver.StmtQueryContext
}

// gatedStmt is a prepared statement that writes, or begins or ends a transaction.
type gatedStmt struct {
	sqliteStmt
	c *gatedConn
	s statement
}

func (s *gatedStmt) Exec(args []driver.Value) (driver.Result, error) {
	return s.ExecContext(context.Background(), namedValues(args))
}

func (s *gatedStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	if s.c.inTx {
		return s.sqliteStmt.ExecContext(ctx, args)
	}
	return s.c.exec(ctx, s.s, func() (driver.Result, error) { return s.sqliteStmt.ExecContext(ctx, args) })
}

func (s *gatedStmt) Query(args []driver.Value) (driver.Rows, error) {
	return s.QueryContext(context.Background(), namedValues(args))
}

func (s *gatedStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	if s.c.inTx {
		return s.sqliteStmt.QueryContext(ctx, args)
	}
	return s.c.query(ctx, s.s, func() (driver.Rows, error) { return s.sqliteStmt.QueryContext(ctx, args) })
}

func namedValues(args []driver.Value) []driver.NamedValue {
	n := make([]driver.NamedValue, len(args))
	for i, v := range args {
		n[i] = driver.NamedValue{Ordinal: i + 1, Value: v}
	}
	return n
}

// exec runs a statement outside a transaction of BeginTx and keeps up with what it
// means for the gate.
func (c *gatedConn) exec(ctx context.Context, s statement, call func() (driver.Result, error)) (res driver.Result, err error) {
	if s == (statement{}) {
		return call()
	}
	wasIn, took := c.inText, s.takesLock() && !c.busy()
	if took {
		res, err = inLine(ctx, c, call)
	} else {
		res, err = call()
	}
	c.inText = c.textTx(s, err)
	switch {
	case c.inText: // the gate, if we have it, is held to the end
	case s.kind == kindRollback && !s.many:
		c.finish(false)
	case took || wasIn:
		c.finish(err == nil || s.writes() && ctx.Err() != nil)
	}
	return res, err
}

// textTx tells whether a transaction that was begun as text is open after s.
func (c *gatedConn) textTx(s statement, err error) bool {
	switch {
	case s.many || s.kind == kindSavepoint || err != nil:
		return c.probe()
	case s.writes():
		return c.inText
	}
	return s.kind == kindBegin || s.kind == kindBeginNow
}

// probe asks SQLite itself whether a transaction is open.
func (c *gatedConn) probe() bool {
	_, err := c.sqliteConn.ExecContext(context.Background(), probeSQL, nil)
	return err != nil && strings.Contains(err.Error(), "within a transaction")
}

// query does the same for a statement that returns rows. A write with a RETURNING
// clause commits when its rows are closed; until then it holds SQLite's lock, and so
// the gate. A WITH is mostly a read, and doesn't stand in line.
func (c *gatedConn) query(ctx context.Context, s statement, call func() (driver.Rows, error)) (driver.Rows, error) {
	switch {
	case s == (statement{}) || s == (statement{kind: kindWith}):
		return call()
	case s.many || s.kind != kindWrite:
		rows, err := call()
		wasIn := c.inText
		if c.inText = c.probe(); wasIn && !c.inText {
			c.finish(err == nil)
		}
		return rows, err
	case c.busy():
		return call()
	}
	rows, err := inLine(ctx, c, call)
	inner, ok := rows.(sqliteRows)
	if err != nil || !ok {
		c.finish(err == nil || ctx.Err() != nil)
		return rows, err
	}
	return &gatedRows{sqliteRows: inner, c: c}, nil
}

// sqliteRows is all that rows of modernc's can do.
type sqliteRows interface {
	driver.Rows
	driver.RowsColumnTypeDatabaseTypeName
	driver.RowsColumnTypeLength
	driver.RowsColumnTypeNullable
	driver.RowsColumnTypePrecisionScale
	driver.RowsColumnTypeScanType
}

type gatedRows struct {
	sqliteRows
	c      *gatedConn
	closed bool
}

func (r *gatedRows) Close() error {
	err := r.sqliteRows.Close()
	if !r.closed {
		r.closed = true
		r.c.finish(err == nil)
	}
	return err
}
