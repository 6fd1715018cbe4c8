package taskbox_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/taskbox-go/taskbox"
)

// A fence is a fenced block of the README.
type fence struct {
	lang, text string
	line       int    // of its opening
	prints     string // what the README says that it prints
	checked    bool   // whether it says so
}

// A readme is the README, taken apart.
type readme struct {
	prose  string // without the fenced blocks
	fences []fence
	tables map[string][][]string // rows by the head's first cell
}

func readReadme(t *testing.T) *readme {
	t.Helper()
	b, err := os.ReadFile("README.md")
	if err != nil {
		t.Fatal(err)
	}
	r := &readme{tables: map[string][][]string{}}
	r.readFences(strings.SplitAfter(string(b), "\n"))
	r.readTables()
	return r
}

// readFences takes out the fenced blocks. One after "It prints:" is the output of the
// one before.
func (r *readme) readFences(lines []string) {
	var f *fence
	last := ""
	for i, line := range lines {
		switch lang, isFence := strings.CutPrefix(line, "```"); {
		case isFence && f == nil:
			f = &fence{lang: strings.TrimSpace(lang), line: i + 1}
		case isFence && f.lang == "text" && last == "It prints:" && len(r.fences) > 0:
			before := &r.fences[len(r.fences)-1]
			before.prints, before.checked, f = f.text, true, nil
		case isFence:
			r.fences, f = append(r.fences, *f), nil
		case f != nil:
			f.text += line
		default:
			r.prose += line
			if s := strings.TrimSpace(line); s != "" {
				last = s
			}
		}
	}
}

