package taskbox

import (
	"context"
	"database/sql"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// allowedScans are the walks over a whole index or table that are meant: each is over
// a partial index of living tasks, or over what is small by nature. The names are
// those of the constants.
var allowedScans = map[string][]string{
	// The task_due index holds due tasks only: the queue's length is what is counted.
	"queueLengthSQL": {"SCAN main.task_outbox USING COVERING INDEX task_due"},
	// One row for each dead letter, and a person looks at those.
	"deadLettersSQL": {"SCAN main.task_outbox USING COVERING INDEX task_dead"},
	// What waits now; nothing of the history.
	"waitingSQL": {
		"SCAN main.task_outbox USING COVERING INDEX task_scheduled",
		"SCAN main.task_outbox USING COVERING INDEX task_retry",
		"SCAN main.task_outbox USING COVERING INDEX task_blocked",
	},
	"hasMetaSQL": {"SCAN main.sqlite_schema"},
	// What people did, newest first, as far as the limit.
	"Audit#1": {"SCAN main.task_audit USING INDEX task_audit_manual"},
	// One task's rows, put in order.
	"Trail#1":      {"SCAN (subquery-3)", "USE TEMP B-TREE FOR ORDER BY"},
	"Steps#1":      {"USE TEMP B-TREE FOR ORDER BY"},
	"stepFactsSQL": {"USE TEMP B-TREE FOR LAST 2 TERMS OF ORDER BY"},
	// Six minutes' rows, a row for each type.
	"recentSQL": {"USE TEMP B-TREE FOR GROUP BY"},
}

// fragments are the beginnings of statements that are put together from a filter;
// they walk the tasks by id, as far as their limit.
var fragments = map[string]bool{"infoColumns": true, "eventColumns": true, "selectTasks#1": true}

// wantSearches are the lookups that the queue's speed rests on.
var wantSearches = map[string]string{
	"dueSQL":              "SEARCH main.task_outbox USING INDEX task_due (event_type=?)",
	"promoteScheduledSQL": "SEARCH main.task_outbox USING INDEX task_scheduled (next_run_at<?)",
	"promoteRetrySQL":     "SEARCH main.task_outbox USING INDEX task_retry (next_run_at<?)",
	"groupHeadSQL":        "SEARCH main.task_outbox USING INDEX task_group (group_key=?)",
	"unblockSQL":          "SEARCH main.task_outbox USING INTEGER PRIMARY KEY (rowid=?)",
	"keyHolderSQL":        "SEARCH main.task_outbox USING INDEX task_key (dedupe_key=?)",
	"heldSQL":             "SEARCH main.task_outbox USING INDEX task_held (owner>?)",
	"recoverSQL":          "SEARCH main.task_outbox USING INDEX task_held (owner=?)",
	"renewSQL":            "SEARCH main.task_outbox USING INDEX task_held (owner=?)",
	"claimBatch":          "SEARCH main.task_outbox USING INTEGER PRIMARY KEY (rowid=?)",
	"succeedBatch":        "SEARCH t USING INTEGER PRIMARY KEY (rowid=?)",
	"endSQL":              "SEARCH main.task_outbox USING INTEGER PRIMARY KEY (rowid=?)",
	"sweepSQL":            "SEARCH main.task_outbox USING INTEGER PRIMARY KEY (rowid>?)",
	"pruneTrailSQL":       "SEARCH main.task_audit USING PRIMARY KEY (task_id=?)",
	"recentSQL":           "SEARCH main.task_stats USING PRIMARY KEY (minute>?)",
}

// harmless are the steps of a plan that read what the statement itself has made.
var harmless = regexp.MustCompile(`^(SCAN (json_each VIRTUAL TABLE INDEX 1:|main.sqlite_sequence|v|due|CONSTANT ROW|\d+ CONSTANT ROWS?|\(join-\d+\))|SCAN \d+-ROW VALUES CLAUSE|SETUP|RECURSIVE STEP|SCALAR SUBQUERY \d+|CORRELATED SCALAR SUBQUERY \d+|MATERIALIZE .*|CO-ROUTINE .*|COMPOUND QUERY|LEFT-MOST SUBQUERY|UNION ALL|LIST SUBQUERY \d+|REUSE LIST SUBQUERY \d+|MULTI-INDEX OR|INDEX \d+)$`)

// TestPlans asks SQLite how it runs each statement of the library. The list is made
// from the source, so that no statement can be forgotten.
func TestPlans(t *testing.T) {
	conn := planFile(t)
	statements := sourceStatements(t)
	names := map[string]bool{}
	for _, s := range statements {
		names[s.name] = true
		if fragments[s.name] {
			continue
		}
		t.Run(s.name, func(t *testing.T) {
			steps := planOf(t, conn, s.text)
			for _, step := range steps {
				checkStep(t, s, step)
			}
			if want := wantSearches[s.name]; want != "" && !slices.Contains(steps, want) {
				t.Errorf("%s: no %q in its plan:\n%s", s.name, want, strings.Join(steps, "\n"))
			}
		})
	}
	// What the search of the source must have found.
	for _, name := range []string{"lookSQL", "insertKeyedSQL", "addStatsSQL", "insertPlainAudit"} {
		if !names[name] {
			t.Errorf("%s isn't among the %d statements found", name, len(statements))
		}
	}
	for name := range allowedScans {
		if !names[name] {
			t.Errorf("allowedScans has %s, and the library hasn't", name)
		}
	}
	for name := range wantSearches {
		if !names[name] {
			t.Errorf("wantSearches has %s, and the library hasn't", name)
		}
	}
}

func checkStep(t *testing.T, s statementText, step string) {
	t.Helper()
	switch {
	case slices.Contains(allowedScans[s.name], step), harmless.MatchString(step):
	case strings.HasPrefix(step, "SEARCH"):
		if strings.Contains(step, "AUTOMATIC") {
			t.Errorf("%s builds an index each time: %s\n%s", s.name, step, s.text)
		}
	case strings.HasPrefix(step, "SCAN"):
		t.Errorf("%s walks a whole table or index: %s\n%s", s.name, step, s.text)
	case strings.HasPrefix(step, "USE TEMP B-TREE"):
		t.Errorf("%s sorts: %s\n%s", s.name, step, s.text)
	default:
		t.Errorf("%s: a step that this test doesn't know: %s\n%s", s.name, step, s.text)
	}
}

// planFile is a connection to a file with tasks, whose planner has no statistics.
func planFile(t *testing.T) *sql.Conn {
	t.Helper()
	db, err := OpenDB(filepath.Join(t.TempDir(), "t.db"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	if _, err := New(t.Context(), db, Options{}); err != nil {
		t.Fatal(err)
	}
	conn, err := db.Conn(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	for _, query := range []string{
		`insert into task_outbox(event_type, payload, status, group_key) with recursive n(i) as (select 1 union all select i + 1 from n limit 1000)
			select 'x' || i % 3, '{}', iif(i % 2, 'success', 'pending'), 'g' || i % 10 from n`,
		`insert into task_audit(task_id, seq, event, at) select id, 1, 'picked', 1 from task_outbox`,
	} {
		if _, err := conn.ExecContext(t.Context(), query); err != nil {
			t.Fatal(err)
		}
	}
	return conn
}

var parameter = regexp.MustCompile(`\?(\d*)`)

// planOf returns the steps of EXPLAIN QUERY PLAN.
func planOf(t *testing.T, conn *sql.Conn, text string) (steps []string) {
	t.Helper()
	n, highest := 0, 0
	for _, m := range parameter.FindAllStringSubmatch(text, -1) {
		if m[1] == "" {
			n++
		} else if i, err := strconv.Atoi(m[1]); err == nil {
			highest = max(highest, i)
		}
	}
	rows, err := conn.QueryContext(context.Background(), "explain query plan "+text, make([]any, max(n, highest))...)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	defer rows.Close()
	for rows.Next() {
		var id, parent, unused int
		var step string
		if err := rows.Scan(&id, &parent, &unused, &step); err != nil {
			t.Fatal(err)
		}
		steps = append(steps, step)
	}
	if err := rows.Err(); err != nil {
		t.Fatal(err)
	}
	return steps
}

type statementText struct{ name, text string }

// built are the statements that functions put together: their source says only a part.
var built = map[string]string{"addStatsSQL": addStatsSQL}

// sourceStatements finds the SQL texts in the package's source that read or change
// rows: constants, variables, batches, and literals inside functions.
func sourceStatements(t *testing.T) []statementText {
	t.Helper()
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	f := finder{t: t, fset: token.NewFileSet(), consts: map[string]string{}}
	var parsed []*ast.File
	for _, name := range files {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		src, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		file, err := parser.ParseFile(f.fset, name, src, 0)
		if err != nil {
			t.Fatal(err)
		}
		parsed = append(parsed, file)
	}
	// Constants may stand after their use; each pass resolves what it can.
	for range 3 {
		for _, file := range parsed {
			ast.Inspect(file, f.constants)
		}
	}
	for _, file := range parsed {
		for _, decl := range file.Decls {
			f.declaration(decl)
		}
	}
	slices.SortFunc(f.found, func(a, b statementText) int { return strings.Compare(a.name, b.name) })
	return f.found
}

type finder struct {
	t      *testing.T
	fset   *token.FileSet
	consts map[string]string // texts by constant
	found  []statementText
}

func (f *finder) constants(n ast.Node) bool {
	if spec, ok := n.(*ast.ValueSpec); ok && len(spec.Values) == len(spec.Names) {
		for i, name := range spec.Names {
			if text, ok := f.text(spec.Values[i]); ok {
				f.consts[name.Name] = text
			}
		}
	}
	return true
}

// text evaluates a constant expression of strings.
func (f *finder) text(e ast.Expr) (string, bool) {
	switch e := e.(type) {
	case *ast.BasicLit:
		if e.Kind != token.STRING {
			return "", false
		}
		s, err := strconv.Unquote(e.Value)
		return s, err == nil
	case *ast.Ident:
		s, ok := f.consts[e.Name]
		return s, ok
	case *ast.ParenExpr:
		return f.text(e.X)
	case *ast.BinaryExpr:
		x, ok := f.text(e.X)
		y, ok2 := f.text(e.Y)
		return x + y, ok && ok2 && e.Op == token.ADD
	}
	return "", false
}

func (f *finder) declaration(decl ast.Decl) {
	gen, ok := decl.(*ast.GenDecl)
	if !ok {
		fn := decl.(*ast.FuncDecl)
		f.literals(fn.Name.Name, fn)
		return
	}
	for _, spec := range gen.Specs {
		v, ok := spec.(*ast.ValueSpec)
		if !ok {
			continue
		}
		for i, name := range v.Names {
			if i < len(v.Values) {
				f.value(name.Name, v.Values[i])
			}
		}
	}
}

// value looks at a constant or variable of the package.
func (f *finder) value(name string, e ast.Expr) {
	if text, ok := built[name]; ok {
		f.add(name, text)
		return
	}
	if text, ok := f.text(e); ok {
		f.add(name, text)
		return
	}
	call, ok := e.(*ast.CallExpr)
	if id, isIdent := callee(call); !ok || !isIdent || id != "newBatch" {
		f.literals(name, e)
		return
	}
	var texts []string // head, row, tail
	for _, arg := range call.Args {
		text, ok := f.text(arg)
		if !ok {
			f.t.Errorf("%s: %s: an argument of newBatch that isn't constant", f.fset.Position(call.Pos()), name)
		}
		texts = append(texts, text)
	}
	if len(texts) == 3 {
		f.add(name, newBatch(texts[0], texts[1], texts[2]).text(batchSizes[0]))
	}
}

func callee(call *ast.CallExpr) (string, bool) {
	if call == nil {
		return "", false
	}
	id, ok := call.Fun.(*ast.Ident)
	if !ok {
		return "", false
	}
	return id.Name, true
}

// literals looks for SQL inside functions.
func (f *finder) literals(name string, n ast.Node) {
	count := 0
	ast.Inspect(n, func(n ast.Node) bool {
		e, ok := n.(ast.Expr)
		if !ok {
			return true
		}
		if _, isName := e.(*ast.Ident); isName {
			return true
		}
		text, ok := f.text(e)
		if !ok {
			return true
		}
		if isStatement(text) {
			count++
			f.add(fmt.Sprintf("%s#%d", name, count), text)
		}
		return false
	})
}

func (f *finder) add(name, text string) {
	if isStatement(text) {
		f.found = append(f.found, statementText{name, text})
	}
}

// isStatement tells SQL that reads or changes rows from other text.
var statementStart = regexp.MustCompile(`^\s*(?:(?:select|delete from|with|values|replace into)\s|insert (?:or \w+ )?into\s|update (?:or \w+ )?\w+\.)`)

func isStatement(text string) bool { return statementStart.MatchString(text) }
