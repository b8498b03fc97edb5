package container

import (
	"time"

	"github.com/opendsec/dsec/internal/backend"
)

var _ backend.DiskSharer = (*Backend)(nil)

// DiskSpace implements backend.DiskSharer.
func (b *Backend) DiskSpace() (backend.DiskSpace, bool, error) {
	space, ok, err := b.disk.Space()
	return backend.DiskSpace(space), ok, err
}

// DiskStarved implements backend.DiskSharer.
func (b *Backend) DiskStarved(from, until time.Time) bool { return b.disk.Starved(from, until) }
