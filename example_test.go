package taskbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/taskbox-go/taskbox"
)

// Order is the payload of the examples.
type Order struct {
	ID int64 `json:"id"`
}

// OrderCreated is declared once, for the code that enqueues and the code that handles.
var OrderCreated = taskbox.NewType[Order]("order_created")

// openShop opens a queue in memory, with a table of the application's beside it.
func openShop() (*sql.DB, *taskbox.Queue) {
	db, err := taskbox.OpenDB(":memory:")
	if err != nil {
		log.Fatal(err)
	}
	if _, err := db.Exec(`create table orders (id integer primary key, item text not null, coupon text)`); err != nil {
		log.Fatal(err)
	}
	q, err := taskbox.New(context.Background(), db, taskbox.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	return db, q
}

func Example() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	db, err := taskbox.OpenDB(":memory:") // or a file, or your own *sql.DB
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	q, err := taskbox.New(ctx, db, taskbox.Options{})
	if err != nil {
		log.Fatal(err)
	}

	OrderCreated.Handle(q, func(ctx context.Context, t *taskbox.Task[Order]) error {
		fmt.Printf("order %d, attempt %d\n", t.Payload.ID, t.Attempt)
		stop() // a server goes on; this example has seen enough
		return nil
	})
	if _, err := q.Enqueue(ctx, db, OrderCreated.New(Order{ID: 42})); err != nil {
		log.Fatal(err)
	}
	if err := q.Run(ctx); err != nil {
		log.Fatal(err)
	}
	// Output:
	// order 42, attempt 1
}

func ExampleQueue_Enqueue() {
	ctx := context.Background()
	db, q := openShop()
	defer db.Close()
	place := func(id int64, item string) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback() // does nothing after Commit
		if _, err := q.Enqueue(ctx, tx, OrderCreated.New(Order{ID: id})); err != nil {
			return err
		}
		if item == "" {
			return errors.New("an order of nothing") // the task goes with the transaction
		}
		if _, err := tx.ExecContext(ctx, `insert into orders (id, item) values (?, ?)`, id, item); err != nil {
			return err
		}
		return tx.Commit()
	}
	fmt.Println(place(1, "tea"))
	fmt.Println(place(2, ""))

	var orders, tasks int
	if err := db.QueryRow(`
select (select count(*) from orders), (select count(*) from task_outbox)`).Scan(&orders, &tasks); err != nil {
		log.Fatal(err)
	}
	fmt.Println(orders, "order,", tasks, "task")
	// Output:
	// <nil>
	// an order of nothing
	// 1 order, 1 task
}

func ExampleQueue_EnqueueMany() {
	ctx := context.Background()
	db, q := openShop()
	defer db.Close()
	receipts, err := q.EnqueueMany(ctx, db,
		OrderCreated.New(Order{ID: 1}),
		OrderCreated.New(Order{ID: 2}, taskbox.Delay(time.Hour)),
		OrderCreated.New(Order{ID: 3}, taskbox.Priority(10), taskbox.MaxAttempts(3)))
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range receipts {
		fmt.Println("task", r.ID)
	}
	// Output:
	// task 1
	// task 2
	// task 3
}

func ExampleQueue_Tx() {
	ctx := context.Background()
	db, q := openShop()
	defer db.Close()
	// The function may be run more than once, so that what it found out is assigned
	// and not added up.
	var task int64
	err := q.Tx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		res, err := tx.ExecContext(ctx, `insert into orders (item) values ('tea')`)
		if err != nil {
			return err
		}
		id, err := res.LastInsertId()
		if err != nil {
			return err
		}
		r, err := q.Enqueue(ctx, tx, OrderCreated.New(Order{ID: id}))
		task = r.ID
		return err
	})
	fmt.Println("task", task, err)
	// Output:
	// task 1 <nil>
}

func ExampleKey() {
	ctx := context.Background()
	db, q := openShop()
	defer db.Close()
	OrderCreated.Handle(q, func(context.Context, *taskbox.Task[Order]) error { return nil })
	enqueue := func() {
		r, err := q.Enqueue(ctx, db, OrderCreated.New(Order{ID: 42}, taskbox.Key("order_created:42")))
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println("task", r.ID, "duplicate", r.Duplicate)
	}
	enqueue()
	enqueue()
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	enqueue() // the first has succeeded, and its key stays taken
	// Output:
	// task 1 duplicate false
	// task 1 duplicate true
	// task 1 duplicate true
}

