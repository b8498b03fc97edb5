package container

import (
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

var _ backend.DiskSharer = (*Backend)(nil)

// DiskSpace implements backend.DiskSharer.
func (b *Backend) DiskSpace() (backend.DiskSpace, bool, error) {
	space, ok, err := b.disk.Space()
	return backend.DiskSpace(space), ok, err
}

// DiskStarved implements backend.DiskSharer.
func (b *Backend) DiskStarved(id dsec.SandboxID, from, until time.Time) bool {
	b.mu.Lock()
	i := b.live[id]
	b.mu.Unlock()
	if i == nil {
		return b.disk.Starved(from, until)
	}
	i.mu.Lock()
	volume := i.volume
	i.mu.Unlock()
	if volume == nil {
		return b.disk.Starved(from, until)
	}
	return volume.Starved(from, until)
}

// DiskMost implements backend.DiskSharer.
func (b *Backend) DiskMost() (int64, bool) { return b.disk.Most() }
