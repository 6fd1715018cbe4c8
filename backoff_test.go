package taskbox_test

import (
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

// waits lists what a schedule answers until it ends.
func waits(s taskbox.Schedule) []time.Duration {
	var all []time.Duration
	for retry := 1; ; retry++ {
		d, ok := s.Delay(retry)
		if !ok {
			return all
		}
		all = append(all, d)
	}
}

func TestSchedule_Delay(t *testing.T) {
	const s, m, h = time.Second, time.Minute, time.Hour
	for _, tt := range []struct {
		name string
		in   taskbox.Schedule
		want []time.Duration
	}{
		{"default", taskbox.DefaultSchedule(), []time.Duration{30 * s, 2 * m, 10 * m, h}},
		{"tiers", taskbox.Tiers(s, h, m), []time.Duration{s, h, m}},
		{"no tiers", taskbox.Tiers(), nil},
		{"exponential", taskbox.Exponential{},
			[]time.Duration{s, 2 * s, 4 * s, 8 * s, 16 * s, 32 * s, 64 * s, 128 * s, 256 * s, 512 * s}},
		{"exponential, capped", taskbox.Exponential{Base: m, Max: 30 * m, Factor: 3, Retries: 5},
			[]time.Duration{m, 3 * m, 9 * m, 27 * m, 30 * m}},
		{"exponential, constant", taskbox.Exponential{Base: m, Factor: 1, Retries: 3}, []time.Duration{m, m, m}},
		{"exponential, base beyond the default maximum", taskbox.Exponential{Base: 3 * h, Retries: 2}, []time.Duration{3 * h, 3 * h}},
		{"exponential, default maximum", taskbox.Exponential{Base: 40 * m, Retries: 2}, []time.Duration{40 * m, h}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, waits(tt.in)); diff != "" {
				t.Errorf("waits (-want +got):\n%s", diff)
			}
			for _, retry := range []int{0, -1, math.MinInt} {
				if d, ok := tt.in.Delay(retry); ok {
					t.Errorf("Delay(%d) = %v, true; want false", retry, d)
				}
			}
		})
	}
}

func TestExponential_Delay_Overflow(t *testing.T) {
	for _, e := range []taskbox.Exponential{
		{Base: time.Second, Max: time.Hour, Factor: 2, Retries: math.MaxInt},
		{Base: time.Second, Max: time.Hour, Factor: math.MaxFloat64, Retries: math.MaxInt},
		{Base: time.Hour, Max: time.Hour, Factor: math.Inf(1), Retries: math.MaxInt},
		{Base: 1, Max: math.MaxInt64, Factor: 10, Retries: math.MaxInt},
	} {
		for _, retry := range []int{100, 1_000, 100_000, math.MaxInt} {
			if d, ok := e.Delay(retry); d != e.Max || !ok {
				t.Errorf("%+v: Delay(%d) = %v, %v; want the maximum, %v", e, retry, d, ok, e.Max)
			}
		}
	}
}

func TestExponential_Delay_NeverFalls(t *testing.T) {
	e := taskbox.Exponential{Base: 7 * time.Millisecond, Max: 3 * time.Hour, Factor: 1.3, Retries: 200}
	var last time.Duration
	for i, d := range waits(e) {
		if d < last || d <= 0 || d > e.Max {
			t.Fatalf("wait %d is %v after %v", i+1, d, last)
		}
		last = d
	}
}

func TestTiers_KeepsItsOwnCopy(t *testing.T) {
	mine := []time.Duration{time.Second}
	s := taskbox.Tiers(mine...)
	mine[0] = time.Hour
	if d, _ := s.Delay(1); d != time.Second {
		t.Errorf("Delay(1) = %v after the caller's slice was changed, want 1s", d)
	}
}
