package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"time"

	"github.com/taskbox-go/taskbox"
)

// customers order through the shop's HTTP interface, so that something happens
// without curl.
type customers struct {
	url  string
	rate float64 // orders per second
	log  io.Writer
}

// run orders until ctx ends, and finishes the order that is under way then.
func (c customers) run(ctx context.Context) error {
	if c.rate == 0 {
		return nil
	}
	tick := time.NewTicker(time.Duration(float64(time.Second) / c.rate))
	defer tick.Stop()
	for n := 0; ctx.Err() == nil; n++ {
		if err := c.order(context.WithoutCancel(ctx), n); err != nil {
			fmt.Fprintln(c.log, "customer:", err)
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
	return nil
}

var menu = []string{"tea", "coffee", "cake", "soup"}

func (c customers) order(ctx context.Context, n int) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	body := fmt.Sprintf(`{"item": %q, "cents": %d}`, menu[n%len(menu)], 300+50*(n%len(menu)))
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url+"/orders", strings.NewReader(body))
	if err != nil {
		return err
	}
	// As if a traced web page had called: the task goes on under the same trace.
	req.Header.Set("traceparent", traceparent(fmt.Sprintf("%016x%016x", rand.Uint64()|1, rand.Uint64())))
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return taskbox.HTTPError(resp)
}

// traceparent is the W3C header for a call under a trace.
func traceparent(trace string) string {
	return fmt.Sprintf("00-%s-%016x-01", trace, rand.Uint64()|1)
}
