package lazy

// readAhead finds readers that go through an image in order. Files lie in an
// image one after the other, so several such readers are usual.
type readAhead struct {
	streams [8]stream
	turn    uint64
}

// stream is one such reader.
type stream struct {
	next   int64  // chunk that it reads next
	until  int64  // what was asked of the store for it ends here
	window int64  // chunks to be ahead
	turn   uint64 // of its last read
}

// saw notes a read of chunks and returns what is to be fetched ahead of the
// reader: nothing at first, then twice as much each time, up to most chunks.
func (a *readAhead) saw(first, end, most, chunks int64) (from, to int64) {
	a.turn++
	oldest := &a.streams[0]
	for i := range a.streams {
		s := &a.streams[i]
		if s.turn > 0 && (first == s.next || first == s.next-1) {
			if end <= s.next {
				s.turn = a.turn
				return 0, 0 // the same chunk again
			}
			s.next, s.turn = end, a.turn
			s.window = min(max(1, 2*s.window), most)
			from = max(end, s.until)
			to = min(end+s.window, chunks)
			if from >= to || s.until > end && to-from < s.window/2 {
				return 0, 0 // far enough ahead: the next call fetches more at once
			}
			s.until = to
			return from, to
		}
		if s.turn < oldest.turn {
			oldest = s
		}
	}
	*oldest = stream{next: end, until: end, turn: a.turn}
	return 0, 0
}

// readAhead fetches what a sequential reader will want next. What the disk has no
// room for is not kept, and so not worth it.
func (c *cache) readAhead(im *image, first, end int64) {
	_, limits := c.settings()
	im.mu.Lock()
	from, to := im.ahead.saw(first, end, limits.ReadAhead/im.ChunkSize, im.chunks())
	im.mu.Unlock()
	if from < to {
		c.start(im, from, to, c.background)
	}
}