func (r *readme) readTables() {
	head, rows := "", [][]string(nil)
	for line := range strings.Lines(r.prose) {
		line = strings.TrimSpace(line)
		if !strings.HasPrefix(line, "|") {
			if head != "" {
				r.tables[head], head, rows = rows, "", nil
			}
			continue
		}
		cells := strings.Split(strings.Trim(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case head == "":
			head = cells[0]
		case !strings.HasPrefix(cells[0], "---"):
			rows = append(rows, cells)
		}
	}
}

// column returns a column of a table, without the marks for code.
func (r *readme) column(t *testing.T, head string, n int) (cells []string) {
	t.Helper()
	if r.tables[head] == nil {
		t.Errorf("the README has no table that begins with %q", head)
	}
	for _, row := range r.tables[head] {
		cells = append(cells, strings.ReplaceAll(row[n], "`", ""))
	}
	return cells
}

func (r *readme) of(lang string) (fs []fence) {
	for _, f := range r.fences {
		if f.lang == lang {
			fs = append(fs, f)
		}
	}
	return fs
}

func TestReadme_CodeFirst(t *testing.T) {
	r := readReadme(t)
	if len(r.fences) == 0 || r.fences[0].lang != "go" || r.fences[0].line > 20 {
		t.Fatalf("the README must begin with Go code within 20 lines; its first block is %+v", r.fences[:min(1, len(r.fences))])
	}
	if !isProgram(r.fences[0].text) {
		t.Error("the README's first block is no complete program")
	}
}

// Tables against what they are about.

func TestReadme_Tables(t *testing.T) {
	r := readReadme(t)
	same := func(head string, want []string) {
		t.Helper()
		got := r.column(t, head, 0)
		slices.Sort(got)
		slices.Sort(want)
		if diff := gocmp.Diff(want, got); diff != "" {
			t.Errorf("README, table %q (-code +README):\n%s", head, diff)
		}
	}
	same("`Options`", fieldsOf[taskbox.Options]())
	same("`TypeOptions`", fieldsOf[taskbox.TypeOptions]())
	same("`Stats`", fieldsOf[taskbox.Stats]())
	same("`BulkOptions`", fieldsOf[taskbox.BulkOptions]())
	same("option", sourceOf(t).returning("EnqueueOption"))
	same("option by hand", sourceOf(t).returning("ManualOption"))
	same("verdict", []string{string(taskbox.Safe), string(taskbox.SafeIf), string(taskbox.Unknown), string(taskbox.Unsafe)})
	same("key", sourceOf(t).attrs())
	if diff := gocmp.Diff(taskbox.ReadmeRules(), r.tables["class"]); diff != "" {
		t.Errorf("README, classification (-errors.go +README):\n%s", diff)
	}
}

func fieldsOf[T any]() (names []string) {
	for f := range reflect.TypeFor[T]().Fields() {
		names = append(names, f.Name)
	}
	return names
}

func TestReadme_Defaults(t *testing.T) {
	r := readReadme(t)
	got := map[string]string{}
	for _, head := range []string{"`Options`", "`TypeOptions`"} {
		for _, row := range r.tables[head] {
			got[strings.Trim(row[0], "`")] = row[1]
		}
	}
	day := 24 * time.Hour
	for name, want := range map[string]string{
		"Workers":    strconv.Itoa(taskbox.DefaultWorkers),
		"Lease":      fmt.Sprintf("%d s", taskbox.DefaultLease/time.Second),
		"Grace":      fmt.Sprintf("%d s", taskbox.DefaultGrace/time.Second),
		"MaxPayload": fmt.Sprintf("%d MiB", taskbox.DefaultMaxPayload>>20),
		"KeepDone":   fmt.Sprintf("%d days", taskbox.DefaultKeepDone/day),
		"KeepAudit":  fmt.Sprintf("%d year", taskbox.DefaultKeepAudit/(365*day)),
		"Timeout":    fmt.Sprintf("%d min", taskbox.DefaultTimeout/time.Minute),
	} {
		if got[name] != want {
			t.Errorf("README: the default of %s is %q, want %q", name, got[name], want)
		}
	}
}

func TestReadme_Tiers(t *testing.T) {
	cells := readReadme(t).column(t, "failure", 1)
	for n, cell := range cells {
		got, _ := time.ParseDuration(strings.NewReplacer(" ", "", "min", "m").Replace(cell))
		want, again := taskbox.DefaultSchedule().Delay(n + 1)
		if got != want || again == (n == len(cells)-1) {
			t.Errorf("README: the wait after failure %d is %q, want %v, %v", n+1, cell, want, again)
		}
	}
}

func TestReadme_Events(t *testing.T) {
	r := readReadme(t)
	src := sourceOf(t)
	names, statuses := r.column(t, "event", 0), r.column(t, "event", 1)
	want := slices.Concat(src.events(), slices.Collect(maps.Keys(taskbox.ReadmeOutcomes())), []string{"created"})
	slices.Sort(want)
	got := slices.Sorted(slices.Values(names))
	if diff := gocmp.Diff(slices.Compact(want), got); diff != "" {
		t.Errorf("README, events (-code +README):\n%s", diff)
	}

	onTheWay := map[string]string{"queued": "pending", "picked": "picked", "processing": "processing", "lost": "pending"}
	byHand := r.column(t, "event by hand", 1)
	seen := slices.DeleteFunc(slices.Clone(byHand), func(s string) bool { return s == "" })
	for i, name := range names {
		want, ok := taskbox.ReadmeOutcomes()[name]
		if !ok {
			want = onTheWay[name]
		}
		if statuses[i] != want {
			t.Errorf("README: after %s the status is %q, want %q", name, statuses[i], want)
		}
		if statuses[i] != "" {
			seen = append(seen, statuses[i])
		}
	}
	slices.Sort(seen)
	if diff := gocmp.Diff(taskbox.ReadmeStatuses(), slices.Compact(seen)); diff != "" {
		t.Errorf("README, statuses (-schema +README):\n%s", diff)
	}
	names = r.column(t, "event by hand", 0)
	want = append(src.byHand(), "paused", "resumed", "applied", "group_resolved") // the last are about the queue
	slices.Sort(want)
	if diff := gocmp.Diff(slices.Compact(want), slices.Sorted(slices.Values(names))); diff != "" {
		t.Errorf("README, events by hand (-code +README):\n%s", diff)
	}
	after := map[string]string{"replayed": "pending", "run_now": "pending", "skipped": "skipped", "cancelled": "cancelled"}
	for i, name := range names {
		if byHand[i] != after[name] {
			t.Errorf("README: after %s by hand the status is %q, want %q", name, byHand[i], after[name])
		}
	}
	for _, key := range taskbox.ReadmeDetailKeys() {
		if !strings.Contains(r.prose, "`"+key+"`") {
			t.Errorf("README: the trail's detail has a key %q that isn't told", key)
		}
	}
}

func TestReadme_LogLevels(t *testing.T) {
	r := readReadme(t)
	m := regexp.MustCompile("(?s)\n([^\n]*) are at level Warn, (.*?) at Error, the others at Debug").FindStringSubmatch(r.prose)
	if m == nil {
		t.Fatal("README: the sentence about the levels has changed; change this test, too")
	}
	for _, event := range r.column(t, "event", 0) {
		want := slog.LevelDebug
		switch quoted := "`" + event + "`"; {
		case strings.Contains(m[1], quoted):
			want = slog.LevelWarn
		case strings.Contains(m[2], quoted):
			want = slog.LevelError
		}
		if got := taskbox.ReadmeLevel(event); got != want {
			t.Errorf("README: %s is logged at %v, in the code at %v", event, want, got)
		}
	}
	for _, key := range sourceOf(t).logKeys() {
		if !strings.Contains(r.prose, "`"+key+"`") {
			t.Errorf("README: the log has a key %q that isn't told", key)
		}
	}
}

// TestReadme_Schema holds the README against the file that New makes.
func TestReadme_Schema(t *testing.T) {
	r := readReadme(t)
	f := open(t, taskbox.Options{})
	columns := f.rows(`select name from pragma_table_info('task_outbox')`)
	for _, c := range r.column(t, "column", 0) {
		if !slices.Contains(columns, c) {
			t.Errorf("README: task_outbox has no column %q", c)
		}
	}
	for _, c := range f.rows(`select name from pragma_table_info('task_trail')`) {
		if !strings.Contains(r.prose, "`"+c+"`") {
			t.Errorf("README: the column %s of task_trail isn't told", c)
		}
	}
	have := f.rows(`select name from sqlite_schema where name like 'task\_%' escape '\' and type in ('table', 'view') order by name`)
	var told []string
	for _, m := range regexp.MustCompile("`(task_\\w+)").FindAllStringSubmatch(r.prose, -1) {
		told = append(told, m[1])
	}
	told = slices.DeleteFunc(told, func(s string) bool { return s == "task_id" }) // a column
	slices.Sort(told)
	if diff := gocmp.Diff(have, slices.Compact(told)); diff != "" {
		t.Errorf("README, tables and views (-file +README):\n%s", diff)
	}
}

// TestReadme_Refusals is the sentence about what an insert can't have.
func TestReadme_Refusals(t *testing.T) {
	f := open(t, taskbox.Options{})
	for _, values := range []string{
		`('t', 'no JSON', null, null, null)`,
		`('', '{}', null, null, null)`,
		`(null, '{}', null, null, null)`,
		`('t', '{}', '', null, null)`,
		`('t', '{}', null, '', null)`,
		`('t', '{}', null, null, 0)`,
		`('t', '{}', null, null, 'often')`,
		`('` + strings.Repeat("t", 201) + `', '{}', null, null, null)`,
		`('t', '{}', '` + strings.Repeat("k", 501) + `', null, null)`,
	} {
		_, err := f.db.Exec(`insert into task_outbox(event_type, payload, dedupe_key, group_key, max_attempts) values ` + values)
		if err == nil {
			t.Errorf("%.80s was inserted", values)
		}
	}
	f.wantInt(0, `select count(*) from task_outbox`)
}

func TestReadme_Names(t *testing.T) {
	r, src := readReadme(t), sourceOf(t)
	methods := func(ty reflect.Type) func(string) bool {
		return func(name string) bool { _, ok := ty.MethodByName(name); return ok }
	}
	field := func(ty reflect.Type) func(string) bool {
		return func(name string) bool { _, ok := ty.FieldByName(name); return ok }
	}
	for _, c := range []struct {
		pattern string
		exists  func(name string) bool
	}{
		{`\btaskbox\.([A-Z]\w*)`, src.exported},
		{`[^.\w](Err[A-Z]\w*)`, src.exported},
		{`\bq\.([A-Z]\w*)`, methods(reflect.TypeFor[*taskbox.Queue]())},
		{`\br\.([A-Z]\w*)`, field(reflect.TypeFor[taskbox.Receipt]())},
		{`\bt\.([A-Z]\w*)`, either(field(reflect.TypeFor[taskbox.Task[Order]]()), methods(reflect.TypeFor[*taskbox.Task[Order]]()))},
		{`\bBulkOptions\.([A-Z]\w*)`, field(reflect.TypeFor[taskbox.BulkOptions]())},
		{`\bOptions\.([A-Z]\w*)`, field(reflect.TypeFor[taskbox.Options]())},
		{`\bTypeOptions\.([A-Z]\w*)`, field(reflect.TypeFor[taskbox.TypeOptions]())},
	} {
		for _, m := range regexp.MustCompile(c.pattern).FindAllStringSubmatch(r.prose, -1) {
			if !c.exists(m[1]) {
				t.Errorf("README: there is no %s", m[0])
			}
		}
	}
	for _, call := range r.column(t, "a handler returns", 0) {
		if name, _, ok := strings.Cut(call, "("); ok && !src.exported(name) {
			t.Errorf("README: there is no %s", call)
		}
	}
}

func either(a, b func(string) bool) func(string) bool {
	return func(name string) bool { return a(name) || b(name) }
}

// TestReadme_ByHand wants each operation of the table to be a method, and each error
// and helper a declaration.
func TestReadme_ByHand(t *testing.T) {
	r, src := readReadme(t), sourceOf(t)
	for _, name := range r.column(t, "operation", 0) {
		if _, ok := reflect.TypeFor[*taskbox.Queue]().MethodByName(name); !ok {
			t.Errorf("README: there is no Queue.%s", name)
		}
	}
	for _, name := range slices.Concat(r.column(t, "error by hand", 0), r.column(t, "error", 0)) {
		if !src.exported(name) {
			t.Errorf("README: there is no %s", name)
		}
	}
	for _, name := range r.column(t, "helper", 0) {
		_, method := reflect.TypeFor[*taskbox.Task[Order]]().MethodByName(name)
		if name != "nothing" && !method && !src.exported(name) {
			t.Errorf("README: there is no helper %s", name)
		}
	}
}

// TestReadme_Tour wants each source file on the tour, and none that isn't there.
func TestReadme_Tour(t *testing.T) {
	r := readReadme(t)
	_, tour, _ := strings.Cut(r.prose, "\n## Read the source\n")
	var patterns []string
	for _, m := range regexp.MustCompile("`([^`]+\\.go)`").FindAllStringSubmatch(tour, -1) {
		patterns = append(patterns, m[1])
		if files, err := filepath.Glob(m[1]); err != nil || len(files) == 0 {
			t.Errorf("README: there is no file %s", m[1])
		}
	}
	for name := range sourceOf(t).files {
		if !slices.ContainsFunc(patterns, func(p string) bool { ok, _ := filepath.Match(p, name); return ok }) {
			t.Errorf("README: %s isn't on the reading tour", name)
		}
	}
}

func TestReadme_Links(t *testing.T) {
	r := readReadme(t)
	headings := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(r.prose, -1) {
		slug := regexp.MustCompile(`[^a-z0-9 -]`).ReplaceAllString(strings.ToLower(m[1]), "")
		headings[strings.ReplaceAll(slug, " ", "-")] = true
	}
	for _, m := range regexp.MustCompile(`\]\(#([^)]*)\)`).FindAllStringSubmatch(r.prose, -1) {
		if !headings[m[1]] {
			t.Errorf("README: the link to #%s leads nowhere", m[1])
		}
	}
}

// The source, for what reflection doesn't tell.

type source struct{ files map[string]*ast.File }

func sourceOf(t *testing.T) source {
	t.Helper()
	names, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	s := source{map[string]*ast.File{}}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		if s.files[name], err = parser.ParseFile(token.NewFileSet(), name, nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	return s
}

// exported tells whether the package declares a name.
func (s source) exported(name string) bool {
	found := false
	for _, f := range s.files {
		for _, d := range f.Decls {
			ast.Inspect(d, func(n ast.Node) bool {
				switch n := n.(type) {
				case *ast.FuncDecl:
					found = found || n.Recv == nil && n.Name.Name == name
					return false
				case *ast.TypeSpec:
					found = found || n.Name.Name == name
				case *ast.ValueSpec:
					found = found || slices.ContainsFunc(n.Names, func(i *ast.Ident) bool { return i.Name == name })
				}
				return true
			})
		}
	}
	return found && token.IsExported(name)
}

// returning lists the exported functions whose only result is of a type.
func (s source) returning(typ string) (names []string) {
	for _, f := range s.files {
		for _, d := range f.Decls {
			fn, ok := d.(*ast.FuncDecl)
			if !ok || fn.Recv != nil || !fn.Name.IsExported() || fn.Type.Results.NumFields() != 1 {
				continue
			}
			if id, ok := fn.Type.Results.List[0].Type.(*ast.Ident); ok && id.Name == typ {
				names = append(names, fn.Name.Name)
			}
		}
	}
	return names
}

// calls runs fn for each call of a method or of a package's function.
func (s source) calls(fn func(on, name string, args []ast.Expr)) {
	for _, f := range s.files {
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok {
				return true
			}
			on := ""
			switch x := sel.X.(type) {
			case *ast.Ident:
				on = x.Name
			case *ast.SelectorExpr:
				on = x.Sel.Name
			}
			fn(on, sel.Sel.Name, call.Args)
			return true
		})
	}
}

