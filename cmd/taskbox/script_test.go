package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestScript runs the scripts in testdata/script. Each is a txtar archive: comments
// and commands, and after them the files of the folder that it runs in. A command
// with ! before it is expected to fail, or, for a check, not to hold.
//
//	taskbox ARGS        the command, in this process
//	exec PROGRAM ARGS   another program; the script is skipped where it isn't installed
//	stdin FILE          what the next taskbox or exec reads
//	status N            the exit code of the last one
//	stdout REGEXP       its output, or a part of it; (?m) is set
//	stderr REGEXP
//	exists FILE
//	cmp FILE FILE       either may be stdout or stderr
//
// Words are separated by spaces; in '…' they may have spaces, and two ' in them stand for one.
func TestScript(t *testing.T) {
	files, err := filepath.Glob("../../testdata/script/*.txtar")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts: %v", err)
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txtar"), func(t *testing.T) {
			runScript(t, string(text))
		})
	}
}

// script is what a running script knows.
type script struct {
	t              *testing.T
	stdin          string
	stdout, stderr string
	status         int
}

func runScript(t *testing.T, text string) {
	commands, files := parseTxtar(text)
	t.Chdir(t.TempDir())
	for name, content := range files {
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	s := &script{t: t}
	for i, line := range strings.Split(commands, "\n") {
		if err := s.line(line); err != nil {
			t.Fatalf("line %d: %s\n%v\n[status] %d\n[stdout]\n%s\n[stderr]\n%s", i+1, line, err, s.status, s.stdout, s.stderr)
		}
	}
}

func (s *script) line(line string) error {
	if strings.HasPrefix(line, "#") {
		return nil
	}
	words, err := splitWords(line)
	if err != nil || len(words) == 0 {
		return err
	}
	not := words[0] == "!"
	if not {
		words = words[1:]
	}
	if len(words) == 0 {
		return errors.New("there is no command after the !")
	}
	err = s.do(words[0], words[1:])
	switch bad, ok := errors.AsType[badScript](err); {
	case ok:
		return bad
	case not && err == nil:
		return errors.New("it wasn't to succeed")
	case not:
		return nil
	}
	return err
}

// badScript is the error of a line that can't be run; a ! doesn't make it right.
type badScript struct{ error }

func (s *script) do(name string, args []string) error {
	least := map[string]int{"taskbox": 0, "exec": 1, "stdin": 1, "status": 1, "stdout": 1, "stderr": 1, "exists": 1, "cmp": 2}
	if n, ok := least[name]; !ok || len(args) < n || n > 0 && name != "exec" && len(args) > n {
		return badScript{fmt.Errorf("unknown command, or arguments that it doesn't take")}
	}
	switch name {
	case "taskbox":
		return s.taskbox(args)
	case "exec":
		return s.exec(args)
	case "stdin":
		text, err := os.ReadFile(args[0])
		s.stdin = string(text)
		return err
	case "status":
		if args[0] != strconv.Itoa(s.status) {
			return fmt.Errorf("the exit code is %d", s.status)
		}
		return nil
	case "stdout":
		return match(s.stdout, args[0])
	case "stderr":
		return match(s.stderr, args[0])
	case "exists":
		_, err := os.Stat(args[0])
		return err
	}
	return s.cmp(args[0], args[1])
}

func (s *script) taskbox(args []string) error {
	var out, errs screen
	s.status = run(s.t.Context(), args, strings.NewReader(s.stdin), &out, &errs)
	s.stdin, s.stdout, s.stderr = "", out.String(), errs.String()
	if s.status != 0 {
		return fmt.Errorf("exit code %d", s.status)
	}
	return nil
}

func (s *script) exec(args []string) error {
	path, err := exec.LookPath(args[0])
	if err != nil {
		s.t.Skip(err)
	}
	var out, errs screen
	cmd := exec.CommandContext(s.t.Context(), path, args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(s.stdin), &out, &errs
	err = cmd.Run()
	s.stdin, s.stdout, s.stderr, s.status = "", out.String(), errs.String(), cmd.ProcessState.ExitCode()
	return err
}

func match(text, pattern string) error {
	re, err := regexp.Compile("(?m)" + pattern)
	if err != nil {
		return badScript{err}
	}
	if !re.MatchString(text) {
		return errors.New("no match")
	}
	return nil
}

func (s *script) cmp(a, b string) error {
	texts := map[string]string{"stdout": s.stdout, "stderr": s.stderr}
	for _, name := range []string{a, b} {
		if _, ok := texts[name]; ok {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			return badScript{err}
		}
		texts[name] = string(text)
	}
	if diff := cmp.Diff(texts[a], texts[b]); diff != "" {
		return errors.New(diff)
	}
	return nil
}

// parseTxtar takes an archive apart: the comment before the first file, and the
// files, each under a line "-- name --". See golang.org/x/tools/txtar.
func parseTxtar(text string) (comment string, files map[string]string) {
	files = map[string]string{}
	name := ""
	for line := range strings.Lines(text) {
		if next, ok := txtarName(line); ok {
			name = next
			files[name] = ""
		} else if name == "" {
			comment += line
		} else {
			files[name] += line
		}
	}
	return comment, files
}

func txtarName(line string) (string, bool) {
	rest, ok := strings.CutPrefix(strings.TrimRight(line, "\r\n"), "-- ")
	name, ok2 := strings.CutSuffix(rest, " --")
	name = strings.TrimSpace(name)
	return name, ok && ok2 && name != ""
}

// splitWords splits a line of a script.
func splitWords(line string) (words []string, err error) {
	word, quoted, started := "", false, false
	for i := 0; i < len(line); i++ {
		switch c := line[i]; {
		case c == '\'' && quoted && strings.HasPrefix(line[i+1:], "'"):
			word += "'"
			i++
		case c == '\'':
			quoted, started = !quoted, true
		case (c == ' ' || c == '\t' || c == '\r') && !quoted:
			if started {
				words = append(words, word)
			}
			word, started = "", false
		default:
			word += line[i : i+1]
			started = true
		}
	}
	if quoted {
		return nil, badScript{errors.New("a ' is missing")}
	}
	if started {
		words = append(words, word)
	}
	return words, nil
}

func TestSplitWords(t *testing.T) {
	for line, want := range map[string][]string{
		"":                        nil,
		" a  b\t":                 {"a", "b"},
		"exec sqlite3 'select 1'": {"exec", "sqlite3", "select 1"},
		"x '' 'it''s' a'b c'd":    {"x", "", "it's", "ab cd"},
		"→ 'é'":                   {"→", "é"},
	} {
		got, err := splitWords(line)
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Errorf("%q: %v %s", line, err, diff)
		}
	}
	if _, err := splitWords("a 'b"); err == nil {
		t.Error("a ' is missing, and nobody says so")
	}
}

func TestParseTxtar(t *testing.T) {
	comment, files := parseTxtar("# one\ntwo\n-- a.txt --\nA\n\n-- b/c --\n-- not a name\n")
	want := map[string]string{"a.txt": "A\n\n", "b/c": "-- not a name\n"}
	if diff := cmp.Diff(want, files); comment != "# one\ntwo\n" || diff != "" {
		t.Errorf("%q %s", comment, diff)
	}
}

// The runner notices what it is made to notice.
func TestScript_Fails(t *testing.T) {
	for _, text := range []string{"taskbox nothing", "! taskbox help", "status 1", "stdout x", "! stdout ''",
		"exists nothing", "nonsense", "! nonsense", "!", "cmp stdout", "! stdout (", "taskbox 'help"} {
		if s := (&script{t: t}); s.line(text) == nil {
			t.Errorf("%q passed", text)
		}
	}
}
