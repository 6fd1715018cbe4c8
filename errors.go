package taskbox

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	"modernc.org/sqlite"
)

// Errors of a call, whenever it is made. They come wrapped in an error that says more;
// test for them with [errors.Is].
var (
	// ErrInvalid is returned by [New], [Queue.Enqueue] and whatever else is given a
	// wrong option, task, name, payload, delay or schedule. The text says what is
	// wrong and what would be right; trying again doesn't help.
	ErrInvalid = errors.New("taskbox: invalid argument")

	// ErrNotFound is returned by the methods that take the id of a task when the
	// file has no such task: it never had, or the task's time of retention is over.
	ErrNotFound = errors.New("taskbox: no such task")

	// ErrBusy is returned when SQLite's write lock couldn't be had: another
	// transaction held it for longer than busy_timeout (SQLITE_BUSY), or has
	// committed since this transaction first read (SQLITE_BUSY_SNAPSHOT, where
	// waiting can't help). Roll back and run the whole transaction again, or use
	// [Queue.Tx], which does.
	ErrBusy = errors.New("taskbox: database is busy")
)

// Errors when a queue is opened.
var (
	// ErrNewerSchema is returned by [New] for a file that a newer version of this
	// library has written. Nothing is changed in it; upgrade the program.
	ErrNewerSchema = errors.New("taskbox: file was written by a newer version of the library")
)

// Errors when a task is enqueued.
var (
	// ErrTxLost is returned by [Queue.Enqueue] when SQLite has already ended the
	// application's transaction by itself, as it does after a cancelled statement, a
	// full disk or an ON CONFLICT ROLLBACK. database/sql doesn't notice; an insert
	// would commit on the spot, a task without its business row, so none is made.
	// Roll back and run the whole transaction again.
	ErrTxLost = errors.New("taskbox: transaction was already ended by SQLite; roll back and run all of it again")

	// ErrPayloadTooLarge is returned by [Queue.Enqueue] when a task's JSON has more
	// bytes than [Options].MaxPayload. Store the data elsewhere and enqueue its key.
	ErrPayloadTooLarge = errors.New("taskbox: payload too large")
)

// Errors while tasks run.
var (
	// ErrRunning is returned by [Queue.Run] and Drain when one of them is already
	// running on the same [Queue].
	ErrRunning = errors.New("taskbox: queue is already running")

	// ErrFileMoved is logged by [Queue.Run] when the database file was deleted,
	// renamed or replaced under it: it claims nothing, and goes on when the file is
	// back. Where it isn't, stop the program and open the right file.
	ErrFileMoved = errors.New("taskbox: the file was moved or deleted")

	// ErrStuck is returned by [Queue.Run] when handlers ignored their cancelled
	// context. Their tasks were given back and will run again; the goroutines are
	// still there, so the process had better end.
	ErrStuck = errors.New("taskbox: handlers ignored their cancelled context; their tasks were given back")

	// ErrLeaseLost is the [context.Cause] of a handler's context when its task is
	// no longer its own: another process took it over, or a person ended it. What
	// the handler returns isn't recorded.
	ErrLeaseLost = errors.New("taskbox: lease lost")

	// ErrStopping is the [context.Cause] of a handler's context when [Queue.Run] is
	// stopping and [Options].Grace is over. An error that the handler then returns
	// gives the task back, which costs no attempt.
	ErrStopping = errors.New("taskbox: poller is stopping")
)

// Errors of operations by hand.
var (
	// ErrActorRequired is returned when [By] doesn't say who and why.
	ErrActorRequired = errors.New("taskbox: actor and reason are required")

	// ErrConflict is returned when the task has changed since the caller looked, or
	// when another living task has its key. The text names what has changed.
	ErrConflict = errors.New("taskbox: the task has changed")

	// ErrTaskRunning is returned for what can't be done to a task while it runs.
	ErrTaskRunning = errors.New("taskbox: the task is running")

	// ErrState is returned for what can't be done to a task in its state.
	ErrState = errors.New("taskbox: wrong state")

	// ErrRisk is returned by [Queue.Replay] for a task whose [Queue.Verdict] is
	// [Unknown] or [Unsafe], unless [AcceptRisk] is given. The text has the reasons.
	ErrRisk = errors.New("taskbox: a replay may repeat effects")

	// ErrNoGroup is returned by [Queue.ResolveGroup] for an unknown fingerprint.
	ErrNoGroup = errors.New("taskbox: no such error group")

	// ErrNoStep is returned when the task has begun no step of that name.
	ErrNoStep = errors.New("taskbox: no such step")
)