func literal(e ast.Expr) (string, bool) {
	lit, ok := e.(*ast.BasicLit)
	if !ok || lit.Kind != token.STRING {
		return "", false
	}
	s, err := strconv.Unquote(lit.Value)
	return s, err == nil
}

// events lists those that are recorded by name.
func (s source) events() (names []string) {
	s.calls(func(_, name string, args []ast.Expr) {
		if name != "record" || len(args) < 2 {
			return
		}
		if event, ok := literal(args[1]); ok {
			names = append(names, event)
		}
	})
	return names
}

// byHand lists those of the operations on a task.
func (s source) byHand() (names []string) {
	s.calls(func(on, name string, args []ast.Expr) {
		if on != "m" || name != "note" && name != "end" && name != "revive" {
			return
		}
		if event, ok := literal(args[0]); ok {
			names = append(names, event)
		}
	})
	return names
}

// attrs lists the keys of the records about tasks.
func (s source) attrs() (keys []string) {
	s.calls(func(on, name string, args []ast.Expr) {
		if on != "slog" || len(args) != 2 {
			return
		}
		if key, ok := literal(args[0]); ok {
			keys = append(keys, key)
		}
	})
	return keys
}

// logKeys lists the keys of the other records.
func (s source) logKeys() (keys []string) {
	s.calls(func(on, name string, args []ast.Expr) {
		if low := strings.ToLower(on); low != "log" && low != "logger" {
			return
		}
		if strings.HasSuffix(name, "Context") && len(args) > 0 {
			args = args[1:]
		}
		for i := 1; i < len(args); i += 2 { // after the message
			if key, ok := literal(args[i]); ok {
				keys = append(keys, key)
			}
		}
	})
	return keys
}

