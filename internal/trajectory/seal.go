package trajectory

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"
	"strings"

	"google.golang.org/protobuf/encoding/protodelim"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/layer/blob"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// In the store a sandbox has
//
//	trajectories/PROJECT/SANDBOX/FIRST-LAST-DIGEST   a piece: its entries as
//	    messages, each after its length (varint), as one zstd frame; the numbers
//	    have 12 digits, the digest is SHA-256 of the frame
//	trajectories/PROJECT/SANDBOX/outputs/DIGEST      as in outputs, compressed
//
// Pieces may overlap where a node died between a piece and its note of it.

// maxPieceBytes is of the entries of one piece, before they are compressed.
const maxPieceBytes = 8 << 20

// prefix is of the sandbox's keys. One whose project was lost to damage has "-".
func (sb *sandbox) prefix() string {
	return "trajectories/" + cmp.Or(sb.project, "-") + "/" + string(sb.id) + "/"
}

func (sb *sandbox) outputKey(digest []byte) string {
	return sb.prefix() + "outputs/" + hex.EncodeToString(digest)
}

// Seal writes what the store does not have of a sandbox's log to the store.
// Errors: unsupported where there is none, and the store's.
func (l *Log) Seal(ctx context.Context, id dsec.SandboxID) error {
	if l.opts.Store == nil {
		return dsec.Errorf(dsec.CodeUnsupported, "this node has no store for trajectories")
	}
	l.mu.Lock()
	sb, err := l.find(id)
	l.mu.Unlock()
	if err != nil {
		return err
	}
	sb.sealing.Lock()
	defer sb.sealing.Unlock()
	// Numbers in the store are never given again.
	if err := l.Sync(ctx); err != nil {
		return err
	}
	l.mu.Lock()
	end := sb.seq
	l.mu.Unlock()
	for {
		l.mu.Lock()
		from := sb.sealed + 1
		l.mu.Unlock()
		if from > end {
			notify(l.wake)
			return nil
		}
		if err := l.sealPiece(ctx, sb, from, end); err != nil {
			return err
		}
	}
}

// sealPiece seals the entries from a number on, up to end or as a piece holds.
func (l *Log) sealPiece(ctx context.Context, sb *sandbox, from, end uint64) error {
	var b bytes.Buffer
	sealed := make(map[string]bool) // objects, by their names
	last := from
	err := l.read(ctx, sb, from, func(r *read) error {
		if r.seq > end || b.Len() > maxPieceBytes {
			return errEnough
		}
		e, err := r.entry()
		if err != nil {
			return err
		}
		for _, o := range objectsOf(e) {
			if err := l.sealObject(ctx, sb, o); err != nil {
				return err
			}
			sealed[objectName(o.seq, o.digest)] = true
		}
		last = r.last
		_, err = protodelim.MarshalTo(&b, e)
		return err
	})
	if err != nil && !errors.Is(err, errEnough) {
		return err
	}
	frame := compress(nil, b.Bytes())
	sum := sha256.Sum256(frame)
	key := fmt.Sprintf("%s%012d-%012d-%x", sb.prefix(), from, last, sum)
	if err := l.opts.Store.Put(ctx, key, bytes.NewReader(frame), int64(len(frame))); err != nil {
		return err
	}
	l.mu.Lock()
	before := sb.sealed
	sb.sealed = last
	err = l.putState(sb, 0)
	if err != nil {
		sb.sealed = before
	}
	l.mu.Unlock()
	if err != nil {
		return err
	}
	return l.outputs.drop(sb.id, func(_ uint64, name string) bool { return sealed[name] })
}

// stored is an object of an action.
type stored struct {
	seq    uint64 // of the entry with which the action began
	digest []byte
}

// storedOf is the object of what an entry has; without a digest there is none.
func storedOf(e *dsecv1.TrajectoryEntry, o *dsecv1.TrajectoryOutput) stored {
	return stored{cmp.Or(e.BegunSeq, e.Seq), o.GetDigest()}
}

// objectsOf are those of an entry.
func objectsOf(e *dsecv1.TrajectoryEntry) (all []stored) {
	for _, o := range []*dsecv1.TrajectoryOutput{e.Output, e.Input} {
		if len(o.GetDigest()) > 0 {
			all = append(all, storedOf(e, o))
		}
	}
	return all
}

func (l *Log) sealObject(ctx context.Context, sb *sandbox, o stored) error {
	f, err := l.outputs.open(sb.id, o.seq, o.digest)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // it is in the store, or lost with the node's power
	}
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	return l.opts.Store.Put(ctx, sb.outputKey(o.digest), f, info.Size())
}

