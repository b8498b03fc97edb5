package trajectory

import (
	"crypto/sha256"
	"io"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// Nameless is a request, marshalled, less where and under which name something is done.
func Nameless(request proto.Message) ([]byte, error) {
	m := proto.Clone(request)
	clearNames(m.ProtoReflect())
	return proto.MarshalOptions{Deterministic: true}.Marshal(m)
}

// digestWith is the digest of a request whose Nameless is b. Requests that ask for the same have the
// same, in whichever sandbox, by whichever action ID, and however they are tagged.
func digestWith(request proto.Message, b []byte) []byte {
	h := sha256.New()
	_, _ = io.WriteString(h, string(request.ProtoReflect().Descriptor().FullName())+"\n")
	size := sha256.Sum256(b)
	_, _ = h.Write(size[:])
	return h.Sum(nil)
}

// Describe has an entry of an action that begins hold its whole request, and the digest
// of that.
func Describe(e *dsecv1.TrajectoryEntry, request proto.Message) error {
	b, err := Nameless(request)
	if err != nil {
		return err
	}
	e.RequestDigest = digestWith(request, b)
	e.Input = &dsecv1.TrajectoryOutput{Head: []*dsecv1.TrajectoryOutputPiece{{Data: b}}}
	return nil
}

// RequestDigest is the digest that Describe gives an entry.
func RequestDigest(request proto.Message) ([]byte, error) {
	b, err := Nameless(request)
	if err != nil {
		return nil, err
	}
	return digestWith(request, b), nil
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
