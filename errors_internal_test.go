package taskbox

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

var (
	unknownVerdict = verdict{kind: verdictRetry}
	retryVerdict   = verdict{kind: verdictRetry, class: ClassRetryable}
	deadVerdict    = verdict{kind: verdictDead, class: ClassPermanent}
)

func afterVerdict(d time.Duration) verdict {
	return verdict{kind: verdictRetry, class: ClassRetryable, after: d}
}

func wantVerdict(t *testing.T, err error, want verdict) {
	t.Helper()
	if got := judge(err, nil); got != want {
		t.Errorf("judge(%v) = %+v, want %+v", err, got, want)
	}
}

type saysError struct{ permanent, timeout bool }

func (e saysError) Error() string   { return "says" }
func (e saysError) Permanent() bool { return e.permanent }
func (e saysError) Timeout() bool   { return e.timeout }

func decodeErr(payload string) error {
	var v struct{ ID int }
	return json.Unmarshal([]byte(payload), &v)
}

func TestJudge_Table(t *testing.T) {
	for _, tt := range []struct {
		name string
		err  error
		want verdict
	}{
		{"nil", nil, verdict{kind: verdictDone}},

		{"payload", &DecodeError{Type: "t", Err: io.EOF}, deadVerdict},
		{"JSON syntax", decodeErr(`{`), deadVerdict},
		{"JSON type", decodeErr(`{"ID":"x"}`), deadVerdict},
		{"ErrInvalid", fmt.Errorf("%w: the delay is -1", ErrInvalid), deadVerdict},
		{"ErrPayloadTooLarge", ErrPayloadTooLarge, deadVerdict},
		{"Permanent() true", saysError{permanent: true}, deadVerdict},
		{"Permanent() true beats Timeout()", saysError{permanent: true, timeout: true}, deadVerdict},

		{"ctx deadline", context.DeadlineExceeded, retryVerdict},
		{"os deadline", os.ErrDeadlineExceeded, retryVerdict},
		{"Timeout()", saysError{timeout: true}, retryVerdict},
		{"Timeout() below one that is false", &net.OpError{Op: "dial", Err: fmt.Errorf("x: %w", saysError{timeout: true})}, retryVerdict},
		{"refused", syscall.ECONNREFUSED, retryVerdict},
		{"reset", syscall.ECONNRESET, retryVerdict},
		{"aborted", syscall.ECONNABORTED, retryVerdict},
		{"pipe", os.NewSyscallError("write", syscall.EPIPE), retryVerdict},
		{"no host", syscall.EHOSTUNREACH, retryVerdict},
		{"no net", syscall.ENETUNREACH, retryVerdict},
		{"Windows refused", &net.OpError{Op: "dial", Err: os.NewSyscallError("connectex", syscall.Errno(10061))}, retryVerdict},
		{"Windows reset", syscall.Errno(10054), retryVerdict},
		{"EOF", io.EOF, retryVerdict},
		{"unexpected EOF", io.ErrUnexpectedEOF, retryVerdict},
		{"DNS temporary", &net.DNSError{Err: "server misbehaving", IsTemporary: true}, retryVerdict},
		{"DNS timeout", &net.DNSError{Err: "timeout", IsTimeout: true}, retryVerdict},
		{"ErrBusy", ErrBusy, retryVerdict},
		{"ErrTxLost", ErrTxLost, retryVerdict},
		{"sql.ErrConnDone", sql.ErrConnDone, retryVerdict},
		{"driver.ErrBadConn", driver.ErrBadConn, retryVerdict},

		{"anything", errors.New("x"), unknownVerdict},
		{"DNS not found", &net.DNSError{Err: "no such host", IsNotFound: true}, unknownVerdict},
		{"Permanent() and Timeout() false", saysError{}, unknownVerdict},
		{"missing file", os.ErrNotExist, unknownVerdict},
		{"no rows", sql.ErrNoRows, unknownVerdict},
		{"cancelled", context.Canceled, unknownVerdict},
		{"panic", &PanicError{Value: "x"}, unknownVerdict},
		{"panic with a known error", &PanicError{Value: decodeErr(`{`)}, deadVerdict},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantVerdict(t, tt.err, tt.want)
			if tt.err != nil {
				wantVerdict(t, fmt.Errorf("charge: %w", tt.err), tt.want)
				wantVerdict(t, errors.Join(nil, errors.New("x"), tt.err), tt.want)
			}
		})
	}
}

