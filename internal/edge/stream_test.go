package edge

import (
	"testing"
	"testing/synctest"
	"time"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// The race detector reads this one too: a keepalive may be the first that
// happens to a sender.
func TestASilentSenderSaysThatItLives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sent := 0
		s := newSender(t.Context(), func(e *dsecv1.ProcessEvent) error {
			if e.GetKeepalive() == nil {
				t.Errorf("sent %v, want a keepalive", e)
			}
			sent++
			return nil
		})
		time.Sleep(2*keepalive + 1) //nolint:forbidigo // of the bubble's clock
		synctest.Wait()
		s.close()
		if sent != 2 {
			t.Errorf("%d keepalives in twice their time, want 2", sent)
		}
		time.Sleep(2 * keepalive) //nolint:forbidigo // of the bubble's clock
		synctest.Wait()
		if sent != 2 {
			t.Errorf("%d keepalives after the end", sent-2)
		}
	})
}
