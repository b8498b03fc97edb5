package edge

import (
	"fmt"
	"strings"
	"time"

	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// extension tells what an ExtendSandbox asked for; 0s is never.
func extension(m *dsecv1.ExtendRequest) string {
	var set []string
	if m.IdleTimeout != nil {
		set = append(set, fmt.Sprintf("idle timeout %s", m.IdleTimeout.AsDuration()))
	}
	if m.MaxLifetime != nil {
		set = append(set, fmt.Sprintf("maximum lifetime %s", m.MaxLifetime.AsDuration()))
	}
	return strings.Join(set, ", ")
}

// extend sets new deadlines of a running sandbox, counted from now. It counts
// as activity. On error nothing is changed.
func (e *Edge) extend(s *sandbox, setIdle bool, idle time.Duration, setLife bool, life time.Duration) error {
	s.mu.Lock()
	if err := s.notLive(); err != nil {
		s.mu.Unlock()
		return err
	}
	now := e.clock()
	oldIdle, oldDeadline, oldActive := s.idle, s.deadline, s.active
	s.active = now
	if setIdle {
		s.idle = idle
	}
	if setLife {
		s.deadline = 0
		if life > 0 {
			s.deadline = now + life
			if s.paused != nil && !s.paused.countLifetime {
				s.deadline = s.paused.at + life // what is left of it begins when it resumes
			}
		}
	}
	if err := e.writeChange(s); err != nil {
		s.idle, s.deadline, s.active = oldIdle, oldDeadline, oldActive
		s.mu.Unlock()
		return err
	}
	s.mu.Unlock()
	e.arm(s)
	return nil
}