// The blocks, run.

// TestReadme_Blocks does what a reader does: it builds the README's Go, runs the
// program, and then everything else on the file that the program has made.
func TestReadme_Blocks(t *testing.T) {
	if testing.Short() {
		t.Skip("builds programs")
	}
	if _, err := exec.LookPath("go"); err != nil {
		t.Skip(err)
	}
	r := readReadme(t)
	w := newReader(t)
	w.writeGo(r.of("go"))
	w.must(w.dir, "", "go", "vet", "./...")
	w.must(w.dir, "", "go", "test", "./...")
	w.must(w.dir, "", "go", "build", "-o", w.bin+string(filepath.Separator), "./...", "github.com/taskbox-go/taskbox/cmd/taskbox")
	for _, f := range r.fences {
		t.Run(fmt.Sprintf("%s at line %d", f.lang, f.line), func(t *testing.T) { w.run(t, f) })
	}
	w.finish()
	w.checkFlags(r)
}

// A reader is somebody with the README, a clone, and a program of his own.
type reader struct {
	*testing.T
	clone string // this directory
	dir   string // the module with the README's Go
	bin   string // what was built of it
	shop  string // where things are run
	own   string // a program beside the clone, which is ../taskbox from there
}

func newReader(t *testing.T) *reader {
	t.Helper()
	clone, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	tmp := t.TempDir()
	w := &reader{T: t, clone: clone, dir: filepath.Join(tmp, "readme"), bin: filepath.Join(tmp, "bin"),
		shop: filepath.Join(tmp, "shop"), own: filepath.Join(tmp, "own")}
	for _, dir := range []string{w.dir, w.bin, w.shop, w.own} {
		if err := os.Mkdir(dir, 0o777); err != nil {
			t.Fatal(err)
		}
	}
	return w
}

