package container

import (
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
)

// A spare is a sandbox that is nobody's: all of it is made, of layers and
// limits that creates asked for lately, under an ID that no edge gives out.
// Nothing of a caller has ever been in it. A create that asks for the same
// takes it over: its parts get the ID, each in one step. Whatever a crash
// leaves has the one ID or the other, and no edge keeps either: the create's
// record has no handle yet.

// spareEdge is the edge part of a spare's ID.
const spareEdge dsec.EdgeID = "spare"

func kindOf(req backend.CreateRequest) kind {
	var digests strings.Builder
	for _, l := range req.Layers {
		digests.WriteString(l.Digest)
	}
	return kind{digests.String(), req.Spec.Limits}
}

// adopt gives a spare its ID.
func (b *Backend) adopt(i *instance, id dsec.SandboxID) error {
	i.id = id
	if err := b.disk.Admit(); err != nil {
		return err // a sandbox made ahead is a new one all the same
	}
	b.crash("adopt-group")
	if err := i.sh.group.Rename(id); err != nil {
		return err
	}
	b.crash("adopt-slot")
	return b.slots.reclaim(i.sh.slot, claim{id, i.volume.Name()})
}
