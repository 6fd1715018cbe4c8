package taskbox

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"modernc.org/sqlite"
)

// OpenDB opens, or creates, a database file for an application and its queue. The
// pool that it returns is an ordinary one, to be used and closed by the application;
// each of its connections has
//
//   - busy_timeout 5000 ms, so that a writer waits for another;
//   - journal_mode WAL, so that readers and the writer don't wait for each other;
//   - synchronous FULL, so that what is committed survives a power cut (on macOS
//     with fullfsync);
//   - _txlock=immediate: a transaction has the write lock from the start, and can't
//     fail half way because another has written in the meantime;
//   - cache_size 8 MB;
//   - wal_autocheckpoint 8000 pages, a -wal file of 32 MB.
//
// Writers of the pool take turns, first come first served; SQLite by itself lets one
// that writes without a pause starve the others. One that has waited for busy_timeout
// gets SQLITE_BUSY as usual.
//
// dsn is a path, or a file: URI in which SQLite's parameters and those of
// modernc.org/sqlite may follow, or ":memory:". What the parameters say is kept, such
// as in "file:shop.db?_pragma=foreign_keys(1)&_synchronous=NORMAL". A relative path is
// that of now: a later [os.Chdir] changes nothing. A pool of a memory database has one
// connection, since every connection would be another database.
//
// The file is tried at once. A path or parameter that can't work is an [ErrInvalid].
// So is a second SQLite library in the process, such as mattn/go-sqlite3: two of them
// on one file destroy committed data. An application that must have it opens the file
// with one of them only, and gives that pool to [New].
func OpenDB(dsn string) (*sql.DB, error) {
	db, err := openDB(dsn)
	if err != nil {
		return nil, fmt.Errorf("open the database: %w", err)
	}
	return db, nil
}

func openDB(dsn string) (*sql.DB, error) {
	src, err := parseDSN(dsn)
	if err != nil {
		return nil, err
	}
	if name := foreignEngine(sql.Drivers(), driverByName); name != "" {
		return nil, fmt.Errorf("%w: this program also has the SQLite driver %q; two SQLite libraries in one process "+
			"undo each other's locks, and committed data is lost. Remove one of them, or open your own *sql.DB "+
			"with the one that uses this file and give it to New", ErrInvalid, name)
	}
	if err := src.checkFile(); err != nil {
		return nil, err
	}
	src.setDefaults(runtime.GOOS)
	base, err := sqlite.NewConnector(src.uri(runtime.GOOS))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	db := sql.OpenDB(&gatedConnector{
		Connector: base,
		driver:    &gatedDriver{Driver: base.Driver(), gate: new(gate)},
		immediate: !strings.EqualFold(src.params.Get("_txlock"), "deferred"),
	})
	conns := 1
	if !src.memory() {
		conns = max(8, 2*runtime.GOMAXPROCS(0))
	}
	db.SetMaxOpenConns(conns)
	db.SetMaxIdleConns(conns)
	if err := src.try(db); err != nil {
		db.Close() // SQLite closes its files itself, and keeps its locks in mind
		return nil, err
	}
	return db, nil
}

// source is a dsn, taken apart.
type source struct {
	path   string // absolute, or ":memory:"
	params url.Values
}

func (s *source) memory() bool {
	return s.path == memoryPath || s.params.Get("mode") == "memory" || s.params.Get("vfs") == "memdb"
}

const memoryPath = ":memory:"

// dsnParams are the parameters that modernc.org/sqlite and SQLite know. What they
// don't know they ignore, and a typo with it.
var dsnParams = []string{
	"_pragma", "_busy_timeout", "_timeout", "_foreign_keys", "_fk", "_journal_mode", "_journal",
	"_synchronous", "_sync", "_auto_vacuum", "_vacuum", "_query_only", "_txlock", "_time_format",
	"_time_integer_format", "_inttotime", "_texttotime", "_timezone", "_dqs", "_defensive", "_error_rc",
	"vfs", "mode", "cache", "immutable", "nolock", "psow", "modeof",
}

