package apiserver

import (
	"errors"
	"sync"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/watcher"
)

// moves remembers where sandboxes were moved to. The edge of each tells it anew when it is
// forgotten.
type moves struct {
	mu sync.Mutex
	to map[string]string
}

// maxMoves bounds what is remembered.
const maxMoves = 1 << 16

// follow takes what an edge said of a sandbox, and reports whether *id is another one now.
func (m *moves) follow(id *string, err error) bool {
	e, ok := errors.AsType[*dsec.Error](err)
	if !ok || e.MovedTo == "" || string(e.MovedTo) == *id {
		return false
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.to == nil || len(m.to) >= maxMoves {
		m.to = map[string]string{}
	}
	m.to[*id] = string(e.MovedTo)
	*id = string(e.MovedTo)
	return true
}

// now is the ID that a sandbox has, as far as it is known here.
func (m *moves) now(id string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	for range len(m.to) {
		to, moved := m.to[id]
		if !moved {
			break
		}
		id = to
	}
	return id
}

// wherever makes a call for a sandbox at its edge, and again where it was moved to.
func wherever[Req any, P sandboxRequest[Req]](s *Server, msg *Req, call func(*watcher.Edge, *Req) error) error {
	id := s.moves.now(P(msg).GetSandboxId())
	for {
		edge, err := s.owner("sandbox_id", id)
		if err != nil {
			return err
		}
		if err := call(edge, forSandbox[Req, P](msg, id)); err == nil || !s.moves.follow(&id, err) {
			return err
		}
	}
}

// forSandbox is msg for the sandbox id. msg itself stays as it is.
func forSandbox[Req any, P sandboxRequest[Req]](msg *Req, id string) *Req {
	if P(msg).GetSandboxId() == id {
		return msg
	}
	out := proto.CloneOf(P(msg))
	r := out.ProtoReflect()
	r.Set(r.Descriptor().Fields().ByName("sandbox_id"), protoreflect.ValueOfString(id))
	return out
}
