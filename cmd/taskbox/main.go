// Command taskbox looks after the task queue in a SQLite file, and has a demo of it.
// "taskbox help" lists the commands.
//
// Data goes to stdout and everything else to stderr. The exit code is 0 when all
// went well, 1 when something failed, and 2 when the command line was wrong.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"strings"
	"syscall"
)

// The exit codes.
const (
	exitOK      = 0
	exitFailure = 1
	exitUsage   = 2
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal asks for a graceful end. After it the default is back, so
	// that a second one kills at once.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr))
}

// stdio are the standard streams of a command.
type stdio struct {
	in       io.Reader
	out, err io.Writer
}

// A usageError says what is wrong with the command line; the exit code is 2.
type usageError struct{ msg string }

func (e usageError) Error() string { return e.msg }

// A command is what the first argument names.
type command struct {
	name string
	what string // one line for the list
	run  func(ctx context.Context, args []string, std stdio) error
}

func commands() []command {
	return []command{
		{"demo", "run a small shop whose downstream misbehaves, and watch its tasks", runDemo},
		{"bench", "measure the queue on this machine, beside the same SQL without it", func(ctx context.Context, args []string, std stdio) error {
			return runBench(ctx, args, std.out, std.err)
		}},
		{"migrate", "create or upgrade the queue's tables in a file", runMigrate},
		{"version", "print the version", runVersion},
		{"help", "print this list, or with a command's name its flags", runHelp},
	}
}

// run is the whole program: it runs the command that args name until that ends or
// ctx is cancelled, and returns the exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	if len(args) == 0 {
		listCommands(stderr)
		return exitUsage
	}
	c, err := findCommand(args[0])
	if err == nil {
		err = c.run(ctx, args[1:], stdio{stdin, stdout, stderr})
	}
	return exitCode(c.name, err, stderr)
}

// exitCode tells the error, if there is one, and returns the exit code that it means.
func exitCode(name string, err error, stderr io.Writer) int {
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return exitOK
	}
	fmt.Fprintln(stderr, strings.TrimSpace("taskbox "+name)+":", err)
	if _, ok := errors.AsType[usageError](err); ok {
		fmt.Fprintln(stderr, "hint:", strings.TrimSpace("taskbox help "+name))
		return exitUsage
	}
	return exitFailure
}

func findCommand(name string) (command, error) {
	switch name {
	case "-h", "-help", "--help":
		name = "help"
	case "-version", "--version":
		name = "version"
	}
	for _, c := range commands() {
		if c.name == name {
			return c, nil
		}
	}
	return command{}, usageError{fmt.Sprintf("unknown command %q", name)}
}

func runHelp(ctx context.Context, args []string, std stdio) error {
	if len(args) == 0 {
		listCommands(std.out)
		return nil
	}
	c, err := findCommand(args[0])
	if err != nil {
		return err
	}
	if c.name == "help" {
		listCommands(std.out)
		return nil
	}
	return c.run(ctx, []string{"-help"}, std)
}

func listCommands(w io.Writer) {
	fmt.Fprint(w, "taskbox is a task queue inside a SQLite file.\n\nusage: taskbox COMMAND [flags]\n\n")
	for _, c := range commands() {
		fmt.Fprintf(w, "  %-9s %s\n", c.name, c.what)
	}
	fmt.Fprint(w, "\nStart with: taskbox demo -for 20s\n")
}

func runVersion(_ context.Context, args []string, std stdio) error {
	fs := newFlags("version", "usage: taskbox version\n")
	if err := parseFlags(fs, args, std.out); err != nil {
		return err
	}
	version := "unknown"
	if info, ok := debug.ReadBuildInfo(); ok {
		version = info.Main.Version
	}
	_, err := fmt.Fprintln(std.out, "taskbox", version, runtime.Version())
	return err
}

// newFlags returns a set of flags whose help is the text and then the flags.
func newFlags(name, text string) *flag.FlagSet {
	fs := flag.NewFlagSet(name, flag.ContinueOnError)
	fs.Usage = func() {
		fmt.Fprint(fs.Output(), text)
		fs.PrintDefaults()
	}
	return fs
}

// parseFlags parses args. Help that was asked for is data and goes to out, with
// [flag.ErrHelp] as the error; what is wrong with args is a [usageError].
func parseFlags(fs *flag.FlagSet, args []string, out io.Writer) error {
	fs.SetOutput(io.Discard)
	err := fs.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fs.SetOutput(out)
		fs.Usage()
		return err
	case err != nil:
		return usageError{err.Error()}
	case fs.NArg() > 0:
		return usageError{fmt.Sprintf("unexpected argument %q", fs.Arg(0))}
	}
	return nil
}
