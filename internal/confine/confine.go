// Package confine is what a sandbox's processes may do to the host's kernel:
// the seccomp filter, the capabilities that are kept, what /proc, /sys and
// /dev show, and resource limits. It decides and generates; applying it is
// the launcher's and chronus's part.
//
// Every list here is of what is allowed, but for ioctl commands, of which
// there is no list to allow from.
package confine

//go:generate go run gen.go
