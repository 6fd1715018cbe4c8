//go:build !linux

package taskbox

// networkFS names the file system that the path is on, if it isn't a local disk.
// Here it doesn't know.
func networkFS(string) string { return "" }
