package confine

import "golang.org/x/sys/unix"

// Rlimit is one resource limit of commands.
type Rlimit struct {
	Resource   int
	Soft, Hard uint64
}

// maxNofile is what a command may open, where the host lets us give as much.
const maxNofile = 65536

// maxSigpending is how many timers and queued signals one user of a sandbox may
// have. All users of a sandbox share the host's limit of one user, see asOwner of
// the container backend.
const maxSigpending = 1024

// Rlimits are those of every command. Files are bounded by the hard limit of
// this process too, which it may be unable to raise. No core files: they would
// land on the sandbox's disk, and a pattern that names a program is the host's.
func Rlimits() ([]Rlimit, error) {
	var files unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &files); err != nil {
		return nil, err
	}
	var signals unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_SIGPENDING, &signals); err != nil {
		return nil, err
	}
	n, s := min(maxNofile, files.Max), min(maxSigpending, signals.Max)
	return []Rlimit{
		{unix.RLIMIT_NOFILE, n, n},
		{unix.RLIMIT_SIGPENDING, s, s},
		{unix.RLIMIT_CORE, 0, 0},
	}, nil
}
