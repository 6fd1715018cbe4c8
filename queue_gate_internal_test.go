package taskbox

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"modernc.org/sqlite"
)

func TestGate_FirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := new(gate)
		hold(t, g)
		var order []int // by the gate
		var wg sync.WaitGroup
		for i := range 10 {
			wg.Go(func() {
				hold(t, g)
				order = append(order, i)
				g.release()
			})
			synctest.Wait()
		}
		if n := g.waiting(); n != 10 {
			t.Errorf("waiting() = %d, want 10", n)
		}
		g.release()
		wg.Wait()
		if !slices.IsSorted(order) || len(order) != 10 {
			t.Errorf("order = %v", order)
		}
		if g.held || g.waiting() != 0 {
			t.Errorf("held %v, %d waiting after all have gone", g.held, g.waiting())
		}
	})
}

func TestGate_NoStarvation(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := new(gate)
		var turns atomic.Int32
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				hold(t, g)
				turns.Add(1)
				time.Sleep(time.Millisecond)
				g.release()
				select {
				case <-stop:
					return
				default:
				}
			}
		})
		for range 100 {
			time.Sleep(100 * time.Microsecond) // into the middle of a turn
			before := turns.Load()
			hold(t, g)
			if n := turns.Load() - before; n > 1 {
				t.Fatalf("the loop had %d turns while another waited", n)
			}
			g.release()
		}
		close(stop)
		wg.Wait()
	})
}

func TestGate_WaiterGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := new(gate)
		hold(t, g)
		ctx, cancel := context.WithCancel(t.Context())
		results := make([]string, 3)
		var wg sync.WaitGroup
		wait := func(i int, ctx context.Context, timeout time.Duration) {
			wg.Go(func() {
				held, err := g.acquire(ctx, timeout)
				results[i] = fmt.Sprint(held, err)
			})
			synctest.Wait()
		}
		wait(0, ctx, time.Hour)
		wait(1, t.Context(), time.Second)
		wait(2, t.Context(), time.Hour)
		cancel()
		time.Sleep(2 * time.Second)
		if n := g.waiting(); n != 1 {
			t.Errorf("waiting() = %d, want the third only", n)
		}
		g.release()
		wg.Wait()
		want := []string{"false context canceled", "false <nil>", "true <nil>"}
		if !slices.Equal(results, want) {
			t.Errorf("got %q, want %q", results, want)
		}
		g.release()
		if held, err := g.acquire(t.Context(), 0); !held || err != nil {
			t.Errorf("the free gate: %v, %v", held, err)
		}
		if held, err := g.acquire(t.Context(), 0); held || err != nil {
			t.Errorf("the taken gate without patience: %v, %v", held, err)
		}
	})
}

// TestGate_GivingUpAtTheTurn has waiters end while the gate is being handed over.
func TestGate_GivingUpAtTheTurn(t *testing.T) {
	g := new(gate)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for i := range 500 {
				ctx, cancel := context.WithCancel(context.Background())
				if i%2 == 0 {
					go cancel()
				}
				held, err := g.acquire(ctx, time.Duration(i%3)*time.Microsecond)
				if held {
					g.release()
				}
				if held && err != nil {
					t.Error("held with an error")
				}
				cancel()
			}
		})
	}
	wg.Wait()
	if g.held || g.waiting() != 0 {
		t.Errorf("held %v, %d waiting after all have gone", g.held, g.waiting())
	}
}

func hold(t *testing.T, g *gate) {
	t.Helper()
	if held, err := g.acquire(context.Background(), time.Hour); !held || err != nil {
		t.Errorf("acquire: %v, %v", held, err)
	}
}

// openGated opens a fresh database with a table.
func openGated(t *testing.T, params string) (*sql.DB, *gate) {
	t.Helper()
	db, err := OpenDB("file:" + filepath.ToSlash(filepath.Join(t.TempDir(), "t.db")) + params)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	mustExec(t, db, "create table t(x)")
	return db, gateOf(db)
}

type execer interface {
	ExecContext(context.Context, string, ...any) (sql.Result, error)
}

func mustExec(t *testing.T, e execer, query string) {
	t.Helper()
	if _, err := e.ExecContext(context.Background(), query); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

func (g *gate) taken() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.held
}

func wantGate(t *testing.T, g *gate, taken bool, commits uint64) {
	t.Helper()
	if g.taken() != taken || g.commits.Load() != commits {
		t.Errorf("taken %v, %d commits; want %v, %d", g.taken(), g.commits.Load(), taken, commits)
	}
}