func TestJudge_EveryStatus(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		code, _ := strconv.Atoi(r.URL.Path[1:])
		w.Header().Set("Retry-After", "90")
		w.WriteHeader(code)
	}))
	defer srv.Close()
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	for code := 200; code < 600; code++ {
		resp, err := client.Get(fmt.Sprint(srv.URL, "/", code))
		if err != nil {
			t.Fatalf("%d: %v", code, err)
		}
		got := judge(HTTPError(resp), nil)
		resp.Body.Close()
		if want := statusVerdict(code); got != want {
			t.Errorf("%d: got %+v, want %+v", code, got, want)
		}
	}
}

func statusVerdict(code int) verdict {
	switch code {
	case 408, 425, 429, 500, 502, 503, 504:
		return afterVerdict(90 * time.Second)
	}
	switch code / 100 {
	case 2:
		return verdict{}
	case 4:
		return deadVerdict
	}
	return verdict{kind: verdictRetry, after: 90 * time.Second}
}

// listenTCP serves each connection with fn, and returns the address.
func listenTCP(t *testing.T, fn func(*net.TCPConn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			fn(c.(*net.TCPConn))
		}
	}()
	return l.Addr().String()
}

func TestJudge_RealNetwork(t *testing.T) {
	closing := listenTCP(t, func(c *net.TCPConn) {
		// Closed before it has read, it may look like an idle connection instead.
		c.Read(make([]byte, 4096))
		c.Close()
	})
	resetting := listenTCP(t, func(c *net.TCPConn) { c.SetLinger(0); c.Close() })
	for name, fail := range map[string]func() error{
		"refused": func() error {
			l, err := net.Listen("tcp", "127.0.0.1:0")
			if err != nil {
				t.Fatal(err)
			}
			l.Close()
			_, err = http.Get("http://" + l.Addr().String())
			return err
		},
		"reset": func() error {
			c, err := net.Dial("tcp", resetting)
			if err != nil {
				return err
			}
			defer c.Close()
			_, err = c.Read(make([]byte, 1))
			return err
		},
		"hung up before the response": func() error {
			_, err := http.Post("http://"+closing, "text/plain", strings.NewReader("x"))
			return err
		},
		"read deadline": func() error {
			a, b := net.Pipe()
			defer a.Close()
			defer b.Close()
			a.SetReadDeadline(time.Unix(1, 0))
			_, err := a.Read(make([]byte, 1))
			return err
		},
		"context deadline": func() error {
			ctx, cancel := context.WithDeadline(t.Context(), time.Unix(1, 0))
			defer cancel()
			req, _ := http.NewRequestWithContext(ctx, "GET", "http://"+closing, nil)
			_, err := http.DefaultClient.Do(req)
			return err
		},
		"broken pipe": func() error {
			r, w, err := os.Pipe()
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			r.Close()
			_, err = w.Write([]byte("x"))
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := fail()
			if err == nil {
				t.Fatal("no error")
			}
			wantVerdict(t, err, retryVerdict)
		})
	}
}

// openTwice opens a file twice, with a transaction that holds the write lock in the
// first.
func openTwice(t *testing.T) (holder *sql.Tx, other *sql.DB) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "x.db")
	var dbs [2]*sql.DB
	for i := range dbs {
		db, err := sql.Open("sqlite", "file:"+file+"?_pragma=journal_mode(wal)")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { db.Close() })
		dbs[i] = db
	}
	if _, err := dbs[0].Exec(`create table x (n integer unique) strict; insert into x values (1)`); err != nil {
		t.Fatal(err)
	}
	tx, err := dbs[0].Begin()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tx.Rollback() })
	return tx, dbs[1]
}

