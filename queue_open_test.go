package taskbox_test

import (
	"database/sql"
	"errors"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

func TestOpenDB_SettingsOnEveryConnection(t *testing.T) {
	path := filepath.ToSlash(filepath.Join(t.TempDir(), "t.db"))
	tests := []struct {
		dsn  string
		want map[string]string
	}{
		{filepath.FromSlash(path), map[string]string{"busy_timeout": "5000", "journal_mode": "wal", "synchronous": "2", "cache_size": "-8000", "foreign_keys": "0"}},
		{"file:" + path + "?_pragma=foreign_keys(1)&_timeout=70&_sync=NORMAL&_pragma=main.cache_size%3D100",
			map[string]string{"busy_timeout": "70", "journal_mode": "wal", "synchronous": "1", "cache_size": "100", "foreign_keys": "1"}},
		{"file:" + path + "?_pragma=busy_timeout%20=%2080&_pragma=synchronous(EXTRA)&_journal=DELETE",
			map[string]string{"busy_timeout": "80", "journal_mode": "delete", "synchronous": "3", "cache_size": "-8000", "foreign_keys": "0"}},
	}
	for _, tt := range tests {
		db := openDB(t, tt.dsn)
		var conns []*sql.Conn // all open at once
		for range 5 {
			conn, err := db.Conn(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			conns = append(conns, conn)
			got := map[string]string{}
			for pragma := range tt.want {
				var v string
				if err := conn.QueryRowContext(t.Context(), "pragma "+pragma).Scan(&v); err != nil {
					t.Fatal(err)
				}
				got[pragma] = v
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tt.dsn, diff)
			}
		}
		for _, conn := range conns {
			conn.Close()
		}
		db.Close()
	}
}

func openDB(t *testing.T, dsn string) *sql.DB {
	t.Helper()
	db, err := taskbox.OpenDB(dsn)
	if err != nil {
		t.Fatalf("OpenDB(%q): %v", dsn, err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

func TestOpenDB_ImmediateTransactions(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	db, other := openDB(t, path), openDB(t, "file:"+filepath.ToSlash(path)+"?_busy_timeout=1")
	tx, err := db.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	if _, err := other.Exec("create table t(x)"); err == nil {
		t.Error("a transaction has begun without the write lock")
	}
}

func TestOpenDB_Paths(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	tests := []struct{ dsn, file string }{
		{"plain.db", "plain.db"},
		{"a b?c#d%20.db", "a b?c#d%20.db"},
		{"äöü €&=+;.db", "äöü €&=+;.db"},
		{"file:uri.db", "uri.db"},
		{"file:a%20b%3Fc%23d%2520.db?_fk=1", "a b?c#d%20.db"},
		{"file:plus+and;semicolon.db", "plus+and;semicolon.db"},
		{"file://" + filepath.ToSlash(dir) + "/abs.db", "abs.db"},
		{"file://localhost" + filepath.ToSlash(dir) + "/local.db?mode=rwc", "local.db"},
		{filepath.Join(dir, "x.db"), "x.db"},
	}
	for _, tt := range tests {
		db := openDB(t, tt.dsn)
		if _, err := db.Exec("create table if not exists t(x)"); err != nil {
			t.Errorf("%s: %v", tt.dsn, err)
		}
		if _, err := os.Stat(filepath.Join(dir, tt.file)); err != nil {
			t.Errorf("%s: %v", tt.dsn, err)
		}
		db.Close()
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != len(tests)-1 { // one is used twice
		t.Errorf("%d files, %v; want %d: %v", len(entries), err, len(tests)-1, entries)
	}
}

func TestOpenDB_RelativePathStays(t *testing.T) {
	t.Chdir(t.TempDir())
	db := openDB(t, "t.db")
	if _, err := db.Exec("create table t(x)"); err != nil {
		t.Fatal(err)
	}
	t.Chdir(t.TempDir())
	for range 3 {
		conn, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if _, err := conn.ExecContext(t.Context(), "insert into t values (1)"); err != nil {
			t.Error(err)
		}
	}
}

func TestOpenDB_Memory(t *testing.T) {
	for _, dsn := range []string{":memory:", "file::memory:?_fk=1", "file:x?mode=memory", "file:/x?vfs=memdb"} {
		db := openDB(t, dsn)
		if n := db.Stats().MaxOpenConnections; n != 1 {
			t.Errorf("%s: %d connections", dsn, n)
		}
		if _, err := db.Exec("create table t(x)"); err != nil {
			t.Error(err)
		}
		for range 5 {
			if _, err := db.Exec("insert into t values (1)"); err != nil {
				t.Errorf("%s: %v", dsn, err)
			}
		}
	}
}

func TestOpenDB_ErrInvalid(t *testing.T) {
	dir := filepath.ToSlash(t.TempDir())
	good := dir + "/good.db"
	openDB(t, good).Close()
	text := dir + "/text.db"
	if err := os.WriteFile(text, []byte(strings.Repeat("this is no database\n", 500)), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(dir+"/folder", 0o700); err != nil {
		t.Fatal(err)
	}
	tests := []struct {
		dsn  string
		says string
	}{
		{"", "empty"},
		{"file:", "no path"},
		{"file:?_fk=1", "no path"},
		{"shop.db\x00", "NUL"},
		{"file:shop%00.db", "NUL"},
		{"FILE:shop.db", "lower case"},
		{"sqlite://shop.db", "write file:shop.db"},
		{"shop.db?_fk=1", `write "file:shop.db?_fk=1"`},
		{":memory:?_fk=1", `write "file::memory:?_fk=1"`},
		{"file:shop.db#x", "%23"},
		{"file:100%.db", "%25"},
		{"file://shop.db", "write file:shop.db"},
		{"file:" + good + "?_busytimeout=1", "did you mean _busy_timeout?"},
		{"file:" + good + "?colour=1", "known are _pragma, _busy_timeout"},
		{"file:" + good + "?_fk=%zz", "%zz"},
		{"file:" + good + "?_fk=1;_sync=1", "semicolon"},
		{"file:" + good + "?_fk=", "no value"},
		{"file:" + good + "?_fk=1&_fk=0", "given 2 times"},
		{"file:" + good + "?_fk=1&_foreign_keys=0", "the same"},
		{"file:" + good + "?_fk=maybe", "_fk"},
		{"file:" + good + "?_busy_timeout=5s", "_busy_timeout"},
		{"file:" + good + "?_txlock=never", "_txlock"},
		{"file:" + good + "?vfs=nowhere", "nowhere"},
		{"file:" + good + "?_pragma=" + url.QueryEscape("foreign_keys(1);drop table t"), "more than one statement"},
		{"file:" + good + "?_pragma=foreign_keys((", "syntax error"},
		{"file:" + good + "?_pragma=locking_mode(exclusive)", "locked out"},
		{"file:" + good + "?cache=shared", "shared cache"},
		{"file:" + good + "?mode=ro", "has to write"},
		{"file:" + good + "?mode=rx", "want rw or rwc"},
		{"file:" + good + "?immutable=1", "has to write"},
		{"file:" + good + "?nolock=1", "destroy"},
		{"file:" + good + "?_query_only=true", "has to write"},
		{"file:" + good + "?_pragma=query_only(1)", "can't be written"},
		{"file:" + dir + "/new.db?mode=rw", "doesn't exist"},
		{dir, "is a directory"},
		{dir + "/folder/", "is a directory"},
		{dir + "/none/shop.db", "create it first"},
		{text + "/shop.db", ""},
		{text, "isn't a SQLite database"},
	}
	for _, tt := range tests {
		db, err := taskbox.OpenDB(tt.dsn)
		if db != nil {
			db.Close()
		}
		if !errors.Is(err, taskbox.ErrInvalid) || !strings.Contains(err.Error(), tt.says) {
			t.Errorf("OpenDB(%q): %v; want an ErrInvalid with %q", tt.dsn, err, tt.says)
		}
	}
	if _, err := os.Stat(dir + "/new.db"); err == nil {
		t.Error("a refused dsn has created a file")
	}
}

func TestOpenDB_ReadOnlyFile(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may write everywhere")
	}
	path := filepath.Join(t.TempDir(), "t.db")
	openDB(t, path).Close()
	if err := os.Chmod(path, 0o400); err != nil {
		t.Fatal(err)
	}
	if _, err := taskbox.OpenDB(path); !errors.Is(err, taskbox.ErrInvalid) || !strings.Contains(err.Error(), "can't be written") {
		t.Errorf("a read-only file: %v", err)
	}
}

func TestOpenDB_ReadOnlyDirectory(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("root may write everywhere")
	}
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o500); err != nil {
		t.Fatal(err)
	}
	if _, err := taskbox.OpenDB(filepath.Join(dir, "t.db")); !errors.Is(err, taskbox.ErrInvalid) {
		t.Errorf("a read-only directory: %v", err)
	}
}

// TestOpenDB_WhileSomebodyWrites opens the file of a program that is in the middle
// of a transaction.
func TestOpenDB_WhileSomebodyWrites(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	tx, err := openDB(t, path).Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback()
	openDB(t, "file:"+filepath.ToSlash(path)+"?_busy_timeout=1")
}

func TestOpenDB_ChangesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "t.db")
	db := openDB(t, path)
	if _, err := db.Exec("pragma user_version = -7; pragma application_id = 8"); err != nil {
		t.Fatal(err)
	}
	db.Close()
	db = openDB(t, path)
	var user, app int
	if err := db.QueryRow("select user_version, application_id from pragma_user_version, pragma_application_id").Scan(&user, &app); err != nil || user != -7 || app != 8 {
		t.Errorf("user_version %d, application_id %d, %v", user, app, err)
	}
}
