package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
)

// asCommand makes the test binary the command itself, for tests of real processes.
const asCommand = "TASKBOX_TEST_AS_COMMAND"

func TestMain(m *testing.M) {
	if os.Getenv(asCommand) != "" {
		main()
	}
	os.Exit(m.Run())
}

// patience is how long a test waits for what must happen, on a slow machine too.
const patience = 30 * time.Second

// A screen is an output that can be waited for.
type screen struct {
	mu   sync.Mutex
	text bytes.Buffer  // mu
	more chan struct{} // closed at the next write; mu
}

func (s *screen) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.more != nil {
		close(s.more)
		s.more = nil
	}
	return s.text.Write(p)
}

func (s *screen) read() (string, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.more == nil {
		s.more = make(chan struct{})
	}
	return s.text.String(), s.more
}

func (s *screen) String() string {
	text, _ := s.read()
	return text
}

// wait returns the first match of a pattern and its groups as soon as it is there.
func (s *screen) wait(t *testing.T, pattern string) []string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	re := regexp.MustCompile(pattern)
	for {
		text, more := s.read()
		if m := re.FindStringSubmatch(text); m != nil {
			return m
		}
		select {
		case <-more:
		case <-ctx.Done():
			t.Fatalf("no %q in\n%s", pattern, text)
		}
	}
}

// taskboxRun runs the command in-process to its end.
func taskboxRun(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs screen
	code = run(t.Context(), args, strings.NewReader(""), &out, &errs)
	return code, out.String(), errs.String()
}

func TestRun_Usage(t *testing.T) {
	for _, tt := range []struct {
		args   string
		code   int
		stdout string
		stderr string
	}{
		{"", exitUsage, "", "usage: taskbox COMMAND"},
		{"help", exitOK, "usage: taskbox COMMAND", ""},
		{"-h", exitOK, "usage: taskbox COMMAND", ""},
		{"help help", exitOK, "usage: taskbox COMMAND", ""},
		{"help demo", exitOK, "-tiers WAITS", ""},
		{"demo -h", exitOK, "-tiers WAITS", ""},
		{"help nothing", exitUsage, "", `unknown command "nothing"`},
		{"nothing", exitUsage, "", `unknown command "nothing"`},
		{"version", exitOK, runtime.Version(), ""},
		{"--version", exitOK, runtime.Version(), ""},
		{"version 2", exitUsage, "", `unexpected argument "2"`},
		{"migrate", exitUsage, "", "say which file"},
		{"demo extra", exitUsage, "", `unexpected argument "extra"`},
		{"demo -bogus", exitUsage, "", "-bogus"},
		{"demo -for -3s", exitUsage, "", "-for is -3s"},
		{"demo -for soon", exitUsage, "", `"soon"`},
		{"demo -rate -1", exitUsage, "", "-rate is -1"},
		{"demo -rate NaN", exitUsage, "", "-rate is NaN"},
		{"demo -rate 1e9", exitUsage, "", "want 0 to 1000"},
		{"demo -rate 1e-9", exitUsage, "", "at least 0.001"},
		{"demo -tiers 1s,x", exitUsage, "", "such as 1s,2s,4s"},
		{"demo -tiers 1s,-2s", exitUsage, "", "such as 1s,2s,4s"},
		{"demo -addr nowhere", exitUsage, "", "want HOST:PORT"},
	} {
		t.Run(tt.args, func(t *testing.T) {
			code, stdout, stderr := taskboxRun(t, strings.Fields(tt.args)...)
			if code != tt.code {
				t.Errorf("exit code %d, want %d", code, tt.code)
			}
			if !strings.Contains(stdout, tt.stdout) || (stdout == "") != (tt.stdout == "") {
				t.Errorf("stdout: %q, want %q in it", stdout, tt.stdout)
			}
			if !strings.Contains(stderr, tt.stderr) || (stderr == "") != (tt.stderr == "") {
				t.Errorf("stderr: %q, want %q in it", stderr, tt.stderr)
			}
		})
	}
}

func TestRun_EveryCommandHasHelp(t *testing.T) {
	for _, c := range commands() {
		code, stdout, stderr := taskboxRun(t, "help", c.name)
		if code != exitOK || !strings.Contains(stdout, "usage: taskbox") || stderr != "" {
			t.Errorf("help %s: exit code %d, stdout %q, stderr %q", c.name, code, stdout, stderr)
		}
	}
}

func TestMigrate_Env(t *testing.T) {
	t.Setenv("TASKBOX_DB", t.TempDir()+"/env.db")
	for range 2 { // the second time there is nothing to do
		if code, _, stderr := taskboxRun(t, "migrate"); code != exitOK {
			t.Fatalf("exit code %d: %s", code, stderr)
		}
	}
}

// The first signal ends the demo gracefully; the second kills.
func TestMain_Signals(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("a process can't send itself or others an interrupt there")
	}
	t.Run("one", func(t *testing.T) {
		cmd, out, errs := startCommand(t, "demo", "-rate", "20")
		out.wait(t, `success`)
		cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil {
			t.Fatalf("%v\n%s", err, errs)
		}
		out.wait(t, `queue length +\d`)
	})
	t.Run("two", func(t *testing.T) {
		// With tiers this long, a slow answer keeps the graceful end waiting.
		cmd, out, errs := startCommand(t, "demo", "-rate", "50", "-tiers", "1m")
		out.wait(t, `→ processing\n`)
		cmd.Process.Signal(os.Interrupt)
		errs.wait(t, `Stopping`)
		ended := make(chan error, 1)
		go func() { ended <- cmd.Wait() }()
		// The first is given back to the system only after it was noticed, so a
		// second one that is too quick may be swallowed.
		for tick := time.Tick(20 * time.Millisecond); ; {
			select {
			case err := <-ended:
				if err == nil || out.String() == "" || strings.Contains(out.String(), "queue length") {
					t.Fatalf("it ended gracefully: %v\n%s", err, out)
				}
				return
			case <-tick:
				cmd.Process.Signal(os.Interrupt)
			}
		}
	})
}

// startCommand starts the command as a process of its own, killed with the test.
func startCommand(t *testing.T, args ...string) (cmd *exec.Cmd, stdout, stderr *screen) {
	t.Helper()
	stdout, stderr = new(screen), new(screen)
	cmd = exec.CommandContext(t.Context(), os.Args[0], args...)
	cmd.Env = append(os.Environ(), asCommand+"=1", "TMPDIR="+t.TempDir())
	cmd.Stdout, cmd.Stderr = stdout, stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return cmd, stdout, stderr
}
