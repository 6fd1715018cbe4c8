package main

import (
	"errors"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

func TestMischief_Mood(t *testing.T) {
	m := mischiefFor(time.Second)
	for _, tt := range []struct {
		order int64
		call  int
		since time.Duration
		want  mood
	}{
		{1, 1, 0, moodHelpful},
		{2, 9, 0, moodBroken}, {12, 1, 0, moodHelpful}, {22, 1, 0, moodBroken},
		{3, 1, 0, moodLimited}, {3, 2, 0, moodHelpful}, {13, 1, 0, moodLimited},
		{5, 1, 0, moodPicky}, {5, 2, 0, moodPicky},
		{7, 1, 0, moodSlow}, {7, 2, 0, moodHelpful},
		{1, 1, 4*time.Second - 1, moodHelpful}, {1, 1, 4 * time.Second, moodClosed},
		{5, 1, 8*time.Second - 1, moodClosed}, {1, 1, 8 * time.Second, moodHelpful},
	} {
		if got := m.mood(tt.order, tt.call, tt.since); got != tt.want {
			t.Errorf("order %d, call %d, after %v: %d, want %d", tt.order, tt.call, tt.since, got, tt.want)
		}
	}
}

// Every kind of trouble is a matter of the first seconds, whatever the tiers.
func TestMischiefFor(t *testing.T) {
	want := mischief{outageFrom: 400 * time.Millisecond, outageTo: 800 * time.Millisecond,
		retryAfter: time.Second, timeout: 250 * time.Millisecond, slow: 375 * time.Millisecond}
	if got := mischiefFor(100 * time.Millisecond); got != want {
		t.Errorf("%+v, want %+v", got, want)
	}
	if got := mischiefFor(1500 * time.Millisecond).retryAfter; got != 3*time.Second {
		t.Errorf("Retry-After %v, want 3s", got)
	}
}

// The client's errors are those that the queue's classification is made for.
func TestCouponClient_Errors(t *testing.T) {
	m := mischief{outageFrom: time.Hour, outageTo: 2 * time.Hour, retryAfter: 2 * time.Second}
	service := newCouponService(m)
	srv := httptest.NewServer(service.routes())
	defer srv.Close()
	c := newCouponClient(srv.URL)
	type answer struct {
		Code  int
		After time.Duration
	}
	got := map[int64]answer{}
	for _, order := range []int64{1, 2, 3, 5} {
		_, err := c.create(t.Context(), order, orderKey(order), "")
		if e, ok := errors.AsType[*taskbox.StatusError](err); ok {
			got[order] = answer{e.Code, e.RetryAfter}
		}
	}
	service.start = time.Now().Add(-time.Hour)
	_, err := c.create(t.Context(), 11, orderKey(11), "")
	if e, ok := errors.AsType[*taskbox.StatusError](err); ok {
		got[11] = answer{e.Code, e.RetryAfter}
	}
	if diff := cmp.Diff(map[int64]answer{2: {500, 0}, 3: {429, 2 * time.Second}, 5: {400, 0}, 11: {503, 0}}, got); diff != "" {
		t.Error(diff)
	}
	srv.Close()
	if _, err := c.create(t.Context(), 1, orderKey(1), ""); err == nil {
		t.Error("no error from a service that is gone")
	}
}
