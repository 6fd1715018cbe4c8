package taskbox

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// poolInfo is what [New] has found out about the pool that it was given.
type poolInfo struct {
	path          string // absolute, of the main database; "" for memory
	memory        bool
	journalMode   string // in lower case
	synchronous   int    // 0 OFF to 3 EXTRA; the least of the connections seen
	busyTimeout   int    // ms; the least of the connections seen
	maxOpen       int    // 0: no limit
	sqliteVersion string
	driver        string // its Go type
}

const (
	// poolSample is how many connections are looked at: a PRAGMA that was executed
	// instead of put into the DSN has reached one of them.
	poolSample = 3
	// poolPatience is how long the second and third are waited for.
	poolPatience = 200 * time.Millisecond
)

// checkPool looks at a pool and returns what is unwise about it, for the log, and an
// [ErrInvalid] for what can't work. It leaves the pool and the file as they were.
func checkPool(ctx context.Context, db *sql.DB) (poolInfo, []string, error) {
	if db == nil {
		return poolInfo{}, nil, fmt.Errorf("%w: the *sql.DB is nil", ErrInvalid)
	}
	conns, err := sampleConns(ctx, db)
	if err != nil {
		return poolInfo{}, nil, poolError(ctx, "the database", err)
	}
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	info := poolInfo{maxOpen: db.Stats().MaxOpenConnections, driver: fmt.Sprintf("%T", db.Driver())}
	if err := info.readFile(ctx, conns[0]); err != nil {
		return info, nil, err
	}
	if err := info.readSettings(ctx, conns); err != nil {
		return info, nil, err
	}
	if !info.memory {
		if err := tryWrite(ctx, conns[0]); err != nil {
			return info, nil, poolError(ctx, info.name(), err)
		}
	}
	return info, info.warnings(packagesOf(db.Driver())), nil
}

// sampleConns takes one connection, and more where the pool has them to spare.
func sampleConns(ctx context.Context, db *sql.DB) ([]*sql.Conn, error) {
	first, err := db.Conn(ctx)
	if err != nil {
		return nil, err
	}
	conns := []*sql.Conn{first}
	ctx, cancel := context.WithTimeout(ctx, poolPatience)
	defer cancel()
	for len(conns) < poolSample {
		if s := db.Stats(); s.MaxOpenConnections > 0 && s.InUse >= s.MaxOpenConnections {
			break
		}
		c, err := db.Conn(ctx)
		if err != nil {
			break
		}
		conns = append(conns, c)
	}
	return conns, nil
}

func (i *poolInfo) name() string {
	if i.memory {
		return "the memory database"
	}
	return i.path
}

// readFile finds out which file it is.
func (i *poolInfo) readFile(ctx context.Context, conn *sql.Conn) error {
	if err := conn.QueryRowContext(ctx, "select sqlite_version()").Scan(&i.sqliteVersion); err != nil {
		if strings.Contains(err.Error(), "sqlite_version") { // it has no such function
			return fmt.Errorf("%w: this is no SQLite database: %w", ErrInvalid, err)
		}
		return poolError(ctx, "the database", err)
	}
	path, err := mainFile(ctx, conn)
	if err != nil {
		return poolError(ctx, "the database", err)
	}
	if path == "" {
		i.memory = true
		if i.maxOpen != 1 {
			return fmt.Errorf("%w: every connection to a memory database has a database of its own; "+
				"call db.SetMaxOpenConns(1) first, use OpenDB(\":memory:\"), or a file", ErrInvalid)
		}
		return nil
	}
	if i.path, err = filepath.Abs(path); err != nil {
		return err
	}
	if _, err := os.Stat(i.path); errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%w: %s is gone: it was deleted or moved while it was open; close the pool and open it again", ErrInvalid, i.path)
	}
	return nil
}

func mainFile(ctx context.Context, conn *sql.Conn) (string, error) {
	rows, err := conn.QueryContext(ctx, "pragma database_list")
	if err != nil {
		return "", err
	}
	defer rows.Close()
	var path string
	for rows.Next() {
		var seq int
		var name string
		var file sql.NullString
		if err := rows.Scan(&seq, &name, &file); err != nil {
			return "", err
		}
		if name == "main" {
			path = file.String
		}
	}
	return path, rows.Err()
}