func parseDSN(dsn string) (*source, error) {
	rest, isURI := strings.CutPrefix(dsn, "file:")
	switch {
	case strings.ContainsRune(dsn, 0):
		return nil, fmt.Errorf("%w: the dsn has a NUL byte", ErrInvalid)
	case isURI:
		return parseURI(rest)
	case dsn == "":
		return nil, fmt.Errorf("%w: the dsn is empty; give a path such as \"shop.db\", a file: URI or \":memory:\"", ErrInvalid)
	case dsn == memoryPath:
		return &source{path: memoryPath, params: url.Values{}}, nil
	case len(dsn) >= 5 && strings.EqualFold(dsn[:5], "file:"):
		return nil, fmt.Errorf("%w: %q: SQLite knows file: in lower case only", ErrInvalid, dsn)
	case strings.Contains(dsn, "://"):
		return nil, fmt.Errorf("%w: %q is no path; write file:%s", ErrInvalid, dsn, dsn[strings.Index(dsn, "://")+3:])
	}
	if path, query, ok := strings.Cut(dsn, "?"); ok && strings.Contains(query, "=") {
		return nil, fmt.Errorf("%w: parameters need a file: URI; write \"file:%s?%s\" (or %%3F for a ? in a file's name)", ErrInvalid, path, query)
	}
	path, err := filepath.Abs(dsn)
	return &source{path: path, params: url.Values{}}, err
}

// parseURI reads what follows "file:", as https://sqlite.org/uri.html says.
func parseURI(rest string) (*source, error) {
	if strings.Contains(rest, "#") {
		return nil, fmt.Errorf("%w: file:%s: everything after a # is ignored by SQLite; write %%23 for a # in a name", ErrInvalid, rest)
	}
	escaped, query, _ := strings.Cut(rest, "?")
	if after, ok := strings.CutPrefix(escaped, "//"); ok {
		host, path, _ := strings.Cut(after, "/")
		if host != "" && host != "localhost" {
			return nil, fmt.Errorf("%w: file:%s names a host, %q; write file:%s, or file:/// and an absolute path", ErrInvalid, escaped, host, after)
		}
		escaped = "/" + path
	}
	path, err := url.PathUnescape(escaped)
	if err != nil {
		return nil, fmt.Errorf("%w: file:%s: %w; write %%25 for a %% in a name", ErrInvalid, escaped, err)
	}
	params, err := url.ParseQuery(query)
	if err != nil {
		return nil, fmt.Errorf("%w: the parameters %q: %w", ErrInvalid, query, err)
	}
	switch {
	case strings.ContainsRune(path, 0):
		return nil, fmt.Errorf("%w: file:%s has a NUL byte", ErrInvalid, escaped)
	case path == "":
		return nil, fmt.Errorf("%w: file:%s has no path; write file:shop.db, or file::memory: for none", ErrInvalid, rest)
	}
	if err := checkParams(params); err != nil {
		return nil, err
	}
	s := &source{path: path, params: params}
	if s.memory() {
		s.path = memoryPath
		return s, nil
	}
	s.path, err = filepath.Abs(nativePath(path, runtime.GOOS))
	return s, err
}

func checkParams(params url.Values) error {
	for name, values := range params {
		if !slices.Contains(dsnParams, name) {
			return fmt.Errorf("%w: unknown parameter %q%s; known are %s", ErrInvalid, name, guess(name), strings.Join(dsnParams, ", "))
		}
		if slices.Contains(values, "") {
			return fmt.Errorf("%w: the parameter %s has no value", ErrInvalid, name)
		}
		if name != "_pragma" && len(values) > 1 {
			return fmt.Errorf("%w: the parameter %s is given %d times", ErrInvalid, name, len(values))
		}
	}
	for _, pair := range [][2]string{{"_busy_timeout", "_timeout"}, {"_foreign_keys", "_fk"}, {"_journal_mode", "_journal"},
		{"_synchronous", "_sync"}, {"_auto_vacuum", "_vacuum"}} {
		if params.Has(pair[0]) && params.Has(pair[1]) {
			return fmt.Errorf("%w: the parameters %s and %s are the same; give one", ErrInvalid, pair[0], pair[1])
		}
	}
	for _, p := range params["_pragma"] {
		if strings.Contains(strings.TrimRight(p, "; "), ";") {
			return fmt.Errorf("%w: _pragma=%s is more than one statement; give _pragma more than once", ErrInvalid, p)
		}
	}
	return checkModes(params)
}

// checkModes refuses what SQLite allows and a queue can't live with.
func checkModes(params url.Values) error {
	if v := params.Get("cache"); v != "" && v != "private" {
		return fmt.Errorf("%w: cache=%s: with a shared cache a writer waits without regard to busy_timeout; leave it out", ErrInvalid, v)
	}
	switch v := params.Get("mode"); v {
	case "", "rw", "rwc", "memory":
	case "ro":
		return fmt.Errorf("%w: mode=ro: a queue has to write; leave it out, or use mode=rw to open existing files only", ErrInvalid)
	default:
		return fmt.Errorf("%w: mode=%s: want rw or rwc", ErrInvalid, v)
	}
	for name, why := range map[string]string{
		"immutable":   "a queue has to write",
		"nolock":      "without locks two connections destroy the file",
		"_query_only": "a queue has to write",
	} {
		if v := params.Get(name); v != "" && !off(v) {
			return fmt.Errorf("%w: %s=%s: %s; leave it out", ErrInvalid, name, v, why)
		}
	}
	if v := pragmaOf(params, "locking_mode"); strings.Contains(strings.ToLower(v), "exclusive") {
		return fmt.Errorf("%w: _pragma=%s: the pool's other connections would be locked out; leave it out", ErrInvalid, v)
	}
	return nil
}

