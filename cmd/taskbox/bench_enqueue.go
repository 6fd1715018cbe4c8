package main

import (
	"context"
	"time"
)

// enqueue is an application's transaction with a task, and with an order where that is
// asked for.
func (r *rig) enqueue(n int, order bool) error {
	ctx := context.Background()
	tx, err := r.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer tx.Rollback() // does nothing after a commit
	if order {
		if _, err := tx.ExecContext(ctx, orderSQL, n); err != nil {
			return err
		}
	}
	if _, err := r.q.Enqueue(ctx, tx, benchJobs.New(benchJob{n})); err != nil {
		return err
	}
	return tx.Commit()
}

// measureEnqueue measures a single producer. The queue is there, but doesn't run.
func measureEnqueue(synchronous string) func(*bench, context.Context) error {
	return func(b *bench, ctx context.Context) error {
		if err := b.measureEnqueue(ctx, synchronous, false); err != nil {
			return err
		}
		return b.measureEnqueue(ctx, synchronous, true)
	}
}

func (b *bench) measureEnqueue(ctx context.Context, synchronous string, order bool) error {
	m, err := b.inTurns(ctx, b.floorEnqueue(ctx, synchronous, order), b.queueEnqueue(ctx, synchronous, order))
	if err != nil {
		return err
	}
	what := "enqueue in own transactions"
	if order {
		what = "enqueue with a business row"
	}
	f := rateFigure(what+suffix(synchronous), m[1], m[0])
	f.target(ofFloor(0.75))
	b.add(f)
	return nil
}

func (b *bench) queueEnqueue(ctx context.Context, synchronous string, order bool) side {
	return side{"queue", func() (sample, error) {
		r, err := b.newRig(ctx, openDBPool, synchronous, 1)
		if err != nil {
			return sample{}, err
		}
		defer r.close()
		return b.repeat(func(i int) error { return r.enqueue(i, order) })
	}}
}

func (b *bench) floorEnqueue(ctx context.Context, synchronous string, order bool) side {
	return side{"floor", func() (s sample, err error) {
		err = b.withFloor(ctx, synchronous, func(_ *rig, f *floor) error {
			s, err = b.repeat(func(int) error { return f.enqueue(order) })
			return err
		})
		return s, err
	}}
}

// repeat calls fn for a sixth of -time.
func (b *bench) repeat(fn func(i int) error) (sample, error) {
	watch := startWatch()
	for i := 0; ; i++ {
		if i > 0 && time.Since(watch.start) >= b.time/6 {
			return watch.stop(i), nil
		}
		if err := fn(i); err != nil {
			return sample{}, err
		}
	}
}
