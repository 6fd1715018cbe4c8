package taskbox

import (
	"database/sql/driver"
	"net/url"
	"testing"

	"modernc.org/sqlite"
)

func TestFileURI(t *testing.T) {
	for _, tt := range []struct{ path, goos, want string }{
		{"/srv/a b?c#d%20.db", "linux", "file:///srv/a%20b%3Fc%23d%2520.db"},
		{"//srv/x.db", "linux", "file:////srv/x.db"},
		{`/srv/a\b;.db`, "linux", "file:///srv/a%5Cb%3B.db"},
		{`C:\data\my shop.db`, "windows", "file:///C:/data/my%20shop.db"},
		{`\\server\share\x.db`, "windows", "file:////server/share/x.db"},
		{memoryPath, "linux", "file::memory:"},
	} {
		if got := fileURI(tt.path, tt.goos); got != tt.want {
			t.Errorf("fileURI(%q, %s) = %s, want %s", tt.path, tt.goos, got, tt.want)
		}
	}
	if got := nativePath("/C:/data/x.db", "windows"); got != "C:/data/x.db" {
		t.Errorf("nativePath: %s", got)
	}
	if got := nativePath("/C:/data/x.db", "linux"); got != "/C:/data/x.db" {
		t.Errorf("nativePath: %s", got)
	}
}

func TestSource_Fullfsync(t *testing.T) {
	s := &source{path: "/x.db", params: url.Values{}}
	s.setDefaults("darwin")
	if pragmaOf(s.params, "fullfsync") == "" {
		t.Error("on macOS fsync alone doesn't reach the disk")
	}
}

type (
	otherDriver struct{ driver.Driver }
	entDriver   struct{ *sqlite.Driver }
)

func TestForeignEngine(t *testing.T) {
	modernc := &sqlite.Driver{}
	for _, tt := range []struct {
		name   string
		driver any
		want   string
	}{
		{"sqlite", modernc, ""},
		{"sqlite3", modernc, ""},
		{"sqlite3", entDriver{modernc}, ""},
		{"sqlite3", otherDriver{modernc}, ""},
		{"sqlite3", &otherDriver{&gatedDriver{Driver: modernc}}, ""},
		{"sqlite3", &otherDriver{}, "sqlite3"},
		{"sqlite3", nil, "sqlite3"},
		{"SQLite3", nil, "SQLite3"},
		{"sqlite-traced", otherDriver{}, ""}, // what it wraps is registered as well
		{"postgres", nil, ""},
	} {
		if got := foreignEngine([]string{tt.name}, func(string) any { return tt.driver }); got != tt.want {
			t.Errorf("%s, %T: %q, want %q", tt.name, tt.driver, got, tt.want)
		}
	}
	if got := foreignEngine([]string{"sqlite"}, driverByName); got != "" {
		t.Errorf("modernc's own driver is taken for another: %q", got)
	}
}

func FuzzParseDSN(f *testing.F) {
	for _, s := range []string{"", "shop.db", "file:shop.db?_fk=1", "file:///x?mode=ro", "a b?c#d%20.db", "file:%41", ":memory:"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, dsn string) {
		s, err := parseDSN(dsn)
		if err != nil {
			return
		}
		s.setDefaults("linux")
		again, err := parseDSN(s.uri("linux"))
		if err != nil || again.path != s.path || again.params.Encode() != s.params.Encode() {
			t.Errorf("%q is %q, and that is %+v, %v", dsn, s.uri("linux"), again, err)
		}
	})
}
