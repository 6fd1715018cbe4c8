package taskbox

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"
)

// scheduleFunc is a schedule of somebody else.
type scheduleFunc func(retry int) (time.Duration, bool)

func (f scheduleFunc) Delay(retry int) (time.Duration, bool) { return f(retry) }

func TestValidSchedule(t *testing.T) {
	constant := func(d time.Duration) Schedule {
		return scheduleFunc(func(int) (time.Duration, bool) { return d, true })
	}
	for _, tt := range []struct {
		name string
		in   Schedule
		want string // in the error's text; empty: valid
	}{
		{"default", DefaultSchedule(), ""},
		{"one tier", Tiers(1), ""},
		{"zero exponential", Exponential{}, ""},
		{"exponential by pointer", &Exponential{Base: time.Minute}, ""},
		{"endless", constant(time.Minute), ""},
		{"at once", constant(0), ""},
		{"ten years", Tiers(maxDelay), ""},

		{"nil", nil, "nil"},
		{"no tiers", Tiers(), "MaxAttempts to 1"},
		{"zero tier", Tiers(time.Second, 0), "tier 2"},
		{"negative tier", Tiers(-time.Second), "tier 1"},
		{"tier too long", Tiers(maxDelay + 1), "10 years"},
		{"bad tier beyond what is probed", Tiers(append(make40Seconds(), -1)...), "tier 41"},
		{"negative", constant(-1), "retry 1 is -1ns"},
		{"absurd", constant(math.MaxInt64), "10 years"},
		{"no retries", scheduleFunc(func(int) (time.Duration, bool) { return 0, false }), "MaxAttempts to 1"},
		{"negative later", scheduleFunc(func(n int) (time.Duration, bool) { return time.Duration(32-n) - 1, true }), "retry 32"},
		{"negative base", Exponential{Base: -1}, "Base"},
		{"negative maximum", Exponential{Max: -1}, "Max"},
		{"maximum below base", Exponential{Base: time.Hour, Max: time.Minute}, "at least Base, 1h"},
		{"maximum too long", Exponential{Max: maxDelay + 1}, "10 years"},
		{"shrinking", Exponential{Factor: 0.5}, "Factor is 0.5"},
		{"negative factor", Exponential{Factor: -2}, "Factor"},
		{"factor NaN", Exponential{Factor: math.NaN()}, "Factor"},
		{"factor infinite", Exponential{Factor: math.Inf(1)}, "Factor"},
		{"negative retries", Exponential{Retries: -1}, "MaxAttempts to 1"},
		{"bad exponential by pointer", &Exponential{Base: -1}, "Base"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := validSchedule(tt.in)
			if tt.want == "" {
				if err != nil {
					t.Errorf("got %v, want nil", err)
				}
				return
			}
			if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("got %v, want ErrInvalid with %q", err, tt.want)
			}
		})
	}
}

func make40Seconds() []time.Duration {
	d := make([]time.Duration, 40)
	for i := range d {
		d[i] = time.Second
	}
	return d
}

func TestSplitmix64_Published(t *testing.T) {
	// The first outputs of the reference generator, https://prng.di.unimi.it/splitmix64.c,
	// seeded with 1234567.
	state := uint64(1234567)
	for i, want := range []uint64{6457827717110365317, 3203168211198807973, 9817491932198370423} {
		if got := splitmix64(state); got != want {
			t.Errorf("output %d is %d, want %d", i, got, want)
		}
		state += 0x9e3779b97f4a7c15
	}
}

func TestJitter_Bounds(t *testing.T) {
	for _, d := range []time.Duration{1, 9, 10, 11, time.Millisecond, 30 * time.Second, time.Hour, maxDelay} {
		for id := range int64(2_000) {
			got := jitter(d, id, 1)
			if got < d-d/10 || got > d+d/10 {
				t.Fatalf("jitter(%v, %d, 1) = %v, more than 10 %% away", d, id, got)
			}
			if again := jitter(d, id, 1); again != got {
				t.Fatalf("jitter(%v, %d, 1) = %v, then %v", d, id, got, again)
			}
		}
	}
}

