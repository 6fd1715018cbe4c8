package main

import (
	"bytes"
	"os"
	"testing"
	"time"
)

func TestBrief(t *testing.T) {
	for d, want := range map[time.Duration]string{
		0:                       "0 ms",
		600 * time.Microsecond:  "0.6 ms",
		12 * time.Millisecond:   "12 ms",
		100 * time.Millisecond:  "100 ms",
		997 * time.Millisecond:  "1.0 s",
		1500 * time.Millisecond: "1.5 s",
		2 * time.Second:         "2 s",
		30 * time.Second:        "30 s",
		2 * time.Minute:         "2m0s",
	} {
		if got := brief(d); got != want {
			t.Errorf("brief(%v) is %q, want %q", d, got, want)
		}
	}
}

func TestShellQuote(t *testing.T) {
	for s, want := range map[string]string{
		"shop.db":     "shop.db",
		"/tmp/x-1.db": "/tmp/x-1.db",
		"":            "''",
		"a b":         "'a b'",
		"it's;rm":     `'it'\''s;rm'`,
	} {
		if got := shellQuote(s); got != want {
			t.Errorf("shellQuote(%q) is %s, want %s", s, got, want)
		}
	}
}

func TestPainter(t *testing.T) {
	if got := painter(true).event("dead_letter", "x"); got != "\x1b[31mx\x1b[0m" {
		t.Errorf("a dead letter is %q", got)
	}
	if got := painter(true).event("picked", "x"); got != "x" {
		t.Errorf("picked is %q", got)
	}
	if painterFor(new(bytes.Buffer)) {
		t.Error("a buffer isn't a terminal")
	}
	t.Setenv("NO_COLOR", "1")
	if painterFor(os.Stdout) {
		t.Error("NO_COLOR is set")
	}
}
