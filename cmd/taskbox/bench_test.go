package main

import (
	"bytes"
	"encoding/json"
	"io"
	"os"
	"strings"
	"testing"
)

// benchArgs are for a bench that shows nothing but that it works.
func benchArgs(t *testing.T, more ...string) []string {
	return append([]string{"bench", "-db", t.TempDir(), "-n", "200", "-runs", "1", "-time", "20ms"}, more...)
}

func TestBench_Drain(t *testing.T) {
	var out, progress bytes.Buffer
	args := benchArgs(t, "-only", "drain")
	if code := run(t.Context(), args, nil, &out, &progress); code != exitOK {
		t.Fatalf("taskbox %q: exit code %d, %s", args, code, &progress)
	}
	for _, row := range []string{
		"drain, workers: 1 ", "drain, workers: 16 ", "drain, workers: 64 ",
		"drain, workers: 1, FULL ", "drain, workers: 16, FULL ", "drain, workers: 64, FULL ",
		"drain, workers: 16 (floor: batches of 16) ",
	} {
		if !strings.Contains(out.String(), "\n"+row) {
			t.Errorf("the table has no row %q:\n%s", row, &out)
		}
	}
	for _, head := range []string{"SQLite 3.", "what ", "≥ 50,000/s, ≥ 70 %", "Of 3 targets "} {
		if !strings.Contains(out.String(), head) {
			t.Errorf("the output has no %q:\n%s", head, &out)
		}
	}
	if !strings.Contains(progress.String(), "drain/full ") {
		t.Errorf("progress is %q, want it to name drain/full", &progress)
	}
}

func TestBench_JSON(t *testing.T) {
	t.Setenv(asCommand, "1") // the process that inserts is this test
	var out bytes.Buffer
	args := benchArgs(t, "-only", "^(enqueue|both|latency|bytes|app|history)", "-history", "50", "-o", "json")
	if code := run(t.Context(), args, nil, &out, t.Output()); code != exitOK {
		t.Fatalf("taskbox %q: exit code %d", args, code)
	}
	var got struct {
		Machine machine
		Figures []figure
	}
	if err := json.Unmarshal(out.Bytes(), &got); err != nil {
		t.Fatalf("output: %v\n%s", err, &out)
	}
	if got.Machine.SQLite == "" || len(got.Figures) == 0 {
		t.Errorf("output = %+v, want a machine and figures", got)
	}
	for _, f := range got.Figures {
		if (f.Target == "") != (f.Met == nil) || f.Floor != 0 && f.Ratio == 0 {
			t.Errorf("figure %+v: its target is neither met nor missed, or it has no ratio", f)
		}
	}
}

func TestBench_Clean(t *testing.T) {
	dir := t.TempDir()
	args := []string{"bench", "-db", dir, "-n", "10", "-runs", "1", "-time", "5ms", "-only", "bytes"}
	if code := run(t.Context(), args, nil, io.Discard, t.Output()); code != exitOK {
		t.Fatalf("taskbox %q: exit code %d", args, code)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v; want nothing", left, err)
	}
}

func TestBench_Usage(t *testing.T) {
	for _, args := range [][]string{
		{"-n", "0"}, {"-runs", "0"}, {"-time", "0s"}, {"-history", "-1"}, {"-o", "xml"},
		{"-only", "("}, {"-only", "nothing"}, {"-wat"}, {"rest"},
	} {
		args = append([]string{"bench"}, args...)
		var out bytes.Buffer
		if code := run(t.Context(), args, nil, &out, io.Discard); code != exitUsage || out.Len() > 0 {
			t.Errorf("taskbox %q: exit code %d, stdout %q, want %d and nothing", args, code, &out, exitUsage)
		}
	}
}

func TestBench_Quantile(t *testing.T) {
	for _, c := range []struct {
		vs   []float64
		q    float64
		want float64
	}{
		{nil, 0.5, 0},
		{[]float64{7}, 0.99, 7},
		{[]float64{3, 1, 2}, 0.5, 2},
		{[]float64{3, 1, 2}, 0, 1},
		{[]float64{3, 1, 2}, 1, 3},
	} {
		if got := quantile(c.vs, c.q); got != c.want {
			t.Errorf("quantile(%v, %v) = %v, want %v", c.vs, c.q, got, c.want)
		}
	}
}

func TestBench_Cells(t *testing.T) {
	f := figure{What: "drain", Value: 52_345, Unit: "/s", Floor: 71_000, CPU: 15.25, FloorCPU: 12}
	f.target(atLeast(50_000).and(ofFloor(0.75)))
	b := &bench{}
	b.add(f)
	b.add(figure{What: "p99", Value: 1.234, Unit: " ms", Floor: 0.1})
	want := []string{
		"drain\t52,345/s\t71,000/s\t74 %\t≥ 50,000/s, ≥ 75 %\tMISSED\t15.2 µs\t12 µs",
		"p99\t1.2 ms\t0.1 ms\t12.3 ×\t\t\t\t",
	}
	for i, f := range b.figures {
		if got := f.cells(); got != want[i] {
			t.Errorf("cells %d = %q, want %q", i, got, want[i])
		}
	}
}
