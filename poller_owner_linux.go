package taskbox

import (
	"bytes"
	"os"
	"strconv"
	"strings"
	"syscall"
)

// machine identifies this start of the machine and the namespace of process ids.
func machine() (boot, space string) {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // without one nothing is known
	space, _ = os.Readlink("/proc/self/ns/pid")
	return strings.TrimSpace(string(b)), space
}

func processGone(pid int) bool { return syscall.Kill(pid, 0) == syscall.ESRCH || zombie(pid) }

// processStart returns the start time of a process in the kernel's ticks, field 22 of
// /proc/PID/stat; see proc(5).
func processStart(pid int) string { return statField(pid, 22) }

func zombie(pid int) bool { return statField(pid, 3) == "Z" }

func statField(pid, n int) string {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return ""
	}
	// The second field is the program's name in brackets and may hold anything.
	_, rest, _ := bytes.Cut(b[bytes.LastIndexByte(b, ')')+1:], []byte(" "))
	fields := bytes.Fields(rest)
	if n-3 >= len(fields) {
		return ""
	}
	return string(fields[n-3])
}
