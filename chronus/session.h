// Shells that live across commands.
#ifndef CHRONUS_SESSION_H
#define CHRONUS_SESSION_H

#include "process.h"

struct session;

// session_files are both ends of what a session's shell is driven by. The
// shell runs a loop that reads a number from a pipe, sources the text of the
// command from a second one, and writes the number and the status to a third:
// nothing that a command prints is ever parsed.
struct session_files {
	int control, status; // ours; text.h has that of the text
	int child_control, child_status, child_text;
};

extern int session_count;

// The calls. Those that cannot be answered yet leave their connection waiting.
void session_open(struct conn *c, const struct start *s);
void session_run(struct conn *c, const struct session_command *cmd);
void session_close(struct conn *c, struct str id);
void session_interrupt(struct conn *c, struct str id);
void put_sessions(struct buf *b);
// session_cancel is for a connection that goes while it waits for its turn.
void session_cancel(struct conn *c);
// session_reader_gone is for one that goes while it reads a command's output.
void session_reader_gone(struct conn *c);
// session_reader_aborts is for one that reads, and wants the command to end.
void session_reader_aborts(struct conn *c);

// What the session's shell, a process, tells.
const struct session_files *session_files(const struct session *s);
// session_started: it has exec'd. c is who opened the session; NULL: gone.
void session_started(struct session *s, struct conn *c);
void session_failed(struct session *s); // it never will
void session_drained(struct session *s);
void session_ended(struct session *s);
// session_interrupt_run begins to kill what the running command started. False:
// none runs.
bool session_interrupt_run(struct session *s);

// The shells' loops. Descriptors of control, status and text are SESSION_BASH_FD
// and the two after it; SESSION_SH_FD for shells that know one digit only.
#define SESSION_BASH_FD 250
#define SESSION_SH_FD 6
extern const char session_bash_loop[], session_sh_loop[];

// parse_status reads "<number> <status>", without the new line.
bool parse_status(const char *line, size_t n, uint64_t *number, uint8_t *status);

#endif