func (w *reader) write(path, text string) {
	w.Helper()
	err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o777), os.WriteFile(path, []byte(text), 0o666))
	if err != nil {
		w.Fatal(err)
	}
}

// writeGo makes a module of the Go blocks: each program, test and set of declarations
// is a package of its own; what is a part of a function becomes one.
func (w *reader) writeGo(fs []fence) {
	w.Helper()
	mod, err := os.ReadFile("go.mod")
	sum, err2 := os.ReadFile("go.sum")
	if err := errors.Join(err, err2); err != nil {
		w.Fatal(err)
	}
	_, requires, _ := strings.Cut(string(mod), "\n")
	w.write(filepath.Join(w.dir, "go.mod"), "module readme\n"+requires+
		"\nrequire github.com/taskbox-go/taskbox v0.0.0\n\nreplace github.com/taskbox-go/taskbox => "+strconv.Quote(w.clone)+"\n")
	w.write(filepath.Join(w.dir, "go.sum"), string(sum))
	for _, f := range fs {
		dir := filepath.Join(w.dir, fmt.Sprintf("line%d", f.line))
		switch {
		case isProgram(f.text):
			w.write(filepath.Join(dir, "main.go"), f.text)
			w.write(filepath.Join(w.own, "main.go"), f.text)
		case strings.HasPrefix(f.text, "package "):
			w.write(filepath.Join(dir, "readme_test.go"), f.text)
		default:
			w.write(filepath.Join(dir, "order.go"), orderGo)
			w.write(filepath.Join(dir, "fragment.go"), fragment(f.text))
		}
	}
}

