package taskbox

import (
	"maps"
	"os"
	"slices"
)

// identity says which process a poller lives in. Its owner name alone decides about
// leases; this only lets a process on the same machine see sooner that it is gone.
type identity struct {
	Host    string   `json:"host"`
	Boot    string   `json:"boot,omitempty"`  // this start of the machine
	Space   string   `json:"space,omitempty"` // the namespace in which PID is meant
	PID     int      `json:"pid"`
	Start   string   `json:"start,omitempty"` // when the process started, to tell a PID used again
	Started int64    `json:"started_at"`
	Types   []string `json:"types"`
}

func (q *Queue) identify(now int64) identity {
	host, _ := os.Hostname() // an unknown host has no name
	id := identity{Host: host, PID: os.Getpid(), Started: now}
	id.Boot, id.Space = machine()
	id.Start = processStart(id.PID)
	q.mu.RLock()
	defer q.mu.RUnlock()
	id.Types = slices.Sorted(maps.Keys(q.types))
	return id
}

// gone tells whether the process is known to have ended; false where we can't know.
func (id identity) gone() bool {
	host, err := os.Hostname()
	if err != nil || id.PID == 0 || id.Host != host {
		return false
	}
	boot, space := machine()
	switch {
	case boot != id.Boot:
		// The same host, started again; with containers it may be another host of
		// the same name, so only a known boot of a known machine counts.
		return false
	case space != id.Space:
		return false
	case processGone(id.PID):
		return true
	}
	start := processStart(id.PID)
	return start != "" && id.Start != "" && start != id.Start
}
