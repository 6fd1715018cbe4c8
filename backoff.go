package taskbox

import (
	"fmt"
	"math"
	"math/bits"
	"slices"
	"time"
)

// Defaults of [Exponential].
const (
	DefaultExponentialBase    = time.Second
	DefaultExponentialMax     = time.Hour
	DefaultExponentialFactor  = 2.0
	DefaultExponentialRetries = 10
)

const (
	// maxDelay is far beyond any sensible wait: what asks for more has mixed up
	// its units.
	maxDelay = 10 * 365 * 24 * time.Hour
	// probedRetries is how far a schedule that we know nothing about is tried out.
	probedRetries = 32
)

// A Schedule says how long a failed task waits before it is tried again. See
// [Tiers], [DefaultSchedule] and [Exponential]. Implementations must be safe for
// concurrent use and give the same answer to the same question.
type Schedule interface {
	// Delay returns the wait before the given retry, which counts from 1. When ok
	// is false there is no such retry, and the task becomes a dead letter. The
	// queue spreads each wait by up to 10 % either way, so that tasks that failed
	// together don't come back together.
	Delay(retry int) (d time.Duration, ok bool)
}

// Tiers returns the schedule that waits d[0] before the first retry, d[1] before the
// second and so on, and has as many retries as there are waits. Whoever is given it
// ([New], [Type.Handle]) fails with [ErrInvalid] when there is no wait or when one
// isn't more than 0.
func Tiers(d ...time.Duration) Schedule { return tiers(slices.Clone(d)) }

// DefaultSchedule returns the schedule that is used where none is given: four
// retries, after 30 s, 2 min, 10 min and 1 h. The fifth failure makes the task a
// dead letter.
func DefaultSchedule() Schedule {
	return Tiers(30*time.Second, 2*time.Minute, 10*time.Minute, time.Hour)
}

type tiers []time.Duration

func (t tiers) Delay(retry int) (time.Duration, bool) {
	if retry < 1 || retry > len(t) {
		return 0, false
	}
	return t[retry-1], true
}

func (t tiers) validate() error {
	for i, d := range t {
		if d <= 0 || d > maxDelay {
			return fmt.Errorf("%w: tier %d of the schedule is %v, want more than 0 (1ms is as good as at once) and at most 10 years; is the unit missing, as in 30*time.Second?",
				ErrInvalid, i+1, d)
		}
	}
	return nil
}

// Exponential is a [Schedule] whose waits grow by a factor: Base, Base·Factor,
// Base·Factor², …, but never more than Max. The zero value is usable.
type Exponential struct {
	// Base is the wait before the first retry. 0: [DefaultExponentialBase], 1 s.
	Base time.Duration
	// Max is the longest wait. 0: [DefaultExponentialMax], 1 h, or Base where that
	// is longer. It must not be less than Base.
	Max time.Duration
	// Factor is how much longer each wait is than the one before; 1 keeps them all
	// alike. 0: [DefaultExponentialFactor], 2. It must not be less than 1.
	Factor float64
	// Retries is how many retries there are. 0: [DefaultExponentialRetries], 10.
	// For none at all set MaxAttempts to 1.
	Retries int
}

// Delay implements [Schedule].
func (e Exponential) Delay(retry int) (time.Duration, bool) {
	e = e.withDefaults()
	if retry < 1 || retry > e.Retries {
		return 0, false
	}
	d := float64(e.Base) * math.Pow(e.Factor, float64(retry-1))
	// Asked this way round, an infinite product and a NaN are the maximum as well.
	if !(d < float64(e.Max)) {
		return e.Max, true
	}
	return time.Duration(d), true
}

func (e Exponential) withDefaults() Exponential {
	if e.Base == 0 {
		e.Base = DefaultExponentialBase
	}
	if e.Max == 0 {
		e.Max = max(DefaultExponentialMax, e.Base)
	}
	if e.Factor == 0 {
		e.Factor = DefaultExponentialFactor
	}
	if e.Retries == 0 {
		e.Retries = DefaultExponentialRetries
	}
	return e
}

