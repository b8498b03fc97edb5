package edge_test

import (
	"path/filepath"
	"testing"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// TestWatchersAfterALossOfPower: the last events that a watcher has seen are not in the log of the node any
// more, one or several. It is told so, and of all that happens after that.
func TestWatchersAfterALossOfPower(t *testing.T) {
	for lost := range 4 {
		n := newNode(t, nil)
		id := n.create(&dsecv1.CreateRequest{})
		kept := t.TempDir()
		w := n.watch(&dsecv1.WatchNodeRequest{FromStart: true})
		w.want("sandbox running")
		copyDir(t, filepath.Join(n.cfg.StateDir, "events"), kept)
		for i := range lost {
			if i%2 == 0 {
				n.mustPause(id, nil)
				w.want("sandbox paused")
			} else {
				n.shell(id, "true")
				w.want("sandbox running")
			}
		}
		at := w.next
		w.stop()
		n.close()
		copyDir(t, kept, filepath.Join(n.cfg.StateDir, "events"))
		n.start()
		w = n.watch(&dsecv1.WatchNodeRequest{From: at})
		if lost > 0 {
			w.want("gap")
		}
		if lost%2 == 1 {
			w.want("sandbox paused repeated") // nobody here knows that it was told
		}
		n.kill(id)
		w.want("sandbox stopping", "sandbox stopped")
	}
}