func TestJitter_Extremes(t *testing.T) {
	for _, d := range []time.Duration{0, -1, math.MinInt64} {
		if got := jitter(d, 1, 1); got != d {
			t.Errorf("jitter(%d) = %d, want it as it is", d, got)
		}
	}
	for id := range int64(1_000) {
		if got := jitter(math.MaxInt64, id, 1); got < math.MaxInt64/10*9 {
			t.Fatalf("jitter of the longest duration is %d: it overflowed", got)
		}
	}
	for _, id := range []int64{math.MinInt64, -1, 0, math.MaxInt64} {
		if got := jitter(time.Hour, id, -id); got < 54*time.Minute || got > 66*time.Minute {
			t.Errorf("jitter(1h, %d) = %v", id, got)
		}
	}
}

// TestJitter_Spread checks that tasks that failed together come back apart: over ids,
// over attempts of one task, and over ids that are far from each other.
func TestJitter_Spread(t *testing.T) {
	const d, n, buckets = time.Hour, 10_000, 100
	for name, at := range map[string]func(i int64) time.Duration{
		"ids":         func(i int64) time.Duration { return jitter(d, i, 1) },
		"attempts":    func(i int64) time.Duration { return jitter(d, 7, i) },
		"sparse ids":  func(i int64) time.Duration { return jitter(d, i<<20, 3) },
		"both at one": func(i int64) time.Duration { return jitter(d, i, i) },
	} {
		t.Run(name, func(t *testing.T) {
			var count [buckets]int
			for i := range int64(n) {
				count[(at(i)-(d-d/10))*buckets/(d/5+1)]++
			}
			for b, c := range count {
				// 100 are expected, with a deviation of 10; 5 % would be 500.
				if c < 50 || c > 150 {
					t.Errorf("bucket %d has %d of %d, want about %d", b, c, n, n/buckets)
				}
			}
		})
	}
}

func TestNextDelay(t *testing.T) {
	s := Tiers(30*time.Second, time.Hour)
	for _, tt := range []struct {
		name     string
		s        Schedule
		retry    int
		atLeast  time.Duration
		min, max time.Duration
		ok       bool
	}{
		{"schedule", s, 1, 0, 27 * time.Second, 33 * time.Second, true},
		{"second tier", s, 2, time.Second, 54 * time.Minute, 66 * time.Minute, true},
		{"Retry-After longer", s, 1, 10 * time.Minute, 10 * time.Minute, 11 * time.Minute, true},
		{"Retry-After alike", s, 1, 30 * time.Second, 30 * time.Second, 33 * time.Second, true},
		{"negative Retry-After", s, 1, -time.Hour, 27 * time.Second, 33 * time.Second, true},
		{"ended", s, 3, 0, 0, 0, false},
		{"ended, with Retry-After", s, 3, time.Hour, 0, 0, false},
		{"negative schedule", scheduleFunc(func(int) (time.Duration, bool) { return -time.Hour, true }), 1, 0, 0, 0, true},
		{"absurd schedule", scheduleFunc(func(int) (time.Duration, bool) { return math.MaxInt64, true }), 1, math.MaxInt64,
			maxDelay, maxDelay + maxDelay/10, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for id := range int64(1_000) {
				d, ok := nextDelay(tt.s, tt.retry, id, int64(tt.retry), tt.atLeast)
				if ok != tt.ok || d < tt.min || d > tt.max {
					t.Fatalf("id %d: got %v, %v; want %v to %v, %v", id, d, ok, tt.min, tt.max, tt.ok)
				}
			}
		})
	}
}

// TestNextDelay_RetryAfterSpread checks that tasks that all got the same Retry-After
// don't all come back in the same moment.
func TestNextDelay_RetryAfterSpread(t *testing.T) {
	seen := map[time.Duration]bool{}
	for id := range int64(1_000) {
		d, _ := nextDelay(Tiers(time.Second), 1, id, 1, time.Minute)
		seen[d.Truncate(100*time.Millisecond)] = true
	}
	if len(seen) < 55 { // of the 60 tenths of a second from 60 s to 66 s
		t.Errorf("1000 tasks come back in %d different tenths of a second, want about 60", len(seen))
	}
}
