// Commands: from the start to when they are forgotten.
#ifndef CHRONUS_PROCESS_H
#define CHRONUS_PROCESS_H

#include "command.h"
#include "conn.h"
#include "group.h"
#include "spool.h"

// output is one pipe or terminal that a process writes to.
struct output {
	struct watch w; // fd -1: nobody can write any more
	struct process *p;
	uint8_t stream;
	bool stalled;      // no space in the spool
	bool draining;     // what it held at some moment is being read
	uint64_t total;    // bytes read
	uint64_t drain_to; // total then
};

// input is what a process reads: the write end of a pipe, or a terminal.
struct input {
	struct watch w; // fd -1: there is none, or it has ended
	struct process *p;
	bool pty, keep_open; // keep_open: more may come after the first input
	uint8_t *first;      // the rest of the first input
	size_t first_off, first_len;
	bool end_mark;        // a terminal's end-of-file character is to be written
	struct conn *writers; // in turn
};

enum process_state {
	STARTING, // its child has not exec'd
	FAILED,   // nor will it; it is only waited for
	STARTED,
};

// exit is how a child ended, from wait4.
struct exit {
	int status;
	uint64_t cpu;     // ns
	uint64_t max_rss; // bytes
};

struct process {
	struct process *next; // of the same list: those that started, by id; or the others
	enum process_state state;
	uint64_t id; // once it has started
	int pid;
	bool ended; // it was waited for
	struct buf argv; // as listed
	struct session *session; // whose shell it is
	char session_id[24];
	size_t session_id_len;
	struct group *group; // NULL where commands have none
	bool is_terminal;
	int pty; // the leader, owned by outputs[0]; -1 where there is none any more
	int64_t started;     // wall
	uint64_t started_at; // live
	struct timer timer;  // of the timeout
	bool timed_out;
	struct exit exit;
	uint64_t elapsed;

	struct watch exec; // a pipe that tells how the exec went
	struct conn *starter; // waits for that
	uint64_t tag; // 0: none
	bool keep;    // its tag was not forgotten
	bool detached; // nobody is ever waited for
	bool orphan;   // goes on without its starter

	struct output outputs[2];
	int output_count;
	int open; // outputs that may still bring bytes
	struct input input;

	struct spool spool;
	uint64_t limit; // number of the first byte that is not kept; 0: none
	bool over;      // it was reached
	bool primary;   // the reader that a lossless process waits for is there
	struct reader *readers;
	struct conn *waiters; // for its end
	bool has_outcome;     // set once all that was written before the exit is in the spool
	struct outcome outcome;
	uint64_t end_seq; // spool.next then
	uint64_t finished, told; // live: of the outcome, and of its first delivery; 0: not yet
};

extern struct process *processes; // that started
extern struct process *starting;  // that did not, or not yet
extern int running;               // commands without an outcome

struct process *process_find(uint64_t id, struct err *e);
struct process *process_of_pid(int pid);

// process_start starts a command for a connection that waits for it. NULL: e
// tells why not, and need_group in it that no command group is free.
struct process *process_start(struct conn *c, const struct start *s, struct session *session, struct err *e);
// start_refused answers a start that process_start refused, or has it wait for
// a group that is about to be free.
void start_refused(struct conn *c, const struct err *e);
// process_exec_told handles what a child told of its exec. Where it has ended, it
// will tell no more.
void process_exec_told(struct process *p, bool ended);
void process_free(struct process *p);

// process_reaped is called when the child was waited for.
void process_reaped(struct process *p, const struct exit *e);
// process_over is called when the output limit has been reached.
void process_over(struct process *p);
// process_drained is called when an output has brought what was waited for.
void process_drained(struct process *p);
bool process_draining(const struct process *p);
// process_lingers tells whether descendants of an ended process run. Without a
// group that is known only of those that hold its output.
bool process_lingers(struct process *p);
void put_process(struct buf *b, struct process *p);

// process_drain begins to read what the outputs hold now.
void process_drain(struct process *p);
void output_start(struct output *o);
void output_resume(struct process *p); // where the spool may have room again
void outputs_close(struct process *p);

void input_feed(struct process *p);
void input_close(struct input *in);
// input_write makes a call that writes wait for its turn.
void input_write(struct conn *c);
void input_cancel(struct conn *c);

// process_follow adds a reader, from number seq on, and sends it the first
// event; readers_pump sends what there is to all.
void process_follow(struct conn *c, struct process *p, uint64_t seq, bool primary);
void readers_pump(struct process *p);
void reader_pump(struct conn *c);
void reader_remove(struct conn *c);
// process_begin_read makes a caller who wants bytes from number seq on the
// reader that the process waits for, if it waits for one and there is none.
bool process_begin_read(struct process *p, uint64_t seq);
void process_end_read(struct process *p);

// process_kill ends the command with all its descendants, process_signal
// signals them.
void process_kill(struct process *p);
void process_signal(struct process *p, int signal);
// process_family lists the processes of the command that run; the caller frees
// the list.
int *process_family(struct process *p, size_t *n);

// pipe_new makes a pipe whose end `ours` (0 reads, 1 writes) does not block.
bool pipe_new(int fds[2], int ours, struct err *e);

void put_started(struct buf *b, const struct process *p);

// sweep_later has what ended commands left freed in time; forget_oldest, at the
// end of a round of the loop, keeps their count down.
void sweep_later(void);
void forget_oldest(void);

#endif