func TestJudge_SQLite(t *testing.T) {
	holder, other := openTwice(t)
	reader, err := other.Begin()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Rollback()
	var n int
	if err := reader.QueryRow(`select n from x`).Scan(&n); err != nil {
		t.Fatal(err)
	}
	if _, err := holder.Exec(`insert into x values (2)`); err != nil {
		t.Fatal(err)
	}
	_, busy := other.Exec(`insert into x values (3)`)
	if err := holder.Commit(); err != nil {
		t.Fatal(err)
	}
	_, snapshot := reader.Exec(`insert into x values (3)`)
	_, unique := other.Exec(`insert into x values (1)`)
	for _, tt := range []struct {
		name string
		err  error
		code int
		busy bool
		want verdict
	}{
		{"busy", busy, 5, true, retryVerdict},
		{"busy snapshot", snapshot, 517, true, retryVerdict},
		{"unique", unique, 2067, false, unknownVerdict},
		{"none", errors.New("x"), 0, false, unknownVerdict},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := fmt.Errorf("insert: %w", tt.err)
			if got := sqliteCode(err); got != tt.code {
				t.Errorf("sqliteCode(%v) = %d, want %d", err, got, tt.code)
			}
			if got := isBusy(err); got != tt.busy {
				t.Errorf("isBusy(%v) = %v, want %v", err, got, tt.busy)
			}
			wantVerdict(t, err, tt.want)
		})
	}
	if sqliteCode(nil) != 0 || isBusy(nil) {
		t.Error("nil has a code")
	}
}

func TestJudge_Outcomes(t *testing.T) {
	e, bad := errors.New("x"), decodeErr(`{`)
	status := &StatusError{Code: 503, RetryAfter: time.Minute}
	skip := verdict{kind: verdictSkip, reason: "gone"}
	snooze := verdict{kind: verdictSnooze, after: time.Hour}
	for _, tt := range []struct {
		name string
		err  error
		want verdict
	}{
		{"Permanent", Permanent(e), deadVerdict},
		{"Permanent of a retryable", Permanent(io.EOF), deadVerdict},
		{"Permanent of a status", Permanent(status), deadVerdict},
		{"Retryable", Retryable(e), retryVerdict},
		{"Retryable of a permanent", Retryable(bad), retryVerdict},
		{"Retryable keeps Retry-After", Retryable(status), afterVerdict(time.Minute)},
		{"RetryAfter", RetryAfter(e, time.Minute), afterVerdict(time.Minute)},
		{"RetryAfter over the header", RetryAfter(status, time.Second), afterVerdict(time.Second)},
		{"RetryAfter negative", RetryAfter(e, -time.Minute), retryVerdict},
		{"RetryAfter a year", RetryAfter(e, 365*24*time.Hour), afterVerdict(MaxRetryAfter)},
		{"Snooze", Snooze(time.Hour), snooze},
		{"Snooze a year", Snooze(8760 * time.Hour), verdict{kind: verdictSnooze, after: 8760 * time.Hour}},
		{"Snooze negative", Snooze(-1), verdict{kind: verdictSnooze}},
		{"Skip", Skip("gone"), skip},
		{"Skip without a reason", Skip(""), verdict{kind: verdictSkip}},
		{"panic(Permanent)", &PanicError{Value: Permanent(e)}, deadVerdict},

		{"outermost: Retryable", Retryable(fmt.Errorf("x: %w", Permanent(e))), retryVerdict},
		{"outermost: Permanent", Permanent(fmt.Errorf("x: %w", Snooze(time.Hour))), deadVerdict},
		{"outermost: RetryAfter", RetryAfter(RetryAfter(e, time.Hour), time.Second), afterVerdict(time.Second)},
		{"outermost around Join", Retryable(errors.Join(e, Permanent(e))), retryVerdict},

		{"Join: Permanent over Skip", errors.Join(Skip("gone"), Permanent(e)), deadVerdict},
		{"Join: Permanent over Retryable", errors.Join(RetryAfter(e, time.Hour), e, Permanent(e)), deadVerdict},
		{"Join: Skip over Snooze", errors.Join(Snooze(time.Hour), Skip("gone")), skip},
		{"Join: Snooze over RetryAfter", errors.Join(Snooze(time.Hour), RetryAfter(e, 2*time.Hour)), snooze},
		{"Join: longest RetryAfter", errors.Join(Retryable(e), RetryAfter(e, time.Hour), RetryAfter(e, time.Second)), afterVerdict(time.Hour)},
		{"Join: longest Snooze", errors.Join(Snooze(1), Snooze(time.Hour)), snooze},
		{"Join: outcome over the table", errors.Join(bad, Retryable(e)), retryVerdict},
		{"Join: Skip over a plain error", errors.Join(e, Skip("gone")), skip},

		{"Join: permanent by table wins", errors.Join(io.EOF, bad), deadVerdict},
		{"Join: permanent status wins", errors.Join(status, &StatusError{Code: 404}), deadVerdict},
		{"Join: retryable over unknown", errors.Join(e, io.EOF), retryVerdict},
		{"Join: longest header", errors.Join(&StatusError{Code: 503, RetryAfter: 1}, status, &StatusError{Code: 429}), afterVerdict(time.Minute)},

		{"status made by hand", &StatusError{Code: 429, RetryAfter: -time.Hour}, retryVerdict},
		{"status made by hand, a year", &StatusError{Code: 429, RetryAfter: 8760 * time.Hour}, afterVerdict(MaxRetryAfter)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			wantVerdict(t, tt.err, tt.want)
			wantVerdict(t, fmt.Errorf("a: %w", fmt.Errorf("b: %w", tt.err)), tt.want)
			wantVerdict(t, fmt.Errorf("%w and %w", nil, tt.err), tt.want)
		})
	}
}

