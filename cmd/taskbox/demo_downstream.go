package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/taskbox-go/taskbox"
)

// mischief is how the coupon service misbehaves. What it does to a call follows
// from the order, how often it was called for it, and the time since its start, so
// that each run shows the same.
type mischief struct {
	outageFrom, outageTo time.Duration // since the start
	retryAfter           time.Duration // whole seconds, as the header wants it
	timeout              time.Duration // the handler's patience …
	slow                 time.Duration // … and an answer that takes longer
}

// mischiefFor scales the service to the first tier: the longer that is, the longer
// are the troubles that it is to outlast.
func mischiefFor(tier time.Duration) mischief {
	timeout := max(tier, 250*time.Millisecond) // a slow machine isn't mischief
	return mischief{
		outageFrom: 4 * tier, outageTo: 8 * tier,
		retryAfter: time.Duration(math.Ceil((2 * tier).Seconds())) * time.Second,
		timeout:    timeout, slow: timeout * 3 / 2,
	}
}

// A mood is how the service treats one call.
type mood int

const (
	moodHelpful mood = iota
	moodClosed       // 503
	moodLimited      // 429 with Retry-After
	moodPicky        // 400
	moodSlow         // issues the coupon, but answers after the caller's timeout
	moodBroken       // 500
)

func (m mischief) mood(order int64, call int, since time.Duration) mood {
	switch {
	case since >= m.outageFrom && since < m.outageTo:
		return moodClosed
	case order%20 == 2:
		return moodBroken
	case order%10 == 3 && call == 1:
		return moodLimited
	case order%10 == 5:
		return moodPicky
	case order%10 == 7 && call == 1:
		return moodSlow
	}
	return moodHelpful
}

// describe explains mood.
func (m mischief) describe(w io.Writer) {
	line := func(when, what, effect string) { fmt.Fprintf(w, "  %-17s %-27s %s\n", when, what, effect) }
	line(brief(m.outageFrom)+" to "+brief(m.outageTo), "503 to everyone", "retried in tiers")
	line("orders 3, 13, …", "429, Retry-After: "+seconds(m.retryAfter), "retried, but not sooner")
	line("orders 5, 15, …", "400", "dead letter at once")
	line("orders 7, 17, …", "an answer after "+brief(m.slow), "timeout after "+brief(m.timeout)+", retried")
	line("orders 2, 22, …", "500, each time", "dead letter after the last tier")
}

func seconds(d time.Duration) string { return strconv.Itoa(int(d / time.Second)) }

// couponService is the downstream. It gives one coupon for each Idempotency-Key,
// however often it is asked.
type couponService struct {
	mischief mischief
	start    time.Time

	mu     sync.Mutex
	calls  map[int64]int     // by order; mu
	issued map[string]string // by Idempotency-Key; mu
}

func newCouponService(m mischief) *couponService {
	return &couponService{mischief: m, start: time.Now(), calls: map[int64]int{}, issued: map[string]string{}}
}

// A coupon is what the service gives for an order.
type coupon struct {
	OrderID int64  `json:"order_id"`
	Code    string `json:"code,omitempty"`
}

func (s *couponService) routes() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /coupons", s.create)
	return mux
}

func (s *couponService) create(w http.ResponseWriter, r *http.Request) {
	var c coupon
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, 4096)).Decode(&c); err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	switch s.next(c.OrderID) {
	case moodClosed:
		http.Error(w, "closed for maintenance", http.StatusServiceUnavailable)
	case moodLimited:
		w.Header().Set("Retry-After", seconds(s.mischief.retryAfter))
		http.Error(w, "too many coupons", http.StatusTooManyRequests)
	case moodPicky:
		http.Error(w, fmt.Sprintf("order %d has no items with coupons", c.OrderID), http.StatusBadRequest)
	case moodBroken:
		http.Error(w, "index out of range", http.StatusInternalServerError)
	case moodSlow:
		c.Code = s.issue(r.Header.Get("Idempotency-Key"), c.OrderID)
		pause(r.Context(), s.mischief.slow)
		writeJSON(w, http.StatusCreated, c)
	default:
		c.Code = s.issue(r.Header.Get("Idempotency-Key"), c.OrderID)
		writeJSON(w, http.StatusCreated, c)
	}
}

// next counts the call and returns the mood for it.
func (s *couponService) next(order int64) mood {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.calls[order]++
	return s.mischief.mood(order, s.calls[order], time.Since(s.start))
}

func (s *couponService) issue(key string, order int64) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.issued[key] == "" {
		s.issued[key] = fmt.Sprintf("TEA-%04d", order)
	}
	return s.issued[key]
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// couponClient is the shop's way to the service.
type couponClient struct {
	url  string
	http *http.Client
}

// newCouponClient sets no timeout: the handler's context has one.
func newCouponClient(url string) *couponClient { return &couponClient{url, &http.Client{}} }

// create gets the coupon for an order. The key makes a second try after a lost
// answer safe, and the trace id leads from the service's log to ours.
func (c *couponClient) create(ctx context.Context, order int64, key, trace string) (string, error) {
	body, err := json.Marshal(coupon{OrderID: order})
	if err != nil {
		return "", err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/coupons", bytes.NewReader(body))
	if err != nil {
		return "", err
	}
	req.Header.Set("Idempotency-Key", key)
	req.Header.Set("traceparent", traceparent(trace))
	resp, err := c.http.Do(req)
	if err != nil {
		return "", err // a timeout or a refused connection is worth a retry: taskbox knows them
	}
	defer resp.Body.Close()
	if err := taskbox.HTTPError(resp); err != nil {
		return "", err // 429 and 5xx are retried, 400 isn't
	}
	var got coupon
	err = json.NewDecoder(resp.Body).Decode(&got)
	return got.Code, err
}