// Errors of steps.
var (
	// ErrInDoubt is in the error of [Step] when the step had begun in an earlier
	// attempt and nobody knows whether it happened, for types that say [Park].
	ErrInDoubt = errors.New("taskbox: step is in doubt")

	// ErrNotCommitted is the error of an attempt whose handler called
	// [Task.Complete] and returned nil, but whose transaction wasn't committed.
	ErrNotCommitted = errors.New("taskbox: the transaction that completes the task wasn't committed")
)

// MaxRetryAfter is the longest wait that [RetryAfter] and [HTTPError] ask for; more is
// cut to it, so that a bad header can't park a task for a year.
const MaxRetryAfter = 24 * time.Hour

const (
	maxErrorTypes = 16
	maxErrorBody  = 512 // bytes
)

// A Class says whether an error is worth a retry. The zero value is Unclassified.
type Class int

// The classes of errors, as [Options].Classify returns them.
const (
	// Unclassified leaves the decision to the built-in table. What that doesn't
	// know either is retried, since a dead letter needs a person and a retry doesn't.
	Unclassified Class = iota
	// ClassRetryable is an error that may pass: the task is retried as its
	// [Schedule] says, and is a dead letter when that has ended.
	ClassRetryable
	// ClassPermanent is an error that stays: the task is a dead letter at once.
	ClassPermanent
)

// String returns unclassified, retryable or permanent, the words of the trail.
func (c Class) String() string {
	switch c {
	case Unclassified:
		return "unclassified"
	case ClassRetryable:
		return "retryable"
	case ClassPermanent:
		return "permanent"
	}
	return fmt.Sprintf("Class(%d)", int(c))
}

// Permanent returns an error that makes the handler's task a dead letter at once,
// whatever err is. It has err's text and unwraps to it. Permanent(nil) is nil.
//
// The outcomes [Permanent], [Retryable], [RetryAfter], [Snooze] and [Skip] are found
// in wrapped and joined errors too, and come before [Options].Classify and the
// built-in table. Of outcomes around each other the outermost counts; of joined ones
// Permanent, then Skip, then Snooze, then Retryable; of equal ones the longest wait.
func Permanent(err error) error {
	return outcomeFor(err, verdict{kind: verdictDead, class: ClassPermanent})
}

// Retryable returns an error that has the handler's task retried as its [Schedule]
// says, whatever err is. A Retry-After that a [StatusError] in err holds still counts.
// It has err's text and unwraps to it. Retryable(nil) is nil.
func Retryable(err error) error { return RetryAfter(err, 0) }

// RetryAfter is [Retryable] with a wait: the retry comes when d has passed or when the
// schedule says, whichever is later. d is at most [MaxRetryAfter]; a negative d is 0.
func RetryAfter(err error, d time.Duration) error {
	return outcomeFor(err, verdict{kind: verdictRetry, class: ClassRetryable, after: limitWait(d)})
}

// Snooze returns an error that puts the handler's task off for d, as if the attempt
// hadn't been: it costs no attempt, and there may be any number of them. A negative
// d is 0, and it is at least 100 ms. Use it for what isn't ready yet, not for what has failed.
func Snooze(d time.Duration) error {
	return &verdictError{verdict: verdict{kind: verdictSnooze, after: max(d, 0)}}
}

// Skip returns an error that ends the handler's task as skipped: there is nothing to
// do any more, such as a mail about an order that was cancelled. The reason is on the
// trail.
func Skip(reason string) error {
	return &verdictError{verdict: verdict{kind: verdictSkip, reason: reason}}
}

func outcomeFor(err error, v verdict) error {
	if err == nil {
		return nil
	}
	return &verdictError{verdict: v, err: err}
}

// verdictError is an error on which the handler has already decided itself.
type verdictError struct {
	verdict verdict
	err     error // nil for snooze and skip
}

func (e *verdictError) Error() string {
	switch e.verdict.kind {
	case verdictSnooze:
		return fmt.Sprintf("snooze for %v", e.verdict.after)
	case verdictSkip:
		return "skip: " + e.verdict.reason
	}
	return e.err.Error()
}

func (e *verdictError) Unwrap() error { return e.err }

// PanicError is the error of an attempt whose handler panicked. Where the value is an
// error it is classified as that, otherwise it is unclassified, and so retried.
type PanicError struct {
	Value any    // what panic was called with
	Stack []byte // as [runtime/debug.Stack] returns it
}

// Error returns "panic: " and the value.
func (e *PanicError) Error() string { return fmt.Sprintf("panic: %v", e.Value) }

// Unwrap returns the value if it is an error, otherwise nil.
func (e *PanicError) Unwrap() error {
	err, _ := e.Value.(error)
	return err
}

