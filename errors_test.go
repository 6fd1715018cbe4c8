package taskbox_test

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

func TestOutcomes_Nil(t *testing.T) {
	for name, err := range map[string]error{
		"Permanent":  taskbox.Permanent(nil),
		"Retryable":  taskbox.Retryable(nil),
		"RetryAfter": taskbox.RetryAfter(nil, time.Hour),
	} {
		if err != nil {
			t.Errorf("%s(nil) = %v, want nil", name, err)
		}
	}
}

func TestOutcomes_Text(t *testing.T) {
	base := errors.New("the cause")
	for _, tt := range []struct {
		err  error
		want string
	}{
		{taskbox.Permanent(base), "the cause"},
		{taskbox.Retryable(base), "the cause"},
		{taskbox.RetryAfter(base, time.Minute), "the cause"},
		{taskbox.Snooze(5 * time.Minute), "snooze for 5m0s"},
		{taskbox.Snooze(-time.Minute), "snooze for 0s"},
		{taskbox.Skip("the order was cancelled"), "skip: the order was cancelled"},
	} {
		if got := tt.err.Error(); got != tt.want {
			t.Errorf("got %q, want %q", got, tt.want)
		}
		if isBase := tt.want == "the cause"; errors.Is(tt.err, base) != isBase {
			t.Errorf("%q: errors.Is = %v, want %v", tt.want, !isBase, isBase)
		}
	}
}

func TestClass_String(t *testing.T) {
	for c, want := range map[taskbox.Class]string{
		taskbox.Unclassified: "unclassified", taskbox.ClassRetryable: "retryable",
		taskbox.ClassPermanent: "permanent", 7: "Class(7)",
	} {
		if got := c.String(); got != want {
			t.Errorf("Class(%d).String() = %q, want %q", int(c), got, want)
		}
	}
	var zero taskbox.Class
	if zero != taskbox.Unclassified {
		t.Error("the zero value isn't Unclassified")
	}
}

func TestPanicError(t *testing.T) {
	base := errors.New("the cause")
	err := fmt.Errorf("attempt: %w", &taskbox.PanicError{Value: base})
	if got, want := err.Error(), "attempt: panic: the cause"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if !errors.Is(err, base) {
		t.Error("it doesn't unwrap to the error that panic was called with")
	}
	if err := (&taskbox.PanicError{Value: "text"}).Unwrap(); err != nil {
		t.Errorf("Unwrap of a value that is no error = %v, want nil", err)
	}
}

func TestDecodeError(t *testing.T) {
	base := errors.New("the cause")
	err := error(&taskbox.DecodeError{Type: "order_created", Err: base})
	if got, want := err.Error(), "decode the payload of type order_created: the cause"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
	if !errors.Is(err, base) {
		t.Error("it doesn't unwrap")
	}
}

func TestHTTPError_Success(t *testing.T) {
	for _, code := range []int{200, 201, 202, 204, 206, 299} {
		if err := taskbox.HTTPError(&http.Response{StatusCode: code}); err != nil {
			t.Errorf("%d: got %v, want nil", code, err)
		}
	}
}

func TestHTTPError_NilResponse(t *testing.T) {
	if err := taskbox.HTTPError(nil); err == nil {
		t.Error("no response counts as a success")
	}
}

