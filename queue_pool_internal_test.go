package taskbox

import (
	"context"
	"database/sql"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func openPool(t *testing.T, dsn string, maxOpen int) *sql.DB {
	t.Helper()
	db, err := sql.Open("sqlite", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	db.SetMaxOpenConns(maxOpen)
	return db
}

func TestCheckPool(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a b#.db")
	wal := usualDSN(path)
	uri := fileURI(path, "")
	rollback := fileURI(filepath.Join(dir, "r.db"), "")
	text := filepath.Join(dir, "text.db")
	if err := os.WriteFile(text, []byte(strings.Repeat("no database\n", 500)), 0o600); err != nil {
		t.Fatal(err)
	}
	mustExec(t, openPool(t, wal, 1), "create table t(x)")
	tests := map[string]struct {
		dsn      string
		maxOpen  int
		prepare  string
		fails    string // part of the error
		warnings []string
	}{
		"good":                {dsn: wal},
		"one connection":      {dsn: wal, maxOpen: 1},
		"two connections":     {dsn: wal, maxOpen: 2},
		"memory":              {dsn: ":memory:", maxOpen: 1},
		"memory of many":      {dsn: ":memory:", fails: "SetMaxOpenConns(1)"},
		"no busy_timeout":     {dsn: uri, fails: usualDSN(path)},
		"set by hand":         {dsn: uri, prepare: "pragma busy_timeout = 4000", fails: "4000 ms on one connection and 0 on another"},
		"set by hand, of one": {dsn: uri, maxOpen: 1, prepare: "pragma busy_timeout = 4000"},
		"no timeout, of one":  {dsn: uri, maxOpen: 1, warnings: []string{"busy_timeout is 0"}},
		"rollback journal":    {dsn: rollback + "?_pragma=busy_timeout(1)", warnings: []string{"journal_mode is delete"}},
		"normal":              {dsn: uri + "?_timeout=1&_sync=1", warnings: []string{"synchronous is NORMAL"}},
		"off":                 {dsn: uri + "?_timeout=1&_sync=0", warnings: []string{"can destroy"}},
		"mode=ro":             {dsn: uri + "?_timeout=1&mode=ro", fails: "can't be written"},
		"query_only":          {dsn: uri + "?_timeout=1&_query_only=1", fails: "query_only"},
		"not a database":      {dsn: text, fails: "isn't a SQLite database"},
		"no directory":        {dsn: filepath.Join(dir, "none", "x.db"), fails: "can't be opened"},
		"open transaction":    {dsn: wal, maxOpen: 1, prepare: "begin", fails: "inside a transaction"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			db := openPool(t, tt.dsn, tt.maxOpen)
			if tt.prepare != "" {
				mustExec(t, db, tt.prepare)
			}
			info, warnings, err := checkPool(t.Context(), db)
			if n := db.Stats().InUse; n != 0 {
				t.Errorf("%d connections are still in use", n)
			}
			if tt.fails != "" {
				if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tt.fails) {
					t.Errorf("got %v, want an ErrInvalid with %q", err, tt.fails)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if len(warnings) != len(tt.warnings) {
				t.Errorf("warnings %q, want %q", warnings, tt.warnings)
			}
			for i := range min(len(warnings), len(tt.warnings)) {
				if !strings.Contains(warnings[i], tt.warnings[i]) {
					t.Errorf("warning %q, want %q", warnings[i], tt.warnings[i])
				}
			}
			if info.memory != (info.path == "") || info.maxOpen != tt.maxOpen || info.sqliteVersion == "" || info.driver != "*sqlite.Driver" {
				t.Errorf("info %+v", info)
			}
		})
	}
}

func TestCheckPool_OpenDB(t *testing.T) {
	for _, dsn := range []string{filepath.Join(t.TempDir(), "t.db"), ":memory:"} {
		db, err := OpenDB(dsn)
		if err != nil {
			t.Fatal(err)
		}
		defer db.Close()
		info, warnings, err := checkPool(t.Context(), db)
		if err != nil || len(warnings) != 0 {
			t.Errorf("%s: %q, %v", dsn, warnings, err)
		}
		if info.busyTimeout != 5000 || info.synchronous != 2 || info.memory != (dsn == ":memory:") {
			t.Errorf("%s: %+v", dsn, info)
		}
		wantGate(t, gateOf(db), false, 0)
	}
}

func TestCheckPool_Nil(t *testing.T) {
	if _, _, err := checkPool(t.Context(), nil); !errors.Is(err, ErrInvalid) {
		t.Errorf("got %v", err)
	}
}

// TestCheckPool_WhileSomebodyWrites has another connection hold the write lock.
func TestCheckPool_WhileSomebodyWrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	writer := openPool(t, usualDSN(path), 1)
	mustExec(t, writer, "begin immediate")
	db := openPool(t, fileURI(path, "")+"?_timeout=1", 2)
	if _, _, err := checkPool(t.Context(), db); err != nil {
		t.Error(err)
	}
}

func TestCheckPool_PoolInUse(t *testing.T) {
	db := openPool(t, usualDSN(filepath.Join(t.TempDir(), "t.db")), 1)
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, _, err := checkPool(ctx, db)
		done <- err
	}()
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	conn.Close()
	if _, _, err := checkPool(t.Context(), db); err != nil {
		t.Error(err)
	}
}

func TestCheckPool_FileGone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	db := openPool(t, usualDSN(path), 1)
	mustExec(t, db, "create table t(x)")
	if err := os.Rename(path, path+".old"); err != nil {
		t.Skip(err) // Windows doesn't rename an open file
	}
	if _, _, err := checkPool(t.Context(), db); !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "is gone") {
		t.Errorf("got %v", err)
	}
}

func TestPoolInfo_OldSQLite(t *testing.T) {
	i := poolInfo{path: "/x.db", journalMode: "wal", synchronous: 2, busyTimeout: 1, sqliteVersion: "3.51.2"}
	if w := i.warnings(""); len(w) != 1 || !strings.Contains(w[0], "3.51.3") {
		t.Errorf("warnings %q", w)
	}
	for v, want := range map[string]bool{"3.51.3": false, "3.54.1": false, "4.0.0": false, "3.7": true, "3.51": true, "odd": false} {
		if got := olderThan(v, 3, 51, 3); got != want {
			t.Errorf("olderThan(%s) = %v", v, got)
		}
	}
}
