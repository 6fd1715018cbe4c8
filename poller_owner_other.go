//go:build !linux

package taskbox

import (
	"os"
	"runtime"
	"syscall"
)

// machine can't tell one start of the machine from another here.
func machine() (boot, space string) { return "", "" }

// processGone tells whether no process has the id. Elsewhere than on Windows finding
// it always works, and asking it does not.
func processGone(pid int) bool {
	proc, err := os.FindProcess(pid)
	if err != nil {
		return runtime.GOOS == "windows"
	}
	defer proc.Release()
	return runtime.GOOS != "windows" && proc.Signal(syscall.Signal(0)) == os.ErrProcessDone
}

// processStart isn't known here: a process id that is used again delays the take-over
// until the lease ends.
func processStart(int) string { return "" }
