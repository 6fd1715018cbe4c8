package taskbox

import (
	"log/slog"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"
)

// What the README repeats of the unexported, for readme_test.go.

// ReadmeRules returns the classification, as the README's table has it.
func ReadmeRules() (rows [][]string) {
	for _, r := range rules {
		rows = append(rows, []string{r.class.String(), r.what})
	}
	return rows
}

// ReadmeOutcomes returns the status after each event that ends an attempt.
func ReadmeOutcomes() map[string]string {
	m := map[string]string{}
	for event, e := range events {
		m[event] = e.status
	}
	return m
}

// ReadmeStatuses returns the values that the schema allows for a status.
func ReadmeStatuses() []string {
	set := map[string]bool{}
	_, rest, _ := strings.Cut(schemaV1, "check (status = ")
	check, _, _ := strings.Cut(rest, "retry_count")
	for _, m := range regexp.MustCompile(`'(\w+)'`).FindAllStringSubmatch(check, -1) {
		set[m[1]] = true
	}
	return slices.Sorted(maps.Keys(set))
}

// ReadmeDetailKeys returns the keys in the trail's column detail.
func ReadmeDetailKeys() (keys []string) {
	for f := range reflect.TypeFor[detail]().Fields() {
		if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" {
			keys = append(keys, name)
		}
	}
	return keys
}

// ReadmeLevel returns the level of an event's log record.
func ReadmeLevel(event string) slog.Level { return levelOf(event) }
