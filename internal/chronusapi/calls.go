package chronusapi

import (
	"context"

	"github.com/opendsec/dsec"
)

// Info asks chronus whether it lives. It uses no file of the sandbox.
func (c *Client) Info(ctx context.Context) (info Info, err error) {
	err = c.simple(ctx, callInfo, nil, dsec.CodeUnavailable, func(d *dec) { info = d.info() })
	return info, err
}

// Start starts a command. It returns after EventStarted came, which is still
// the first event of the stream. An error says that nothing was started,
// unless its code is outcome_unknown. ErrNeedGroup asks for a command group.
// ctx bounds the whole stream. With a tag it is a conflict where FindTag knows a
// command of that tag or said that there is none, and unsupported where chronus is of
// the version before.
func (c *Client) Start(ctx context.Context, req StartRequest) (*Events, error) {
	if err := req.Validate(); err != nil {
		return nil, err
	}
	var e enc
	typ := callStart
	if req.Tag != 0 {
		typ = callStartTagged
		e.u64(req.Tag)
	}
	e.startRequest(&req)
	return c.stream(ctx, typ, e.b, dsec.CodeOutcomeUnknown)
}

// FindTag returns the process that was started with a tag, whether it runs or has
// ended. 0 says that there is none, and that none ever will be: it was not started, or
// it is gone since ForgetTag. The error is outcome_unknown where it may be one that
// chronus had no room for any more.
func (c *Client) FindTag(ctx context.Context, tag uint64) (process uint64, err error) {
	err = c.onTag(ctx, callFindTag, tag, func(d *dec) { process = d.u64() })
	return process, err
}

// ForgetTag lets go of the command with a tag, once nobody will look for it any more:
// as soon as it has ended, it is kept as one without a tag is. It does nothing where
// there is none.
func (c *Client) ForgetTag(ctx context.Context, tag uint64) error {
	return c.onTag(ctx, callForgetTag, tag, nil)
}

// onTag makes a call that has nothing but a tag.
func (c *Client) onTag(ctx context.Context, typ uint8, tag uint64, result func(*dec)) error {
	if err := checkTag(tag); err != nil {
		return err
	}
	var e enc
	e.u64(tag)
	return c.simple(ctx, typ, e.b, dsec.CodeUnavailable, result)
}

// Attach streams a process's output from byte number from on. Bytes that the
// spool no longer holds are one EventGap. ctx bounds the whole stream.
func (c *Client) Attach(ctx context.Context, process, from uint64) (*Events, error) {
	var e enc
	e.u64(process)
	e.u64(from)
	return c.stream(ctx, callAttach, e.b, dsec.CodeUnavailable)
}

// Processes lists the commands that run, and those that ended lately.
func (c *Client) Processes(ctx context.Context) (list []Process, err error) {
	err = c.simple(ctx, callProcesses, nil, dsec.CodeUnavailable, func(d *dec) {
		for n := d.u32(); n > 0 && !d.bad; n-- {
			list = append(list, d.process())
		}
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// Signal sends a signal to a process, with tree to all its descendants too.
func (c *Client) Signal(ctx context.Context, process uint64, signal int, tree bool) error {
	if err := checkSignal(signal); err != nil {
		return err
	}
	var e enc
	e.u64(process)
	e.u32(uint32(signal))
	e.bool(tree)
	return c.simple(ctx, callSignal, e.b, dsec.CodeOutcomeUnknown, nil)
}

// WriteStdin appends data to a process's input and returns the count of bytes
// taken; with eof the input ends after them. It blocks while the process does
// not read. A process that closed its input is a conflict.
func (c *Client) WriteStdin(ctx context.Context, process uint64, data []byte, eof bool) (int, error) {
	taken := 0
	for {
		chunk := data[:min(len(data), MaxChunk)]
		data = data[len(chunk):]
		var e enc
		e.u64(process)
		e.bool(eof && len(data) == 0)
		e.bytes(chunk)
		var n uint32
		err := c.simple(ctx, callWriteStdin, e.b, dsec.CodeOutcomeUnknown, func(d *dec) {
			if n = d.u32(); int(n) > len(chunk) {
				d.bad = true
			}
		})
		taken += int(n)
		if err != nil || len(data) == 0 {
			return taken, err
		}
	}
}

// Resize changes the size of a process's terminal.
func (c *Client) Resize(ctx context.Context, process uint64, size WindowSize) error {
	if err := checkSize(size); err != nil {
		return err
	}
	var e enc
	e.u64(process)
	e.windowSize(size)
	return c.simple(ctx, callResize, e.b, dsec.CodeUnavailable, nil)
}

// OpenSession opens a session.
func (c *Client) OpenSession(ctx context.Context, req SessionRequest) (s Session, err error) {
	if err := req.Validate(); err != nil {
		return Session{}, err
	}
	var e enc
	e.sessionRequest(&req)
	err = c.simple(ctx, callOpenSession, e.b, dsec.CodeOutcomeUnknown, func(d *dec) { s = d.session() })
	return s, err
}

// RunCommand runs one command in a session; its Outcome is Claimed. ctx bounds
// the whole stream: where it ends the command runs on, unless it was canceled
// with ErrInterrupt.
func (c *Client) RunCommand(ctx context.Context, cmd SessionCommand) (*Events, error) {
	if err := cmd.Validate(); err != nil {
		return nil, err
	}
	var e enc
	e.sessionCommand(&cmd)
	return c.stream(ctx, callRunCommand, e.b, dsec.CodeOutcomeUnknown)
}

// Sessions lists the open sessions.
func (c *Client) Sessions(ctx context.Context) (list []Session, err error) {
	err = c.simple(ctx, callSessions, nil, dsec.CodeUnavailable, func(d *dec) {
		for n := d.u32(); n > 0 && !d.bad; n-- {
			list = append(list, d.session())
		}
	})
	if err != nil {
		return nil, err
	}
	return list, nil
}

// Interrupt kills what the command under way in a session started, as its
// timeout does. The command's stream tells how it ended.
func (c *Client) Interrupt(ctx context.Context, session string) error {
	return c.onSession(ctx, callInterrupt, session)
}

// CloseSession ends a session's shell and everything that it started.
func (c *Client) CloseSession(ctx context.Context, id string) error {
	return c.onSession(ctx, callCloseSession, id)
}

// onSession makes a call that has nothing but the ID of a session.
func (c *Client) onSession(ctx context.Context, typ uint8, id string) error {
	if id == "" || len(id) > maxSessionID {
		return dsec.Errorf(dsec.CodeNotFound, "no session %.64q", id)
	}
	var e enc
	e.str(id)
	return c.simple(ctx, typ, e.b, dsec.CodeOutcomeUnknown, nil)
}
