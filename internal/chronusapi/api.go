// Package chronusapi is the protocol between an edge and chronus, the PID 1
// of a sandbox.
//
// The words: a process is one command that chronus started, named by an ID
// that chronus never reuses; a session is a shell that lives across commands;
// a spool holds the last output of a process, so that a reader may come late
// or come back.
//
// A connection carries one call at a time: the edge writes a request, chronus
// answers, and the connection can be used again. Several calls at once take
// several connections, so each has the back-pressure of its own socket and
// none waits behind another. A connection that breaks in mid-call says nothing
// about a process: attach again by its ID, or find that by its tag. A command
// started without Detach belongs to its connection and is killed when that goes
// away before the exit was delivered, unless Orphan was asked for: then it goes
// on, for a restarted edge to attach to. A command of a session runs on, unless
// the edge sends one frame before it closes the connection, which has the command
// interrupted.
//
// Bytes from either side are hostile: every length is bounded before it is
// allocated, and a malformed frame ends the connection and nothing else.
package chronusapi

import (
	"context"
	"io"
	"time"

	"github.com/opendsec/dsec"
)

// Version is the version of the protocol. Each side serves this and the one before.
const Version = 2

// Limits of the protocol.
const (
	MaxFrame     = 256 << 10 // bytes of one frame, header apart
	MaxChunk     = 64 << 10  // bytes of data in one output, input or file frame
	MaxArgBytes  = 2 << 20   // argv and env of one command together
	MaxArgs      = 64 << 10  // strings in argv or env
	MaxPath      = 4096      // bytes of a path
	MaxProcesses = 256       // commands at once in one sandbox
	MaxSessions  = 64
	MaxEnded     = 64 // commands that ended and are remembered
)

// DiskFull ends the message of an exhausted error of a file that the kernel had no
// room for, as chronus/err.c has it. Whose disk that is chronus does not know.
const DiskFull = "the disk of the sandbox is full"

// Stream tells which output a byte came from.
type Stream uint8

// The output streams.
const (
	Stdout Stream = 1
	Stderr Stream = 2
	PTY    Stream = 3
)

// Command is what to run.
type Command struct {
	// Argv is the program and its arguments. Argv[0] is looked up in the PATH
	// of Env unless it has a slash.
	Argv []string
	// Shell, in place of Argv, is run by bash -c, or sh -c where there is no bash.
	Shell string
	// Env is the whole environment, KEY=VALUE.
	Env []string
	// Cwd is absolute.
	Cwd string
	// User is name, uid, name:group or uid:gid; empty is root.
	User string
	// Timeout ends the command and its descendants; 0 is none.
	Timeout time.Duration
	// OutputLimit in bytes, of all streams; 0 is none.
	OutputLimit int64
}

// StartRequest starts a command.
type StartRequest struct {
	Command Command
	// Stdin is the first input; it ends there unless OpenStdin.
	Stdin     []byte
	OpenStdin bool
	// Detach: the stream ends after EventStarted, and output that nobody reads
	// overwrites the oldest in the spool. Without it the command waits for its
	// reader, and is killed when the reader's connection goes away.
	Detach bool
	// Orphan: with Detach unset, a broken connection turns the command into a
	// detached one in place of killing it. The edge sets it always, and kills
	// by Signal where the client went away, so that its own death kills nothing.
	Orphan bool
	// PTY, where not nil, is the terminal's size.
	PTY *WindowSize
	// Tag, where not 0, names the command for whoever chose it, before there is a
	// process number: unique in its sandbox, and ascending. FindTag finds it, and all
	// of its output that the spool has room for, until it has ended and ForgetTag was
	// called. Of those that ended chronus keeps MaxEnded, and those that nobody may
	// look for go first.
	Tag uint64
}

// WindowSize is a terminal's size in characters.
type WindowSize struct{ Rows, Cols uint16 }

// EventKind tells the Events apart.
type EventKind uint8

// The events of a process stream.
const (
	EventStarted EventKind = 1 // first; Process and PID are set
	EventOutput  EventKind = 2 // Stream, Seq and Data are set
	EventGap     EventKind = 3 // bytes [Seq, To) are lost
	EventExited  EventKind = 4 // last; Outcome is set
)

// Event is one event of a process stream.
type Event struct {
	Kind    EventKind
	Process uint64
	PID     int
	Stream  Stream
	Seq     uint64 // number of the first byte of Data, counted over all streams
	To      uint64
	Data    []byte // valid until the next call of Next
	Outcome dsec.Outcome
}

