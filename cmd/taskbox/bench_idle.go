package main

import (
	"context"
	"database/sql"
	"os"
	"time"
)

// measureIdle looks at a queue with nothing to do for longer than a heartbeat of its
// lease, and before that, as the floor, at the process without it.
func (b *bench) measureIdle(ctx context.Context) error {
	r, err := b.newRig(ctx, openDBPool, normal, 16)
	if err != nil {
		return err
	}
	defer r.close()
	without, err := cpuShare(ctx, b.time/2)
	if err != nil {
		return err
	}
	var with float64
	var writes int
	err = r.during(ctx, func() error {
		time.Sleep(b.time / 4) // it opens its connection and registers
		writes, err = r.writesWhile(ctx, func() error {
			with, err = cpuShare(ctx, 3*b.time)
			return err
		})
		return err
	})
	if err != nil {
		return err
	}
	f := figure{What: "idle, CPU of one core (floor: no queue)", Value: with, Unit: " %", Floor: without}
	f.target(atMost(0.3))
	b.add(f)
	w := figure{What: "idle, commits and changes of the WAL", Value: float64(writes)}
	w.target(atMost(0))
	b.add(w)
	return nil
}

// cpuShare sleeps for d and returns the CPU time that the process has taken, in per
// cent of one core.
func cpuShare(ctx context.Context, d time.Duration) (float64, error) {
	watch := startWatch()
	select {
	case <-ctx.Done():
		return 0, ctx.Err()
	case <-time.After(d):
	}
	return 100 * (cpuTime() - watch.cpu).Seconds() / time.Since(watch.start).Seconds(), nil
}

// writesWhile counts what has been written to the file while fn runs, as a connection
// other than the queue's sees it.
func (r *rig) writesWhile(ctx context.Context, fn func() error) (int, error) {
	conn, err := r.db.Conn(ctx)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	before, wal, err := r.written(ctx, conn)
	if err != nil {
		return 0, err
	}
	if err := fn(); err != nil {
		return 0, err
	}
	after, walAfter, err := r.written(ctx, conn)
	if err != nil {
		return 0, err
	}
	n := after - before
	if wal.Size() != walAfter.Size() || !wal.ModTime().Equal(walAfter.ModTime()) {
		n++
	}
	return n, nil
}

func (r *rig) written(ctx context.Context, conn *sql.Conn) (version int, wal os.FileInfo, err error) {
	if err := conn.QueryRowContext(ctx, "pragma data_version").Scan(&version); err != nil {
		return 0, nil, err
	}
	wal, err = os.Stat(r.path + "-wal")
	return version, wal, err
}

const manyScheduled = 200_000

// measureScheduled times the loop's look and an empty claim by their SQL: from outside,
// the loop's own can't be told from its sleep.
func (b *bench) measureScheduled(ctx context.Context) error {
	return b.withFloor(ctx, normal, func(r *rig, f *floor) error {
		without, err := b.repeat(func(int) error { return f.lookAndClaim() })
		if err != nil {
			return err
		}
		if err := r.fill(ctx, manyScheduled, scheduledSQL); err != nil {
			return err
		}
		with, err := b.repeat(func(int) error { return f.lookAndClaim() })
		if err != nil {
			return err
		}
		g := figure{What: "empty look and claim, scheduled: 200,000 (floor: 0)", Value: with.cpu, Unit: " µs", Floor: without.cpu}
		g.target(atMost(50))
		b.add(g)
		return nil
	})
}

func (f *floor) lookAndClaim() error {
	st, err := f.stmt(floorLookSQL)
	if err != nil {
		return err
	}
	var scheduled, retry sql.NullInt64
	var types string
	if err := st.QueryRowContext(f.ctx).Scan(&scheduled, &retry, &types); err != nil {
		return err
	}
	return f.due(largeBatch)
}
