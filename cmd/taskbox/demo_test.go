package main

import (
	"context"
	"database/sql"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

// openFile opens a file that a demo has left.
func openFile(t *testing.T, path string) *sql.DB {
	t.Helper()
	db, err := taskbox.OpenDB(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// ask returns the rows of a query, each as text with | between the columns.
func ask(t *testing.T, db *sql.DB, query string, args ...any) []string {
	t.Helper()
	rows, err := db.Query(query, args...)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	cols, err := rows.Columns()
	if err != nil {
		t.Fatal(err)
	}
	all := []string{}
	for rows.Next() {
		texts := make([]sql.NullString, len(cols))
		dest := make([]any, len(cols))
		for i := range texts {
			dest[i] = &texts[i]
		}
		if err := rows.Scan(dest...); err != nil {
			t.Fatal(err)
		}
		var row []string
		for _, s := range texts {
			row = append(row, s.String)
		}
		all = append(all, strings.Join(row, "|"))
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// checkShop holds orders and tasks against each other.
func checkShop(t *testing.T, db *sql.DB) {
	t.Helper()
	for what, query := range map[string]string{
		"orders without their one task": `
select o.id, count(t.id) from orders o
left join task_outbox t on t.event_type = 'order_created' and t.payload ->> '$.order_id' = o.id
group by o.id having count(t.id) <> 1 or max(t.id) is not o.task_id or max(t.dedupe_key) is not 'order_created:' || o.id`,
		"tasks without their order": `
select t.id from task_outbox t left join orders o on o.task_id = t.id
where t.event_type = 'order_created' and o.id is null`,
		"successes without a coupon": `
select o.id from orders o join task_outbox t on t.id = o.task_id
where t.status = 'success' and o.coupon is null`,
		"coupons without their one receipt": `
select o.id, count(t.id) from orders o
left join task_outbox t on t.event_type = 'receipt_mail' and t.payload ->> '$.order_id' = o.id
where o.coupon is not null group by o.id having count(t.id) <> 1`,
		"receipts without a coupon": `
select t.id from task_outbox t left join orders o on t.payload ->> '$.order_id' = o.id
where t.event_type = 'receipt_mail' and o.coupon is null`,
		"tasks that are still held": `select id from task_outbox where owner is not null`,
	} {
		if diff := cmp.Diff([]string{}, ask(t, db, query)); diff != "" {
			t.Errorf("%s: %s", what, diff)
		}
	}
}

// A whole demo: real services, a real file, and all that is to be seen.
func TestDemo(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shop.db")
	code, stdout, stderr := taskboxRun(t, "demo", "-for", "3s", "-rate", "10", "-tiers", "200ms,400ms,800ms", "-db", path)
	if code != exitOK {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	for _, want := range []string{
		`created → queued → picked → processing → success  in \d`,
		`attempt 1: POST /coupons: 503 Service Unavailable: closed for maintenance; again in \d`,
		`429 Too Many Requests: .*; again in 1.\d s`,
		`failed → dead_letter\n +attempt \d: POST /coupons: 400 Bad Request: .* \(permanent error\)`,
		`context deadline exceeded; again in`,
		`queued → picked → processing → success  attempt 2`,
		`\nqueue length +\d+ `,
		`\naverage wait +\S+ m?s `,
		`\nfailure rate +\d+ % `,
		`\ndead letters +[1-9]\d* `,
		`\n  #\d+ +order_created for order 5, permanent error: POST /coupons: 400`,
		`\none whole trail: task #\d+, order_created for order \d+, trace [0-9a-f]{32}\n.* created\n`,
		`\none whole trail(?s:.*) retry_wait  attempt 1 (?s:.*) queued\n.* picked +attempt \d\n.* processing +attempt \d\n.* success +attempt \d\n`,
	} {
		if !regexp.MustCompile(want).MatchString(stdout) {
			t.Errorf("stdout has no %q", want)
		}
	}
	if t.Failed() {
		t.Log(stdout)
	}
	if strings.Contains(stdout, "\x1b") {
		t.Error("there are colours, and no terminal")
	}
	if !strings.Contains(stderr, "200 ms, 400 ms, 0.8 s") || !strings.Contains(stderr, "sqlite3 -box") {
		t.Errorf("stderr lacks the tiers or the hints:\n%s", stderr)
	}
	checkShop(t, openFile(t, path))
}

// What waits when a demo is stopped goes on in the next one.
func TestDemo_GoesOn(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shop.db")
	first := startDemo(t, "-db", path, "-rate", "20", "-tiers", "2s")
	first.out.wait(t, `order_created  created → .* → retry_wait\n .* 500 Internal Server Error`)
	first.stop(t)
	second := startDemo(t, "-db", path, "-rate", "0", "-tiers", "2s")
	second.errs.wait(t, `An earlier run has left \d+ tasks?; they go on now`)
	second.out.wait(t, `order_created  queued → picked → processing → failed → dead_letter\n .* 500 .*failed 2 times`)
	second.stop(t)
	db := openFile(t, path)
	checkShop(t, db)
	if got := ask(t, db, `select status, attempt from task_outbox where payload ->> '$.order_id' = 2`); !cmp.Equal(got, []string{"dead_letter|2"}) {
		t.Errorf("the task of order 2: %q", got)
	}
}

// A demo that is interrupted in the middle of a handler leaves nothing half done.
func TestDemo_Interrupt(t *testing.T) {
	path := filepath.Join(t.TempDir(), "shop.db")
	d := startDemo(t, "-db", path, "-rate", "50", "-tiers", "500ms")
	d.out.wait(t, `→ processing\n`) // the slow answer
	d.stop(t)
	db := openFile(t, path)
	checkShop(t, db)
	if got := ask(t, db, `select status from task_outbox where status in ('picked', 'processing')`); len(got) > 0 {
		t.Errorf("%d tasks are unfinished", len(got))
	}
}

// A running demo answers curl, and its own addresses are the ones that it prints.
func TestDemo_Curl(t *testing.T) {
	d := startDemo(t, "-rate", "0")
	url := d.errs.wait(t, `(http://127\.0\.0\.1:\d+)/orders`)[1]
	resp, err := http.Post(url+"/orders", "application/x-www-form-urlencoded", strings.NewReader(sampleOrder))
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	d.out.wait(t, `#1 +order_created  created → .* → success`)
	d.out.wait(t, `#2 +receipt_mail   created → .* → success`)
	resp, err = http.Get(url + "/orders/1")
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	if !strings.Contains(string(body), `"coupon": "TEA-0001"`) || !strings.Contains(string(body), `"event": "success"`) {
		t.Errorf("GET /orders/1: %s", body)
	}
	file := d.errs.wait(t, `file: +(\S+)`)[1]
	d.stop(t)
	if _, err := os.Stat(filepath.Dir(file)); !os.IsNotExist(err) {
		t.Errorf("the temporary folder is still there: %v", err)
	}
}

func TestDemo_NoOrders(t *testing.T) {
	code, stdout, stderr := taskboxRun(t, "demo", "-for", "100ms", "-rate", "0")
	if code != exitOK || !strings.Contains(stdout, "there was no order") {
		t.Errorf("exit code %d\n%s\n%s", code, stdout, stderr)
	}
}

func TestDemo_BadFile(t *testing.T) {
	dir := t.TempDir()
	junk, foreign := filepath.Join(dir, "junk.db"), filepath.Join(dir, "foreign.db")
	if err := os.WriteFile(junk, []byte("this is no database, and never was one"), 0o600); err != nil {
		t.Fatal(err)
	}
	db, err := sql.Open("sqlite", foreign)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := db.Exec("create table orders (id integer primary key)"); err != nil {
		t.Fatal(err)
	}
	db.Close()
	for path, want := range map[string]string{
		dir:                              "is a directory",
		junk:                             "isn't a SQLite database",
		foreign:                          "tables of another program",
		filepath.Join(dir, "no/such.db"): "no such file or directory",
	} {
		before, _ := os.ReadFile(path)
		code, stdout, stderr := taskboxRun(t, "demo", "-for", "1s", "-db", path)
		if code != exitFailure || stdout != "" || !strings.Contains(stderr, want) {
			t.Errorf("-db %s: exit code %d, stdout %q, stderr %q", path, code, stdout, stderr)
		}
		if after, _ := os.ReadFile(path); string(before) != string(after) {
			t.Errorf("-db %s: the file was changed", path)
		}
	}
}

func TestDemo_PortInUse(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	code, _, stderr := taskboxRun(t, "demo", "-for", "1s", "-addr", l.Addr().String())
	if code != exitFailure || !strings.Contains(stderr, l.Addr().String()) || !strings.Contains(stderr, "hint: choose another address") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
}

// startedDemo is a demo that runs in the background.
type startedDemo struct {
	out, errs screen
	cancel    context.CancelFunc
	wait      func() error
}

func startDemo(t *testing.T, args ...string) *startedDemo {
	t.Helper()
	d := new(startedDemo)
	var ctx context.Context
	ctx, d.cancel = context.WithCancel(t.Context())
	d.wait = background(func() error {
		if code := run(ctx, append([]string{"demo"}, args...), strings.NewReader(""), &d.out, &d.errs); code != exitOK {
			return fmt.Errorf("exit code %d", code)
		}
		return nil
	})
	return d
}

// stop interrupts the demo as Ctrl-C does, and expects the figures.
func (d *startedDemo) stop(t *testing.T) {
	t.Helper()
	d.cancel()
	if err := d.wait(); err != nil || !strings.Contains(d.out.String(), "queue length") {
		t.Fatalf("%v\n%s\n%s", err, &d.out, &d.errs)
	}
}
