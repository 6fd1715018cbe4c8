package main

import (
	"context"
	"fmt"
	"time"
)

const (
	appEvery = time.Millisecond
	// window is over what a rate is taken when it is asked whether the drain is back.
	window = 40 * time.Millisecond
	// greedyAgain is the share of the rate alone that counts as back.
	greedyAgain = 0.80
)

func measureApp(pool poolKind) func(*bench, context.Context) error {
	return func(b *bench, ctx context.Context) error { return b.measureApp(ctx, pool) }
}

// measureApp drains a backlog alone, then beside an application that has a transaction
// a millisecond, then alone again.
func (b *bench) measureApp(ctx context.Context, pool poolKind) error {
	r, err := b.newRig(ctx, pool, normal, 16)
	if err != nil {
		return err
	}
	defer r.close()
	floor, err := r.transactions(ctx, b.time/4)
	if err != nil {
		return err
	}
	backlog, err := b.backlogFor(ctx, 2*b.time)
	if err != nil {
		return err
	}
	if err := r.fill(ctx, backlog, backlogSQL); err != nil {
		return err
	}
	var p appPhases
	err = r.during(ctx, func() error {
		p, err = r.phases(ctx, b.time)
		return err
	})
	if err != nil {
		return err
	}
	if r.started.Load() >= int64(backlog) {
		return fmt.Errorf("the backlog of %d tasks ended too early: the machine was slower before than it was then", backlog)
	}
	b.addApp(pool, floor, p)
	return nil
}

// backlogFor is about what keeps the queue busy for d: it isn't faster than the floor.
func (b *bench) backlogFor(ctx context.Context, d time.Duration) (int, error) {
	s, err := b.floorDrain(ctx, normal, largeBatch).once(ctx)
	return 1000 + int(1.1*s.rate*d.Seconds()), err
}

// appPhases is what a drain with an application beside it yields.
type appPhases struct {
	alone, beside float64   // tasks a second
	app           []float64 // milliseconds from begin to commit
	greedy        time.Duration
}

func (r *rig) phases(ctx context.Context, d time.Duration) (p appPhases, err error) {
	time.Sleep(d / 10) // it gets going
	p.alone = r.rateDuring(func() { time.Sleep(d / 4) })
	p.beside = r.rateDuring(func() { p.app, err = r.transactions(ctx, d) })
	if err != nil {
		return p, err
	}
	p.greedy = r.backTo(greedyAgain*p.alone, d/2)
	return p, nil
}

func (r *rig) rateDuring(fn func()) float64 {
	start, n := time.Now(), r.started.Load()
	fn()
	return float64(r.started.Load()-n) / time.Since(start).Seconds()
}

// backTo waits, for d at most, until the rate over a window is at least want, and
// returns when that window began.
func (r *rig) backTo(want float64, d time.Duration) time.Duration {
	type point struct {
		at time.Duration
		n  int64
	}
	start := time.Now()
	points := []point{{0, r.started.Load()}}
	for time.Since(start) < d {
		time.Sleep(2 * time.Millisecond)
		now := point{time.Since(start), r.started.Load()}
		points = append(points, now)
		for now.at-points[1].at >= window {
			points = points[1:]
		}
		took := now.at - points[0].at
		if took >= window && float64(now.n-points[0].n)/took.Seconds() >= want {
			return points[0].at
		}
	}
	return d
}

// transactions has one transaction of the application's a millisecond for d and returns
// how long each took from begin to commit, in milliseconds.
func (r *rig) transactions(ctx context.Context, d time.Duration) (ms []float64, err error) {
	tick := time.NewTicker(appEvery)
	defer tick.Stop()
	for start := time.Now(); time.Since(start) < d; {
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-tick.C:
		}
		begin := time.Now()
		if err := r.order(len(ms)); err != nil {
			return nil, err
		}
		ms = append(ms, milliseconds(time.Since(begin)))
	}
	return ms, nil
}

// order is a transaction of the application's that has nothing to do with the queue.
func (r *rig) order(total int) error {
	ctx := context.Background()
	tx, err := r.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // does nothing after a commit
	if _, err := tx.ExecContext(ctx, orderSQL, total); err != nil {
		return err
	}
	return tx.Commit()
}

// appTargets are for the 99th percentile of the application's transactions and for the
// drain's rate meanwhile, by pool.
var appTargets = map[string]struct{ p99, rate target }{
	foreignPool.name: {atMost(2), atLeast(12_000)},
	openDBPool.name:  {atMost(5), atLeast(35_000)},
}

func (b *bench) addApp(pool poolKind, floor []float64, p appPhases) {
	t := appTargets[pool.name]
	ms := func(name string, q float64) figure {
		return figure{What: "app's transaction beside a drain, " + pool.name + ", " + name,
			Value: quantile(p.app, q), Unit: " ms", Floor: quantile(floor, q)}
	}
	p99 := ms("p99", 0.99)
	p99.target(t.p99)
	rate := figure{What: "drain beside them, " + pool.name + " (floor: alone)", Value: p.beside, Unit: "/s", Floor: p.alone}
	rate.target(t.rate)
	greedy := figure{What: "drain greedy again after, " + pool.name, Value: milliseconds(p.greedy), Unit: " ms"}
	greedy.target(atMost(200))
	for _, f := range []figure{ms("p50", 0.5), p99, ms("max", 1), rate, greedy} {
		b.add(f)
	}
}