func off(v string) bool {
	return slices.Contains([]string{"0", "no", "false", "off", "f"}, strings.ToLower(v))
}

// guess finds the parameter that a typo in underscores or case stands for.
func guess(name string) string {
	plain := func(s string) string { return strings.ToLower(strings.ReplaceAll(s, "_", "")) }
	for _, p := range dsnParams {
		if plain(p) == plain(name) {
			return ", did you mean " + p + "?"
		}
	}
	return ""
}

// pragmaOf returns the first _pragma that is about name, such as "busy_timeout(5000)".
func pragmaOf(params url.Values, name string) string {
	for _, p := range params["_pragma"] {
		word := strings.TrimSpace(p)
		if i := strings.IndexAny(word, "(= \t;"); i >= 0 {
			word = word[:i]
		}
		word = word[strings.LastIndexByte(word, '.')+1:] // a schema's name
		if strings.EqualFold(word, name) {
			return p
		}
	}
	return ""
}

// setDefaults adds what the dsn leaves open.
func (s *source) setDefaults(goos string) {
	def := func(pragma, value string, aliases ...string) {
		if slices.ContainsFunc(aliases, s.params.Has) || pragmaOf(s.params, pragma) != "" {
			return
		}
		s.params.Add("_pragma", pragma+"("+value+")")
	}
	def("busy_timeout", "5000", "_busy_timeout", "_timeout")
	def("cache_size", "-8000")
	// A checkpoint runs inside a commit, with the lock held: fewer of them let
	// everybody's commits through sooner. It makes the -wal file 32 MB.
	def("wal_autocheckpoint", "8000")
	def("synchronous", "FULL", "_synchronous", "_sync")
	if !s.memory() {
		def("journal_mode", "WAL", "_journal_mode", "_journal")
	}
	if goos == "darwin" { // where fsync leaves data in the disk's cache
		def("fullfsync", "1")
	}
	if !s.params.Has("_txlock") {
		s.params.Set("_txlock", "immediate")
	}
}

func (s *source) uri(goos string) string { return fileURI(s.path, goos) + "?" + s.params.Encode() }

