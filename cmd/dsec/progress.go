package main

import (
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/term"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/units"
)

// meter shows how far a transfer is: on a terminal as one line that changes, plainly
// as a line each second. A nil one shows nothing.
type meter struct {
	w     io.Writer
	plain bool
	width int
	start time.Time
	done  chan struct{}
	ended chan struct{}

	mu          sync.Mutex
	bytes, size int64 // size 0 is not known
}

// Between two lines.
const (
	redraw    = 200 * time.Millisecond
	plainLine = time.Second
)

// progressFlag adds --progress.
func progressFlag(f *flags) *string {
	return f.String("progress", "auto", "`how` to show progress: auto (a bar, on a terminal), plain or none")
}

func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// startMeter starts to show progress on standard error, until stop is called.
func startMeter(e *env, how string) (*meter, error) {
	m := &meter{w: e.stderr, start: time.Now(), done: make(chan struct{}), ended: make(chan struct{})}
	every := redraw
	switch how {
	case "none":
		return nil, nil
	case "plain":
		m.plain, every = true, plainLine
	case "auto":
		if !isTerminal(e.stderr) {
			return nil, nil
		}
		m.width = 80
		if w, _, err := term.GetSize(int(e.stderr.(*os.File).Fd())); err == nil && w > 0 {
			m.width = w
		}
	default:
		return nil, dsec.Invalid("--progress", "%.20q: want auto, plain or none", how)
	}
	go m.run(every)
	return m, nil
}

func (m *meter) run(every time.Duration) {
	defer close(m.ended)
	tick := time.NewTicker(every)
	defer tick.Stop()
	for {
		select {
		case <-m.done:
			return
		case <-tick.C:
			if text := m.line(time.Since(m.start)); text == "" {
			} else if m.plain {
				_, _ = fmt.Fprintln(m.w, text)
			} else {
				_, _ = fmt.Fprintf(m.w, "\r%.*s\x1b[K", m.width-1, text)
			}
		}
	}
}

// set says how far it is.
func (m *meter) set(bytes, size int64) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.bytes, m.size = bytes, size
}

// stop clears the line.
func (m *meter) stop() {
	if m == nil {
		return
	}
	close(m.done)
	<-m.ended
	if !m.plain {
		_, _ = io.WriteString(m.w, "\r\x1b[K")
	}
}

// line is what is shown; empty where nothing has come yet.
func (m *meter) line(took time.Duration) string {
	m.mu.Lock()
	bytes, size := m.bytes, m.size
	m.mu.Unlock()
	if bytes == 0 {
		return ""
	}
	rate := int64(float64(bytes) / max(took.Seconds(), 0.001))
	if size <= 0 {
		return fmt.Sprintf("%s, %s/s", units.Bytes(bytes), units.Bytes(rate))
	}
	if bytes >= size {
		return fmt.Sprintf("%s sent, being converted", units.Bytes(size))
	}
	const cells = 24
	full := int(cells * bytes / size)
	bar := strings.Repeat("#", full) + strings.Repeat("-", cells-full)
	left := time.Duration(float64(size-bytes) / float64(max(rate, 1)) * float64(time.Second)).Round(time.Second)
	return fmt.Sprintf("[%s] %d%% of %s, %s/s, %s left", bar, 100*bytes/size, units.Bytes(size), units.Bytes(rate), left)
}

// reader counts what is read of r, of size bytes.
func (m *meter) reader(r io.Reader, size int64) io.Reader {
	if m == nil {
		return r
	}
	return &metered{m: m, r: r, size: size}
}

type metered struct {
	m       *meter
	r       io.Reader
	n, size int64
}

func (r *metered) Read(p []byte) (int, error) {
	n, err := r.r.Read(p)
	r.n += int64(n)
	r.m.set(r.n, r.size)
	return n, err
}