// readSettings reads the file's journal mode and each connection's own settings.
func (i *poolInfo) readSettings(ctx context.Context, conns []*sql.Conn) error {
	if err := conns[0].QueryRowContext(ctx, "pragma main.journal_mode").Scan(&i.journalMode); err != nil {
		return poolError(ctx, i.name(), err)
	}
	i.journalMode = strings.ToLower(i.journalMode)
	highest := 0
	for n, conn := range conns {
		var busy, sync, queryOnly int
		err := errors.Join(
			conn.QueryRowContext(ctx, "pragma busy_timeout").Scan(&busy),
			conn.QueryRowContext(ctx, "pragma main.synchronous").Scan(&sync),
			conn.QueryRowContext(ctx, "pragma query_only").Scan(&queryOnly),
		)
		switch {
		case err != nil:
			return poolError(ctx, i.name(), err)
		case queryOnly != 0:
			return fmt.Errorf("%w: a connection to %s has query_only set, and a queue has to write; leave it out of the DSN", ErrInvalid, i.name())
		case n == 0:
			i.busyTimeout, i.synchronous = busy, sync
		}
		i.busyTimeout, i.synchronous = min(i.busyTimeout, busy), min(i.synchronous, sync)
		highest = max(highest, busy)
	}
	if i.busyTimeout > 0 || i.memory || i.maxOpen == 1 {
		return nil
	}
	what := "busy_timeout is 0: a connection fails at once when another is writing"
	if highest > 0 {
		what = fmt.Sprintf("busy_timeout is %d ms on one connection and 0 on another: a PRAGMA that is executed reaches one connection of the pool only", highest)
	}
	return fmt.Errorf("%w: %s; use OpenDB, or %s", ErrInvalid, what, i.advice())
}

// advice is how to open the pool.
func (i *poolInfo) advice() string {
	return fmt.Sprintf("sql.Open(\"sqlite\", %q); with another driver than modernc.org/sqlite, the same settings on every connection in its own way", usualDSN(i.path))
}

// warnings says what is unwise, and what to do about it. pkgs are the packages of
// the pool's driver.
func (i *poolInfo) warnings(pkgs string) []string {
	var w []string
	if name := foreignEngine(sql.Drivers(), driverByName); name != "" && strings.Contains(pkgs, "modernc.org/sqlite") {
		w = append(w, fmt.Sprintf("this program also has the SQLite driver %q: never open this file with it, "+
			"two SQLite libraries in one process undo each other's locks and lose committed data", name))
	}
	if i.memory {
		return w
	}
	if i.busyTimeout == 0 {
		w = append(w, "busy_timeout is 0: a statement fails at once while another process writes; use OpenDB, or "+i.advice())
	}
	if i.journalMode != "wal" {
		w = append(w, fmt.Sprintf("journal_mode is %s: readers and writers wait for each other, and an idle queue polls more slowly; use OpenDB, or %s", i.journalMode, i.advice()))
	}
	switch {
	case i.synchronous == 0:
		w = append(w, "synchronous is OFF: a power cut can destroy the database, tasks and business rows alike; use at least synchronous(NORMAL), or FULL so that nothing committed is lost")
	case i.synchronous == 1:
		w = append(w, "synchronous is NORMAL: a power cut can take the last commits with it, tasks together with their business rows; use synchronous(FULL) where that matters")
	}
	if fs := networkFS(i.path); fs != "" {
		w = append(w, fmt.Sprintf("the file is on %s: SQLite's locks and its WAL need a local disk, and files there have been destroyed; move it to one (in a container, a named volume)", fs))
	}
	if i.journalMode == "wal" && olderThan(i.sqliteVersion, 3, 51, 3) {
		w = append(w, fmt.Sprintf("SQLite %s can corrupt a WAL database when a checkpoint meets a commit (fixed in 3.51.3); upgrade the driver", i.sqliteVersion))
	}
	return w
}

// olderThan compares a version such as "3.51.2". What can't be read isn't older.
func olderThan(version string, want ...int) bool {
	parts := strings.Split(version, ".")
	for n, w := range want {
		if n >= len(parts) {
			return true
		}
		v, err := strconv.Atoi(parts[n])
		if err != nil || v != w {
			return err == nil && v < w
		}
	}
	return false
}

// tryWrite writes and takes it back. A transaction alone says little: SQLite begins
// one with the write lock on a file that it can only read, too. That somebody else is
// writing is no error.
func tryWrite(ctx context.Context, conn *sql.Conn) (err error) {
	if err := ctx.Err(); err != nil {
		return err
	}
	if _, err := conn.ExecContext(ctx, "begin immediate"); err != nil {
		if ctx.Err() != nil {
			discard(conn) // it may have begun
		}
		if code := sqliteCode(err) & 0xff; code == 5 || code == 6 {
			return nil
		}
		return err
	}
	defer func() {
		if _, e := conn.ExecContext(context.WithoutCancel(ctx), "rollback"); e != nil {
			discard(conn)
		}
	}()
	var version int64
	if err := conn.QueryRowContext(ctx, "pragma main.user_version").Scan(&version); err != nil {
		return err
	}
	_, err = conn.ExecContext(ctx, "pragma main.user_version = "+strconv.FormatInt(version, 10))
	return err
}

// discard keeps a connection from going back to the pool.
func discard(conn *sql.Conn) {
	conn.Raw(func(any) error { return driver.ErrBadConn })
}

func poolError(ctx context.Context, name string, err error) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("check %s: %w", name, err)
	case strings.Contains(err.Error(), "within a transaction"):
		return fmt.Errorf("%w: a connection of the pool for %s is inside a transaction that somebody began and didn't end: %w", ErrInvalid, name, err)
	}
	return explainFile(name, err)
}