// DecodeError is the error of a task whose payload can't be decoded as its type wants
// it. The handler isn't called; the task is a dead letter at once.
type DecodeError struct {
	Type string // the task's type
	Err  error  // of encoding/json
}

// Error names the type and what is wrong.
func (e *DecodeError) Error() string {
	return fmt.Sprintf("decode the payload of type %s: %v", e.Type, e.Err)
}

// Unwrap returns Err.
func (e *DecodeError) Unwrap() error { return e.Err }

// A verdict is what a handler's error means for its task.
type verdict struct {
	kind verdictKind
	// class is the error's: Unclassified on a retry says that nobody knew it.
	class Class
	// after is the wait of a snooze, or the least wait of a retry.
	after time.Duration
	// reason is that of a skip, or what went wrong while judging.
	reason string
}

// verdictKind is in ascending order of precedence among joined errors.
type verdictKind int

const (
	verdictDone verdictKind = iota
	verdictRetry
	verdictSnooze
	verdictSkip
	verdictDead
)

// judge decides what a handler's error means: first the outcomes that the handler
// itself has put into it, then classify, which may be nil, then the table of rules.
func judge(err error, classify func(error) Class) (v verdict) {
	if err == nil {
		return verdict{}
	}
	// classify and the methods of errors are the application's. A nil pointer in an
	// error is the usual mistake, and no reason to take the process down.
	defer func() {
		if p := recover(); p != nil {
			v = verdict{kind: verdictRetry, reason: fmt.Sprintf("judging the error panicked: %v", p)}
		}
	}()
	v, ok := explicit(err)
	if !ok {
		v = verdictOf(classOf(err, classify))
	}
	if v.kind == verdictRetry && v.after == 0 {
		v.after = statedWait(err)
	}
	return v
}

func verdictOf(c Class) verdict {
	if c == ClassPermanent {
		return verdict{kind: verdictDead, class: c}
	}
	return verdict{kind: verdictRetry, class: c}
}

// explicit returns the verdict of the outermost outcome in err; where branches of a
// joined error have one each, the one that takes precedence.
func explicit(err error) (best verdict, found bool) {
	if e, ok := err.(*verdictError); ok {
		return e.verdict, true
	}
	for _, child := range children(err) {
		v, ok := explicit(child)
		if ok && (!found || v.kind > best.kind || v.kind == best.kind && v.after > best.after) {
			best, found = v, true
		}
	}
	return best, found
}

// statedWait is the longest Retry-After in err.
func statedWait(err error) time.Duration {
	var longest time.Duration
	for e := range tree(err) {
		if s, ok := e.(*StatusError); ok {
			longest = max(longest, limitWait(s.RetryAfter))
		}
	}
	return longest
}

func classOf(err error, classify func(error) Class) Class {
	if classify != nil {
		if c := classify(err); c == ClassRetryable || c == ClassPermanent {
			return c
		}
	}
	for _, r := range rules {
		if r.matches(err) {
			return r.class
		}
	}
	return Unclassified
}

// A rule gives a class to the errors that it matches, anywhere in their tree.
type rule struct {
	class   Class
	what    string // for people: the README repeats it
	matches func(error) bool
}

// rules is the built-in classification; the first that matches decides. The permanent
// ones come first, so that of joined errors a permanent one wins: a bad parameter
// doesn't get better because the network was bad, too. It is never written to.
var rules = []rule{
	{ClassPermanent, "payload that can't be decoded", has[*DecodeError]},
	{ClassPermanent, "invalid JSON, or JSON of another type", isJSON},
	{ClassPermanent, "ErrInvalid, ErrPayloadTooLarge", isAny(ErrInvalid, ErrPayloadTooLarge)},
	{ClassPermanent, "an error whose method Permanent() returns true", saysPermanent},
	{ClassPermanent, "HTTP 4xx, except 408, 425 and 429", hasStatus(isPermanentStatus)},

	{ClassRetryable, "HTTP 408, 425, 429, 500, 502, 503, 504", hasStatus(isRetryableStatus)},
	{ClassRetryable, "deadline exceeded", isAny(context.DeadlineExceeded, os.ErrDeadlineExceeded)},
	{ClassRetryable, "timeout, by the method Timeout()", saysTimeout},
	{ClassRetryable, "connection refused, reset, aborted or broken, host or network unreachable", isAny(networkErrors...)},
	{ClassRetryable, "end of input: io.EOF, io.ErrUnexpectedEOF", isAny(io.EOF, io.ErrUnexpectedEOF)},
	{ClassRetryable, "DNS failure that is temporary or a timeout", isPassingDNS},
	{ClassRetryable, "SQLite busy or locked, ErrBusy, ErrTxLost", func(err error) bool {
		return isBusy(err) || errors.Is(err, ErrBusy) || errors.Is(err, ErrTxLost)
	}},
	{ClassRetryable, "lost database connection", isAny(sql.ErrConnDone, driver.ErrBadConn)},
}