func TestJudge_Classify(t *testing.T) {
	e := errors.New("x")
	status := &StatusError{Code: 404, RetryAfter: time.Minute}
	for _, tt := range []struct {
		name string
		err  error
		says Class
		want verdict
	}{
		{"permanent over the table", io.EOF, ClassPermanent, deadVerdict},
		{"retryable over the table", decodeErr(`{`), ClassRetryable, retryVerdict},
		{"retryable with a header", status, ClassRetryable, afterVerdict(time.Minute)},
		{"unclassified: the table", io.EOF, Unclassified, retryVerdict},
		{"unclassified: unknown", e, Unclassified, unknownVerdict},
		{"out of range: the table", decodeErr(`{`), 99, deadVerdict},
		{"the handler's outcome first", Retryable(e), ClassPermanent, retryVerdict},
		{"the handler's outcome first, wrapped", fmt.Errorf("x: %w", Permanent(e)), ClassRetryable, deadVerdict},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := judge(tt.err, func(err error) Class {
				if err != tt.err {
					t.Errorf("Classify was given %v, want the handler's error as it is", err)
				}
				return tt.says
			})
			if got != tt.want {
				t.Errorf("got %+v, want %+v", got, tt.want)
			}
		})
	}
	if v := judge(nil, func(error) Class { panic("asked about nil") }); v.kind != verdictDone {
		t.Errorf("nil is %+v", v)
	}
}

type pointerError struct{ err error }

func (e *pointerError) Error() string   { return e.err.Error() }
func (e *pointerError) Unwrap() error   { return e.err }
func (e *pointerError) Permanent() bool { return e.err != nil }

// TestJudge_Panics checks that errors which panic, above all nil pointers, can't take
// the process down.
func TestJudge_Panics(t *testing.T) {
	for name, v := range map[string]verdict{
		"classify":    judge(errors.New("x"), func(error) Class { panic("oh") }),
		"nil pointer": judge((*pointerError)(nil), nil),
		"wrapped":     judge(fmt.Errorf("a: %w", (*pointerError)(nil)), nil),
		"nil status":  judge((*StatusError)(nil), nil),
	} {
		if v.kind != verdictRetry || v.class != Unclassified {
			t.Errorf("%s: got %+v, want a retry, unclassified", name, v)
		}
	}
	v := judge(errors.New("x"), func(error) Class { panic("oh") })
	if want := "judging the error panicked: oh"; v.reason != want {
		t.Errorf("reason %q, want %q", v.reason, want)
	}
	if got := errorTypes((*pointerError)(nil)); len(got) != 1 {
		t.Errorf("errorTypes of a nil pointer: %q", got)
	}
}

func TestRules_Named(t *testing.T) {
	seen := map[string]bool{}
	last := ClassPermanent
	for _, r := range rules {
		if r.what == "" || seen[r.what] || r.matches == nil {
			t.Errorf("rule %q is nameless, twice or empty", r.what)
		}
		if r.class > last {
			t.Errorf("rule %q: a permanent rule after a retryable one doesn't win in a joined error", r.what)
		}
		if r.matches(errors.New("x")) {
			t.Errorf("rule %q matches anything", r.what)
		}
		seen[r.what], last = true, r.class
	}
}

