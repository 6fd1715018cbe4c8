package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/taskbox-go/taskbox"
)

// ordersSQL are the columns of the shop's own table, orders, beside the queue's
// tables in one file.
const ordersSQL = ` (
	id          integer primary key autoincrement,
	item        text    not null,
	cents       integer not null,
	request_key text    unique, -- the request's Idempotency-Key
	created_at  integer not null, -- Unix ms
	task_id     integer, -- the task that gets it a coupon
	coupon      text,
	mailed_at   integer -- when the receipt was mailed, Unix ms
) strict`

// shop is the application: its orders, and the handlers of its tasks.
type shop struct {
	db           *sql.DB
	q            *taskbox.Queue
	coupons      *couponClient
	orderCreated *taskbox.Type[orderTask]
	receiptMail  *taskbox.Type[orderTask]
}

// orderTask is the payload of both types of tasks: the order is in the database.
type orderTask struct {
	OrderID int64 `json:"order_id"`
}

func newShop(db *sql.DB, q *taskbox.Queue, coupons *couponClient, timeout time.Duration) *shop {
	s := &shop{
		db: db, q: q, coupons: coupons,
		orderCreated: taskbox.NewType[orderTask]("order_created", taskbox.TypeOptions{Timeout: timeout}),
		receiptMail:  taskbox.NewType[orderTask]("receipt_mail"),
	}
	s.orderCreated.Handle(q, s.getCoupon)
	s.receiptMail.Handle(q, s.mailReceipt)
	return s
}

// newOrder is what a customer sends.
type newOrder struct {
	Item  string `json:"item"`
	Cents int64  `json:"cents"`
}

// placed is what a customer gets.
type placed struct {
	OrderID   int64  `json:"order_id"`
	TaskID    int64  `json:"task_id"`
	TraceID   string `json:"trace_id"`
	Duplicate bool   `json:"duplicate,omitempty"`
}

// errOtherOrder is returned for a key that came with another order before.
var errOtherOrder = errors.New("the Idempotency-Key was used for a different order")

// place writes an order and its task in one transaction: there are both or neither.
func (s *shop) place(ctx context.Context, o newOrder, requestKey, traceparent string) (p placed, err error) {
	err = s.q.Tx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		p, err = s.placeIn(ctx, tx, o, requestKey, traceparent)
		return err
	})
	return p, err
}

func (s *shop) placeIn(ctx context.Context, tx *sql.Tx, o newOrder, requestKey, traceparent string) (p placed, err error) {
	err = tx.QueryRowContext(ctx, `
insert into orders (item, cents, request_key, created_at) values (?, ?, nullif(?, ''), ?)
on conflict (request_key) do nothing
returning id`, o.Item, o.Cents, requestKey, time.Now().UnixMilli()).Scan(&p.OrderID)
	if errors.Is(err, sql.ErrNoRows) {
		return placedBefore(ctx, tx, o, requestKey)
	}
	if err != nil {
		return p, err
	}
	r, err := s.q.Enqueue(ctx, tx, s.orderCreated.New(orderTask{p.OrderID},
		taskbox.Key(orderKey(p.OrderID)), taskbox.Traceparent(traceparent)))
	if err != nil {
		return p, err
	}
	p.TaskID = r.ID
	err = tx.QueryRowContext(ctx, `select trace_id from task_outbox where id = ?`, r.ID).Scan(&p.TraceID)
	if err != nil {
		return p, err
	}
	_, err = tx.ExecContext(ctx, `update orders set task_id = ? where id = ?`, r.ID, p.OrderID)
	return p, err
}

// placedBefore answers a request that was sent twice as it was answered first.
func placedBefore(ctx context.Context, tx *sql.Tx, o newOrder, requestKey string) (placed, error) {
	var old newOrder
	p := placed{Duplicate: true}
	err := tx.QueryRowContext(ctx, `
select o.id, o.item, o.cents, coalesce(o.task_id, 0), coalesce(t.trace_id, '')
from orders o left join task_outbox t on t.id = o.task_id
where o.request_key = ?`, requestKey).Scan(&p.OrderID, &old.Item, &old.Cents, &p.TaskID, &p.TraceID)
	if err == nil && old != o {
		err = errOtherOrder
	}
	return p, err
}

// orderKey is the business key of an order's task, and of what it asks of others.
func orderKey(id int64) string { return fmt.Sprintf("order_created:%d", id) }

// getCoupon handles order_created. It may run more than once, since no queue can do
// better for calls to others, so both of its effects are made to happen once: the
// service knows the key, and the order is changed only while it has no coupon.
func (s *shop) getCoupon(ctx context.Context, t *taskbox.Task[orderTask]) error {
	id := t.Payload.OrderID
	if err := s.mustExist(ctx, id); err != nil {
		return err
	}
	code, err := s.coupons.create(ctx, id, orderKey(id), t.TraceID)
	if err != nil {
		return err
	}
	return s.q.Tx(ctx, func(ctx context.Context, tx *sql.Tx) error {
		n, err := changed(tx.ExecContext(ctx, `update orders set coupon = ? where id = ? and coupon is null`, code, id))
		if err != nil || n == 0 {
			return err
		}
		return enqueueReceipt(ctx, tx, id)
	})
}

// mustExist makes a task without its order a dead letter at once: waiting won't help.
func (s *shop) mustExist(ctx context.Context, id int64) error {
	var n int
	err := s.db.QueryRowContext(ctx, `select 1 from orders where id = ?`, id).Scan(&n)
	if errors.Is(err, sql.ErrNoRows) {
		return taskbox.Permanent(fmt.Errorf("there is no order %d", id))
	}
	return err
}

// enqueueReceipt enqueues in plain SQL, as any language can: the rest has defaults.
func enqueueReceipt(ctx context.Context, tx *sql.Tx, id int64) error {
	payload, err := json.Marshal(orderTask{id})
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `insert into task_outbox(event_type, payload) values (?, ?)`, "receipt_mail", string(payload))
	return err
}

// mailReceipt handles receipt_mail. The mail is a note in the order.
func (s *shop) mailReceipt(ctx context.Context, t *taskbox.Task[orderTask]) error {
	id := t.Payload.OrderID
	if err := s.mustExist(ctx, id); err != nil {
		return err
	}
	_, err := s.db.ExecContext(ctx, `
update orders set mailed_at = ? where id = ? and mailed_at is null`, time.Now().UnixMilli(), id)
	return err
}

func changed(res sql.Result, err error) (int64, error) {
	if err != nil {
		return 0, err
	}
	return res.RowsAffected()
}
