package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/taskbox-go/taskbox"
)

// The demo is an application like any other: it has a table of its own in the file
// beside the queue's, and its SQL is an application's. Its parts:
//
//	demo_config.go      flags, and what follows from them
//	demo_file.go        the file, and whether it may be used
//	demo_shop.go        orders: the table, the transaction that enqueues, the handlers
//	demo_http.go        the shop's HTTP interface
//	demo_downstream.go  the coupon service that misbehaves, and its client
//	demo_customers.go   the built-in stream of orders
//	demo_live.go        each task's trail as it moves
//	demo_trail.go       reading the trail, and saying why
//	demo_summary.go     the five figures at the end
//	demo_text.go        durations, colours, quoting

// demo is one run of the shop.
type demo struct {
	cfg     demoConfig
	std     stdio
	db      *sql.DB
	q       *taskbox.Queue
	shop    *shop
	live    *live
	coupons *server // the downstream
	front   *server // the shop
	waiting int64   // tasks that an earlier run has left
}

func runDemo(ctx context.Context, args []string, std stdio) error {
	cfg, err := parseDemo(args, std.out)
	if err != nil {
		return err
	}
	remove, err := cfg.makeFile()
	if err != nil {
		return err
	}
	defer remove()
	db, err := openShopFile(ctx, cfg.db)
	if err != nil {
		return err
	}
	defer db.Close()
	d := &demo{cfg: cfg, std: std, db: db}
	if err := d.open(ctx); err != nil {
		return err
	}
	if err := d.play(ctx); err != nil {
		return err
	}
	// Whoever stopped the demo wants to see the figures, too.
	return d.summary(context.WithoutCancel(ctx))
}

// open makes the queue, and the two services, which listen but don't serve yet.
func (d *demo) open(ctx context.Context) (err error) {
	d.live = newLive(d.db, d.std)
	d.q, err = taskbox.New(ctx, d.db, taskbox.Options{
		Schedule: taskbox.Tiers(d.cfg.tiers...),
		Logger:   d.live.logger(),
	})
	if err != nil {
		return err
	}
	if err := d.lookBack(ctx); err != nil {
		return err
	}
	service := newCouponService(d.cfg.mischief)
	if d.coupons, err = listen("127.0.0.1:0", service.routes()); err != nil {
		return err
	}
	d.shop = newShop(d.db, d.q, newCouponClient(d.coupons.url), d.cfg.mischief.timeout)
	d.front, err = listen(d.cfg.addr, d.shop.routes(d.std.err))
	if err != nil {
		d.coupons.srv.Close()
		return fmt.Errorf("%w\nhint: choose another address with -addr, or leave it out", err)
	}
	return nil
}

// lookBack finds out what an earlier run has left.
func (d *demo) lookBack(ctx context.Context) error {
	s, err := d.q.Stats(ctx)
	d.waiting = s.QueueLength + s.Scheduled + s.RetryWait + s.Blocked + s.Running
	return errors.Join(err, d.live.skipOld(ctx))
}

// play runs all parts until ctx ends, the time is over or one of them fails, and
// then stops them in the order in which they feed each other.
func (d *demo) play(ctx context.Context) error {
	d.introduce()
	ctx, cancel := d.cfg.limit(ctx)
	defer cancel()
	polling, stopPolling := context.WithCancel(context.WithoutCancel(ctx))
	defer stopPolling()
	printing, stopPrinting := context.WithCancel(context.WithoutCancel(ctx))
	defer stopPrinting()

	coupons := background(func() error { defer cancel(); return d.coupons.serve() })
	front := background(func() error { defer cancel(); return d.front.serve() })
	live := background(func() error { defer cancel(); return d.live.run(printing) })
	poller := background(func() error { defer cancel(); return d.q.Run(polling) })
	orders := background(func() error { return customers{d.front.url, d.cfg.rate, d.std.err}.run(ctx) })

	<-ctx.Done()
	fmt.Fprintln(d.std.err, "\nStopping: what runs is finished, what waits stays in the file.")
	err := orders()
	err = errors.Join(err, d.front.stop(), front())
	stopPolling()
	err = errors.Join(err, poller(), d.coupons.stop(), coupons())
	stopPrinting()
	return errors.Join(err, live())
}

// background runs fn in the background. The function that it returns waits for the end.
func background(fn func() error) (wait func() error) {
	done := make(chan error, 1) // fn ends, whether or not anybody waits
	go func() { done <- fn() }()
	return func() error { return <-done }
}

// A server is an HTTP server that has its port.
type server struct {
	srv      *http.Server
	listener net.Listener
	url      string
}

func listen(addr string, h http.Handler) (*server, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, err
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 10 * time.Second, IdleTimeout: time.Minute}
	return &server{srv, l, "http://" + l.Addr().String()}, nil
}

func (s *server) serve() error {
	if err := s.srv.Serve(s.listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// stop finishes the requests that are under way.
func (s *server) stop() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := s.srv.Shutdown(ctx); err != nil {
		return s.srv.Close()
	}
	return nil
}
