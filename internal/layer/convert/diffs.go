package convert

import (
	"bufio"
	"io"

	"github.com/opendsec/dsec"
)

// readDiffs applies the streams of upper directories to t.
func (c *converter) readDiffs(t *tree, r io.Reader) error {
	in := bufio.NewReaderSize(&capped{c: c, r: r}, copySize)
	for t.layer = range c.diffs {
		src := &source{c: c, r: in}
		if err := c.apply(t, src, false); err != nil {
			return err
		}
		if src.total-src.entryEnd < 512 {
			return dsec.Invalid("data", "truncated: stream %d of %d has no end mark", t.layer+1, c.diffs)
		}
	}
	if n, err := in.Read(make([]byte, 1)); n > 0 {
		return dsec.Invalid("data", "more follows the last of %d streams", c.diffs)
	} else if err != io.EOF {
		return err
	}
	return nil
}