func TestErrorTypes(t *testing.T) {
	deep := error(io.EOF)
	for range 40 {
		deep = fmt.Errorf("x: %w", deep)
	}
	for _, tt := range []struct {
		name string
		err  error
		want []string
	}{
		{"nil", nil, nil},
		{"plain", io.EOF, []string{"*errors.errorString"}},
		{"ours left out", Permanent(fmt.Errorf("x: %w", Retryable(syscall.EPIPE))), []string{"*fmt.wrapError", "syscall.Errno"}},
		{"snooze", Snooze(1), nil},
		{"panic", &PanicError{Value: io.EOF}, []string{"*taskbox.PanicError", "*errors.errorString"}},
		{"join", errors.Join(&StatusError{}, saysError{}), []string{"*errors.joinError", "*taskbox.StatusError", "taskbox.saysError"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, errorTypes(tt.err)); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	if got := len(errorTypes(deep)); got != maxErrorTypes {
		t.Errorf("%d types of a deep error, want %d", got, maxErrorTypes)
	}
}

func TestParseRetryAfter(t *testing.T) {
	now := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	const (
		date   = "Sun, 01 Mar 2020 00:00:00 GMT"
		minute = "Sun, 01 Mar 2020 00:01:00 GMT"
	)
	for _, tt := range []struct {
		value, date string
		want        time.Duration
	}{
		{"", "", 0},
		{"0", "", 0},
		{"120", "", 2 * time.Minute},
		{" 120 ", "", 2 * time.Minute},
		{"000120", date, 2 * time.Minute},
		{"86400", "", MaxRetryAfter},
		{"86401", "", MaxRetryAfter},
		{"31536000", "", MaxRetryAfter},
		{"9999999999999999999", "", MaxRetryAfter},
		{strings.Repeat("9", 1000), "", MaxRetryAfter},

		{"-1", "", 0},
		{"-9999999999999999999", "", 0},
		{"+5", "", 0},
		{"1.5", "", 0},
		{"1e9", "", 0},
		{"0x10", "", 0},
		{"1_000", "", 0},
		{"soon", "", 0},
		{"١٢٠", "", 0},
		{"120, 240", "", 0},
		{"12\x000", "", 0},

		{minute, date, time.Minute},
		{"Sunday, 01-Mar-20 00:01:00 GMT", date, time.Minute},
		{"Sun Mar  1 00:01:00 2020", date, time.Minute},
		{date, minute, 0},
		{minute, "", 0}, // long past for us
		{minute, "garbage", 0},
		{"Sun, 01 Mar 2026 12:30:00 GMT", "", 30 * time.Minute},
		{"Sun, 01 Mar 2026 12:30:00 GMT", "garbage", 30 * time.Minute},
		{"Fri, 31 Dec 9999 23:59:59 GMT", date, MaxRetryAfter},
		{"Mon, 01 Jan 0001 00:00:00 GMT", date, 0},
	} {
		if got := parseRetryAfter(tt.value, tt.date, now); got != tt.want {
			t.Errorf("Retry-After %.40q, Date %q: got %v, want %v", tt.value, tt.date, got, tt.want)
		}
	}
}

func FuzzParseRetryAfter(f *testing.F) {
	for _, seed := range []string{"", "120", "-1", "9999999999999999999", "Sun, 01 Mar 2020 00:00:00 GMT", "Fri, 31 Dec 9999 23:59:59 GMT"} {
		f.Add(seed, "Sun, 01 Mar 2020 00:00:00 GMT", int64(0))
		f.Add(seed, "", int64(1)<<62)
	}
	f.Fuzz(func(t *testing.T, value, date string, now int64) {
		d := parseRetryAfter(value, date, time.Unix(now, 0))
		if d < 0 || d > MaxRetryAfter {
			t.Errorf("Retry-After %q, Date %q, now %d: %v is out of range", value, date, now, d)
		}
		if d%time.Second != 0 {
			t.Errorf("Retry-After %q: %v isn't whole seconds, which is all the header can say", value, d)
		}
	})
}
