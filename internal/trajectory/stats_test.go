package trajectory

// Stats are what there is of a log.
type Stats struct {
	Bytes     int64 // of segments and outputs
	Segments  int
	Sandboxes int
	Actions   int // under way
}

// Stats tells what there is now.
func (l *Log) Stats() Stats {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := Stats{Bytes: l.bytes(), Segments: len(l.segments) + 1, Actions: int(l.reserved / endRoom)}
	for _, sb := range l.sandboxes {
		if !sb.forgotten {
			s.Sandboxes++
		}
	}
	return s
}
