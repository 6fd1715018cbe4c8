package taskbox

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"io"
	"strings"
	"syscall"
)

const (
	// maxGroupInput and maxGroupText bound what is read of an error's text to find
	// its group, and what is kept, in bytes.
	maxGroupInput = 2 << 10
	maxGroupText  = 300
	// maxPathPart is the longest part of a URL's path that may be fixed.
	maxPathPart = 40
)

// An errorGroup is what failures have in common that differ only by ids, numbers,
// times and the like.
type errorGroup struct {
	fingerprint    string // empty: no failure, or not known yet
	typ            string
	class, message string
	own            string // what a method Fingerprint of the error returned

	// What one transaction counts.
	sample, first, last, n int64
}

// fingerprint names the group of a failure. An error that has a fingerprint of its
// own is grouped by that and its type alone.
func fingerprint(typ, class string, types []string, message, own string) string {
	parts := []string{typ, "own", own}
	if own == "" {
		parts = append([]string{typ, class, message}, types...)
	}
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return hex.EncodeToString(sum[:6])
}

// ownFingerprint is what the first method Fingerprint in err's tree returns that
// returns anything.
func ownFingerprint(err error) string {
	for e := range tree(err) {
		if s := callFingerprint(e); s != "" {
			return clip(s, maxGroupText)
		}
	}
	return ""
}

func callFingerprint(err error) string {
	defer func() { _ = recover() }() // a nil pointer in an error, see children
	if e, ok := err.(interface{ Fingerprint() string }); ok {
		return e.Fingerprint()
	}
	return ""
}

// brokeOff tells whether err leaves open what the other side has done: a timeout, a
// cancellation or a connection that broke while it was used.
func brokeOff(err error) bool {
	for e := range tree(err) {
		switch e {
		case context.Canceled, io.EOF, io.ErrUnexpectedEOF:
			return true
		case error(syscall.ECONNRESET), error(syscall.ECONNABORTED), error(syscall.EPIPE):
			return true
		}
		if callTimeout(e) {
			return true
		}
	}
	return false
}

func callTimeout(err error) bool {
	defer func() { _ = recover() }()
	e, ok := err.(interface{ Timeout() bool })
	return ok && e.Timeout()
}

// normalise takes out of an error's text what differs between failures of one kind:
// numbers, ids, addresses, times and durations become #, what is quoted becomes …,
// URLs keep their host and the fixed parts of their path. Of a text that is long the
// beginning counts. It is one pass, without regular expressions.
func normalise(text string) string {
	if len(text) > maxGroupInput {
		text = text[:maxGroupInput]
	}
	n := normaliser{in: strings.ToValidUTF8(text, "\uFFFD")}
	for n.pos < len(n.in) && len(n.out) <= maxGroupText {
		n.next()
	}
	return clip(strings.TrimSpace(string(n.out)), maxGroupText)
}

type normaliser struct {
	in  string
	pos int
	out []byte
	// open are the quotes of which one has no end: none is looked for again.
	open string
}

func (n *normaliser) next() {
	switch c := n.in[n.pos]; {
	case c <= ' ' || c == 0x7f:
		n.pos++
		if len(n.out) > 0 && n.out[len(n.out)-1] != ' ' {
			n.out = append(n.out, ' ')
		}
	case (c == '"' || c == '\'' || c == '`') && n.quoted(c):
	case inChunk(c):
		n.chunk()
	default:
		n.out = append(n.out, c)
		n.pos++
	}
}

// quoted takes a quoted string out, unless its end is missing or it is an apostrophe.
func (n *normaliser) quoted(quote byte) bool {
	if quote == '\'' && n.pos > 0 && isAlnum(n.in[n.pos-1]) || strings.IndexByte(n.open, quote) >= 0 {
		return false
	}
	end := n.closing(quote)
	if end < 0 {
		n.open += string(quote)
		return false
	}
	content := n.in[n.pos+1 : end]
	n.out = append(n.out, quote)
	switch {
	case strings.Contains(content, "://") && !strings.ContainsAny(content, " \t\n"):
		n.url(content)
	case content != "":
		n.out = append(n.out, "…"...)
	}
	n.out = append(n.out, quote)
	n.pos = end + 1
	return true
}

func (n *normaliser) closing(quote byte) int {
	for i := n.pos + 1; i < len(n.in); i++ {
		switch {
		case n.in[i] == '\\' && quote == '"':
			i++
		case n.in[i] != quote:
		case quote != '\'' || i+1 == len(n.in) || !isAlnum(n.in[i+1]):
			return i
		}
	}
	return -1
}

// chunk takes a run of letters, digits and what stands between the parts of numbers,
// names and addresses.
func (n *normaliser) chunk() {
	end := n.pos
	for end < len(n.in) && inChunk(n.in[end]) {
		end++
	}
	word := n.in[n.pos:end]
	if strings.HasSuffix(word, ":") && strings.HasPrefix(n.in[end:], "//") && isScheme(word[:len(word)-1]) {
		end = n.urlEnd()
		n.url(n.in[n.pos:end])
		n.pos = end
		return
	}
	core := strings.TrimRight(word, ".,:+-@")
	n.word(core)
	n.out = append(n.out, word[len(core):]...)
	n.pos = end
}

