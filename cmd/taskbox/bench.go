package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"regexp"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"time"
)

const benchUsage = `usage: taskbox bench [flags]

Measures the queue on this machine, and beside it the floor: the same SQL in the same
batches on one connection, without the queue. In each measurement that compares the
two they take turns, -runs times, and the medians count. What isn't said to be FULL is
measured with synchronous=NORMAL. Progress goes to stderr, the table to stdout.

The measurements, for -only:
`

// A bench is one run of the command.
type bench struct {
	dir     string // for the files of this run
	n       int
	runs    int
	time    time.Duration
	history int
	only    string
	output  string
	profile string
	machine machine
	log     io.Writer
	figures []figure
}

// A measurement yields one or more figures.
type measurement struct {
	name, what string
	run        func(*bench, context.Context) error
}

var measurements = []measurement{
	{"enqueue/normal", "enqueues in transactions of their own", measureEnqueue(normal)},
	{"enqueue/full", "the same with synchronous=FULL", measureEnqueue(full)},
	{"drain/normal", "a backlog run by 1, 16 and 64 workers", measureDrain(normal)},
	{"drain/full", "the same with synchronous=FULL", measureDrain(full)},
	{"both", "producers enqueue while the queue runs", (*bench).measureBoth},
	{"latency/opendb", "from commit to handler, a pool of OpenDB's", measureLatency(openDBPool, normal)},
	{"latency/foreign", "the same, a pool of the application's own", measureLatency(foreignPool, normal)},
	{"latency/full", "the same with synchronous=FULL, both pools", measureLatencyFull},
	{"latency/process", "from another process's commit to handler", (*bench).measureProcess},
	{"idle", "CPU and writes with nothing to do", (*bench).measureIdle},
	{"bytes", "what a task and its trail take in the file", (*bench).measureBytes},
	{"app/foreign", "an application's transactions beside a drain, its own pool", measureApp(foreignPool)},
	{"app/opendb", "the same, a pool of OpenDB's", measureApp(openDBPool)},
	{"scheduled", "a look for due tasks beside 200,000 scheduled ones", (*bench).measureScheduled},
	{"history", "a drain beside -history finished tasks", (*bench).measureHistory},
}

// runBench is the command bench. The table has what could be measured even where
// something couldn't; that is the error.
func runBench(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if path := os.Getenv(inserterEnv); path != "" {
		return runInserter(path, stdout)
	}
	b := &bench{log: stderr}
	if err := parseFlags(b.flags(), args, stdout); err != nil {
		return err
	}
	chosen, err := b.choose()
	if err != nil {
		return err
	}
	b.machine = thisMachine(b.dir)
	err = b.profiled(func() error { return b.measure(ctx, chosen) })
	return errors.Join(err, b.print(stdout))
}

func (b *bench) flags() *flag.FlagSet {
	text := new(strings.Builder)
	text.WriteString(benchUsage)
	for _, m := range measurements {
		fmt.Fprintf(text, "  %-16s %s\n", m.name, m.what)
	}
	fs := newFlags("bench", text.String()+"\n")
	fs.StringVar(&b.dir, "db", os.TempDir(), "put the files in `DIR`; a disk's sync decides what FULL costs")
	fs.IntVar(&b.n, "n", 20_000, "tasks per drain")
	fs.IntVar(&b.runs, "runs", 3, "runs of what is compared with its floor")
	fs.DurationVar(&b.time, "time", 2*time.Second, "how long a measurement lasts that goes by time, more or less")
	fs.IntVar(&b.history, "history", 100_000, "finished tasks in the file for the measurement history")
	fs.StringVar(&b.only, "only", "", "run the measurements whose names match `REGEXP`")
	fs.StringVar(&b.output, "o", "text", "output format: text or json")
	fs.StringVar(&b.profile, "cpuprofile", "", "write a CPU profile to `FILE`, with the label side: queue or floor")
	return fs
}