func TestGate_Statements(t *testing.T) {
	type step struct {
		text    string
		held    bool // afterwards
		commits uint64
		fails   bool
	}
	tests := map[string][]step{
		"writes": {
			{text: "insert into t values (1)", commits: 1},
			{text: " -- why\n /* because */ ; UPDATE t set x = 2", commits: 2},
			{text: "with a as (select 1) delete from t", commits: 3},
			{text: "replace into t values (';')", commits: 4},
			{text: "insert into nowhere values (1)", commits: 4, fails: true},
			{text: "select * from t", commits: 4},
		},
		"immediate": {
			{text: "Begin /* now */ Immediate", held: true},
			{text: "insert into t values (1)", held: true},
			{text: "begin immediate", held: true, fails: true},
			{text: "savepoint s", held: true},
			{text: "rollback to s", held: true},
			{text: "rollback transaction to savepoint s", held: true},
			{text: "release s", held: true},
			{text: "commit", commits: 1},
			{text: "commit", commits: 1, fails: true},
		},
		"exclusive and back": {
			{text: "begin exclusive transaction", held: true},
			{text: "insert into t values (1)", held: true},
			{text: "ROLLBACK;"},
			{text: "rollback", fails: true},
		},
		"deferred": {
			{text: "begin"},
			{text: "insert into t values (1)"},
			{text: "insert into t values (1)"},
			{text: "end", commits: 1},
			{text: "insert into t values (1)", commits: 2},
		},
		"savepoint": {
			{text: "savepoint a"},
			{text: "insert into t values (1)"},
			{text: "savepoint b"},
			{text: "release b"},
			{text: "insert into t values (1)"},
			{text: "release a", commits: 1},
			{text: "insert into t values (1)", commits: 2},
		},
		"many": {
			{text: "begin immediate; insert into t values (1); commit;", commits: 1},
			{text: "insert into t values (1); insert into t values (2)", commits: 2},
			{text: "begin immediate; insert into t values (1)", held: true, commits: 2},
			{text: "commit; begin immediate; rollback", commits: 3},
			{text: "select 1; begin", commits: 3},
			{text: "insert into t values (1)", commits: 3},
			{text: "end", commits: 4},
		},
		"ended by SQLite": {
			{text: "create unique index u on t(x)"},
			{text: "begin immediate", held: true},
			{text: "insert into t values (1)", held: true},
			{text: "insert or rollback into t values (1)", fails: true},
			{text: "insert into t values (2)", commits: 1},
		},
	}
	for name, steps := range tests {
		for _, prepared := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/prepared=%v", name, prepared), func(t *testing.T) {
				db, g := openGated(t, "")
				conn, err := db.Conn(t.Context())
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				for _, s := range steps {
					var st *sql.Stmt
					if prepared {
						st, err = conn.PrepareContext(t.Context(), s.text)
						if err == nil {
							_, err = st.ExecContext(t.Context())
							st.Close()
						}
					} else {
						_, err = conn.ExecContext(t.Context(), s.text)
					}
					if (err != nil) != s.fails {
						t.Fatalf("%s: error %v", s.text, err)
					}
					if g.taken() != s.held || g.commits.Load() != s.commits {
						t.Fatalf("after %s: taken %v, %d commits; want %v, %d", s.text, g.taken(), g.commits.Load(), s.held, s.commits)
					}
				}
			})
		}
	}
}

func TestGate_Tx(t *testing.T) {
	db, g := openGated(t, "")
	var heard int
	stop := g.listen(func() {
		heard++
		if g.taken() {
			t.Error("a listener was called with the gate held")
		}
	})

	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	wantGate(t, g, true, 0)
	mustExec(t, tx, "insert into t values (1)")
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	wantGate(t, g, false, 1)

	tx, _ = db.BeginTx(t.Context(), nil)
	mustExec(t, tx, "insert into t values (1)")
	tx.Rollback()
	wantGate(t, g, false, 1)

	tx, _ = db.BeginTx(t.Context(), &sql.TxOptions{ReadOnly: true})
	wantGate(t, g, false, 1)
	tx.Commit()
	wantGate(t, g, false, 1)

	ctx, cancel := context.WithCancel(t.Context())
	tx, _ = db.BeginTx(ctx, nil)
	wantGate(t, g, true, 1)
	cancel()
	for g.taken() { // database/sql rolls back in a goroutine
		db.PingContext(t.Context())
	}
	tx.Rollback()
	if _, err := db.BeginTx(ctx, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("BeginTx with a cancelled ctx: %v", err)
	}
	wantGate(t, g, false, 1)

	if heard != 1 {
		t.Errorf("the listener was called %d times, want 1", heard)
	}
	stop()
	mustExec(t, db, "insert into t values (1)")
	if heard != 1 {
		t.Error("the listener was called after stop")
	}
}