func ExampleGroup() {
	ctx := context.Background()
	db, q := openShop()
	defer db.Close()
	stock := taskbox.NewType[int]("stock_changed")
	stock.Handle(q, func(ctx context.Context, t *taskbox.Task[int]) error {
		// There are 16 workers, but of one group only one task runs at a time.
		fmt.Println(t.Group, t.Payload)
		return nil
	})
	for n := range 4 {
		if _, err := q.Enqueue(ctx, db, stock.New(n, taskbox.Group("item:tea"))); err != nil {
			log.Fatal(err)
		}
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	// Output:
	// item:tea 0
	// item:tea 1
	// item:tea 2
	// item:tea 3
}

func ExampleType_Handle() {
	ctx := context.Background()
	db, q := openShop()
	defer db.Close()
	OrderCreated.Handle(q, func(ctx context.Context, t *taskbox.Task[Order]) error {
		switch t.Payload.ID {
		case 1:
			return nil
		case 2:
			return errors.New("who knows") // retried, as what nobody knows is
		case 3:
			return taskbox.Permanent(errors.New("there is no such coupon"))
		case 4:
			return taskbox.RetryAfter(errors.New("closed for lunch"), time.Hour)
		case 5:
			return taskbox.Skip("the order was cancelled")
		case 6:
			return taskbox.Snooze(time.Minute) // not ready yet; costs no attempt
		default:
			panic("an order of the seventh kind") // an error like any other
		}
	})
	for id := range int64(7) {
		if _, err := q.Enqueue(ctx, db, OrderCreated.New(Order{ID: id + 1})); err != nil {
			log.Fatal(err)
		}
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}

	rows, err := db.Query(`select id, status, attempt, coalesce(last_error, '') from task_outbox order by id`)
	if err != nil {
		log.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var id, attempt int
		var status, lastError string
		if err := rows.Scan(&id, &status, &attempt, &lastError); err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%d %s, attempt %d, error %q\n", id, status, attempt, lastError)
	}
	if err := rows.Err(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// 1 success, attempt 1, error ""
	// 2 retry_wait, attempt 1, error "who knows"
	// 3 dead_letter, attempt 1, error "there is no such coupon"
	// 4 retry_wait, attempt 1, error "closed for lunch"
	// 5 skipped, attempt 1, error ""
	// 6 scheduled, attempt 0, error ""
	// 7 retry_wait, attempt 1, error "panic: an order of the seventh kind"
}

func ExampleSnooze() {
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	db, q := openShop()
	defer db.Close()
	calls := 0
	OrderCreated.Handle(q, func(ctx context.Context, t *taskbox.Task[Order]) error {
		calls++
		fmt.Println("call", calls, "attempt", t.Attempt)
		if calls < 3 {
			return taskbox.Snooze(100 * time.Millisecond) // the payment isn't in yet
		}
		stop()
		return nil
	})
	if _, err := q.Enqueue(ctx, db, OrderCreated.New(Order{ID: 42})); err != nil {
		log.Fatal(err)
	}
	if err := q.Run(ctx); err != nil {
		log.Fatal(err)
	}
	// Output:
	// call 1 attempt 1
	// call 2 attempt 1
	// call 3 attempt 1
}

func ExampleHTTPError() {
	busy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Retry-After", "120")
		http.Error(w, "too many orders", http.StatusTooManyRequests)
	}))
	defer busy.Close()

	resp, err := http.Get(busy.URL)
	if err != nil {
		log.Fatal(err)
	}
	defer resp.Body.Close()
	err = taskbox.HTTPError(resp) // what a handler returns
	if e, ok := errors.AsType[*taskbox.StatusError](err); ok {
		fmt.Println(e.Status)
		fmt.Println(e.RetryAfter)
		fmt.Println(e.Body)
	}
	// Output:
	// 429 Too Many Requests
	// 2m0s
	// too many orders
}