func isScheme(s string) bool {
	for i := range len(s) {
		if !isASCIILetter(s[i]) {
			return false
		}
	}
	return s != ""
}

func (n *normaliser) urlEnd() int {
	rest := n.in[n.pos:]
	if i := strings.IndexAny(rest, " \t\r\n\"'`<>(){},;"); i >= 0 {
		rest = rest[:i]
	}
	return n.pos + len(strings.TrimRight(rest, ".,:"))
}

// url keeps scheme, host and the fixed parts of the path.
func (n *normaliser) url(s string) {
	scheme, rest, _ := strings.Cut(s, "://")
	n.word(scheme)
	n.out = append(n.out, "://"...)
	rest, _, query := strings.Cut(rest, "?")
	host, path, _ := strings.Cut(rest, "/")
	n.word(host[strings.LastIndexByte(host, '@')+1:])
	for path != "" {
		var part string
		part, path, _ = strings.Cut(path, "/")
		n.out = append(n.out, '/')
		if len(part) > maxPathPart {
			part = "#" // an id or a token
		}
		n.word(part)
	}
	if query {
		n.out = append(n.out, "?…"...)
	}
}

// word writes a chunk without what varies in it.
func (n *normaliser) word(s string) {
	switch at := strings.IndexByte(s, '@'); {
	case at > 0 && at < len(s)-1:
		n.out = append(n.out, "<email>"...)
	case !strings.ContainsAny(s, "0123456789"):
		n.out = append(n.out, s...)
	case isVariable(s):
		n.out = append(n.out, '#')
	default:
		n.parts(s)
	}
}

// isVariable tells whether all of s is a number, an address, a time, a duration or
// an id. It has a digit.
func isVariable(s string) bool {
	var c chunkBytes
	for i := range len(s) {
		c |= byteKind(s[i])
	}
	colons := strings.Count(s, ":")
	switch {
	case c&^(aDigit|aSeparator) == 0: // numbers, IPv4, dates, times
		return true
	case c&^(aDigit|aSeparator|aTime) == 0, c&^(aDigit|aSeparator|aUnit|aHexUnit) == 0:
		return s[0] >= '0' && s[0] <= '9' || s[0] == '-' || s[0] == '+'
	case c&^(aDigit|aSeparator|aHex|aHexUnit) == 0 && colons >= 2: // IPv6, MAC
		return true
	case len(s) == 36 && s[8] == '-' && s[13] == '-' && s[18] == '-' && s[23] == '-': // UUID
		return c&^(aDigit|aSeparator|aHex|aHexUnit) == 0
	}
	return false
}

// parts writes a chunk of several parts, each without what varies in it.
func (n *normaliser) parts(s string) {
	for s != "" {
		end := 0
		for end < len(s) && isAlnum(s[end]) {
			end++
		}
		if end == 0 {
			n.out, s = append(n.out, s[0]), s[1:]
			continue
		}
		n.part(s[:end])
		s = s[end:]
	}
}

func (n *normaliser) part(s string) {
	if isID(s) {
		n.out = append(n.out, '#')
		return
	}
	for i := range len(s) {
		if !isDigit(s[i]) {
			n.out = append(n.out, s[i])
		} else if i == 0 || !isDigit(s[i-1]) {
			n.out = append(n.out, '#')
		}
	}
}

// isID tells whether s looks like hexadecimal, or like an id of letters and digits.
func isID(s string) bool {
	hexadecimal, digits, turns := true, false, 0
	for i := range len(s) {
		hexadecimal = hexadecimal && byteKind(s[i])&(aDigit|aHex|aHexUnit) != 0
		digits = digits || isDigit(s[i])
		if i > 0 && isDigit(s[i]) != isDigit(s[i-1]) {
			turns++
		}
	}
	return digits && (len(s) >= 8 && (hexadecimal || turns >= 3) || strings.HasPrefix(s, "0x"))
}

// chunkBytes says which kinds of bytes there are in a chunk.
type chunkBytes int

const (
	aDigit chunkBytes = 1 << iota
	aSeparator
	aHex     // a-f and A-F, but d
	aUnit    // of durations: h, m, s, u, n and the bytes of both µ
	aHexUnit // d
	aTime    // T and Z
	aLetter
)

func byteKind(c byte) chunkBytes {
	switch {
	case isDigit(c):
		return aDigit
	case strings.IndexByte(".,:+-", c) >= 0:
		return aSeparator
	case c == 'T' || c == 'Z':
		return aTime
	case c == 'd':
		return aHexUnit
	case c >= 'a' && c <= 'f' || c >= 'A' && c <= 'F':
		return aHex
	case strings.IndexByte("hmsun\xc2\xb5\xce\xbc", c) >= 0:
		return aUnit
	}
	return aLetter
}

func isDigit(c byte) bool { return c >= '0' && c <= '9' }

// isAlnum takes every byte of other alphabets for a letter.
func isAlnum(c byte) bool { return isDigit(c) || isASCIILetter(c) || c >= 0x80 }

func inChunk(c byte) bool { return isAlnum(c) || strings.IndexByte("_.,:+-@", c) >= 0 }

func isASCIILetter(c byte) bool { return c|0x20 >= 'a' && c|0x20 <= 'z' }
