package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"time"
)

// Latencies are of tasks that are enqueued a few milliseconds apart, and each tenth
// after a pause in which the poller has gone to sleep.
const (
	shortGap = 4 * time.Millisecond
	longGap  = 120 * time.Millisecond
	gapEvery = 10
)

// latencySamples is how many of them fit into -time, a multiple of gapEvery.
func (b *bench) latencySamples() int {
	return gapEvery * max(1, int(b.time/(longGap+(gapEvery-1)*shortGap)))
}

func measureLatency(pool poolKind, synchronous string) func(*bench, context.Context) error {
	return func(b *bench, ctx context.Context) error { return b.measureLatency(ctx, pool, synchronous) }
}

func measureLatencyFull(b *bench, ctx context.Context) error {
	if err := b.measureLatency(ctx, openDBPool, full); err != nil {
		return err
	}
	return b.measureLatency(ctx, foreignPool, full)
}

// measureLatency enqueues in transactions of the application's and takes the time from
// the return of Commit to the start of the handler; one that has started before that
// counts as 0. The floor is the transaction that claims the task.
func (b *bench) measureLatency(ctx context.Context, pool poolKind, synchronous string) error {
	r, err := b.newRig(ctx, pool, synchronous, 16)
	if err != nil {
		return err
	}
	defer r.close()
	floor, err := r.claims(ctx, b.latencySamples())
	if err != nil {
		return err
	}
	starts := make(chan time.Time, 1) // so that the handler needn't wait
	r.onStart = func() { starts <- time.Now() }
	var all, rested []float64
	err = r.during(ctx, func() error {
		all, rested, err = r.latencies(ctx, b.latencySamples(), starts)
		return err
	})
	if err != nil {
		return err
	}
	b.addLatencies("commit to handler, "+pool.name, synchronous, floor, all)
	b.add(figure{What: "commit to handler, " + pool.name + suffix(synchronous) + ", p50 after a pause",
		Value: quantile(rested, 0.5), Unit: " ms"})
	return nil
}

// claims returns how long the floor takes to claim a task that another connection has
// just enqueued, in milliseconds.
func (r *rig) claims(ctx context.Context, n int) ([]float64, error) {
	writer, err := newFloor(ctx, r.db)
	if err != nil {
		return nil, err
	}
	defer writer.close()
	f, err := newFloor(ctx, r.db)
	if err != nil {
		return nil, err
	}
	defer f.close()
	var ms []float64
	for range n {
		time.Sleep(shortGap)
		if err := writer.enqueue(true); err != nil {
			return nil, err
		}
		start := time.Now()
		if _, _, err := f.turn(1); err != nil {
			return nil, err
		}
		ms = append(ms, milliseconds(time.Since(start)))
	}
	_, err = f.drain(1) // the last one
	return ms, err
}

// latencies returns all of them, and those after a long pause, in milliseconds.
func (r *rig) latencies(ctx context.Context, n int, starts <-chan time.Time) (all, rested []float64, err error) {
	for i := range n {
		gap := shortGap
		if i%gapEvery == 0 {
			gap = longGap
		}
		time.Sleep(gap)
		if err := r.enqueue(i, true); err != nil {
			return nil, nil, err
		}
		committed := time.Now()
		select {
		case <-ctx.Done():
			return nil, nil, ctx.Err()
		case start := <-starts:
			all = append(all, max(0, milliseconds(start.Sub(committed))))
		}
		if gap == longGap {
			rested = append(rested, all[i])
		}
	}
	return all, rested, nil
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// addLatencies adds the 50th and 99th percentiles. The targets are for NORMAL: with FULL
// the claim waits for the disk.
func (b *bench) addLatencies(what, synchronous string, floor, all []float64) {
	for _, p := range []struct {
		name string
		q    float64
		t    target
	}{{", p50", 0.5, atMost(0.2)}, {", p99", 0.99, atMost(1.5)}} {
		f := figure{What: what + suffix(synchronous) + p.name, Value: quantile(all, p.q), Unit: " ms", Floor: quantile(floor, p.q)}
		if synchronous == normal {
			f.target(p.t)
		}
		b.add(f)
	}
}

// inserterEnv makes the command bench a process that inserts into the file which the
// variable names.
const inserterEnv = "TASKBOX_BENCH_INSERT"

const inserterGap = 80 * time.Millisecond

// runInserter inserts by plain SQL, as a program would that doesn't know the library,
// and prints each commit's time in Unix nanoseconds, until it is killed.
func runInserter(path string, stdout io.Writer) error {
	db, err := foreignPool.open(benchDSN(path, normal))
	if err != nil {
		return err
	}
	defer db.Close()
	for i := 0; ; i++ {
		time.Sleep(inserterGap)
		if _, err := db.Exec(plainInsertSQL, benchType, fmt.Sprintf(`{"n":%d}`, i)); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(stdout, time.Now().UnixNano()); err != nil {
			return err
		}
	}
}

// measureProcess takes the time from another process's commit to the handler.
func (b *bench) measureProcess(ctx context.Context) error {
	r, err := b.newRig(ctx, openDBPool, normal, 16)
	if err != nil {
		return err
	}
	defer r.close()
	n := 1 + int(2*b.time/inserterGap)
	starts := make(chan int64, n) // as many as are read: the handler never waits
	r.onStart = func() {
		select {
		case starts <- time.Now().UnixNano():
		default: // inserted after the last that counts
		}
	}
	var ms []float64
	err = r.during(ctx, func() error {
		ms, err = insertElsewhere(ctx, r.path, n, starts)
		return err
	})
	if err != nil {
		return err
	}
	p50 := figure{What: "another process's commit to handler, p50", Value: quantile(ms, 0.5), Unit: " ms"}
	p50.target(atMost(60))
	b.add(p50)
	b.add(figure{What: "another process's commit to handler, p99", Value: quantile(ms, 0.99), Unit: " ms"})
	return nil
}

// insertElsewhere runs this program as an inserter until n tasks have been handled.
func insertElsewhere(ctx context.Context, path string, n int, starts <-chan int64) ([]float64, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	cmd := exec.CommandContext(ctx, exe, "bench")
	cmd.Env = append(os.Environ(), inserterEnv+"="+path)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		cancel()
		return nil, err
	}
	ms, err := matchStarts(ctx, bufio.NewScanner(out), n, starts)
	cancel()
	_ = cmd.Wait() // it was killed, and says so
	return ms, err
}

// matchStarts pairs each commit with the next start of a handler.
func matchStarts(ctx context.Context, commits *bufio.Scanner, n int, starts <-chan int64) (ms []float64, err error) {
	for range n {
		if !commits.Scan() {
			return nil, errors.Join(errors.New("the inserting process has ended"), commits.Err())
		}
		var at int64
		if _, err := fmt.Sscan(commits.Text(), &at); err != nil {
			return nil, err
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case start := <-starts:
			ms = append(ms, max(0, milliseconds(time.Duration(start-at))))
		}
	}
	return ms, nil
}