// networkErrors are what a downstream that restarts or can't be reached looks like.
var networkErrors = []error{
	syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.ECONNABORTED, syscall.EPIPE,
	syscall.EHOSTUNREACH, syscall.ENETUNREACH,
	// On Windows sockets report Winsock's numbers, and the names above match nothing
	// there; no other system has errors as high as these.
	syscall.Errno(10051), // WSAENETUNREACH
	syscall.Errno(10053), // WSAECONNABORTED
	syscall.Errno(10054), // WSAECONNRESET
	syscall.Errno(10060), // WSAETIMEDOUT
	syscall.Errno(10061), // WSAECONNREFUSED
	syscall.Errno(10065), // WSAEHOSTUNREACH
}

func isAny(targets ...error) func(error) bool {
	return func(err error) bool {
		return slices.ContainsFunc(targets, func(t error) bool { return errors.Is(err, t) })
	}
}

func has[E error](err error) bool {
	_, ok := errors.AsType[E](err)
	return ok
}

func isJSON(err error) bool {
	return has[*json.SyntaxError](err) || has[*json.UnmarshalTypeError](err)
}

func saysPermanent(err error) bool {
	return anyOf(err, func(e interface{ Permanent() bool }) bool { return e.Permanent() })
}

func saysTimeout(err error) bool {
	return anyOf(err, func(e interface{ Timeout() bool }) bool { return e.Timeout() })
}

func isPassingDNS(err error) bool {
	return anyOf(err, func(e *net.DNSError) bool { return e.IsTemporary || e.IsTimeout })
}

func hasStatus(in func(code int) bool) func(error) bool {
	return func(err error) bool {
		return anyOf(err, func(e *StatusError) bool { return in(e.Code) })
	}
}

func isRetryableStatus(code int) bool {
	switch code {
	case 408, 425, 429, 500, 502, 503, 504:
		return true
	}
	return false
}

func isPermanentStatus(code int) bool { return code/100 == 4 && !isRetryableStatus(code) }

// anyOf tells whether a T in err's tree satisfies ok. [errors.AsType] would stop at the
// first T, such as a url.Error, and not see those behind it.
func anyOf[T any](err error, ok func(T) bool) bool {
	for e := range tree(err) {
		if t, is := e.(T); is && ok(t) {
			return true
		}
	}
	return false
}

// tree yields err and what it wraps, in the order of [errors.Is].
func tree(err error) iter.Seq[error] {
	return func(yield func(error) bool) { walk(err, yield) }
}

func walk(err error, yield func(error) bool) bool {
	if err == nil {
		return true
	}
	if !yield(err) {
		return false
	}
	for _, child := range children(err) {
		if !walk(child, yield) {
			return false
		}
	}
	return true
}

// children returns what err wraps directly.
func children(err error) []error {
	defer func() { _ = recover() }() // Unwrap of a nil pointer in an error
	switch e := err.(type) {
	case interface{ Unwrap() error }:
		return []error{e.Unwrap()}
	case interface{ Unwrap() []error }:
		return e.Unwrap()
	}
	return nil
}

// errorTypes returns the Go types in err's tree, outermost first, for the trail. Our
// own outcomes are left out.
func errorTypes(err error) []string {
	var names []string
	for e := range tree(err) {
		if _, ours := e.(*verdictError); ours {
			continue
		}
		if len(names) == maxErrorTypes {
			break
		}
		names = append(names, fmt.Sprintf("%T", e))
	}
	return names
}

// isBusy tells whether SQLite's lock couldn't be had: SQLITE_BUSY and, with a shared
// cache, SQLITE_LOCKED, in all their extended codes.
func isBusy(err error) bool {
	code := sqliteCode(err) & 0xff
	return code == 5 || code == 6
}

// sqliteCode returns the extended result code of the SQLite error in err, or 0. Errors
// of drivers other than modernc's are known by SQLite's own texts.
func sqliteCode(err error) int {
	if e, ok := errors.AsType[*sqlite.Error](err); ok {
		return e.Code()
	}
	if err == nil {
		return 0
	}
	for text, code := range map[string]int{
		"database is locked":          5,
		"attempt to write a readonly": 8,
		"unable to open database":     14,
		"file is not a database":      26,
	} {
		if strings.Contains(textOf(err), text) {
			return code
		}
	}
	return 0
}