// Process describes a started command.
type Process struct {
	ID        uint64
	PID       int
	Argv      []string
	Started   time.Time
	Outcome   *dsec.Outcome // nil while it runs
	NextSeq   uint64        // bytes of output so far
	FirstSeq  uint64        // first byte that the spool still holds
	PTY       bool
	Lingering bool // ended, but descendants run
	Session   string
}

// SessionRequest opens a session.
type SessionRequest struct {
	Env  []string
	Cwd  string
	User string
}

// Session describes an open session.
type Session struct {
	ID      string
	Process uint64
	Busy    bool
}

// SessionCommand is one command of a session.
type SessionCommand struct {
	Session     string
	Command     string
	Timeout     time.Duration
	OutputLimit int64
}

// FileInfo describes a file of the sandbox.
type FileInfo struct {
	Name     string // last element; any bytes but NUL and /
	Type     string // file dir symlink fifo socket char block
	Size     int64
	Mode     uint32 // 07777 bits
	UID, GID uint32 // as seen inside
	Modified time.Time
	Target   string // of a symlink
}

// WriteRequest opens a file to be replaced, or appended to.
type WriteRequest struct {
	Path   string
	Mode   uint32 // 0: that of the file replaced, or 0644
	User   string // owner of a new file; empty is root
	Append bool
}

// UploadRequest names the directory that a tar stream is unpacked below.
type UploadRequest struct {
	Path string
	User string // owner of all entries; empty: as in the tar
}

// UploadResult counts what an upload made.
type UploadResult struct{ Entries, Bytes int64 }

// Info is chronus's answer to a health probe. It uses no file and no program
// of the sandbox.
type Info struct {
	Version   int
	Processes int // running
	Sessions  int
}

// Sink receives the events of one call, in order. It blocks for as long as
// the reader is slow; an error means that the reader is gone.
type Sink func(Event) error

// Handler serves the calls of one sandbox but those for files, which are
// FileHandler's. Errors are *dsec.Error, and anything else counts as internal. A
// canceled ctx means that the connection is gone.
type Handler interface {
	Info(ctx context.Context) (Info, error)

	Start(ctx context.Context, req StartRequest, sink Sink) error
	Attach(ctx context.Context, process, from uint64, sink Sink) error
	// FindTag is final: where it says that there is no command with a tag, a start
	// with that tag, which may be under way, is refused from then on.
	FindTag(ctx context.Context, tag uint64) (process uint64, err error)
	ForgetTag(ctx context.Context, tag uint64) error
	Processes(ctx context.Context) ([]Process, error)
	// Signal with tree reaches every process of the command.
	Signal(ctx context.Context, process uint64, signal int, tree bool) error
	// WriteStdin returns the count of bytes taken; eof ends the input after them.
	WriteStdin(ctx context.Context, process uint64, data []byte, eof bool) (int, error)
	Resize(ctx context.Context, process uint64, size WindowSize) error

	OpenSession(ctx context.Context, req SessionRequest) (Session, error)
	// RunCommand runs a command when those before it in the session are over. One
	// whose ctx ends in its turn runs on; with the cause ErrInterrupt it is
	// interrupted. One that still waits for its turn never runs.
	RunCommand(ctx context.Context, cmd SessionCommand, sink Sink) error
	Sessions(ctx context.Context) ([]Session, error)
	// Interrupt kills what the command under way in a session started, as its
	// timeout does, again and again until the shell comes back; a shell that does
	// not is killed with its session. It does not wait for that: the command's
	// stream tells how it ended, with Signal 9 or what its shell makes of that. A
	// session that runs no command is a conflict.
	Interrupt(ctx context.Context, session string) error
	CloseSession(ctx context.Context, id string) error
}

// FileHandler serves the calls for files. In a container another process does
// so than the one that serves the rest, and a connection stays with the one
// that served its first call; so a Client keeps connections of either kind.
type FileHandler interface {
	Stat(ctx context.Context, path string, follow bool) (FileInfo, error)
	// ListDir returns at most limit entries after the name `after`, sorted by bytes.
	ListDir(ctx context.Context, path, after string, limit int) (entries []FileInfo, more bool, err error)
	Mkdir(ctx context.Context, path string, mode uint32, parents bool) error
	Rename(ctx context.Context, from, to string) error
	Remove(ctx context.Context, path string, recursive bool) error
	Read(ctx context.Context, path string, offset, length int64, w io.Writer) error
	Write(ctx context.Context, req WriteRequest, r io.Reader) (size int64, err error)
	Download(ctx context.Context, path string, w io.Writer) error // a tar
	Upload(ctx context.Context, req UploadRequest, tar io.Reader) (UploadResult, error)
}
