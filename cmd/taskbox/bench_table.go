package main

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"text/tabwriter"
)

// A figure is a line of the table.
type figure struct {
	What   string  `json:"what"`
	Value  float64 `json:"figure"`
	Unit   string  `json:"unit"`
	Floor  float64 `json:"floor,omitempty"` // 0: there is none
	Ratio  float64 `json:"ratio,omitempty"`
	Target string  `json:"target,omitempty"`
	Met    *bool   `json:"met,omitempty"` // nil: no target
	// CPU time of the process for each operation, in µs; 0: not measured.
	CPU      float64 `json:"cpu_us,omitempty"`
	FloorCPU float64 `json:"floor_cpu_us,omitempty"`
}

// rateFigure is operations a second, beside those of the floor.
func rateFigure(what string, queue, floor sample) figure {
	return figure{What: what, Value: queue.rate, Unit: "/s", Floor: floor.rate, CPU: queue.cpu, FloorCPU: floor.cpu}
}

// A target is what a figure should reach.
type target struct {
	text func(unit string) string
	met  func(figure) bool
}

func atLeast(v float64) target {
	return target{func(u string) string { return "≥ " + amount(v) + u }, func(f figure) bool { return f.Value >= v }}
}

func atMost(v float64) target {
	return target{func(u string) string { return "≤ " + amount(v) + u }, func(f figure) bool { return f.Value <= v }}
}

// ofFloor asks for a share of the floor.
func ofFloor(share float64) target {
	return target{
		func(string) string { return fmt.Sprintf("≥ %.0f %%", share*100) },
		func(f figure) bool { return f.Value >= share*f.Floor },
	}
}

func (t target) and(o target) target {
	return target{
		func(u string) string { return t.text(u) + ", " + o.text(u) },
		func(f figure) bool { return t.met(f) && o.met(f) },
	}
}

func (f *figure) target(t target) {
	met := t.met(*f)
	f.Target, f.Met = t.text(f.Unit), &met
}

func (b *bench) add(f figure) {
	if f.Floor != 0 {
		f.Ratio = f.Value / f.Floor
	}
	b.figures = append(b.figures, f)
}

// amount writes large numbers with a comma and small ones with three digits.
func amount(v float64) string {
	switch {
	case v >= 1000:
		return fmt.Sprintf("%d,%03d", int(v)/1000, int(v)%1000)
	case v >= 100 || v == float64(int(v)):
		return fmt.Sprintf("%.0f", v)
	case v >= 10:
		return fmt.Sprintf("%.1f", v)
	}
	return fmt.Sprintf("%.2g", v)
}

// percent writes a ratio, a large one as a multiple.
func percent(ratio float64) string {
	if ratio >= 10 {
		return amount(ratio) + " ×"
	}
	return fmt.Sprintf("%.0f %%", ratio*100)
}

func (f figure) cells() string {
	floor, ratio, met, cpu, floorCPU := "", "", "", "", ""
	if f.Floor != 0 {
		floor, ratio = amount(f.Floor)+f.Unit, percent(f.Ratio)
	}
	if f.Met != nil {
		met = map[bool]string{true: "met", false: "MISSED"}[*f.Met]
	}
	if f.CPU != 0 {
		cpu, floorCPU = amount(f.CPU)+" µs", amount(f.FloorCPU)+" µs"
	}
	return strings.Join([]string{f.What, amount(f.Value) + f.Unit, floor, ratio, f.Target, met, cpu, floorCPU}, "\t")
}

func (b *bench) print(w io.Writer) error {
	if b.output == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(struct {
			Machine machine  `json:"machine"`
			Figures []figure `json:"figures"`
		}{b.machine, b.figures})
	}
	fmt.Fprintf(w, "%s\n\n", b.machine)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "what\tfigure\tfloor\tratio\ttarget\t\tCPU each\tfloor's")
	for _, f := range b.figures {
		fmt.Fprintln(t, f.cells())
	}
	if err := t.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprint(w, "\n", b.notes())
	return err
}

func (b *bench) notes() string {
	targets, missed := 0, 0
	for _, f := range b.figures {
		if f.Met != nil {
			targets++
			if !*f.Met {
				missed++
			}
		}
	}
	return fmt.Sprintf(`The floor is the same SQL without the queue, on one connection unless it says
otherwise: drains in batches of %d or, where producers enqueue meanwhile, of %d; of
latencies it is the transaction that claims the task.
Handlers are empty and trails are complete. Rates are medians of %d. CPU each is the
time of all cores that an operation took. The targets are for a machine whose floor
drains 65,000 to 98,000 a second. Of %d targets %d were missed.
`, largeBatch, smallBatch, b.runs, targets, missed)
}

// A machine is where the figures come from.
type machine struct {
	CPU        string  `json:"cpu"`
	Cores      int     `json:"cores"`
	Go         string  `json:"go"`
	SQLite     string  `json:"sqlite"`
	Filesystem string  `json:"filesystem,omitempty"`
	Load       float64 `json:"load"` // processes that wanted a core in the minute before; 0: not known
}

func (m machine) String() string {
	s := fmt.Sprintf("%s, cores: %d, %s, SQLite %s", m.CPU, m.Cores, m.Go, m.SQLite)
	if m.Filesystem != "" {
		s += ", " + m.Filesystem
	}
	if m.Load > 0.3*float64(m.Cores) {
		s += fmt.Sprintf("\nThe machine was busy: its load was %.1f before the bench began.", m.Load)
	}
	return s
}

func thisMachine(dir string) machine {
	return machine{
		CPU: cpuModel(), Cores: runtime.GOMAXPROCS(0),
		Go:         runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH,
		SQLite:     sqliteVersion(),
		Filesystem: filesystemOf(dir),
		Load:       loadAverage(),
	}
}

func sqliteVersion() string {
	db, err := sql.Open("sqlite", ":memory:")
	if err != nil {
		return "?"
	}
	defer db.Close()
	v := "?" // not known
	_ = db.QueryRow("select sqlite_version()").Scan(&v)
	return v
}

// cpuModel asks Linux; elsewhere the architecture must do.
func cpuModel() string {
	text, _ := os.ReadFile("/proc/cpuinfo")
	for line := range strings.Lines(string(text)) {
		if name, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(name) == "model name" {
			return strings.TrimSpace(value)
		}
	}
	return runtime.GOARCH
}

// filesystemOf asks Linux; elsewhere it returns "".
func filesystemOf(dir string) string {
	dir, err := filepath.EvalSymlinks(dir)
	text, err2 := os.ReadFile("/proc/self/mounts")
	if err != nil || err2 != nil {
		return ""
	}
	best, kind := "", ""
	for line := range strings.Lines(string(text)) {
		f := strings.Fields(line)
		if len(f) < 3 || len(f[1]) < len(best) {
			continue
		}
		if rel, err := filepath.Rel(f[1], dir); err == nil && filepath.IsLocal(rel) {
			best, kind = f[1], f[2]
		}
	}
	return kind
}

// loadAverage asks Linux; elsewhere it returns 0.
func loadAverage() (load float64) {
	text, err := os.ReadFile("/proc/loadavg")
	if err == nil {
		_, _ = fmt.Sscan(string(text), &load) // 0 says that it isn't known
	}
	return load
}
