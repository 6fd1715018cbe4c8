package taskbox

import (
	"encoding/binary"
	"os"
	"syscall"
	"time"
)

// shortPause sleeps for about a tenth of a millisecond: Go's timers can't wait for
// less than one.
func shortPause() {
	t := syscall.NsecToTimespec(int64(50 * time.Microsecond))
	_ = syscall.Nanosleep(&t, nil) // cut short by a signal it serves as well
}

// rewatch is how long the watcher waits for a -wal file that isn't there.
const rewatch = time.Second

// watchFile wakes the loop whenever the -wal file, or the database file where there
// is none, is written to. The watch is by path: opening one of SQLite's files and
// closing it would drop SQLite's locks.
func (p *poller) watchFile() (stop func()) {
	fd, err := syscall.InotifyInit1(syscall.IN_NONBLOCK | syscall.IN_CLOEXEC)
	if err != nil {
		return func() {} // out of inotify instances: the loop ticks
	}
	f := os.NewFile(uintptr(fd), "inotify")
	quit := make(chan struct{})
	p.wg.Go(func() { p.watchLoop(fd, f, quit) })
	return func() { close(quit); f.Close() }
}

func (p *poller) watchLoop(fd int, f *os.File, quit <-chan struct{}) {
	defer p.watching.Store(false)
	buf := make([]byte, 4096)
	for {
		if !p.addWatch(fd) {
			select {
			case <-quit:
				return
			case <-time.After(rewatch):
				continue
			}
		}
		p.watching.Store(true)
		for {
			n, err := f.Read(buf)
			if err != nil {
				return
			}
			p.fileChanged()
			if gone(buf[:n]) {
				break
			}
		}
		p.watching.Store(false)
	}
}

func (p *poller) addWatch(fd int) bool {
	path := p.q.pool.path
	if p.q.pool.journalMode == "wal" {
		path += "-wal"
	}
	_, err := syscall.InotifyAddWatch(fd, path, syscall.IN_MODIFY|syscall.IN_DELETE_SELF|syscall.IN_MOVE_SELF)
	return err == nil
}

// gone tells whether an event says that the watched file has been deleted or moved.
// The mask is the second of the four 32-bit words that begin an event, see inotify(7).
func gone(events []byte) bool {
	for len(events) >= syscall.SizeofInotifyEvent {
		mask := binary.NativeEndian.Uint32(events[4:])
		if mask&(syscall.IN_DELETE_SELF|syscall.IN_MOVE_SELF|syscall.IN_IGNORED) != 0 {
			return true
		}
		size := syscall.SizeofInotifyEvent + int(binary.NativeEndian.Uint32(events[12:]))
		events = events[min(size, len(events)):]
	}
	return false
}
