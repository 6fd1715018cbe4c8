//go:build !linux

package taskbox

import "time"

// shortPause lets about a tenth of a millisecond pass.
func shortPause() { time.Sleep(100 * time.Microsecond) }

// watchFile isn't there on this system: the loop looks every [blindTick].
func (p *poller) watchFile() (stop func()) { return func() {} }
