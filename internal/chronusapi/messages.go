package chronusapi

import (
	"time"
)

func (e *enc) command(c *Command) {
	e.strs(c.Argv)
	e.str(c.Shell)
	e.strs(c.Env)
	e.str(c.Cwd)
	e.str(c.User)
	e.i64(int64(c.Timeout))
	e.i64(c.OutputLimit)
}

func (d *dec) command() (c Command) {
	c.Argv = d.strs(MaxArgs, MaxArgBytes)
	c.Shell = d.str(MaxArgBytes)
	c.Env = d.strs(MaxArgs, MaxArgBytes)
	c.Cwd = d.str(MaxPath)
	c.User = d.str(maxUser)
	c.Timeout = time.Duration(d.i64())
	c.OutputLimit = d.i64()
	return c
}

func (e *enc) windowSize(w WindowSize) {
	e.u16(w.Rows)
	e.u16(w.Cols)
}

func (d *dec) windowSize() WindowSize { return WindowSize{Rows: d.u16(), Cols: d.u16()} }

func (e *enc) startRequest(r *StartRequest) {
	e.command(&r.Command)
	e.bytes(r.Stdin)
	e.bool(r.OpenStdin)
	e.bool(r.Detach)
	e.bool(r.Orphan)
	e.bool(r.PTY != nil)
	if r.PTY != nil {
		e.windowSize(*r.PTY)
	}
}

func (d *dec) startRequest() (r StartRequest) {
	r.Command = d.command()
	if p := d.bytes(MaxStdin); len(p) > 0 {
		// The message's buffer is used again while the command still reads.
		r.Stdin = append([]byte(nil), p...)
	}
	r.OpenStdin = d.bool()
	r.Detach = d.bool()
	r.Orphan = d.bool()
	if d.bool() {
		w := d.windowSize()
		r.PTY = &w
	}
	return r
}

// eventHead encodes an event up to its data.
func (e *enc) eventHead(ev *Event) {
	e.u8(uint8(ev.Kind))
	switch ev.Kind {
	case EventStarted:
		e.u64(ev.Process)
		e.u32(uint32(ev.PID))
	case EventOutput:
		e.u8(uint8(ev.Stream))
		e.u64(ev.Seq)
	case EventGap:
		e.u64(ev.Seq)
		e.u64(ev.To)
	case EventExited:
		e.outcome(&ev.Outcome)
	}
}

// event decodes a whole event; Data is part of the message.
func (d *dec) event() (ev Event) {
	ev.Kind = EventKind(d.u8())
	switch ev.Kind {
	case EventStarted:
		ev.Process = d.u64()
		ev.PID = int(d.u32())
	case EventOutput:
		ev.Stream = Stream(d.u8())
		ev.Seq = d.u64()
		ev.Data = d.take(len(d.b))
		if ev.Stream < Stdout || ev.Stream > PTY || len(ev.Data) == 0 || len(ev.Data) > MaxChunk {
			d.bad = true
		}
	case EventGap:
		ev.Seq = d.u64()
		ev.To = d.u64()
		if ev.To <= ev.Seq {
			d.bad = true
		}
	case EventExited:
		ev.Outcome = d.outcome()
	default:
		d.bad = true
	}
	return ev
}

func (e *enc) process(p *Process) {
	e.u64(p.ID)
	e.u32(uint32(p.PID))
	e.strs(p.Argv)
	e.time(p.Started)
	e.bool(p.Outcome != nil)
	if p.Outcome != nil {
		e.outcome(p.Outcome)
	}
	e.u64(p.NextSeq)
	e.u64(p.FirstSeq)
	e.bool(p.PTY)
	e.bool(p.Lingering)
	e.str(p.Session)
}

func (d *dec) process() (p Process) {
	p.ID = d.u64()
	p.PID = int(d.u32())
	p.Argv = d.strs(MaxArgs, MaxListedArgv)
	p.Started = d.time()
	if d.bool() {
		o := d.outcome()
		p.Outcome = &o
	}
	p.NextSeq = d.u64()
	p.FirstSeq = d.u64()
	p.PTY = d.bool()
	p.Lingering = d.bool()
	p.Session = d.str(maxSessionID)
	return p
}

func (e *enc) sessionRequest(r *SessionRequest) {
	e.strs(r.Env)
	e.str(r.Cwd)
	e.str(r.User)
}

func (d *dec) sessionRequest() (r SessionRequest) {
	r.Env = d.strs(MaxArgs, MaxArgBytes)
	r.Cwd = d.str(MaxPath)
	r.User = d.str(maxUser)
	return r
}

func (e *enc) session(s *Session) {
	e.str(s.ID)
	e.u64(s.Process)
	e.bool(s.Busy)
}

func (d *dec) session() (s Session) {
	s.ID = d.str(maxSessionID)
	s.Process = d.u64()
	s.Busy = d.bool()
	return s
}

func (e *enc) sessionCommand(c *SessionCommand) {
	e.str(c.Session)
	e.str(c.Command)
	e.i64(int64(c.Timeout))
	e.i64(c.OutputLimit)
}

func (d *dec) sessionCommand() (c SessionCommand) {
	c.Session = d.str(maxSessionID)
	c.Command = d.str(MaxArgBytes)
	c.Timeout = time.Duration(d.i64())
	c.OutputLimit = d.i64()
	return c
}

func (e *enc) fileInfo(f *FileInfo) {
	e.str(f.Name)
	e.str(f.Type)
	e.i64(f.Size)
	e.u32(f.Mode)
	e.u32(f.UID)
	e.u32(f.GID)
	e.time(f.Modified)
	e.str(f.Target)
}

func (d *dec) fileInfo() (f FileInfo) {
	f.Name = d.str(MaxPath)
	f.Type = d.str(16)
	f.Size = d.i64()
	f.Mode = d.u32()
	f.UID = d.u32()
	f.GID = d.u32()
	f.Modified = d.time()
	f.Target = d.str(MaxPath)
	return f
}

func (e *enc) writeRequest(r *WriteRequest) {
	e.str(r.Path)
	e.u32(r.Mode)
	e.str(r.User)
	e.bool(r.Append)
}

func (d *dec) writeRequest() (r WriteRequest) {
	r.Path = d.str(MaxPath)
	r.Mode = d.u32()
	r.User = d.str(maxUser)
	r.Append = d.bool()
	return r
}

func (e *enc) uploadRequest(r *UploadRequest) {
	e.str(r.Path)
	e.str(r.User)
}

func (d *dec) uploadRequest() (r UploadRequest) {
	r.Path = d.str(MaxPath)
	r.User = d.str(maxUser)
	return r
}

func (e *enc) info(i *Info) {
	e.u32(uint32(i.Version))
	e.u32(uint32(i.Processes))
	e.u32(uint32(i.Sessions))
}

func (d *dec) info() Info {
	return Info{Version: int(d.u32()), Processes: int(d.u32()), Sessions: int(d.u32())}
}
