package taskbox

import (
	"strings"
)

// A statement is what the gate needs to know of a text. The zero value is of no
// concern to it.
type statement struct {
	kind kind
	many bool // there may be more than one
}

type kind uint8

const (
	kindOther kind = iota
	kindWrite
	kindWith     // may be a write
	kindBegin    // without the lock
	kindBeginNow // with it
	kindCommit
	kindRollback
	kindSavepoint // or the end of one
)

// writes tells of a write by itself. Where its ctx ended, it may have been made or not.
func (s statement) writes() bool { return s.kind == kindWrite || s.kind == kindWith }

func (s statement) takesLock() bool { return s.writes() || s.kind == kindBeginNow }

// statementOf looks at the first words of a text. A semicolon in a literal is taken
// for the end of a statement, which costs a probe and nothing else.
func statementOf(text string) statement {
	word, rest := firstWord(text)
	return statement{
		kind: kindOf(word, rest),
		many: strings.Contains(strings.TrimRight(rest, "; \t\r\n"), ";"),
	}
}

func kindOf(word, rest string) kind {
	switch strings.ToUpper(word) {
	case "INSERT", "UPDATE", "DELETE", "REPLACE":
		return kindWrite
	case "WITH":
		return kindWith
	case "BEGIN":
		switch next, _ := firstWord(rest); strings.ToUpper(next) {
		case "IMMEDIATE", "EXCLUSIVE":
			return kindBeginNow
		}
		return kindBegin
	case "COMMIT", "END":
		return kindCommit
	case "ROLLBACK":
		next, rest := firstWord(rest)
		if strings.EqualFold(next, "TRANSACTION") {
			next, _ = firstWord(rest)
		}
		if strings.EqualFold(next, "TO") {
			return kindOther
		}
		return kindRollback
	case "SAVEPOINT", "RELEASE":
		return kindSavepoint
	}
	return kindOther
}

// longestWord is the length of the longest word that matters, TRANSACTION.
const longestWord = 11

// firstWord returns the first keyword of an SQL text, empty if it is none that
// matters, and what follows. White space, comments and semicolons before it are
// skipped.
func firstWord(text string) (word, rest string) {
	for {
		text = strings.TrimLeft(text, "; \t\r\n\f\ufeff")
		var ok bool
		switch {
		case strings.HasPrefix(text, "--"):
			_, text, ok = strings.Cut(text, "\n")
		case strings.HasPrefix(text, "/*"):
			_, text, ok = strings.Cut(text[2:], "*/")
		default:
			n := 0
			for n < len(text) && isLetter(text[n]) {
				n++
			}
			if n > longestWord {
				return "", text[n:]
			}
			return text[:n], text[n:]
		}
		if !ok {
			return "", ""
		}
	}
}

func isLetter(b byte) bool { return 'a' <= b|0x20 && b|0x20 <= 'z' || b == '_' }