func isProgram(text string) bool { return strings.HasPrefix(text, "package main\n") }

// orderGo is what the README's parts of programs take from the program at its top.
const orderGo = `package readme

import "github.com/taskbox-go/taskbox"

type Order struct {
	ID   int64  ` + "`json:\"id\"`" + `
	Item string ` + "`json:\"item\"`" + `
}

var OrderCreated = taskbox.NewType[Order]("order_created")
`

// fragment makes a file of declarations or of statements.
func fragment(text string) string {
	if _, err := parser.ParseFile(token.NewFileSet(), "", "package readme\n"+text, 0); err != nil {
		text = "func _(ctx context.Context, db *sql.DB, tx *sql.Tx, q *taskbox.Queue) error {\n" + text + used(text) + "}\n"
	}
	imports := ""
	for _, path := range []string{"context", "database/sql", "errors", "fmt", "log/slog", "net", "net/http", "os", "os/signal",
		"strings", "syscall", "time", "github.com/taskbox-go/taskbox"} {
		if regexp.MustCompile(`\b` + path[strings.LastIndex(path, "/")+1:] + `\.[A-Z]`).MatchString(text) {
			imports += strconv.Quote(path) + "\n"
		}
	}
	return "package readme\n\nimport (\n" + imports + ")\n\n" + text
}

