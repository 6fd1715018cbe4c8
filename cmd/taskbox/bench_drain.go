package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// The floor's batches: what the queue's turns come to with a full backlog, and what
// they'd come to if it claimed no more than 16 workers can take.
const (
	largeBatch = 100
	smallBatch = 16
)

// drainTargets are by workers, for synchronous=NORMAL.
var drainTargets = map[int]target{
	1:  atLeast(25_000),
	16: atLeast(50_000).and(ofFloor(0.70)),
	64: atLeast(60_000),
}

func measureDrain(synchronous string) func(*bench, context.Context) error {
	return func(b *bench, ctx context.Context) error { return b.measureDrain(ctx, synchronous) }
}

func (b *bench) measureDrain(ctx context.Context, synchronous string) error {
	m, err := b.inTurns(ctx,
		b.floorDrain(ctx, synchronous, largeBatch), b.floorDrain(ctx, synchronous, smallBatch),
		b.queueDrain(ctx, synchronous, 1), b.queueDrain(ctx, synchronous, 16), b.queueDrain(ctx, synchronous, 64))
	if err != nil {
		return err
	}
	for i, workers := range []int{1, 16, 64} {
		what, got := fmt.Sprintf("drain, workers: %d%s", workers, suffix(synchronous)), m[2+i]
		f := rateFigure(what, got, m[0])
		if synchronous == normal {
			f.target(drainTargets[workers])
		}
		b.add(f)
		if workers == smallBatch {
			b.add(rateFigure(fmt.Sprintf("%s (floor: batches of %d)", what, smallBatch), got, m[1]))
		}
	}
	return nil
}

func suffix(synchronous string) string {
	if synchronous == full {
		return ", FULL"
	}
	return ""
}

// queueDrain runs a backlog of n tasks, with empty handlers, from the first one's
// start until all is recorded.
func (b *bench) queueDrain(ctx context.Context, synchronous string, workers int) side {
	return side{"queue", func() (sample, error) {
		r, err := b.newRig(ctx, openDBPool, synchronous, workers)
		if err != nil {
			return sample{}, err
		}
		defer r.close()
		return r.drain(ctx, b.n)
	}}
}

// drain adds n tasks and runs them.
func (r *rig) drain(ctx context.Context, n int) (s sample, err error) {
	if err := r.fill(ctx, n, backlogSQL); err != nil {
		return sample{}, err
	}
	r.started.Store(0)
	watch := startWatch()
	err = r.during(ctx, func() error {
		err := r.waitDone(ctx, n)
		watch.start = time.Unix(0, r.first.Load())
		s = watch.stop(n)
		return err
	})
	return s, err
}

// floorDrain is queueDrain by the floor.
func (b *bench) floorDrain(ctx context.Context, synchronous string, batch int) side {
	return side{"floor", func() (s sample, err error) {
		err = b.withFloor(ctx, synchronous, func(r *rig, f *floor) error {
			if err := r.fill(ctx, b.n, backlogSQL); err != nil {
				return err
			}
			watch := startWatch()
			n, err := f.drain(batch)
			s = watch.stop(b.n)
			if err == nil && n != b.n {
				err = fmt.Errorf("the floor has run %d tasks, want %d", n, b.n)
			}
			return err
		})
		return s, err
	}}
}

// withFloor makes a queue's file and a floor on it. The queue doesn't run.
func (b *bench) withFloor(ctx context.Context, synchronous string, fn func(*rig, *floor) error) error {
	r, err := b.newRig(ctx, foreignPool, synchronous, 1)
	if err != nil {
		return err
	}
	defer r.close()
	f, err := newFloor(ctx, r.db)
	if err != nil {
		return err
	}
	defer f.close()
	return fn(r, f)
}

const producers = 4