func TestHTTPError_BareResponse(t *testing.T) {
	got := taskbox.HTTPError(&http.Response{StatusCode: 503})
	want := &taskbox.StatusError{Code: 503, Status: "503 Service Unavailable"}
	if diff := cmp.Diff(error(want), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	req := &http.Request{URL: &url.URL{Scheme: "https", Host: "example.com", Path: "/x"}}
	if got, want := taskbox.HTTPError(&http.Response{StatusCode: 404, Request: req}).Error(), "GET https://example.com/x: 404 Not Found"; got != want {
		t.Errorf("text %q, want %q", got, want)
	}
	if got := taskbox.HTTPError(&http.Response{StatusCode: 999}).Error(); got != "999" {
		t.Errorf("text of an unknown status is %q, want 999", got)
	}
}

// TestHTTPError_Server reads a real response, with secrets where clients put them.
func TestHTTPError_Server(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Retry-After", "120")
		w.WriteHeader(http.StatusTooManyRequests)
		io.WriteString(w, "{\n  \"error\": \"slow down\"\n}\n")
	}))
	defer srv.Close()
	u, err := url.Parse(srv.URL + "/v1/a%2Fb?token=secret1#secret2")
	if err != nil {
		t.Fatal(err)
	}
	u.User = url.UserPassword("secret3", "secret4")
	resp, err := http.Post(u.String(), "", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()

	got := taskbox.HTTPError(resp)
	want := &taskbox.StatusError{
		Code: 429, Status: "429 Too Many Requests", Method: "POST", URL: srv.URL + "/v1/a%2Fb",
		RetryAfter: 2 * time.Minute, Body: `{ "error": "slow down" }`,
	}
	if diff := cmp.Diff(error(want), got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if text := got.Error(); strings.Contains(text, "secret") {
		t.Errorf("the text gives secrets away: %s", text)
	}
	text := "POST " + srv.URL + `/v1/a%2Fb: 429 Too Many Requests: { "error": "slow down" }`
	if got.Error() != text {
		t.Errorf("text %q, want %q", got, text)
	}
	// The caller still gets the whole body.
	if b, err := io.ReadAll(resp.Body); err != nil || string(b) != "{\n  \"error\": \"slow down\"\n}\n" {
		t.Errorf("the body is %q, %v after HTTPError", b, err)
	}
}

// countingBody counts what is read from it and whether it was closed.
type countingBody struct {
	io.Reader
	read   int
	closed bool
}

func (b *countingBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	b.read += n
	return n, err
}

func (b *countingBody) Close() error { b.closed = true; return nil }

func TestHTTPError_Body(t *testing.T) {
	broken := errors.New("broken")
	for _, tt := range []struct {
		name, in, want string
	}{
		{"empty", "", ""},
		{"long", strings.Repeat("x", 100_000), strings.Repeat("x", 512)},
		{"cut within a rune", strings.Repeat("x", 511) + "é", strings.Repeat("x", 511)},
		{"binary", "a\x00b\xff\xfe\x1b[31mc", "ab[31mc"},
		{"white space", " a\r\n\t b\u00a0c ", "a b c"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			body := &countingBody{Reader: io.MultiReader(strings.NewReader(tt.in), errReader{broken})}
			resp := &http.Response{StatusCode: 500, Body: body}
			err := taskbox.HTTPError(resp)
			s, ok := errors.AsType[*taskbox.StatusError](err)
			if !ok || s.Body != tt.want || !utf8.ValidString(s.Body) {
				t.Errorf("body %q, want %q", s.Body, tt.want)
			}
			if body.read > 512 || body.closed {
				t.Errorf("read %d bytes, closed: %v", body.read, body.closed)
			}
			rest, err := io.ReadAll(resp.Body)
			if string(rest) != tt.in || !errors.Is(err, broken) {
				t.Errorf("reading on gave %d bytes, %v; want %d, and the body's own error", len(rest), err, len(tt.in))
			}
			if resp.Body.Close(); !body.closed {
				t.Error("Close doesn't reach the body")
			}
		})
	}
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func TestHTTPError_SwitchingProtocols(t *testing.T) {
	body := &countingBody{Reader: strings.NewReader("frames")}
	if err := taskbox.HTTPError(&http.Response{StatusCode: 101, Body: body}); err == nil || body.read > 0 {
		t.Errorf("got %v, read %d bytes of the connection", err, body.read)
	}
}

// TestHTTPError_RetryAfterFromNow has no Date header to go by.
func TestHTTPError_RetryAfterFromNow(t *testing.T) {
	h := http.Header{"Retry-After": {time.Now().Add(time.Hour).UTC().Format(http.TimeFormat)}}
	err := taskbox.HTTPError(&http.Response{StatusCode: 503, Header: h})
	s, _ := errors.AsType[*taskbox.StatusError](err)
	if s.RetryAfter < 59*time.Minute || s.RetryAfter > time.Hour {
		t.Errorf("RetryAfter is %v, want about 1h", s.RetryAfter)
	}
}
