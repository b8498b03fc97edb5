// Connections: frames in and out, and the one call that a connection carries.
#ifndef CHRONUS_CONN_H
#define CHRONUS_CONN_H

#include "codec.h"
#include "err.h"
#include "loop.h"

// Types of frames: requests have the number of their call.
enum {
	CALL_INFO = 1,
	CALL_START,
	CALL_ATTACH,
	CALL_PROCESSES,
	CALL_SIGNAL,
	CALL_WRITE_STDIN,
	CALL_RESIZE,
	CALL_OPEN_SESSION,
	CALL_RUN_COMMAND,
	CALL_SESSIONS,
	CALL_CLOSE_SESSION,
	// Then those that chronus-files serves.
	CALL_SETUP = CALL_CLOSE_SESSION + 10,
	CALL_ADD_GROUP,
	CALL_INTERRUPT,
	CALL_HOLD, // this and all that follow since version 2
	CALL_START_TAGGED,
	CALL_FIND_TAG,
	CALL_FORGET_TAG,

	FRAME_RESULT = 0x80, // last of a call: it worked
	FRAME_ERROR,         // last of a call: it did not
	FRAME_EVENT,
	FRAME_DATA,
	FRAME_END,
	FRAME_ABORT,
	FRAME_MORE, // a message goes on in the next frame
};

#define HEADER_LEN 5

// wait is what a call that has not been answered waits for.
enum wait {
	WAIT_NOTHING,
	WAIT_GROUP,   // a group that is about to be free, to start in
	WAIT_EXEC,    // the child of a start
	WAIT_OUTPUT,  // a reader of output
	WAIT_INPUT,   // a process that reads its input
	WAIT_TURN,    // the command of its session before
	WAIT_END,     // the end of a session's shell
	WAIT_TAG,     // a command with the tag asked for, which may yet fail to start
};

struct process;
struct session;

// reader is a call that follows the output of a process.
struct reader {
	struct process *p;
	struct reader *next;
	uint64_t seq;         // of the next byte to send
	uint64_t last;        // where the output ends, once known
	struct outcome outcome; // then
	bool known;
	bool primary; // the process waits for it
	bool command; // of a session: not the end of the process is its end
};

// writer is a call that writes input.
struct writer {
	struct process *p;
	struct str data; // the rest
	uint32_t taken;
	bool eof;
};

struct conn {
	struct watch w;
	struct conn *next_unsettled, *next; // next: among those that wait for the same
	bool dead, unsettled;

	// What comes in.
	uint8_t head[HEADER_LEN]; // of the frame, or the preface
	uint8_t head_len;
	bool greeted, in_payload;
	bool early; // more than is taken now came, or may have come
	bool half;  // the client will send no more, but reads
	uint32_t left;    // of the frame's payload
	struct buf msg;   // the message; has a NUL after it
	uint8_t *rest;    // came while a call was under way
	size_t rest_len;
	int *fds; // that came with it
	int fds_len;

	// What goes out.
	struct buf out;
	size_t sent;
	bool blocked; // the socket is full
	struct timer held; // set: what is out waits for what follows it

	// The call under way.
	enum wait wait;
	uint8_t call;
	uint64_t until; // of WAIT_GROUP
	struct process *p; // of WAIT_EXEC and WAIT_END
	struct session *session; // of WAIT_TURN
	struct reader reader;
	struct writer writer;
};

// conn_listen accepts connections of a socket; with outside only those from
// outside of this PID namespace.
void conn_listen(int fd, bool outside);
struct conn *conn_new(int fd);

// conn_unlink takes a connection off a list by next, where it is on it.
void conn_unlink(struct conn **list, const struct conn *c);

// conn_put adds a message to what is sent when the loop's round ends, or later
// where it is held.
void conn_put(struct conn *c, uint8_t type, const void *p, size_t n);
// conn_hold has what was put wait for what follows it, for at most ns.
void conn_hold(struct conn *c, uint64_t ns);
// conn_put_data adds a message of head and data. Much data is sent at once and
// not copied, as far as the socket takes it.
void conn_put_data(struct conn *c, uint8_t type, const struct buf *head, const void *p, size_t n);
// conn_full tells whether what was put should be sent first.
bool conn_full(struct conn *c);

// A call ends by one of these. conn_answer frees the result; NULL is none.
void conn_answer(struct conn *c, struct buf *result);
void conn_refuse(struct conn *c, const struct err *e);
void conn_refuse_raw(struct conn *c, const void *p, size_t n);

// conn_close ends the connection: what waited for it is told. The memory is
// freed when the loop's round ends.
void conn_close(struct conn *c);

// conn_settle sends what was put, and goes on with connections whose call ended.
void conn_settle(void);

// For the module that serves the calls: call_serve serves a message and leaves
// the connection closed, answered or waiting; call_writable is called when a
// full socket has room; call_cancel where the connection of a waiting call goes;
// call_abort where the client says before that the command is to end.
void call_serve(struct conn *c, uint8_t call, struct dec *d);
void call_writable(struct conn *c);
void call_cancel(struct conn *c);
void call_abort(struct conn *c);
// call_survives tells whether the call under way goes on although its client
// will send no more.
bool call_survives(struct conn *c);

#endif
