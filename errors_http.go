package taskbox

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// StatusError is an HTTP response that isn't a success. See [HTTPError].
type StatusError struct {
	Code   int    // such as 503
	Status string // such as "503 Service Unavailable"
	Method string // of the request, such as "POST"; empty where it isn't known
	// URL is scheme, host and path of the last request, after redirects. The query,
	// the fragment and the user are left out: they are where secrets are.
	URL string
	// RetryAfter is the wait that the server asked for, 0 to [MaxRetryAfter].
	RetryAfter time.Duration
	// Body is the beginning of the response, at most 512 bytes of it, as one line of
	// printable text.
	Body string
}

// Error returns method, URL, status and the beginning of the body.
func (e *StatusError) Error() string {
	text := strings.TrimSpace(e.Method + " " + e.URL)
	if text != "" {
		text += ": "
	}
	text += e.Status
	if e.Body != "" {
		text += ": " + e.Body
	}
	return text
}

// HTTPError returns nil for a response with a 2xx status and a [*StatusError] for any
// other. As a handler's error it is retried when the status is 408, 425, 429, 500,
// 502, 503 or 504, no sooner than the Retry-After header says (RFC 9110 §10.2.3, in
// either form; a date is taken relative to the response's Date header, so that a
// wrong clock does no harm). Any other 4xx is permanent; what is left is retried as
// unclassified.
//
// For the error's text it reads up to 512 bytes of the body, which end up on the
// task's trail, and may wait for them as long as the request's context allows. They are
// put back: the body can still be read from its beginning, and must be closed, by the
// caller.
func HTTPError(resp *http.Response) error {
	if resp == nil {
		return errors.New("taskbox: HTTPError: the response is nil; look at the error of the request first")
	}
	if resp.StatusCode/100 == 2 {
		return nil
	}
	e := &StatusError{Code: resp.StatusCode, Status: oneLine(resp.Status)}
	if e.Status == "" {
		e.Status = strings.TrimSpace(fmt.Sprintf("%d %s", e.Code, http.StatusText(e.Code)))
	}
	if r := resp.Request; r != nil {
		e.Method, e.URL = requestLine(r)
	}
	e.RetryAfter = parseRetryAfter(resp.Header.Get("Retry-After"), resp.Header.Get("Date"), time.Now())
	e.Body = peekBody(resp)
	return e
}

func requestLine(r *http.Request) (method, where string) {
	method = r.Method
	if method == "" {
		method = http.MethodGet // see http.Request.Method
	}
	if u := r.URL; u != nil {
		where = (&url.URL{Scheme: u.Scheme, Host: u.Host, Path: u.Path, RawPath: u.RawPath}).String()
	}
	return method, where
}

// peekBody returns the beginning of the body and puts it back.
func peekBody(resp *http.Response) string {
	// The body of a 101 is the connection itself; nothing may ever come.
	if resp.Body == nil || resp.StatusCode < 200 {
		return ""
	}
	// An error comes again when the caller reads on; what there is, is shown.
	head, _ := io.ReadAll(io.LimitReader(resp.Body, maxErrorBody))
	resp.Body = struct {
		io.Reader
		io.Closer
	}{io.MultiReader(bytes.NewReader(head), resp.Body), resp.Body}
	return oneLine(string(head))
}

// oneLine makes text of others fit for a log and a terminal: valid UTF-8, printable,
// one space where there was white space.
func oneLine(s string) string {
	s = strings.Map(func(r rune) rune {
		switch {
		case unicode.IsSpace(r):
			return ' '
		case unicode.IsPrint(r):
			return r
		}
		return -1
	}, strings.ToValidUTF8(s, ""))
	return strings.Join(strings.Fields(s), " ")
}

// parseRetryAfter reads a Retry-After header: seconds, or a date, which is relative to
// the Date header, or to now where that is missing. What can't be read is 0, so that
// the schedule decides.
func parseRetryAfter(value, date string, now time.Time) time.Duration {
	value = strings.TrimSpace(value)
	seconds, err := strconv.ParseUint(value, 10, 64)
	if err == nil || errors.Is(err, strconv.ErrRange) {
		return time.Duration(min(seconds, uint64(MaxRetryAfter/time.Second))) * time.Second
	}
	until, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	if sent, err := http.ParseTime(date); err == nil {
		now = sent
	}
	return limitWait(until.Sub(now))
}

func limitWait(d time.Duration) time.Duration { return min(max(d, 0), MaxRetryAfter) }