func (e Exponential) validate() error {
	e = e.withDefaults()
	switch {
	case e.Base < 0:
		return fmt.Errorf("%w: Exponential.Base is %v, want more than 0, or 0 for the default", ErrInvalid, e.Base)
	case e.Max < e.Base:
		return fmt.Errorf("%w: Exponential.Max is %v, want at least Base, %v, or 0 for the default", ErrInvalid, e.Max, e.Base)
	case e.Max > maxDelay:
		return fmt.Errorf("%w: Exponential.Max is %v, want at most 10 years", ErrInvalid, e.Max)
	case !(e.Factor >= 1) || math.IsInf(e.Factor, 1):
		return fmt.Errorf("%w: Exponential.Factor is %v, want at least 1, or 0 for the default", ErrInvalid, e.Factor)
	case e.Retries < 0:
		return fmt.Errorf("%w: Exponential.Retries is %d, want at least 1, or 0 for the default; for no retries set MaxAttempts to 1", ErrInvalid, e.Retries)
	}
	return nil
}

// validSchedule returns [ErrInvalid] for a schedule that can't be meant, so that it is
// found when the program starts and not when the first task fails.
func validSchedule(s Schedule) error {
	if s == nil {
		return fmt.Errorf("%w: the schedule is nil", ErrInvalid)
	}
	if known, ok := s.(interface{ validate() error }); ok {
		if err := known.validate(); err != nil {
			return err
		}
	}
	return probe(s)
}

// probe asks a schedule for its first waits.
func probe(s Schedule) error {
	for retry := 1; retry <= probedRetries; retry++ {
		d, ok := s.Delay(retry)
		switch {
		case !ok && retry == 1:
			return fmt.Errorf("%w: the schedule has no retries; if that is meant, set MaxAttempts to 1 and leave the schedule out", ErrInvalid)
		case !ok:
			return nil
		case d < 0 || d > maxDelay:
			return fmt.Errorf("%w: the schedule's wait before retry %d is %v, want 0 to 10 years; return false to end the retries", ErrInvalid, retry, d)
		}
	}
	return nil
}

// nextDelay returns the wait before a retry, or false where the schedule has ended.
// It is at least atLeast, what a downstream asked for, whose spread goes upward only:
// coming back early is what it asked us not to do.
func nextDelay(s Schedule, retry int, id, attempt int64, atLeast time.Duration) (time.Duration, bool) {
	d, ok := s.Delay(retry)
	if !ok {
		return 0, false
	}
	d = jitter(min(max(d, 0), maxDelay), id, attempt)
	atLeast = min(max(atLeast, 0), maxDelay)
	return max(d, atLeast+spread(atLeast/10, id, attempt)), true
}

// jitter moves d by up to 10 % either way. The same task and attempt always get the
// same wait, so that a trail can be explained and a test repeated.
func jitter(d time.Duration, id, attempt int64) time.Duration {
	if d <= 0 {
		return d
	}
	tenth := d / 10
	low, more := d-tenth, spread(2*tenth, id, attempt)
	if more > math.MaxInt64-low {
		return math.MaxInt64
	}
	return low + more
}

// spread picks a duration from 0 to n, evenly over ids and attempts.
func spread(n time.Duration, id, attempt int64) time.Duration {
	hash := splitmix64(splitmix64(uint64(id)) + uint64(attempt))
	// The high word of the product scales the hash to the range without the bias
	// of a remainder.
	picked, _ := bits.Mul64(hash, uint64(n)+1)
	return time.Duration(picked)
}

// splitmix64 is one step of the generator in Steele, Lea and Flood, "Fast splittable
// pseudorandom number generators" (OOPSLA 2014), started at x: neighbouring ids
// become unrelated numbers.
func splitmix64(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}