// used mentions the variables that a reader would go on to use, and returns.
func used(text string) (uses string) {
	if regexp.MustCompile(`(?m)^return .*\n\z`).MatchString(text) {
		return ""
	}
	for _, m := range regexp.MustCompile(`(?m)^(\w+(?:, \w+)*) :=`).FindAllStringSubmatch(text, -1) {
		for name := range strings.SplitSeq(m[1], ", ") {
			uses += "_ = " + name + "\n"
		}
	}
	return uses + "return nil\n"
}

// output runs a command. Go has to make do with what the module cache holds.
func (w *reader) output(dir, stdin, name string, args ...string) (stdout, stderr string, err error) {
	ctx, cancel := context.WithTimeout(w.Context(), 5*time.Minute) // where nothing is built yet
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir, cmd.Stdin = dir, strings.NewReader(stdin)
	cmd.Env = append(os.Environ(), "GOFLAGS=", "GOPROXY=off", "GOTOOLCHAIN=local", "GOWORK=", "PWD="+dir)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	err = cmd.Run()
	return out.String(), errs.String(), err
}

func (w *reader) must(dir, stdin, name string, args ...string) (stdout string) {
	w.Helper()
	out, errs, err := w.output(dir, stdin, name, args...)
	if err != nil {
		w.Fatalf("%s %s: %v\n%s%s", name, strings.Join(args, " "), err, out, errs)
	}
	return out
}

// run runs one block. Those that it doesn't know it fails.
func (w *reader) run(t *testing.T, f fence) {
	w = &reader{T: t, clone: w.clone, dir: w.dir, bin: w.bin, shop: w.shop, own: w.own}
	out := ""
	switch {
	case f.lang == "go" && isProgram(f.text):
		out = w.must(w.shop, "", filepath.Join(w.bin, fmt.Sprintf("line%d", f.line)))
	case f.lang == "go", f.lang == "":
	case f.lang == "sql":
		w.sqlBlock(f.text)
	case f.lang == "python":
		w.needs("python3", "-c", "import sqlite3; print(sqlite3.sqlite_version)")
		out = w.must(w.shop, f.text, "python3", "-")
	case f.lang == "sh" && strings.Contains(f.text, "sqlite3 "):
		w.needs("sqlite3", "--version")
		if _, err := exec.LookPath("sh"); err != nil {
			t.Skip(err)
		}
		out = w.must(w.shop, f.text, "sh", "-e")
	case f.lang == "sh" && strings.HasPrefix(f.text, "go mod "), f.lang == "sh" && strings.HasPrefix(f.text, "go work "):
		w.ownProgram(f.text)
	case f.text == "go run ./cmd/taskbox demo\ngo test ./...\n":
		// The scripts of cmd/taskbox run the one, and this is the other.
	default:
		t.Errorf("README: the test doesn't know what to do with the block %q at line %d", f.lang, f.line)
	}
	if f.checked && out != f.prints {
		t.Errorf("README: the block at line %d prints\n%s\nand not\n%s", f.line, out, f.prints)
	}
}