// fileURI is the URI of an absolute path, or of ":memory:".
func fileURI(path, goos string) string {
	if path == memoryPath {
		return "file:" + memoryPath
	}
	if goos == "windows" {
		path = strings.ReplaceAll(path, `\`, "/")
	}
	if !strings.HasPrefix(path, "/") { // a drive's letter
		path = "/" + path
	}
	const plain = "-._~/:@!$'()*,+="
	var b strings.Builder
	b.WriteString("file://")
	for i := range len(path) {
		c := path[i]
		if 'a' <= c|0x20 && c|0x20 <= 'z' || '0' <= c && c <= '9' || strings.IndexByte(plain, c) >= 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// nativePath is the path in a URI as the system writes it: "/C:/x" is "C:/x".
func nativePath(path, goos string) string {
	if goos == "windows" && len(path) >= 3 && path[0] == '/' && path[2] == ':' {
		return path[1:]
	}
	return path
}

// checkFile looks at the path. It opens nothing: to open one of SQLite's files and
// close it drops the locks that this process has on it.
func (s *source) checkFile() error {
	if s.memory() || s.params.Has("vfs") {
		return nil
	}
	switch fi, err := os.Stat(s.path); {
	case err == nil && fi.IsDir():
		return fmt.Errorf("%w: %s is a directory; give the path of a file in it", ErrInvalid, s.path)
	case err == nil && !fi.Mode().IsRegular():
		return fmt.Errorf("%w: %s is no regular file (%v)", ErrInvalid, s.path, fi.Mode().Type())
	case err == nil:
		return nil
	case !errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	case s.params.Get("mode") == "rw":
		return fmt.Errorf("%w: %s doesn't exist, and mode=rw doesn't create it; leave mode out", ErrInvalid, s.path)
	}
	dir := filepath.Dir(s.path)
	switch fi, err := os.Stat(dir); {
	case err != nil:
		return fmt.Errorf("%w: the directory of %s: %w; create it first", ErrInvalid, s.path, err)
	case !fi.IsDir():
		return fmt.Errorf("%w: %s is no directory", ErrInvalid, dir)
	}
	return nil
}

// try opens the first connection: it reads the header, writes, and takes it back.
func (s *source) try(db *sql.DB) error {
	ctx := context.Background()
	conn, err := db.Conn(ctx)
	if err != nil {
		return s.explain(err)
	}
	defer conn.Close()
	if err := tryWrite(ctx, conn); err != nil {
		return s.explain(err)
	}
	if s.memory() || s.params.Has("_journal_mode") || s.params.Has("_journal") ||
		!strings.Contains(strings.ToLower(pragmaOf(s.params, "journal_mode")), "wal") {
		return nil
	}
	var mode string
	if err := conn.QueryRowContext(ctx, "pragma main.journal_mode").Scan(&mode); err != nil {
		return s.explain(err)
	}
	if mode != "wal" {
		return fmt.Errorf("%w: %s stays in journal mode %s: its file system or vfs has no WAL; move it to a local disk, or add _journal_mode=%s",
			ErrInvalid, s.path, mode, strings.ToUpper(mode))
	}
	return nil
}

func (s *source) explain(err error) error {
	if _, ok := errors.AsType[*sqlite.Error](err); !ok {
		return fmt.Errorf("%w: %s: %w", ErrInvalid, s.path, err) // the driver's own, about a parameter
	}
	return explainFile(s.path, err)
}

// explainFile says what to do where SQLite says only what is wrong.
func explainFile(path string, err error) error {
	switch sqliteCode(err) & 0xff {
	case 8:
		return fmt.Errorf("%w: %s can't be written, and a queue has to; look at the owner and the mode of the file, "+
			"its -wal and -shm and its directory, and at query_only: %w", ErrInvalid, path, err)
	case 14:
		return fmt.Errorf("%w: %s can't be opened; the directory must exist, and SQLite must be allowed to create files in it: %w", ErrInvalid, path, err)
	case 26:
		return fmt.Errorf("%w: %s isn't a SQLite database (or it is encrypted); nothing was changed in it: %w", ErrInvalid, path, err)
	case 1:
		return fmt.Errorf("%w: %s: a setting of the connection: %w", ErrInvalid, path, err)
	}
	return fmt.Errorf("%s: %w", path, explainBusy(err))
}

// foreignEngine returns the name of a registered driver that is another SQLite
// library than modernc's, or "".
func foreignEngine(names []string, driverOf func(name string) any) string {
	for _, name := range names {
		if low := strings.ToLower(name); !strings.Contains(low, "sqlite") && !strings.Contains(low, "libsql") {
			continue
		}
		switch pkg := packagesOf(driverOf(name)); {
		case strings.Contains(pkg, "modernc.org/sqlite"), strings.Contains(pkg, "glebarez/go-sqlite"):
			// The same library, perhaps under another name or inside a wrapper.
		case strings.Contains(pkg, "go-sqlite3"), strings.Contains(pkg, "libsql"), strings.EqualFold(name, "sqlite3"):
			return name
		}
	}
	return ""
}

// driverByName returns a registered driver, or nil. Nothing is opened.
func driverByName(name string) any {
	db, err := sql.Open(name, "")
	if err != nil {
		return nil
	}
	defer db.Close()
	return db.Driver()
}

// packagesOf returns the import path of a driver's type and of the types of its
// fields: those of what it wraps.
func packagesOf(driver any) string {
	var paths []string
	var walk func(v reflect.Value, depth int)
	walk = func(v reflect.Value, depth int) {
		for v.Kind() == reflect.Pointer || v.Kind() == reflect.Interface {
			if v.Kind() == reflect.Pointer && v.Type().Elem().PkgPath() != "" {
				paths = append(paths, v.Type().Elem().PkgPath())
			}
			v = v.Elem()
		}
		if !v.IsValid() {
			return
		}
		paths = append(paths, v.Type().PkgPath())
		if v.Kind() == reflect.Struct && depth > 0 {
			for i := range v.NumField() {
				walk(v.Field(i), depth-1)
			}
		}
	}
	walk(reflect.ValueOf(driver), 2)
	return strings.Join(paths, " ")
}

// usualDSN is the dsn for modernc.org/sqlite that a pool for a queue should have.
func usualDSN(path string) string {
	return fileURI(path, runtime.GOOS) + "?_txlock=immediate&_pragma=busy_timeout(" + strconv.Itoa(usualBusyTimeout) +
		")&_pragma=journal_mode(WAL)&_pragma=synchronous(FULL)"
}

const usualBusyTimeout = 5000 // ms
