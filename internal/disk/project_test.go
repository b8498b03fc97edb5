package disk

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/testutil"
)

// An edge that died in the middle of a removal leaves files of a project that no
// volume has. They count, so the project is nobody else's until they are gone.
func TestProjectOfWhatIsInTheTrashIsTaken(t *testing.T) {
	dir := projectDir(t)
	p := openStopped(t, dir)
	taken := p.createProject(t)
	check(t, p.close())
	p = openStopped(t, dir)
	if id := p.createProject(t); id == taken {
		t.Errorf("project %d has files in the trash, and was given away", id)
	}
	check(t, errors.Join(p.close(), p.destroy()))
}

// The file system keeps limits of projects, and what was a Store's is another's.
func TestDestroyedStoreLeavesNoLimits(t *testing.T) {
	dir := projectDir(t)
	p := openStopped(t, dir)
	id := p.createProject(t)
	var q dqblk
	check(t, quotactl(p.fd, getQuota, id, &q))
	if q.blockHard == 0 || q.inodeHard == 0 || q.inodes == 0 {
		t.Errorf("control: the project of a volume has %+v", q)
	}
	check(t, errors.Join(p.close(), p.destroy()))
	check(t, quotactl(openFD(t, dir), getQuota, id, &q))
	if q.blockHard != 0 || q.inodeHard != 0 || q.inodes != 0 {
		t.Errorf("left: %+v", q)
	}
}

// projectDir is a directory for a Store, on a file system of its own.
func projectDir(t *testing.T) string {
	t.Helper()
	testutil.Require(t, testutil.Root)
	dir := testutil.Dir(t)
	testutil.Ledger(t, filepath.Base(dir))
	return projectFS(t, dir)
}

// openStopped opens a Store that was told to stop: the trash stays as it is.
func openStopped(t *testing.T, dir string) *project {
	t.Helper()
	s := &Store{opts: Options{Dir: dir}, log: testutil.Logger(t), stop: make(chan struct{})}
	close(s.stop)
	var err error
	s.root, err = os.OpenRoot(dir)
	check(t, err)
	d, err := openProject(s)
	check(t, errors.Join(err, s.root.Close()))
	s.wg.Wait()
	return d.(*project)
}

// createProject makes a volume, whose project it returns, and removes it.
func (p *project) createProject(t *testing.T) uint32 {
	t.Helper()
	name, fd, err := p.create(t.Context(), Request{Bytes: 8 << 20, Inodes: 100})
	check(t, err)
	id, err := projectOf(fd)
	check(t, errors.Join(err, unix.Close(fd), p.remove(t.Context(), name)))
	if id < firstProject {
		t.Errorf("the volume has project %d", id)
	}
	return id
}

// Volumes come and go at once, and each begins with nothing in it.
func TestProjectIsUsedAgainClean(t *testing.T) {
	s := openStore(t, "project")
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 10 {
				if err := useOnce(s); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// useOnce makes a volume, looks whether it is empty, fills it a little and removes it.
func useOnce(s *Store) error {
	const own = 3 // top, upper and work
	v, err := s.Create(context.Background(), Request{Bytes: 8 << 20, Inodes: 100, UID: owner, GID: owner})
	if err != nil {
		return err
	}
	u, err := v.Usage()
	if err == nil && (u.Inodes != own || u.Bytes > own*4096) {
		err = fmt.Errorf("a new volume holds %+v", u)
	}
	top, oerr := v.Open()
	if oerr != nil {
		return errors.Join(err, oerr)
	}
	for i := range 20 {
		err = errors.Join(err, os.WriteFile(fmt.Sprintf("/proc/self/fd/%d/upper/%d", top, i), []byte("x"), 0o644))
	}
	return errors.Join(err, unix.Close(top), v.Remove(context.Background()))
}