func ExampleOptions_classify() {
	ctx := context.Background()
	db, err := taskbox.OpenDB(":memory:")
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	q, err := taskbox.New(ctx, db, taskbox.Options{
		Logger: slog.New(slog.DiscardHandler),
		Classify: func(err error) taskbox.Class {
			if errors.Is(err, sql.ErrNoRows) {
				return taskbox.ClassPermanent // the row is gone, and won't come back
			}
			return taskbox.Unclassified // the built-in table decides
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	OrderCreated.Handle(q, func(ctx context.Context, t *taskbox.Task[Order]) error {
		return fmt.Errorf("read order %d: %w", t.Payload.ID, sql.ErrNoRows)
	})
	if _, err := q.Enqueue(ctx, db, OrderCreated.New(Order{ID: 42})); err != nil {
		log.Fatal(err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}

	var status, lastError string
	if err := db.QueryRow(`select status, last_error from task_outbox`).Scan(&status, &lastError); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%s: %s\n", status, lastError)
	// Output:
	// dead_letter: read order 42: sql: no rows in result set
}

// Drain runs what is due and returns: enqueue, drain, look. A task that a handler
// enqueues is due, too, and runs in the same call.
func ExampleQueue_Drain() {
	ctx := context.Background()
	db, q := openShop()
	defer db.Close()
	receipt := taskbox.NewType[Order]("receipt")
	OrderCreated.Handle(q, func(ctx context.Context, t *taskbox.Task[Order]) error {
		fmt.Println("order", t.Payload.ID)
		_, err := q.Enqueue(ctx, db, receipt.New(t.Payload))
		return err
	})
	receipt.Handle(q, func(ctx context.Context, t *taskbox.Task[Order]) error {
		fmt.Println("receipt for order", t.Payload.ID, "of task", t.ParentID)
		return nil
	})

	if _, err := q.Enqueue(ctx, db, OrderCreated.New(Order{ID: 42})); err != nil {
		log.Fatal(err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	// Output:
	// order 42
	// receipt for order 42 of task 1
}

func ExampleQueue_Stats() {
	ctx := context.Background()
	db, q := openShop()
	defer db.Close()
	OrderCreated.Handle(q, func(ctx context.Context, t *taskbox.Task[Order]) error {
		if t.Payload.ID == 3 {
			return taskbox.Permanent(errors.New("there is no order 3"))
		}
		return nil
	})
	for id := range int64(4) {
		if _, err := q.Enqueue(ctx, db, OrderCreated.New(Order{ID: id})); err != nil {
			log.Fatal(err)
		}
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	webhook := taskbox.NewType[string]("webhook") // which nobody here handles
	if _, err := q.Enqueue(ctx, db, webhook.New("https://example.org")); err != nil {
		log.Fatal(err)
	}

	s, err := q.Stats(ctx)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("queue length", s.QueueLength)
	fmt.Printf("failure rate %.0f %%\n", 100*s.FailureRate)
	fmt.Println("dead letters", s.DeadLetters)
	for _, t := range s.Types {
		fmt.Printf("%-13s due %d, picked %d, succeeded %d, dead %d\n", t.Type, t.QueueLength, t.Picked, t.Succeeded, t.Dead)
	}
	// Output:
	// queue length 1
	// failure rate 25 %
	// dead letters 1
	// order_created due 0, picked 4, succeeded 3, dead 1
	// webhook       due 1, picked 0, succeeded 0, dead 0
}

// SQL is an API: two columns are a complete enqueue, from any language.
func Example_sql() {
	ctx := context.Background()
	db, q := openShop()
	defer db.Close()
	OrderCreated.Handle(q, func(ctx context.Context, t *taskbox.Task[Order]) error {
		fmt.Printf("order %d, key %q\n", t.Payload.ID, t.Key)
		return nil
	})
	for _, insert := range []string{
		`insert into task_outbox(event_type, payload) values ('order_created', '{"id": 1}')`,
		`insert into task_outbox(event_type, payload, dedupe_key, priority)
			values ('order_created', json_object('id', 2), 'order_created:2', -1)`,
		// A duplicate of a live key inserts nothing.
		`insert into task_outbox(event_type, payload, dedupe_key)
			values ('order_created', json_object('id', 2), 'order_created:2')`,
	} {
		res, err := db.ExecContext(ctx, insert)
		if err != nil {
			log.Fatal(err)
		}
		n, err := res.RowsAffected()
		fmt.Println(n, err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	// Unordered output:
	// 1 <nil>
	// 1 <nil>
	// 0 <nil>
	// order 1, key ""
	// order 2, key "order_created:2"
}

// The view task_trail has all that happened to a task.
func Example_trail() {
	ctx := context.Background()
	db, q := openShop()
	defer db.Close()
	OrderCreated.Handle(q, func(ctx context.Context, t *taskbox.Task[Order]) error {
		return taskbox.Permanent(errors.New("there is no order 42"))
	})
	r, err := q.Enqueue(ctx, db, OrderCreated.New(Order{ID: 42}))
	if err != nil {
		log.Fatal(err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}

	rows, err := db.Query(`
select event, coalesce(attempt, 0), coalesce(detail ->> 'error', detail ->> 'cause', '')
from task_trail where task_id = ?`, r.ID)
	if err != nil {
		log.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var event, why string
		var attempt int
		if err := rows.Scan(&event, &attempt, &why); err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%d %s %q\n", attempt, event, why)
	}
	if err := rows.Err(); err != nil {
		log.Fatal(err)
	}
	// Output:
	// 0 created ""
	// 0 queued ""
	// 1 picked ""
	// 1 processing ""
	// 1 failed "there is no order 42"
	// 1 dead_letter "permanent error"
}
