package container

import (
	"testing"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/backendtest"
)

func TestSuite(t *testing.T) {
	h := newHost(t, nil)
	backendtest.Run(t, backendtest.Harness{
		New: func(t testing.TB) backend.Backend {
			b, err := New(h.config)
			check(t, err)
			t.Cleanup(func() {
				if err := b.Close(); err != nil {
					t.Error(cause(err))
				}
			})
			return b
		},
		Spec:   dsec.Spec{Kind: dsec.KindContainer, Limits: backendtest.Limits},
		Layers: []backend.Layer{h.image},
		Flush:  h.flush,
		OOM:    true, Pids: true, Disk: true, Users: true, Terminal: true,
	})
}