func TestGate_Deferred(t *testing.T) {
	db, g := openGated(t, "?_txlock=deferred")
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	wantGate(t, g, false, 0)
	mustExec(t, tx, "insert into t values (1)")
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	wantGate(t, g, false, 1)
}

func TestGate_Returning(t *testing.T) {
	db, g := openGated(t, "")
	rows, err := db.QueryContext(t.Context(), "insert into t values (1), (2) returning x")
	if err != nil {
		t.Fatal(err)
	}
	wantGate(t, g, true, 0)
	if types, err := rows.ColumnTypes(); err != nil || len(types) != 1 {
		t.Errorf("ColumnTypes: %v, %v", types, err)
	}
	rows.Next()
	rows.Close()
	wantGate(t, g, false, 1)

	st, err := db.PrepareContext(t.Context(), "update t set x = x + 1 returning x")
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	var x int
	if err := st.QueryRowContext(t.Context()).Scan(&x); err != nil || x != 2 {
		t.Errorf("got %d, %v", x, err)
	}
	wantGate(t, g, false, 2)
	if err := db.QueryRowContext(t.Context(), "insert into t values (1) on conflict do nothing returning nothing").Scan(&x); err == nil {
		t.Error("a bad query has no error")
	}
	wantGate(t, g, false, 2)
}

// TestGate_SecondConnection writes on a second connection while a transaction is
// open on the first: SQLite's own answer is BUSY, and the gate must not hang on it.
func TestGate_SecondConnection(t *testing.T) {
	db, g := openGated(t, "?_busy_timeout=30")
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, tx, "insert into t values (1)")
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.ExecContext(t.Context(), "insert into t values (2)"); !isBusy(err) {
		t.Errorf("insert: %v, want BUSY", err)
	}
	if _, err := conn.BeginTx(t.Context(), nil); !isBusy(err) {
		t.Errorf("begin: %v, want BUSY", err)
	}
	if _, err := conn.ExecContext(t.Context(), "begin immediate"); !isBusy(err) {
		t.Errorf("begin immediate: %v, want BUSY", err)
	}
	var timeout int
	if err := conn.QueryRowContext(t.Context(), "pragma busy_timeout").Scan(&timeout); err != nil || timeout != 30 {
		t.Errorf("busy_timeout = %d, %v after the wait", timeout, err)
	}
	wantGate(t, g, true, 0)
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	wantGate(t, g, false, 1)
	mustExec(t, conn, "insert into t values (2)")
	wantGate(t, g, false, 2)
}

// TestGate_WaitsForBusyTimeout measures the wait, by the clock of the bubble.
func TestGate_WaitsForBusyTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db, g := openGated(t, "")
		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		if _, err := db.BeginTx(t.Context(), nil); !isBusy(err) {
			t.Errorf("got %v, want BUSY", err)
		}
		if d := time.Since(start); d != 5*time.Second {
			t.Errorf("waited %v, want busy_timeout", d)
		}
		tx.Rollback()
		wantGate(t, g, false, 0)
	})
}

// TestGate_CourtesyOnly has the gate held by somebody who doesn't hold SQLite's lock.
func TestGate_CourtesyOnly(t *testing.T) {
	db, g := openGated(t, "?_busy_timeout=5")
	hold(t, g)
	mustExec(t, db, "insert into t values (1)")
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(); err != nil {
		t.Fatal(err)
	}
	wantGate(t, g, true, 2)
}

func TestGate_CancelledInLine(t *testing.T) {
	db, g := openGated(t, "")
	hold(t, g)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() {
		_, err := db.ExecContext(ctx, "insert into t values (1)")
		done <- err
	}()
	for g.waiting() == 0 {
		db.PingContext(t.Context())
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if g.waiting() != 0 {
		t.Error("it still stands in line")
	}
}

func TestGate_LeftOpen(t *testing.T) {
	db, g := openGated(t, "")
	db.SetMaxOpenConns(1)
	// As text on a pool of one, the connection goes back to the pool in between.
	mustExec(t, db, "begin immediate")
	wantGate(t, g, false, 0)
	mustExec(t, db, "insert into t values (1)")
	wantGate(t, g, false, 0)
	mustExec(t, db, "commit")
	wantGate(t, g, false, 1)

	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, conn, "begin immediate")
	wantGate(t, g, true, 1)
	discard(conn)
	wantGate(t, g, false, 1)
	mustExec(t, db, "insert into t values (1)")
	wantGate(t, g, false, 2)
}

