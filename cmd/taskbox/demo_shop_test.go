package main

import (
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

// newTestShop is a shop on a real file whose poller doesn't run, and its downstream.
func newTestShop(t *testing.T, m mischief) *shop {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shop.db")
	db, err := openShopFile(t.Context(), path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	q, err := taskbox.New(t.Context(), db, taskbox.Options{Logger: newLive(db, stdio{out: io.Discard, err: io.Discard}).logger()})
	if err != nil {
		t.Fatal(err)
	}
	downstream := httptest.NewServer(newCouponService(m).routes())
	t.Cleanup(downstream.Close)
	return newShop(db, q, newCouponClient(downstream.URL), 5*time.Second)
}

// post sends an order and returns the answer.
func post(t *testing.T, url, body string, header ...string) (int, placed, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url+"/orders", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	var p placed
	_ = json.Unmarshal(text, &p)
	return resp.StatusCode, p, string(text)
}

func TestShop_Post(t *testing.T) {
	s := newTestShop(t, mischief{})
	web := httptest.NewServer(s.routes(io.Discard))
	defer web.Close()
	const trace = "4bf92f3577b34da6a3ce929d0e0e4736"
	code, p, _ := post(t, web.URL, sampleOrder, "traceparent", "00-"+trace+"-00f067aa0ba902b7-01")
	if want := (placed{OrderID: 1, TaskID: 1, TraceID: trace}); code != http.StatusCreated || p != want {
		t.Errorf("%d %+v, want 201 %+v", code, p, want)
	}
	code, p, _ = post(t, web.URL, sampleOrder)
	if code != http.StatusCreated || p.OrderID != 2 || len(p.TraceID) != 32 || p.TraceID == trace {
		t.Errorf("without a traceparent: %d %+v", code, p)
	}
	checkShop(t, s.db)
}

func TestShop_Post_Refused(t *testing.T) {
	s := newTestShop(t, mischief{})
	web := httptest.NewServer(s.routes(io.Discard))
	defer web.Close()
	long := strings.Repeat("x", maxItemLength+1)
	for _, tt := range []struct {
		body   string
		header []string
		code   int
	}{
		{body: ``, code: 400},
		{body: `{"item":"tea"`, code: 400},
		{body: `[]`, code: 400},
		{body: `null`, code: 400},
		{body: `{"item":"tea","cents":"450"}`, code: 400},
		{body: `{"item":"tea","cents":4.5}`, code: 400},
		{body: `{"item":"tea","cents":450,"free":true}`, code: 400},
		{body: sampleOrder + sampleOrder, code: 400},
		{body: `{"item":" ","cents":450}`, code: 400},
		{body: `{"item":"` + long + `","cents":450}`, code: 400},
		{body: `{"item":"tea","cents":0}`, code: 400},
		{body: `{"item":"tea","cents":-1}`, code: 400},
		{body: `{"item":"tea","cents":1000001}`, code: 400},
		{body: `{"item":"` + strings.Repeat("x", maxOrderBytes) + `"}`, code: 413},
		{body: sampleOrder + strings.Repeat(" ", maxOrderBytes), code: 413},
		{body: sampleOrder, header: []string{"Idempotency-Key", strings.Repeat("k", maxRequestKey+1)}, code: 400},
		{body: sampleOrder, header: []string{"Sec-Fetch-Site", "cross-site"}, code: 403},
	} {
		if code, _, text := post(t, web.URL, tt.body, tt.header...); code != tt.code || text == "" {
			t.Errorf("%.40s %.40s: %d %s, want %d", tt.body, tt.header, code, text, tt.code)
		}
	}
	if got := ask(t, s.db, `select (select count(*) from orders), (select count(*) from task_outbox)`); got[0] != "0|0" {
		t.Errorf("orders|tasks: %v", got)
	}
}

// The same request twice is one order and one task.
func TestShop_Post_Twice(t *testing.T) {
	s := newTestShop(t, mischief{})
	web := httptest.NewServer(s.routes(io.Discard))
	defer web.Close()
	code, first, _ := post(t, web.URL, sampleOrder, "Idempotency-Key", "a1")
	if code != http.StatusCreated || first.Duplicate {
		t.Fatalf("%d %+v", code, first)
	}
	code, second, _ := post(t, web.URL, sampleOrder, "Idempotency-Key", "a1")
	first.Duplicate = true
	if code != http.StatusOK || second != first {
		t.Errorf("again: %d %+v, want 200 %+v", code, second, first)
	}
	if code, _, text := post(t, web.URL, `{"item":"tea","cents":1}`, "Idempotency-Key", "a1"); code != http.StatusUnprocessableEntity {
		t.Errorf("another order with the same key: %d %s", code, text)
	}
	if code, third, _ := post(t, web.URL, sampleOrder, "Idempotency-Key", "a2"); code != http.StatusCreated || third.TaskID != 2 {
		t.Errorf("another key: %d %+v", code, third)
	}
	checkShop(t, s.db)
}

func TestShop_Get(t *testing.T) {
	s := newTestShop(t, mischief{})
	web := httptest.NewServer(s.routes(io.Discard))
	defer web.Close()
	post(t, web.URL, `{"item":"<tea>","cents":450}`)
	if err := s.q.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]int{"/orders/1": 200, "/orders/2": 404, "/orders/x": 400, "/": 200, "/else": 404} {
		resp, err := http.Get(web.URL + path)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("GET %s: %d, want %d", path, resp.StatusCode, want)
		}
	}
	v, err := s.getOrder(t.Context(), "1")
	if err != nil {
		t.Fatal(err)
	}
	var way []string
	for _, e := range v.Trail {
		way = append(way, e.Event)
	}
	if diff := cmp.Diff([]string{"created", "queued", "picked", "processing", "success"}, way); diff != "" {
		t.Error(diff)
	}
	if v.Item != "<tea>" || v.Status != "success" || v.Coupon != "TEA-0001" || !v.Mailed {
		t.Errorf("%+v", v)
	}
}

