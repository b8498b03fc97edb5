package layer

import (
	"context"
	"errors"
	"io"
	"strings"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
)

// ownerKey is the blob that says which control plane the store belongs to: the ID of
// its unit. Names of layers are in a control plane's own etcd, and what none of them
// refers to is removed: two of them at one store would remove each other's layers.
const ownerKey = "owner"

// ownerBytes is the most that is read of it.
const ownerBytes = 128

// Claim has the store belong to the control plane of a unit, where it belongs to none.
// The error is conflict, of the field layers.store, where it belongs to another one.
func (s *Store) Claim(ctx context.Context, unit string) error {
	if unit == "" {
		return errNoUnit
	}
	owner, err := ownerOf(ctx, s.blobs)
	if notFound(err) {
		// Of two that come at once one is first, and both read whose mark is there.
		mark := unit + "\n"
		if err := s.blobs.Put(ctx, ownerKey, strings.NewReader(mark), int64(len(mark))); err != nil && dsec.CodeOf(err) != dsec.CodeConflict {
			return err
		}
		owner, err = ownerOf(ctx, s.blobs)
	}
	if err != nil {
		return err
	}
	return sameOwner(owner, unit)
}

// CheckUnowned looks whether a store belongs to nobody yet, for a control plane that is
// about to be made, and has no unit. The error is as of Claim.
func CheckUnowned(ctx context.Context, blobs blob.Store) error {
	owner, err := ownerOf(ctx, blobs)
	if notFound(err) {
		return nil
	} else if err != nil {
		return err
	}
	return ownerError("the layer store belongs to the control plane %.64q, this one is new; two at one store would remove each other's layers. "+
		"Where that one is gone for good, remove the store's file %q", owner, ownerKey)
}

// CheckOwner looks whether the store belongs to a unit now, for whoever is about to
// remove something: another may be in its place, or an older copy of it. The error is
// conflict, of the field layers.store, also where it belongs to none.
func (s *Store) CheckOwner(ctx context.Context, unit string) error {
	if unit == "" {
		return errNoUnit
	}
	owner, err := ownerOf(ctx, s.blobs)
	if notFound(err) {
		return ownerError("the layer store has no mark of the control plane that it belongs to, this one is %s: nothing is removed from it; "+
			"where it is the right store, the server claims it when it is started", unit)
	} else if err != nil {
		return err
	}
	return sameOwner(owner, unit)
}

var errNoUnit = dsec.Invalid("unit", "want the ID of the control plane's unit")

func sameOwner(owner, unit string) error {
	if owner == unit {
		return nil
	}
	return ownerError("the layer store belongs to the control plane %.64q, this one is %q; two at one store would remove each other's layers. "+
		"Where that one is gone for good, remove the store's file %q", owner, unit, ownerKey)
}

func ownerError(format string, args ...any) error {
	e := dsec.Errorf(dsec.CodeConflict, format, args...)
	e.Field = "layers.store"
	return e
}

// ownerOf is the unit that a store's mark names.
func ownerOf(ctx context.Context, blobs blob.Store) (string, error) {
	b := make([]byte, ownerBytes)
	n, err := blobs.ReadAt(ctx, ownerKey, b, 0)
	if errors.Is(err, blob.ErrDirectory) { // which no mark can be written in the place of
		return "", ownerError("the layer store's mark of the control plane that it belongs to, %q, is a directory, want a file: remove it", ownerKey)
	}
	if err != nil && !errors.Is(err, io.EOF) {
		return "", err
	}
	return strings.TrimSpace(string(b[:n])), nil
}