// needs skips where a program isn't installed, or brings a SQLite without STRICT.
func (w *reader) needs(name string, version ...string) {
	w.Helper()
	if _, err := exec.LookPath(name); err != nil {
		w.Skip(err)
	}
	out, _, err := w.output(w.shop, "", name, version...)
	var minor int
	if _, err2 := fmt.Sscanf(out, "3.%d", &minor); err != nil || err2 != nil || minor < 37 {
		w.Skipf("%s has SQLite %q (%v)", name, out, err)
	}
}

// sqlBlock runs a statement on the program's file, with something for its parameters.
func (w *reader) sqlBlock(text string) {
	w.Helper()
	db := fileDB(w.T, filepath.Join(w.shop, "shop.db"))
	switch strings.Count(text, "?") {
	case 0:
		rowsOf(w.T, db, text)
	case 1: // a copy of a dead letter
		rowsOf(w.T, db, `
insert into task_outbox(id, event_type, payload, status, dedupe_key, finished_at)
values (1000, 'order_created', '{"id": 4712}', 'dead_letter', 'again', 1)`)
		rowsOf(w.T, db, text, 1000)
		if n := rowsOf(w.T, db, `select id from task_outbox where dedupe_key = 'again' and status = 'pending'`); len(n) != 1 {
			w.Errorf("README: the copy of a dead letter made the tasks %q", n)
		}
	case 2:
		rowsOf(w.T, db, text, "order_created", `{"id": 4711, "item": "tea"}`)
	}
}

// ownProgram follows the README's way to depend on a clone.
func (w *reader) ownProgram(text string) {
	w.Helper()
	link := filepath.Join(filepath.Dir(w.own), "taskbox")
	if err := os.Symlink(w.clone, link); err != nil && !os.IsExist(err) {
		w.Skip(err)
	}
	w.write(filepath.Join(w.own, "go.mod"), "module shop\n\ngo 1.26.0\n")
	for line := range strings.Lines(text) {
		args := strings.Fields(line)
		if _, errs, err := w.output(w.own, "", args[0], args[1:]...); strings.Contains(errs, "GOPROXY=off") {
			w.Skipf("%s: a module of a test of a module isn't in the cache", line)
		} else if err != nil {
			w.Fatalf("%s: %v\n%s", line, err, errs)
		}
	}
	w.must(w.own, "", "go", "vet", ".")
	os.Remove(filepath.Join(w.own, "go.work"))
}

// finish runs what the blocks have enqueued with SQL alone.
func (w *reader) finish() {
	w.Helper()
	db := fileDB(w.T, filepath.Join(w.shop, "shop.db"))
	q := newQueue(w.T, db, taskbox.Options{})
	var orders record
	OrderCreated.Handle(q, func(ctx context.Context, t *taskbox.Task[Order]) error {
		orders.start(strconv.FormatInt(t.Payload.ID, 10))()
		return nil
	})
	if err := q.Drain(w.Context()); err != nil {
		w.Fatal(err)
	}
	if orders.count("4711") != 1 || orders.count("4712") != 1 {
		w.Errorf("of the tasks that were enqueued with SQL ran those of the orders %q", orders.all())
	}
	if left := rowsOf(w.T, db, `select id, status, last_error from task_outbox where status <> 'success' and id <> 1000`); left != nil {
		w.Errorf("tasks that haven't succeeded: %q", left)
	}
}

// checkFlags wants the commands that the README names, with their flags.
func (w *reader) checkFlags(r *readme) {
	w.Helper()
	text := r.prose
	for _, f := range r.of("sh") {
		text += f.text
	}
	for _, m := range regexp.MustCompile("go run ./cmd/taskbox (\\w+)([^`\n]*)").FindAllStringSubmatch(text, -1) {
		help := w.must(w.shop, "", filepath.Join(w.bin, "taskbox"), "help", m[1])
		for _, flag := range regexp.MustCompile(`(?: |^)(-\w+)`).FindAllStringSubmatch(m[2], -1) {
			if !strings.Contains(help, "  "+flag[1]+" ") {
				w.Errorf("README: taskbox %s has no flag %s", m[1], flag[1])
			}
		}
	}
}
