package trajectory

import (
	"crypto/sha256"
	"hash"
	"io"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// NewDigest is the digest of what a request asks for, so far without the data
// that follow it in a stream: whoever has these writes them to it. Requests
// that ask for the same have the same digest, in whichever sandbox, by
// whichever action ID, and however they are tagged.
func NewDigest(request proto.Message) (hash.Hash, error) {
	b, err := Nameless(request)
	if err != nil {
		return nil, err
	}
	return digestWith(request, b), nil
}

// Nameless is a request, marshalled, less where and under which name something is done.
func Nameless(request proto.Message) ([]byte, error) {
	m := proto.Clone(request)
	clearNames(m.ProtoReflect())
	return proto.MarshalOptions{Deterministic: true}.Marshal(m)
}

// digestWith is of a request whose Nameless is b.
func digestWith(request proto.Message, b []byte) hash.Hash {
	h := sha256.New()
	_, _ = io.WriteString(h, string(request.ProtoReflect().Descriptor().FullName())+"\n")
	size := sha256.Sum256(b) // so that no data can pass for a part of the request
	_, _ = h.Write(size[:])
	return h
}

// Describe has an entry of an action that begins hold its whole request, and the digest
// of that.
func Describe(e *dsecv1.TrajectoryEntry, request proto.Message) error {
	b, err := Nameless(request)
	if err != nil {
		return err
	}
	e.RequestDigest = digestWith(request, b).Sum(nil)
	e.Input = &dsecv1.TrajectoryOutput{Head: []*dsecv1.TrajectoryOutputPiece{{Data: b}}}
	return nil
}

// RequestDigest is NewDigest of a request that no data follow.
func RequestDigest(request proto.Message) ([]byte, error) {
	h, err := NewDigest(request)
	if err != nil {
		return nil, err
	}
	return h.Sum(nil), nil
}

// clearNames clears the fields that say where and under which name something
// is done, also where they are in the first message of a stream.
func clearNames(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.Name() == "sandbox_id", f.Name() == "action_id", f.Name() == "tag":
			m.Clear(f)
		case f.ContainingOneof() != nil && f.Message() != nil:
			clearNames(v.Message())
		}
		return true
	})
}

// JSONLine is an entry as one line of JSON, in the form in which the API has it.
func JSONLine(e *dsecv1.TrajectoryEntry) ([]byte, error) {
	b, err := protojson.Marshal(e)
	return append(b, '\n'), err
}
