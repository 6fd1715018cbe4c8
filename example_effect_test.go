package taskbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"log/slog"

	"github.com/taskbox-go/taskbox"
)

// A Payment is the payload of the examples about effects.
type Payment struct {
	Order  int    `json:"order"`
	Card   string `json:"card"`
	Amount int    `json:"amount"`
}

// Pay charges a card and books the payment.
var Pay = taskbox.NewType[Payment]("pay")

// openBooks opens a queue in memory, with the application's books beside it.
func openBooks() (*sql.DB, *taskbox.Queue) {
	db, err := taskbox.OpenDB(":memory:")
	if err != nil {
		log.Fatal(err)
	}
	if _, err := db.Exec(`create table books (entry text not null)`); err != nil {
		log.Fatal(err)
	}
	q, err := taskbox.New(context.Background(), db, taskbox.Options{Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		log.Fatal(err)
	}
	return db, q
}

// A key is taken while its task lives and after its success. The application may
// enqueue as often as it likes.
func ExampleKey_afterSuccess() {
	ctx := context.Background()
	db, q := openBooks()
	defer db.Close()
	Pay.Handle(q, func(ctx context.Context, t *taskbox.Task[Payment]) error {
		fmt.Println("pay order", t.Payload.Order)
		return nil
	})
	enqueue := func() {
		r, err := q.Enqueue(ctx, db, Pay.New(Payment{Order: 42}, taskbox.Key("pay:42")))
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
	enqueue()
	// Output:
	// task 1 duplicate false
	// task 1 duplicate true
	// pay order 42
	// task 1 duplicate true
}

// A step that is done isn't run again when what follows it fails.
func ExampleStep() {
	ctx := context.Background()
	db, q := openBooks()
	defer db.Close()
	Pay.Handle(q, func(ctx context.Context, t *taskbox.Task[Payment]) error {
		receipt, err := taskbox.Step(ctx, "charge", func(ctx context.Context) (string, error) {
			fmt.Println("charge", t.Payload.Amount) // with t.IdempotencyKey("charge") in the request's header
			return "receipt 7", nil
		})
		if err != nil {
			return err
		}
		_, err = taskbox.Step(ctx, "mail", func(ctx context.Context) (any, error) {
			if t.Attempt == 1 {
				return nil, taskbox.Permanent(errors.New("no such address"))
			}
			fmt.Println("mail", receipt, "in attempt", t.Attempt)
			return nil, nil
		})
		return err
	})
	r, err := q.Enqueue(ctx, db, Pay.New(Payment{Order: 42, Amount: 100}))
	if err != nil {
		log.Fatal(err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	by := taskbox.By{Actor: "ann", Reason: "the address is there now"}
	if err := q.Replay(ctx, r.ID, by); err != nil {
		log.Fatal(err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	// Output:
	// charge 100
	// mail receipt 7 in attempt 2
}

// What StepTx writes and the record that it is done are one transaction: the entry is
// in the books exactly once.
func ExampleStepTx() {
	ctx := context.Background()
	db, q := openBooks()
	defer db.Close()
	Pay.Handle(q, func(ctx context.Context, t *taskbox.Task[Payment]) error {
		err := taskbox.StepTx(ctx, "book", func(ctx context.Context, tx *sql.Tx) error {
			_, err := tx.ExecContext(ctx, `insert into books values (?)`, fmt.Sprintf("order %d: %d", t.Payload.Order, t.Payload.Amount))
			return err
		})
		if err == nil && t.Attempt == 1 {
			err = taskbox.Permanent(errors.New("after the entry"))
		}
		return err
	})
	r, err := q.Enqueue(ctx, db, Pay.New(Payment{Order: 42, Amount: 100}))
	if err != nil {
		log.Fatal(err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	if err := q.Replay(ctx, r.ID, taskbox.By{Actor: "ann", Reason: "it was a bug"}); err != nil {
		log.Fatal(err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	var entries int
	var entry string
	if err := db.QueryRow(`select count(*), max(entry) from books`).Scan(&entries, &entry); err != nil {
		log.Fatal(err)
	}
	fmt.Println(entries, "entry:", entry)
	// Output:
	// 1 entry: order 42: 100
}

// A person has done by hand what a step couldn't do, and has the task go on with what
// follows.
func ExampleQueue_SkipStep() {
	ctx := context.Background()
	db, q := openBooks()
	defer db.Close()
	Pay.Handle(q, func(ctx context.Context, t *taskbox.Task[Payment]) error {
		receipt, err := taskbox.Step(ctx, "charge", func(ctx context.Context) (string, error) {
			return "", taskbox.Permanent(errors.New("the card has expired"))
		})
		if err != nil {
			return err
		}
		fmt.Println("book", receipt)
		return nil
	})
	r, err := q.Enqueue(ctx, db, Pay.New(Payment{Order: 42, Amount: 100}))
	if err != nil {
		log.Fatal(err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	by := taskbox.By{Actor: "ann", Reason: "paid in cash"}
	if err := q.SkipStep(ctx, r.ID, "charge", "cash receipt 12", by); err != nil {
		log.Fatal(err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	i, err := q.Get(ctx, r.ID)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(i.Status, "in attempt", i.Attempt)
	// Output:
	// book cash receipt 12
	// success in attempt 2
}

// The payload was wrong: it is put right and the task run again. What it was, and who
// changed it, stays on the trail.
func ExampleQueue_Replay() {
	ctx := context.Background()
	db, q := openBooks()
	defer db.Close()
	Pay.Handle(q, func(ctx context.Context, t *taskbox.Task[Payment]) error {
		if t.Payload.Card == "" {
			return taskbox.Permanent(errors.New("no card"))
		}
		return nil
	})
	r, err := q.Enqueue(ctx, db, Pay.New(Payment{Order: 42}))
	if err != nil {
		log.Fatal(err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	by := taskbox.By{Actor: "ann", Reason: "the customer has called"}
	if err := q.Replay(ctx, r.ID, by, taskbox.WithPayload(Payment{Order: 42, Card: "4111"})); err != nil {
		log.Fatal(err)
	}
	if err := q.Drain(ctx); err != nil {
		log.Fatal(err)
	}
	trail, err := q.Trail(ctx, r.ID)
	if err != nil {
		log.Fatal(err)
	}
	for _, e := range trail {
		if e.Actor != "" {
			fmt.Printf("%s by %s: %s\n", e.Event, e.Actor, e.Reason)
		}
	}
	i, err := q.Get(ctx, r.ID)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(i.Status, "in run", i.Run)
	// Output:
	// edited by ann: the customer has called
	// replayed by ann: the customer has called
	// success in run 2
}
