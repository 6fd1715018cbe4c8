package main

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/taskbox-go/taskbox"
)

// makeFile finds a place for the file where the user gave none. The function that it
// returns removes it again.
func (cfg *demoConfig) makeFile() (remove func(), err error) {
	if cfg.keep {
		return func() {}, nil
	}
	dir, err := os.MkdirTemp("", "taskbox-demo-")
	if err != nil {
		return nil, err
	}
	cfg.db = filepath.Join(dir, "shop.db")
	return func() { os.RemoveAll(dir) }, nil
}

// openShopFile opens the file and makes the shop's table in it.
func openShopFile(ctx context.Context, path string) (*sql.DB, error) {
	if err := lookFirst(ctx, path); err != nil {
		return nil, err
	}
	db, err := taskbox.OpenDB(path)
	if err != nil {
		return nil, err
	}
	if err := makeShop(ctx, db, path); err != nil {
		db.Close()
		return nil, err
	}
	return db, nil
}

// lookFirst refuses a file that isn't the demo's without a change to it; OpenDB
// would have set its journal mode. What it can't read, OpenDB explains.
func lookFirst(ctx context.Context, path string) error {
	fi, err := os.Stat(path)
	if err != nil || !fi.Mode().IsRegular() {
		return nil
	}
	abs, err := filepath.Abs(path)
	if err != nil {
		return err
	}
	slashed := "/" + strings.TrimPrefix(filepath.ToSlash(abs), "/") // a drive's letter has none
	uri := url.URL{Scheme: "file", Path: slashed, RawQuery: "mode=ro"}
	db, err := sql.Open("sqlite", uri.String())
	if err != nil {
		return err
	}
	defer db.Close()
	tables, err := otherTables(ctx, db)
	if err != nil {
		return nil
	}
	_, err = hasShop(tables, path)
	return err
}

func makeShop(ctx context.Context, db *sql.DB, path string) error {
	tables, err := otherTables(ctx, db)
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	has, err := hasShop(tables, path)
	if has || err != nil {
		return err
	}
	_, err = db.ExecContext(ctx, "create table if not exists orders"+ordersSQL)
	return err
}

// hasShop tells whether the shop's table is there. The tables of another program are
// an error: the demo would fill its file with orders.
func hasShop(tables map[string]string, path string) (bool, error) {
	switch {
	case strings.HasSuffix(tables["orders"], ordersSQL):
		return true, nil
	case len(tables) > 0:
		return false, fmt.Errorf("%s has tables of another program and was left alone; give the demo a file of its own with -db", path)
	}
	return false, nil
}

// otherTables returns the definitions of all tables but the queue's.
func otherTables(ctx context.Context, db *sql.DB) (map[string]string, error) {
	rows, err := db.QueryContext(ctx, `
select name, coalesce(sql, '') from sqlite_schema
where type = 'table' and name not glob 'task_*' and name not glob 'sqlite_*'`)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	tables := map[string]string{}
	for rows.Next() {
		var name, def string
		if err := rows.Scan(&name, &def); err != nil {
			return nil, err
		}
		tables[name] = def
	}
	return tables, rows.Err()
}
