package fake_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/backend"
	"github.com/opendsec/dsec/internal/backend/backendtest"
	"github.com/opendsec/dsec/internal/backend/fake"
)

func TestSuite(t *testing.T) {
	for name, groups := range map[string]int{"plain": 0, "groups": 1} {
		t.Run(name, func(t *testing.T) {
			world := fake.NewWorld()
			backendtest.Run(t, backendtest.Harness{
				New:  func(testing.TB) backend.Backend { return fake.New(fake.Options{World: world, Groups: groups}) },
				Spec: dsec.Spec{Kind: dsec.KindFake, Limits: backendtest.Limits},
				Ledger: func(t testing.TB) {
					t.Cleanup(func() {
						if ids := world.IDs(); len(ids) != 0 {
							t.Errorf("left in the world: %v", ids)
						}
						goleak.VerifyNone(t)
					})
				},
			})
		})
	}
}
