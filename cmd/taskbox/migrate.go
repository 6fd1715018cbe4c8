package main

import (
	"cmp"
	"context"
	"fmt"
	"os"

	"github.com/taskbox-go/taskbox"
)

const migrateHelp = `usage: taskbox migrate -db FILE

Creates the queue's tables in FILE, or upgrades them to what this version knows. A
file that doesn't exist is made. Programs that use the library needn't call it:
taskbox.New does the same.

`

func runMigrate(ctx context.Context, args []string, std stdio) error {
	fs := newFlags("migrate", migrateHelp)
	file := fs.String("db", "", "the SQLite `FILE`; without it the environment's TASKBOX_DB")
	if err := parseFlags(fs, args, std.out); err != nil {
		return err
	}
	path := cmp.Or(*file, os.Getenv("TASKBOX_DB"))
	if path == "" {
		return usageError{"say which file: -db FILE, or TASKBOX_DB in the environment"}
	}
	db, err := taskbox.OpenDB(path)
	if err != nil {
		return err
	}
	defer db.Close()
	if _, err := taskbox.New(ctx, db, taskbox.Options{}); err != nil {
		return err
	}
	_, err = fmt.Fprintln(std.out, path+": the queue's tables are up to date")
	return err
}
