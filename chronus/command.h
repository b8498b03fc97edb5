// The requests that start something, decoded and checked.
#ifndef CHRONUS_COMMAND_H
#define CHRONUS_COMMAND_H

#include "codec.h"
#include "err.h"

// Limits of the protocol, as internal/chronusapi has them.
#define VERSION 2
#define MAX_FRAME (256u << 10)
#define MAX_CHUNK (64u << 10)
#define MAX_ARG_BYTES (2u << 20)
#define MAX_ARGS (64u << 10)
#define MAX_PATH 4096u
#define MAX_PROCESSES 256
#define MAX_SESSIONS 64
#define MAX_STDIN (1u << 20)
#define MAX_LISTED_ARGV 4096u
#define MAX_TIMEOUT (30LL * 24 * 3600 * 1000000000LL)
#define MAX_USER 256u
#define MAX_SESSION_ID 64u
#define MAX_MESSAGE (MAX_ARG_BYTES + MAX_STDIN + (256u << 10))

struct command {
	struct strs argv;
	struct str shell; // in place of argv
	struct strs env;
	struct str cwd, user;
	int64_t timeout; // ns, 0: none
	int64_t output_limit;
};

struct window_size {
	uint16_t rows, cols;
};

// start is what to start. Its strings are in the message that it came in.
struct start {
	struct command cmd;
	struct str in;
	bool open_stdin, detach, orphan, pty;
	uint64_t tag; // 0: none
	struct window_size size;
};

// session_command is one command of a session.
struct session_command {
	struct str session, text;
	int64_t timeout, output_limit;
};

void get_start(struct dec *d, struct start *s);
void get_tagged_start(struct dec *d, struct start *s);
void get_session_request(struct dec *d, struct start *s);
void get_session_command(struct dec *d, struct session_command *c);
struct window_size get_window_size(struct dec *d);

// Each check is false, with e set, where a request can never work as written.
bool check_start(const struct start *s, struct err *e);
bool check_session_request(const struct start *s, struct err *e);
bool check_session_command(const struct session_command *c, struct err *e);
bool check_size(struct window_size w, struct err *e);
bool check_signal(int signal, struct err *e);

// put_shown_argv writes what the list of processes shows of a command.
void put_shown_argv(struct buf *b, const struct command *c);

#endif
