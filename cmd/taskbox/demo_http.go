package main

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/taskbox-go/taskbox"
)

// Bounds of what a customer may send.
const (
	maxOrderBytes = 4 << 10
	maxItemLength = 100 // characters
	maxCents      = 1_000_000
	maxRequestKey = 200 // bytes
)

const sampleOrder = `{"item":"tea","cents":450}`

// routes is the shop's HTTP interface. The log is told what the customer isn't.
func (s *shop) routes(log io.Writer) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /orders", func(w http.ResponseWriter, r *http.Request) {
		p, err := s.postOrder(w, r)
		code := http.StatusCreated
		if p.Duplicate {
			code = http.StatusOK
		}
		answer(w, p, code, err, log)
	})
	mux.HandleFunc("GET /orders/{id}", func(w http.ResponseWriter, r *http.Request) {
		v, err := s.getOrder(r.Context(), r.PathValue("id"))
		answer(w, v, http.StatusOK, err, log)
	})
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "POST /orders %s\nGET  /orders/1\n", sampleOrder)
	})
	// A web page of somebody else's has no business here.
	return http.NewCrossOriginProtection().Handler(mux)
}

// An httpError is an answer that isn't the one asked for.
type httpError struct {
	code int
	msg  string
}

func (e httpError) Error() string { return e.msg }

func badRequest(format string, args ...any) error {
	return httpError{http.StatusBadRequest, fmt.Sprintf(format, args...)}
}

func (s *shop) postOrder(w http.ResponseWriter, r *http.Request) (placed, error) {
	o, err := readOrder(http.MaxBytesReader(w, r.Body, maxOrderBytes))
	if err != nil {
		return placed{}, err
	}
	key := r.Header.Get("Idempotency-Key")
	if len(key) > maxRequestKey {
		return placed{}, badRequest("the Idempotency-Key has more than %d bytes", maxRequestKey)
	}
	p, err := s.place(r.Context(), o, key, r.Header.Get("traceparent"))
	if errors.Is(err, errOtherOrder) {
		err = httpError{http.StatusUnprocessableEntity, err.Error()}
	}
	return p, err
}

func readOrder(body io.Reader) (o newOrder, err error) {
	dec := json.NewDecoder(body)
	dec.DisallowUnknownFields()
	err = dec.Decode(&o)
	if err == nil {
		if _, err = dec.Token(); err == nil {
			err = errors.New("there is more than one value")
		} else if errors.Is(err, io.EOF) {
			return o, o.validate()
		}
	}
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return o, httpError{http.StatusRequestEntityTooLarge, fmt.Sprintf("the order has more than %d bytes", maxOrderBytes)}
	}
	return o, badRequest("the order isn't JSON such as %s: %v", sampleOrder, err)
}

func (o newOrder) validate() error {
	switch {
	case strings.TrimSpace(o.Item) == "" || utf8.RuneCountInString(o.Item) > maxItemLength:
		return badRequest("item must have 1 to %d characters", maxItemLength)
	case o.Cents < 1 || o.Cents > maxCents:
		return badRequest("cents must be 1 to %d", maxCents)
	}
	return nil
}

// orderView is an order and where its task has got to.
type orderView struct {
	ID        int64       `json:"order_id"`
	Item      string      `json:"item"`
	Cents     int64       `json:"cents"`
	CreatedAt time.Time   `json:"created_at"`
	Coupon    string      `json:"coupon,omitempty"`
	Mailed    bool        `json:"mailed"`
	TaskID    int64       `json:"task_id"`
	TraceID   string      `json:"trace_id"`
	Status    string      `json:"status"`
	Trail     []eventView `json:"trail"`
}

type eventView struct {
	Time    time.Time `json:"time"`
	Event   string    `json:"event"`
	Attempt int64     `json:"attempt,omitempty"`
	Why     string    `json:"why,omitempty"`
}

func (s *shop) getOrder(ctx context.Context, text string) (v orderView, err error) {
	id, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return v, badRequest("%q isn't the number of an order", text)
	}
	var created int64
	err = s.db.QueryRowContext(ctx, `
select o.id, o.item, o.cents, o.created_at, coalesce(o.coupon, ''), o.mailed_at is not null,
	coalesce(o.task_id, 0), coalesce(t.trace_id, ''), coalesce(t.status, '')
from orders o left join task_outbox t on t.id = o.task_id
where o.id = ?`, id).Scan(&v.ID, &v.Item, &v.Cents, &created, &v.Coupon, &v.Mailed, &v.TaskID, &v.TraceID, &v.Status)
	if errors.Is(err, sql.ErrNoRows) {
		return v, httpError{http.StatusNotFound, fmt.Sprintf("there is no order %d", id)}
	}
	if err != nil {
		return v, err
	}
	v.CreatedAt = time.UnixMilli(created).UTC()
	events, err := readTrail(ctx, s.db, v.TaskID, beforeTrail)
	for _, e := range events {
		v.Trail = append(v.Trail, eventView{e.at.UTC(), e.name, e.attempt, e.why()})
	}
	return v, err
}

// answer writes what came of a request.
func answer(w http.ResponseWriter, v any, code int, err error, log io.Writer) {
	if err == nil {
		writeJSON(w, code, v)
		return
	}
	e, ok := errors.AsType[httpError](err)
	switch {
	case ok:
	case errors.Is(err, taskbox.ErrBusy):
		w.Header().Set("Retry-After", "1")
		e = httpError{http.StatusServiceUnavailable, "the shop is busy, please try again"}
	case errors.Is(err, context.Canceled):
		return // the customer has gone
	default:
		fmt.Fprintln(log, "shop:", err)
		e = httpError{http.StatusInternalServerError, "something went wrong here"}
	}
	writeJSON(w, e.code, map[string]string{"error": e.msg})
}

func writeJSON(w http.ResponseWriter, code int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	enc.SetEscapeHTML(false)
	_ = enc.Encode(v) // an error here means that the customer has gone
}