// choose checks the flags and returns the measurements to run.
func (b *bench) choose() ([]measurement, error) {
	re, err := regexp.Compile(b.only)
	if err != nil {
		return nil, usageError{fmt.Sprintf("-only: %v", err)}
	}
	chosen := slices.Clone(measurements)
	chosen = slices.DeleteFunc(chosen, func(m measurement) bool { return !re.MatchString(m.name) })
	switch {
	case len(chosen) == 0:
		return nil, usageError{fmt.Sprintf("-only %q matches no measurement", b.only)}
	case b.n < 1 || b.runs < 1 || b.time <= 0 || b.history < 1:
		return nil, usageError{"-n, -runs, -time and -history must be more than 0"}
	case b.output != "text" && b.output != "json":
		return nil, usageError{fmt.Sprintf("-o is %q, want text or json", b.output)}
	}
	return chosen, nil
}

// measure runs the measurements in a folder of their own.
func (b *bench) measure(ctx context.Context, chosen []measurement) error {
	dir, err := os.MkdirTemp(b.dir, "taskbox-bench-")
	if err != nil {
		return fmt.Errorf("make a folder for the files: %w", err)
	}
	defer os.RemoveAll(dir)
	b.dir = dir
	var errs []error
	for _, m := range chosen {
		start := time.Now()
		fmt.Fprintf(b.log, "%-16s ", m.name)
		if err := m.run(b, ctx); err != nil {
			errs = append(errs, fmt.Errorf("measure %s: %w", m.name, err))
		}
		fmt.Fprintf(b.log, "%5.1f s\n", time.Since(start).Seconds())
		if ctx.Err() != nil {
			break
		}
	}
	return errors.Join(errs...)
}

func (b *bench) profiled(fn func() error) error {
	if b.profile == "" {
		return fn()
	}
	f, err := os.Create(b.profile)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := pprof.StartCPUProfile(f); err != nil {
		return err
	}
	defer pprof.StopCPUProfile()
	return fn()
}

// A side is one of the things compared. Its run is one measurement.
type side struct {
	name string // queue or floor, as the profile's label
	run  func() (sample, error)
}

// A sample is how many operations a second a side got through, and how many
// microseconds of CPU time each took the process: the second says more than the first
// where other programs want the CPU too.
type sample struct{ rate, cpu float64 }

// A stopwatch makes a sample.
type stopwatch struct {
	start time.Time
	cpu   time.Duration
}

func startWatch() stopwatch { return stopwatch{time.Now(), cpuTime()} }

// stop returns the sample of n operations since the start.
func (w stopwatch) stop(n int) sample {
	cpu := (cpuTime() - w.cpu).Seconds() * 1e6
	return sample{float64(n) / time.Since(w.start).Seconds(), cpu / float64(n)}
}

// inTurns runs the sides in turn, several times over, because a machine is faster at one
// moment than at another; it returns the medians of each.
func (b *bench) inTurns(ctx context.Context, sides ...side) ([]sample, error) {
	rates, cpus := make([][]float64, len(sides)), make([][]float64, len(sides))
	for range b.runs {
		for i, s := range sides {
			got, err := s.once(ctx)
			if err != nil {
				return nil, err
			}
			rates[i], cpus[i] = append(rates[i], got.rate), append(cpus[i], got.cpu)
		}
	}
	medians := make([]sample, len(sides))
	for i := range medians {
		medians[i] = sample{quantile(rates[i], 0.5), quantile(cpus[i], 0.5)}
	}
	return medians, nil
}

func (s side) once(ctx context.Context) (got sample, err error) {
	if err := ctx.Err(); err != nil {
		return sample{}, err
	}
	runtime.GC() // what the side before has left
	pprof.Do(ctx, pprof.Labels("side", s.name), func(context.Context) { got, err = s.run() })
	return got, err
}

// quantile sorts vs; q is from 0 to 1. Of nothing it is 0.
func quantile(vs []float64, q float64) float64 {
	if len(vs) == 0 {
		return 0
	}
	slices.Sort(vs)
	return vs[min(int(q*float64(len(vs))), len(vs)-1)]
}