// openObject opens an object, compressed, here or in the store.
func (l *Log) openObject(ctx context.Context, sb *sandbox, o stored) (io.ReadCloser, error) {
	f, err := l.outputs.open(sb.id, o.seq, o.digest)
	if err == nil || !errors.Is(err, fs.ErrNotExist) {
		return f, err
	}
	if l.opts.Store != nil {
		b, err := l.fetch(ctx, sb.outputKey(o.digest))
		if err == nil {
			return io.NopCloser(bytes.NewReader(b)), nil
		}
		if dsec.CodeOf(err) != dsec.CodeNotFound {
			return nil, err
		}
	}
	return nil, dsec.Errorf(dsec.CodeNotFound, "what the action that began with entry %d wrote or was given is gone", o.seq)
}

func (l *Log) fetch(ctx context.Context, key string) ([]byte, error) {
	info, err := l.opts.Store.Stat(ctx, key)
	if err != nil {
		return nil, err
	}
	b := make([]byte, info.Size)
	if n, err := l.opts.Store.ReadAt(ctx, key, b, 0); n < len(b) {
		if err == nil || err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return nil, err
	}
	return b, nil
}

// pieces are those that were read last.
type pieces struct{ of []piece }

type piece struct {
	key         string
	first, last uint64
	entries     []*dsecv1.TrajectoryEntry
}

const maxPieces = 4

// readPiece reads an entry that the store has.
func (l *Log) readPiece(ctx context.Context, sb *sandbox, r *read) error {
	p, err := l.piece(ctx, sb, r.seq)
	if err != nil {
		return err
	}
	i, ok := slices.BinarySearchFunc(p.entries, r.seq, func(e *dsecv1.TrajectoryEntry, seq uint64) int {
		switch {
		case e.Seq > seq:
			return 1
		case max(e.Seq, e.Gap.GetLastSeq()) < seq:
			return -1
		}
		return 0
	})
	if !ok {
		r.typ, r.flags, r.decoded = typeEvent, flagGap, gapEntry(r.seq, r.last, reasonDamaged)
		return nil
	}
	r.of(p.entries[i])
	return nil
}

// piece returns the piece that has an entry.
func (l *Log) piece(ctx context.Context, sb *sandbox, seq uint64) (piece, error) {
	has := func(p piece) bool {
		return p.first <= seq && seq <= p.last && strings.HasPrefix(p.key, sb.prefix())
	}
	l.mu.Lock()
	i := slices.IndexFunc(l.pieces.of, has)
	if i >= 0 {
		p := l.pieces.of[i]
		l.mu.Unlock()
		return p, nil
	}
	l.mu.Unlock()
	if l.opts.Store == nil {
		return piece{first: seq, last: seq}, nil // sealed when there was one
	}
	var found piece
	err := l.opts.Store.List(ctx, sb.prefix(), func(i blob.Info) error {
		p := piece{key: i.Key}
		if n, _ := fmt.Sscanf(strings.TrimPrefix(i.Key, sb.prefix()), "%d-%d-", &p.first, &p.last); n == 2 && has(p) {
			found = p
		}
		return nil
	})
	if err != nil {
		return piece{}, err
	}
	if found.key == "" {
		return piece{first: seq, last: seq}, nil
	}
	frame, err := l.fetch(ctx, found.key)
	if err != nil {
		return piece{}, err
	}
	if found.entries, err = decodePiece(found.key, frame); err != nil {
		return piece{}, err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pieces.of = append(l.pieces.of[max(0, len(l.pieces.of)+1-maxPieces):], found)
	return found, nil
}

// decodePiece holds a piece against its key and decodes its entries.
func decodePiece(key string, frame []byte) ([]*dsecv1.TrajectoryEntry, error) {
	damaged := func(err error) error {
		return &dsec.Error{Code: dsec.CodeInternal, Message: "a sealed part of the trajectory is damaged in the store", Err: err}
	}
	if sum := sha256.Sum256(frame); !strings.HasSuffix(key, hex.EncodeToString(sum[:])) {
		return nil, damaged(nil)
	}
	content, err := decompressed(bytes.NewReader(frame))
	if err != nil {
		return nil, err
	}
	defer content.Close()
	b, err := io.ReadAll(io.LimitReader(content, maxPieceBytes+2*maxPayload))
	if err != nil {
		return nil, damaged(err)
	}
	var entries []*dsecv1.TrajectoryEntry
	for in := bytes.NewReader(b); in.Len() > 0; {
		e := new(dsecv1.TrajectoryEntry)
		if err := protodelim.UnmarshalFrom(in, e); err != nil {
			return nil, damaged(err)
		}
		entries = append(entries, e)
	}
	return entries, nil
}
