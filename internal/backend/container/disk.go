package container

import (
	"time"

	"github.com/opendsec/dsec/internal/backend"
)

var (
	_ backend.DiskSharer = (*Backend)(nil)
	_ backend.DiskUser   = (*instance)(nil)
)

// DiskSpace implements backend.DiskSharer.
func (b *Backend) DiskSpace() (backend.DiskSpace, bool, error) {
	space, ok, err := b.disk.Space()
	return backend.DiskSpace(space), ok, err
}

// DiskStarved implements backend.DiskUser.
func (i *instance) DiskStarved(from, until time.Time) bool {
	return i.volume.Starved(from, until)
}

// DiskMost implements backend.DiskSharer.
func (b *Backend) DiskMost() (int64, bool) { return b.disk.Most() }
