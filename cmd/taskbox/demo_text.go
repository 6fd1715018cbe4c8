package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"time"
)

// brief is a duration as people say it: two digits are enough.
func brief(d time.Duration) string {
	switch {
	case d < 10*time.Millisecond && d%time.Millisecond != 0:
		return fmt.Sprintf("%.1f ms", float64(d)/float64(time.Millisecond))
	case d < 500*time.Millisecond:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	case d < 10*time.Second && d%time.Second != 0:
		return fmt.Sprintf("%.1f s", d.Seconds())
	case d < time.Minute:
		return fmt.Sprintf("%.0f s", d.Seconds())
	}
	return d.Round(time.Second).String()
}

func plural(n int64, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}

// clip shortens a text to n characters.
func clip(s string, n int) string {
	if r := []rune(s); len(r) > n {
		return string(r[:n-1]) + "…"
	}
	return s
}

// shellQuote makes a word that a POSIX shell takes as it is.
func shellQuote(s string) string {
	if s != "" && strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-./:") == "" {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// A painter colours text, or doesn't.
type painter bool

// painterFor colours on a terminal only, and never under NO_COLOR; see https://no-color.org.
func painterFor(w io.Writer) painter {
	f, ok := w.(*os.File)
	if !ok || os.Getenv("NO_COLOR") != "" || os.Getenv("TERM") == "dumb" {
		return false
	}
	info, err := f.Stat()
	return painter(err == nil && info.Mode()&os.ModeCharDevice != 0)
}

const (
	bold = "1"
	dim  = "2"
)

func (p painter) paint(code, text string) string {
	if !p || code == "" || text == "" {
		return text
	}
	return "\x1b[" + code + "m" + text + "\x1b[0m"
}

// event paints an event by how good it is: those without news stay as they are.
func (p painter) event(name, text string) string {
	return p.paint(map[string]string{
		"success": "32", "skipped": "32",
		"retry_wait": "33", "interrupted": "33", "lost": "33",
		"failed": "31", "dead_letter": "31",
	}[name], text)
}