// measureBoth lets producers enqueue, each task in its own transaction, while the
// queue runs. There are two floors: everything on one connection, which has all pages
// in its cache, and a connection for each producer and one for the turns.
func (b *bench) measureBoth(ctx context.Context) error {
	m, err := b.inTurns(ctx, b.floorBoth(ctx, 0), b.floorBoth(ctx, producers), b.queueBoth(ctx))
	if err != nil {
		return err
	}
	what := fmt.Sprintf("enqueue and drain at once, producers: %d", producers)
	f := rateFigure(what, m[2], m[0])
	f.target(ofFloor(0.80))
	b.add(f)
	b.add(rateFigure(what+" (floor: a connection each)", m[2], m[1]))
	return nil
}

func (b *bench) queueBoth(ctx context.Context) side {
	return side{"queue", func() (s sample, err error) {
		r, err := b.newRig(ctx, openDBPool, normal, 16)
		if err != nil {
			return sample{}, err
		}
		defer r.close()
		each := max(1, b.n/producers)
		watch := startWatch()
		err = r.during(ctx, func() error {
			if err := r.enqueueAll(each); err != nil {
				return err
			}
			err := r.waitDone(ctx, each*producers)
			s = watch.stop(each * producers)
			return err
		})
		return s, err
	}}
}

// enqueueAll has each producer enqueue n tasks.
func (r *rig) enqueueAll(n int) error {
	var wg sync.WaitGroup
	errs := make([]error, producers)
	for p := range errs {
		wg.Go(func() {
			for i := 0; i < n && errs[p] == nil; i++ {
				errs[p] = r.enqueue(i, false)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// floorBoth enqueues as many tasks as a turn then takes, in turns. With 0 producers the
// turns' connection enqueues.
func (b *bench) floorBoth(ctx context.Context, producers int) side {
	return side{"floor", func() (s sample, err error) {
		err = b.withFloor(ctx, normal, func(r *rig, f *floor) error {
			writers := []*floor{f}
			for i := range producers {
				w, err := newFloor(ctx, r.db)
				if err != nil {
					return err
				}
				defer w.close()
				writers = append(writers[:i], w)
			}
			watch := startWatch()
			err := f.both(b.n, writers)
			s = watch.stop(b.n)
			return err
		})
		return s, err
	}}
}

func (f *floor) both(n int, writers []*floor) error {
	for i := range n {
		if err := writers[i%len(writers)].enqueue(false); err != nil {
			return err
		}
		if i%smallBatch == smallBatch-1 {
			if _, _, err := f.turn(smallBatch); err != nil {
				return err
			}
		}
	}
	_, err := f.drain(smallBatch)
	return err
}

// measureHistory compares drains of a file with many finished tasks and of one without.
func (b *bench) measureHistory(ctx context.Context) error {
	old, err := b.newRig(ctx, openDBPool, normal, 16)
	if err != nil {
		return err
	}
	defer old.close()
	if err := old.fillHistory(ctx, b.history); err != nil {
		return err
	}
	m, err := b.inTurns(ctx, b.queueDrain(ctx, normal, 16),
		side{"queue", func() (sample, error) { return old.drain(ctx, b.n) }})
	if err != nil {
		return err
	}
	f := rateFigure(fmt.Sprintf("drain beside %s finished tasks (floor: none)", amount(float64(b.history))), m[1], m[0])
	f.target(ofFloor(0.85))
	b.add(f)
	return nil
}

// measureBytes looks at the file after a drain.
func (b *bench) measureBytes(ctx context.Context) error {
	r, err := b.newRig(ctx, openDBPool, normal, 16)
	if err != nil {
		return err
	}
	defer r.close()
	if _, err := r.drain(ctx, b.n); err != nil {
		return err
	}
	if err := r.emptyWAL(ctx); err != nil {
		return err
	}
	fi, err := os.Stat(r.path)
	if err != nil {
		return err
	}
	f := figure{What: "file per finished task with its trail", Value: float64(fi.Size()) / float64(b.n), Unit: " bytes"}
	f.target(atMost(700))
	b.add(f)
	return nil
}