// A handler that runs again after its success wasn't recorded does nothing twice.
func TestShop_HandlerTwice(t *testing.T) {
	s := newTestShop(t, mischief{})
	p, err := s.place(t.Context(), newOrder{"tea", 450}, "", "")
	if err != nil {
		t.Fatal(err)
	}
	task := &taskbox.Task[orderTask]{ID: p.TaskID, Payload: orderTask{p.OrderID}, TraceID: p.TraceID}
	for range 2 {
		if err := s.getCoupon(t.Context(), task); err != nil {
			t.Fatal(err)
		}
	}
	checkShop(t, s.db)
}

// Tasks that people have made up end as dead letters that say why.
func TestShop_NoSuchOrder(t *testing.T) {
	s := newTestShop(t, mischief{})
	for _, typ := range []string{"order_created", "receipt_mail"} {
		if _, err := s.db.Exec(`insert into task_outbox(event_type, payload) values (?, '{"order_id": 99}')`, typ); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.q.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	want := []string{"dead_letter|1|there is no order 99", "dead_letter|1|there is no order 99"}
	if diff := cmp.Diff(want, ask(t, s.db, `select status, attempt, last_error from task_outbox`)); diff != "" {
		t.Error(diff)
	}
}

func FuzzReadOrder(f *testing.F) {
	f.Add(sampleOrder)
	f.Add(`{"item":"tea","cents":1e3} `)
	f.Add(`null`)
	f.Fuzz(func(t *testing.T, body string) {
		o, err := readOrder(strings.NewReader(body))
		if err == nil && (strings.TrimSpace(o.Item) == "" || o.Cents < 1 || o.Cents > maxCents) {
			t.Errorf("%q was taken as %+v", body, o)
		}
	})
}
