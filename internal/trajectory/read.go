package trajectory

import (
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"io/fs"
	"slices"

	"google.golang.org/protobuf/proto"

	"github.com/opendsec/dsec"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// read is one entry as it is read, decoded only where somebody wants that. A
// gap may have several numbers.
type read struct {
	seq, last uint64
	typ       recordType
	kind      uint8
	flags     uint8
	begun     uint64
	sandbox   dsec.SandboxID
	payload   []byte
	decoded   *dsecv1.TrajectoryEntry // in place of payload
}

// entry decodes what is read. What it returns is the caller's.
func (r *read) entry() (*dsecv1.TrajectoryEntry, error) {
	e := r.decoded
	if e == nil {
		e = new(dsecv1.TrajectoryEntry)
		if err := proto.Unmarshal(r.payload, e); err != nil {
			return nil, &dsec.Error{Code: dsec.CodeInternal, Message: "an entry of the trajectory log cannot be decoded", Err: err}
		}
	} else {
		e = proto.CloneOf(e)
	}
	e.Seq, e.SandboxId = r.seq, string(r.sandbox)
	if e.Gap != nil {
		e.Gap.LastSeq = r.last
	}
	return e, nil
}

// of takes over what a decoded entry says.
func (r *read) of(e *dsecv1.TrajectoryEntry) {
	r.decoded, r.last, r.kind, r.begun, r.typ, r.flags = e, e.Seq, uint8(e.Kind), e.BegunSeq, typeEvent, 0
	switch e.Phase {
	case dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_BEGUN:
		r.typ = typeBegun
		if e.ActionId != "" {
			r.flags = flagAction
		}
	case dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_ENDED:
		r.typ, r.flags = typeEnded, endFlags(e)
	case dsecv1.TrajectoryPhase_TRAJECTORY_PHASE_GAP:
		r.last, r.flags = e.Gap.GetLastSeq(), flagGap
	}
}

// readBatch is for how many entries the lock is taken once.
const readBatch = 256

// read calls f for the entries from a number on, to the end that there is now.
func (l *Log) read(ctx context.Context, sb *sandbox, from uint64, f func(*read) error) error {
	var at []position
	var buf []byte
	for from = max(from, 1); ; {
		if err := cmp.Or(ctx.Err(), l.closed()); err != nil {
			return err
		}
		l.mu.Lock()
		ix, err := l.indexed(sb)
		if err != nil || from > sb.seq {
			l.mu.Unlock()
			return err
		}
		n := min(sb.seq-from+1, readBatch)
		at = append(at[:0], ix.at[from-1:from-1+n]...)
		sealed, v := sb.sealed, l.view()
		l.mu.Unlock()
		for i := uint64(0); i < n; {
			r := read{seq: from, last: from, sandbox: sb.id}
			err := l.readHere(v, at[i:], &r, &buf, sealed)
			if errors.Is(err, fs.ErrClosed) {
				break // the segment went meanwhile: look again
			}
			if errors.Is(err, errElsewhere) {
				err = l.readPiece(ctx, sb, &r)
			}
			if err == nil {
				err = f(&r)
			}
			if err != nil {
				return err
			}
			i, from = i+r.last-from+1, r.last+1
		}
	}
}

var errElsewhere = errors.New("trajectory: not here")

// readHere reads the first of the entries at these positions, or how many there
// are none of. Its error is errElsewhere for one that the store has.
func (l *Log) readHere(v view, at []position, r *read, buf *[]byte, sealed uint64) error {
	missing := func(p position) bool { return v.find(p.segment) == nil }
	reason := reasonDamaged
	switch {
	case !missing(at[0]):
		h, record, err := v.find(at[0].segment).record(at[0].offset, v.seed, *buf)
		if errors.Is(err, fs.ErrClosed) {
			return err
		}
		if err == nil && h.seq == r.seq && h.of(r.sandbox) && h.entry() {
			*buf = record
			r.typ, r.kind, r.flags, r.begun, r.payload = h.typ, h.kind, h.flags, h.begun, record[headerLen:]
			return nil
		}
	case at[0] != damagedAt:
		reason = reasonDropped
	}
	if r.seq <= sealed {
		return errElsewhere
	}
	for n := 1; n < len(at) && at[n] == at[0] && missing(at[n]); n++ {
		r.last++
	}
	r.typ, r.flags, r.decoded = typeEvent, flagGap, gapEntry(r.seq, r.last, reason)
	return nil
}

// Entries calls f for the entries of a sandbox from a number on, in order, to the
// end that there is now. An entry is f's to keep. Only kinds are told, if there
// are any, and always gaps.
func (l *Log) Entries(ctx context.Context, id dsec.SandboxID, from uint64, kinds []dsecv1.TrajectoryKind, f func(*dsecv1.TrajectoryEntry) error) error {
	l.mu.Lock()
	sb, err := l.find(id)
	l.mu.Unlock()
	if err != nil {
		return err
	}
	return l.read(ctx, sb, from, tell(kinds, f))
}

func tell(kinds []dsecv1.TrajectoryKind, f func(*dsecv1.TrajectoryEntry) error) func(*read) error {
	return func(r *read) error {
		if len(kinds) > 0 && r.flags&flagGap == 0 && !slices.Contains(kinds, dsecv1.TrajectoryKind(r.kind)) {
			return nil
		}
		e, err := r.entry()
		if err != nil {
			return err
		}
		return f(e)
	}
}

// maxPage is the most bytes of entries in a page.
const maxPage = 8 << 20

// List answers a request of the API.
func (l *Log) List(ctx context.Context, req *dsecv1.ListTrajectoryRequest) (*dsecv1.ListTrajectoryResponse, error) {
	size := int(req.PageSize)
	switch {
	case size == 0:
		size = 100
	case size < 0 || size > 1000:
		return nil, dsec.Invalid("page_size", "want 1 to 1000, got %d", size)
	}
	out, bytes := new(dsecv1.ListTrajectoryResponse), 0
	err := l.Entries(ctx, dsec.SandboxID(req.SandboxId), req.FromSeq, req.Kinds, func(e *dsecv1.TrajectoryEntry) error {
		bytes += proto.Size(e)
		if len(out.Entries) == size || bytes > maxPage && len(out.Entries) > 0 {
			out.NextSeq = e.Seq
			return errEnough
		}
		out.Entries = append(out.Entries, e)
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	return out, nil
}

// Follow is Entries that goes on with each entry that comes, until ctx ends, or
// the sandbox is forgotten: not_found.
func (l *Log) Follow(ctx context.Context, id dsec.SandboxID, from uint64, kinds []dsecv1.TrajectoryKind, f func(*dsecv1.TrajectoryEntry) error) error {
	l.mu.Lock()
	sb, err := l.find(id)
	l.mu.Unlock()
	if err != nil {
		return err
	}
	from, told := max(from, 1), tell(kinds, f)
	for {
		err := l.read(ctx, sb, from, func(r *read) error {
			from = r.last + 1
			return told(r)
		})
		if err != nil {
			return err
		}
		l.mu.Lock()
		if sb.changed == nil {
			sb.changed = make(chan struct{})
		}
		more, gone, changed := from <= sb.seq, sb.forgotten, sb.changed
		l.mu.Unlock()
		switch {
		case gone:
			return notFound(id)
		case more:
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		case <-l.ctx.Done():
			return l.closed()
		}
	}
}

// Output calls f for the pieces of the output that an action's last entry tells
// of, as far as it is kept. Only when it returns nil were they all there and as
// they were written.
func (l *Log) Output(ctx context.Context, id dsec.SandboxID, seq uint64, f func(*dsecv1.TrajectoryOutputPiece) error) error {
	return l.content(ctx, id, seq, "output", (*dsecv1.TrajectoryEntry).GetOutput, f)
}

// Input is Output of what an entry says that its action was given.
func (l *Log) Input(ctx context.Context, id dsec.SandboxID, seq uint64, f func(*dsecv1.TrajectoryOutputPiece) error) error {
	return l.content(ctx, id, seq, "input", (*dsecv1.TrajectoryEntry).GetInput, f)
}

func (l *Log) content(ctx context.Context, id dsec.SandboxID, seq uint64, what string, of func(*dsecv1.TrajectoryEntry) *dsecv1.TrajectoryOutput, f func(*dsecv1.TrajectoryOutputPiece) error) error {
	l.mu.Lock()
	sb, err := l.find(id)
	l.mu.Unlock()
	if err != nil {
		return err
	}
	if seq == 0 {
		return dsec.Invalid("seq", "want the number of an entry with %s, got 0", what)
	}
	e, err := l.one(ctx, sb, seq)
	if err != nil {
		return err
	}
	out := of(e)
	switch {
	case out == nil:
		return dsec.Errorf(dsec.CodeNotFound, "entry %d has no %s", seq, what)
	case len(out.Digest) == 0:
		for _, p := range out.Head {
			if err := f(p); err != nil {
				return err
			}
		}
		return nil
	}
	r, err := l.openObject(ctx, sb, storedOf(e, out))
	if err != nil {
		return err
	}
	defer r.Close()
	content, err := decompressed(r)
	if err != nil {
		return err
	}
	defer content.Close()
	return eachPiece(content, out.Digest, f)
}

// eachPiece reads an object and holds it against its digest: that of the pieces as they
// are, or of input, of the bytes in them.
func eachPiece(content io.Reader, digest []byte, f func(*dsecv1.TrajectoryOutputPiece) error) error {
	damaged := func(err error) error {
		return &dsec.Error{Code: dsec.CodeInternal, Message: "what an entry of the trajectory log tells of is damaged", Err: err}
	}
	sum, input := sha256.New(), sha256.New()
	in := bufio.NewReader(io.TeeReader(content, sum))
	for {
		n, err := binary.ReadUvarint(in)
		if err == io.EOF {
			break
		}
		if err != nil || n > maxPiece+64 {
			return damaged(err)
		}
		b := make([]byte, n)
		if _, err := io.ReadFull(in, b); err != nil {
			return damaged(err)
		}
		p := new(dsecv1.TrajectoryOutputPiece)
		if err := proto.Unmarshal(b, p); err != nil {
			return damaged(err)
		}
		input.Write(p.Data)
		if err := f(p); err != nil {
			return err
		}
	}
	if string(sum.Sum(nil)) != string(digest) && string(input.Sum(nil)) != string(digest) {
		return damaged(nil)
	}
	return nil
}
