package container

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/opendsec/dsec/internal/chronusapi"
)

func init() { tries["lockers"] = lockers }

const lockersCount = 40

// lockers are processes that do nothing but write to a file that another one
// has open, or but compute where there is no such file, until they are killed.
func lockers(args []string) {
	fd := -1
	if len(args) > 0 {
		var err error
		if fd, err = unix.Open(args[0], unix.O_RDWR|unix.O_NONBLOCK, 0); err != nil {
			say("open "+args[0], err)
			return
		}
	}
	runtime.GOMAXPROCS(lockersCount + 1)
	fmt.Println("ready")
	buf := make([]byte, 64<<20)
	for range lockersCount {
		go func() {
			for {
				if fd >= 0 {
					_, _ = unix.Pwrite(fd, buf, 0) // of a file
					_, _ = unix.Write(fd, buf[:4096])
				}
			}
		}()
	}
	_, _ = os.Stdin.Read(make([]byte, 1))
}

// inSession runs a command in a session to its end.
func (s *sandbox) inSession(session, text string) (o outcome) {
	s.Helper()
	stream, err := s.client.RunCommand(s.Context(), chronusapi.SessionCommand{Session: session, Command: text})
	check(s, err)
	defer stream.Close()
	for {
		ev, err := stream.Next()
		check(s, err)
		o.out += string(ev.Data)
		if ev.Kind == chronusapi.EventExited {
			o.Outcome = ev.Outcome
			return o
		}
	}
}

// Whoever may write to a file holds its inode's lock while it does, and an
// agent's processes may write to all that its commands have. So PID 1 neither
// writes to such a file nor cuts it: it answers as fast as beside processes
// that only compute.
func TestWritersDoNotHoldPID1Up(t *testing.T) {
	s := newHost(t, nil).create()
	open := func() string {
		sess, err := s.client.OpenSession(t.Context(), chronusapi.SessionRequest{Env: []string{"PATH=/bin"}})
		check(t, err)
		return sess.ID
	}
	attacked := open()
	shell := strings.TrimSpace(s.inSession(attacked, "echo $$").out)
	// slow is what health takes, at the 99th percentile and at most, while lockers run
	// and commands are given to the session whose file they write to.
	slow := func(argv ...string) (at99, worst time.Duration) {
		t.Helper()
		h := s.hold(nil, append([]string{"/bin/inside", "lockers"}, argv...)...)
		ctx, cancel := context.WithCancel(t.Context())
		var commands sync.WaitGroup
		commands.Go(func() {
			for ctx.Err() == nil {
				stream, err := s.client.RunCommand(ctx, chronusapi.SessionCommand{Session: attacked, Command: ":"})
				for err == nil {
					_, err = stream.Next()
				}
				if stream != nil {
					_ = stream.Close()
				}
			}
		})
		var all []time.Duration
		for start := time.Now(); time.Since(start) < 5*time.Second; {
			begin := time.Now()
			_, err := s.client.Info(t.Context())
			check(t, err)
			all = append(all, time.Since(begin))
		}
		slices.Sort(all)
		at99, worst = all[len(all)*99/100], all[len(all)-1]
		t.Log(len(all), all[len(all)/2], at99, worst)
		check(t, h.Close())
		cancel()
		commands.Wait()
		return at99, worst
	}
	computing99, computing := slow()
	// A PID 1 that is held up has both; one that the machine held up once has not.
	if at99, worst := slow("/proc/" + shell + "/fd/8"); at99 > 10*computing99 && worst > 10*computing {
		t.Errorf("health takes %v and up to %v, and beside processes that compute %v and %v", at99, worst, computing99, computing)
	}
}