func TestGate_CloseWithOpenTx(t *testing.T) {
	db, g := openGated(t, "")
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, tx, "insert into t values (1)")
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	tx.Rollback()
	wantGate(t, g, false, 0)
}

func TestGate_Writers(t *testing.T) {
	db, g := openGated(t, "?_synchronous=OFF")
	const writers, each = 6, 30
	var wg sync.WaitGroup
	for range writers {
		wg.Go(func() {
			for range each {
				tx, err := db.BeginTx(context.Background(), nil)
				if err == nil {
					_, err = tx.Exec("insert into t values (1)")
					err = errors.Join(err, tx.Commit())
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	var n int
	if err := db.QueryRow("select count(*) from t").Scan(&n); err != nil || n != writers*each {
		t.Errorf("%d rows, %v", n, err)
	}
	wantGate(t, g, false, writers*each)
}

func TestGate_Raw(t *testing.T) {
	db, _ := openGated(t, "")
	mustExec(t, db, "insert into t values (1)")
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	err = conn.Raw(func(dc any) error {
		b, err := dc.(interface {
			NewBackup(string) (*sqlite.Backup, error)
		}).NewBackup(filepath.Join(t.TempDir(), "copy.db"))
		if err != nil {
			return err
		}
		if _, err := b.Step(-1); err != nil {
			return err
		}
		return b.Finish()
	})
	if err != nil {
		t.Error(err)
	}
	if _, err := sqlite.Limit(conn, 0, -1); err != nil {
		t.Errorf("Limit: %v", err)
	}
}

// TestGatedConn_Complete fails when a new version of the driver can do more than is
// handed on.
func TestGatedConn_Complete(t *testing.T) {
	db, _ := openGated(t, "")
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	err = conn.Raw(func(dc any) error {
		c := dc.(*gatedConn)
		st, err := c.sqliteConn.Prepare("select 1 union select ?")
		if err != nil {
			return err
		}
		defer st.Close()
		rows, err := st.(driver.StmtQueryContext).QueryContext(t.Context(), []driver.NamedValue{{Ordinal: 1, Value: int64(2)}})
		if err != nil {
			return err
		}
		defer rows.Close()
		for inner, outer := range map[any]reflect.Type{
			c.sqliteConn: reflect.TypeFor[*gatedConn](),
			st:           reflect.TypeFor[*gatedStmt](),
			rows:         reflect.TypeFor[*gatedRows](),
		} {
			typ := reflect.TypeOf(inner)
			for i := range typ.NumMethod() {
				m := typ.Method(i)
				if slices.Contains([]string{"Lock", "Unlock", "TryLock"}, m.Name) { // an embedded mutex
					continue
				}
				if o, ok := outer.MethodByName(m.Name); !ok || o.Type.NumIn() != m.Type.NumIn() {
					t.Errorf("%v has %s, %v hasn't", typ, m.Name, outer)
				}
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestGateOf_ForeignPool(t *testing.T) {
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if gateOf(db) != nil {
		t.Error("a pool that isn't OpenDB's has a gate")
	}
}

func FuzzStatementOf(f *testing.F) {
	for _, s := range []string{"", "begin", "/*", "--", "/**/insert", "rollback transaction to x", ";;;", "\ufeffinsert", "begin; x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		s := statementOf(text)
		if again := statementOf(" \n-- x\n/* y */" + text); again != s {
			t.Errorf("%q: %v, after a comment %v", text, s, again)
		}
		if up := statementOf(strings.ToUpper(text)); up.kind != s.kind {
			t.Errorf("%q: %v, in upper case %v", text, s, up)
		}
	})
}

func BenchmarkGate(b *testing.B) {
	for _, gated := range []bool{false, true} {
		b.Run(fmt.Sprintf("gate=%v", gated), func(b *testing.B) {
			path := filepath.Join(b.TempDir(), "t.db")
			db, err := OpenDB("file:" + path + "?_synchronous=OFF")
			if err != nil {
				b.Fatal(err)
			}
			if !gated {
				db.Close()
				db, err = sql.Open("sqlite", "file:"+path+"?_txlock=immediate&_pragma=busy_timeout(5000)&_pragma=synchronous(OFF)&_pragma=cache_size(-8000)")
				if err != nil {
					b.Fatal(err)
				}
			}
			defer db.Close()
			if _, err := db.Exec("create table t(x)"); err != nil {
				b.Fatal(err)
			}
			st, err := db.Prepare("insert into t values (1)")
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				tx, err := db.Begin()
				if err != nil {
					b.Fatal(err)
				}
				if _, err := tx.Stmt(st).Exec(); err != nil {
					b.Fatal(err)
				}
				if err := tx.Commit(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
