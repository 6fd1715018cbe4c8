package main

import (
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"strings"
	"time"
)

const demoHelp = `usage: taskbox demo [flags]

Runs a small shop: POST /orders writes an order and its task in one transaction, and
the task's handler gets the order a coupon from an HTTP service that misbehaves on
purpose. It prints each task's trail as it moves, and the figures at the end.

`

// maxRate bounds -rate: beyond it the demo would measure HTTP.
const maxRate = 1000

// demoConfig is what the flags say.
type demoConfig struct {
	addr   string
	db     string // the file
	keep   bool   // it is the user's, not a temporary one
	length time.Duration
	rate   float64
	tiers  []time.Duration
	// mischief is how the downstream misbehaves; its times follow from the tiers.
	mischief mischief
}

func parseDemo(args []string, out io.Writer) (demoConfig, error) {
	cfg := demoConfig{tiers: []time.Duration{time.Second, 2 * time.Second, 4 * time.Second, 8 * time.Second}}
	fs := newFlags("demo", demoHelp)
	fs.StringVar(&cfg.addr, "addr", "127.0.0.1:0", "serve the shop on `HOST:PORT`; port 0: a free one")
	fs.StringVar(&cfg.db, "db", "", "use and keep this SQLite `FILE`, and go on where an earlier run stopped (default: a temporary one)")
	fs.DurationVar(&cfg.length, "for", 0, "end after this `DURATION`, such as 20s (default: at Ctrl-C)")
	fs.Float64Var(&cfg.rate, "rate", 2, "`ORDERS` per second from built-in customers; 0: none")
	fs.Func("tiers", "the `WAITS` before the retries (default 1s,2s,4s,8s)", cfg.setTiers)
	if err := parseFlags(fs, args, out); err != nil {
		return cfg, err
	}
	cfg.keep = cfg.db != ""
	cfg.mischief = mischiefFor(cfg.tiers[0])
	return cfg, cfg.validate()
}

func (cfg *demoConfig) setTiers(text string) error {
	cfg.tiers = nil
	for part := range strings.SplitSeq(text, ",") {
		d, err := time.ParseDuration(strings.TrimSpace(part))
		if err != nil || d <= 0 {
			return fmt.Errorf("want positive durations with commas between, such as 1s,2s,4s")
		}
		cfg.tiers = append(cfg.tiers, d)
	}
	return nil
}

func (cfg *demoConfig) validate() error {
	switch {
	case cfg.length < 0:
		return usageError{fmt.Sprintf("-for is %v, want a positive duration, or 0 to run until Ctrl-C", cfg.length)}
	case math.IsNaN(cfg.rate) || cfg.rate < 0 || cfg.rate > maxRate:
		return usageError{fmt.Sprintf("-rate is %v, want 0 to %d orders per second", cfg.rate, maxRate)}
	case cfg.rate > 0 && cfg.rate < 0.001:
		return usageError{fmt.Sprintf("-rate is %v, want 0, or at least 0.001 orders per second", cfg.rate)}
	}
	if _, _, err := net.SplitHostPort(cfg.addr); err != nil {
		return usageError{fmt.Sprintf("-addr is %q, want HOST:PORT, such as 127.0.0.1:8080", cfg.addr)}
	}
	return nil
}

// limit ends ctx when the demo's time is over.
func (cfg *demoConfig) limit(ctx context.Context) (context.Context, context.CancelFunc) {
	if cfg.length == 0 {
		return context.WithCancel(ctx)
	}
	return context.WithTimeout(ctx, cfg.length)
}

// introduce says what is about to be seen.
func (d *demo) introduce() {
	w, m := d.std.err, d.cfg.mischief
	fmt.Fprintf(w, "The shop takes orders at %s/orders. Each order needs a coupon\n", d.front.url)
	fmt.Fprintf(w, "from the service at %s, which misbehaves on purpose:\n\n", d.coupons.url)
	m.describe(w)
	fmt.Fprintf(w, "\nThe waits before the retries, the tiers, are short here, so that you can watch:\n%s (the library's own: 30 s, 2 min, 10 min, 1 h). A task that\nfails after the last one is a dead letter. Orders are taken all the while.\n", tierList(d.cfg.tiers))
	if d.cfg.keep {
		fmt.Fprintf(w, "\nfile:   %s\n", d.cfg.db)
	} else {
		fmt.Fprintf(w, "\nfile:   %s (removed at the end; -db FILE keeps one)\n", d.cfg.db)
	}
	fmt.Fprintf(w, "order:  curl -d '%s' %s/orders\n", sampleOrder, d.front.url)
	fmt.Fprintf(w, "look:   curl %s/orders/1\n", d.front.url)
	if d.cfg.length == 0 {
		fmt.Fprintln(w, "stop:   Ctrl-C (twice to kill)")
	}
	fmt.Fprintln(w)
	if d.waiting > 0 {
		fmt.Fprintf(w, "An earlier run has left %s; they go on now.\n\n", plural(d.waiting, "task"))
	}
}

func tierList(tiers []time.Duration) string {
	var texts []string
	for _, d := range tiers {
		texts = append(texts, brief(d))
	}
	return strings.Join(texts, ", ")
}
