#define _GNU_SOURCE
#include "session.h"

#include "text.h"

#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// How long the shell of a session has to come back after the processes of its
// command were killed, and how often they are looked for.
#define INTERRUPT_EVERY (50 * MILLISECOND)
#define INTERRUPT_TRIES 20

// How many rounds of the loop a status is waited for that was there when the time
// of its command was over: more than all that can be ready takes.
#define LATE_ROUNDS 64

// The loops that the shells run. The text is sourced by a path that opens the
// pipe anew, and ends where nobody has the other end open any more. The function
// gives a command the $? of the one before.
// "command" keeps a POSIX shell alive where the text has a syntax error.
const char session_bash_loop[] = "__dsec_status() { return \"$1\"; }\n"
				 "__dsec_s=0\n"
				 "while IFS= read -r -u 250 __dsec_n; do\n"
				 "__dsec_status \"$__dsec_s\"\n"
				 ". /proc/self/fd/252\n"
				 "__dsec_s=$?\n"
				 "printf '%s %s\\n' \"$__dsec_n\" \"$__dsec_s\" >&251\n"
				 "done";
const char session_sh_loop[] = "__dsec_status() { return \"$1\"; }\n"
			       "__dsec_s=0\n"
			       "while IFS= read -r __dsec_n <&6; do\n"
			       "__dsec_status \"$__dsec_s\"\n"
			       "command . /proc/self/fd/8\n"
			       "__dsec_s=$?\n"
			       "printf '%s %s\\n' \"$__dsec_n\" \"$__dsec_s\" >&7\n"
			       "done";

// run is the command under way.
struct run {
	uint64_t number; // 0: there is none
	int64_t started; // wall
	uint64_t started_at; // live
	uint64_t from; // first byte of output
	int64_t oom_start;
	int *before; // processes that ran before it, sorted
	size_t before_len;
	bool timed_out;
	int late; // rounds since its time was over in which a status was there to be read
	bool finished; // its status is known: its output is being drained
	uint8_t status;
	int tries; // of killing what it started; 0: nothing is being killed
	struct conn *reader; // NULL: gone
};

struct session {
	struct session *next;
	char id[24];
	struct process *p; // the shell
	bool open;         // and not closed
	struct session_files files;
	struct watch status; // of files.status
	struct text text;    // of the command under way
	uint64_t last;       // number of the last command
	struct run run;
	struct timer timeout, interrupt;
	struct conn *turns; // in turn
};

int session_count; // holding a place: open, or being opened
static struct session *sessions;

static void on_status(struct watch *w, uint32_t events);
static void on_text_broken(struct text *t);
static void on_timeout(struct timer *t);
static void on_interrupt(struct timer *t);

const struct session_files *session_files(const struct session *s) { return &s->files; }

// forget gives the session's place up.
static void forget(struct session *s) {
	for (struct session **at = &sessions; *at; at = &(*at)->next)
		if (*at == s) {
			*at = s->next;
			session_count--;
			break;
		}
	s->open = false;
}

static void free_session(struct session *s) {
	forget(s);
	timer_stop(&s->timeout);
	timer_stop(&s->interrupt);
	watch_close(&s->status);
	text_close(&s->text);
	close_fd(&s->files.control);
	close_fd(&s->files.child_control);
	close_fd(&s->files.child_status);
	close_fd(&s->files.child_text);
	free(s->run.before);
	free(s);
}

static void no_session(struct err *e, struct str id) {
	err_set(e, NOT_FOUND, "session_id", "no session %s; it may have ended with its shell", QUOTED(id.s, min_size(id.n, 64)));
}

static struct session *find(struct str id, struct err *e) {
	for (struct session *s = sessions; s; s = s->next)
		if (s->open && strlen(s->id) == id.n && memcmp(s->id, id.s, id.n) == 0)
			return s;
	no_session(e, id);
	return NULL;
}

// ---- open ----

static bool open_files(struct session_files *f, struct text *text, struct err *e) {
	int fds[2];
	if (!text_open(text, &f->child_text, e) || !pipe_new(fds, 1, e))
		return false;
	f->child_control = fds[0];
	f->control = fds[1];
	if (!pipe_new(fds, 0, e))
		return false;
	f->status = fds[0];
	f->child_status = fds[1];
	return true;
}

void session_open(struct conn *c, const struct start *start) {
	static uint64_t last_id;
	struct err e;
	if (session_count >= MAX_SESSIONS) {
		err_set(&e, EXHAUSTED, "", "%d sessions are open, which is the most of a sandbox", MAX_SESSIONS);
		conn_refuse(c, &e);
		return;
	}
	struct session *s = xcalloc(sizeof *s);
	s->files = (struct session_files){-1, -1, -1, -1, -1};
	s->text = (struct text){.fd = -1, .feed.fd = -1, .broken = on_text_broken};
	s->timeout = (struct timer){.fire = on_timeout, .live = true};
	s->interrupt.fire = on_interrupt;
	snprintf(s->id, sizeof s->id, "s%llu", (unsigned long long)++last_id);
	s->next = sessions; // holds the place
	sessions = s;
	session_count++;
	bool ok = open_files(&s->files, &s->text, &e);
	s->status = (struct watch){.fd = s->files.status, .ready = on_status};
	if (ok && (s->p = process_start(c, start, s, &e))) {
		close_fd(&s->files.child_control);
		close_fd(&s->files.child_status);
		close_fd(&s->files.child_text);
		return;
	}
	free_session(s);
	start_refused(c, &e);
}

void session_failed(struct session *s) { free_session(s); }

static void put_session(struct buf *b, const struct session *s) {
	put_str(b, s->id, strlen(s->id));
	put_u64(b, s->p->id);
	put_u8(b, s->run.number != 0);
}

void session_started(struct session *s, struct conn *c) {
	struct process *p = s->p;
	memcpy(p->session_id, s->id, sizeof s->id);
	p->session_id_len = strlen(s->id);
	process_end_read(p); // between commands nobody waits for the output
	if (!watch_set(&s->status, EPOLLIN))
		process_kill(p);
	if (!c)
		return; // it was killed, and nobody will hear of it
	s->open = true;
	struct buf b = {0};
	put_session(&b, s);
	conn_answer(c, &b);
}

void put_sessions(struct buf *b) {
	size_t at = b->n;
	uint8_t n = 0;
	put_u32(b, 0);
	for (struct process *p = processes; p; p = p->next)
		if (p->session && p->session->open) {
			put_session(b, p->session);
			n++;
		}
	b->p[at + 3] = n;
}

// ---- run ----

static void on_text_broken(struct text *t) { process_kill(container_of(t, struct session, text)->p); }

// begin hands a command to the shell, which is free.
static void begin(struct session *s, struct conn *c, const struct session_command *cmd) {
	struct process *p = s->p;
	struct run *r = &s->run;
	struct err e;
	if (!text_put(&s->text, cmd->text)) {
		err_set(&e, EXHAUSTED, "", "no memory for the command: %s", errno_text(errno));
		conn_refuse(c, &e);
		return;
	}
	*r = (struct run){.number = ++s->last, .started = wall(), .started_at = live(), .from = p->spool.next, .reader = c};
	r->before = process_family(p, &r->before_len);
	if (p->group)
		r->oom_start = group_oom_kills(p->group);
	if (cmd->output_limit > 0)
		p->limit = r->from + (uint64_t)cmd->output_limit;
	if (cmd->timeout > 0)
		timer_set(&s->timeout, r->started_at + (uint64_t)cmd->timeout);
	process_follow(c, p, r->from, process_begin_read(p, r->from));
	c->reader.command = true;
	buf_free(&c->msg);
	// A shell that is gone is told by its exit, which ends the command.
	char line[24];
	int n = snprintf(line, sizeof line, "%llu\n", (unsigned long long)r->number);
	if (write(s->files.control, line, (size_t)n) < 0 && errno != EPIPE)
		process_kill(p); // it reads no commands any more
}

void session_run(struct conn *c, const struct session_command *cmd) {
	struct err e;
	struct session *s = find(cmd->session, &e);
	if (!s) {
		conn_refuse(c, &e);
	} else if (!s->run.number) {
		begin(s, c, cmd);
	} else {
		struct conn **end = &s->turns;
		while (*end)
			end = &(*end)->next;
		*end = c;
		c->next = NULL;
		c->session = s;
		c->wait = WAIT_TURN;
	}
}

void session_cancel(struct conn *c) {
	conn_unlink(&c->session->turns, c);
}

void session_reader_gone(struct conn *c) {
	struct session *s = c->reader.p->session;
	if (s && s->run.reader == c)
		s->run.reader = NULL;
}

void session_reader_aborts(struct conn *c) {
	struct session *s = c->reader.p->session;
	if (s && s->run.reader == c)
		session_interrupt_run(s);
}

// begin_next begins the command that waited longest, which may fail.
static void begin_next(struct session *s) {
	while (s->turns && !s->run.number) {
		struct conn *c = s->turns;
		struct dec d = {.p = c->msg.p, .n = c->msg.n};
		struct session_command cmd;
		s->turns = c->next;
		c->wait = WAIT_NOTHING;
		get_session_command(&d, &cmd);
		begin(s, c, &cmd);
	}
}

// ---- end ----

// complete ends the command under way. Where shell is not NULL, that is how the
// session's shell ended with it.
static void complete(struct session *s, const struct outcome *shell) {
	struct process *p = s->p;
	struct run *r = &s->run;
	struct outcome o = {.code = r->status};
	if (shell)
		o = *shell;
	else if (p->group)
		o.oom = group_oom_kills(p->group) > r->oom_start;
	o.claimed = true;
	o.timed_out = o.timed_out || r->timed_out;
	o.started = r->started;
	o.duration = live() - r->started_at;
	o.output_limit = p->over;
	p->over = false;
	p->limit = 0;
	timer_stop(&s->timeout);
	timer_stop(&s->interrupt);
	if (!text_clear(&s->text))
		process_kill(p);
	struct conn *c = r->reader;
	free(r->before);
	*r = (struct run){0};
	if (c) {
		c->reader.known = true;
		c->reader.last = p->spool.next;
		c->reader.outcome = o;
		reader_pump(c);
	}
}

void session_drained(struct session *s) {
	if (!s->run.number || !s->run.finished)
		return;
	complete(s, NULL);
	begin_next(s);
}

void session_ended(struct session *s) {
	struct process *p = s->p;
	forget(s);
	if (s->run.number)
		complete(s, &p->outcome);
	while (s->turns) {
		struct conn *c = s->turns;
		struct err e;
		s->turns = c->next;
		no_session(&e, (struct str){s->id, strlen(s->id)});
		conn_refuse(c, &e);
	}
	p->session = NULL;
	free_session(s);
}

bool parse_status(const char *line, size_t n, uint64_t *number, uint8_t *status) {
	const char *space = memchr(line, ' ', n);
	uint64_t v;
	if (!space || !parse_u64(line, (size_t)(space - line), UINT64_MAX, number) ||
	    !parse_u64(space + 1, n - 1 - (size_t)(space - line), 255, &v))
		return false;
	*status = (uint8_t)v;
	return *number > 0;
}

// on_status reads what the shell tells, until it closes its end: a command may
// do that, too, and then nothing but the shell's own end is told any more. Any
// process of the session can write there, which is one reason why the status
// is only claimed.
static void on_status(struct watch *w, uint32_t events) {
	struct session *s = container_of(w, struct session, status);
	char text[64]; // the shell writes each line at once, and a pipe keeps it whole
	(void)events;
	ssize_t n = read(w->fd, text, sizeof text);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		watch_close(w);
		return;
	}
	for (char *line = text, *end = text + n, *next; line < end; line = next + 1) {
		next = memchr(line, '\n', (size_t)(end - line));
		next = next ? next : end;
		uint64_t number;
		uint8_t status;
		if (!parse_status(line, (size_t)(next - line), &number, &status) || number != s->run.number || s->run.finished)
			continue;
		s->run.finished = true;
		s->run.status = status;
		timer_stop(&s->timeout);
		timer_stop(&s->interrupt);
		struct process *p = s->p; // the session may be gone after this
		process_drain(p);
		readers_pump(p);
		process_drained(p);
		return;
	}
}

// ---- interrupt ----

static void on_timeout(struct timer *t) {
	struct session *s = container_of(t, struct session, timeout);
	struct pollfd f = {.fd = s->status.fd, .events = POLLIN};
	// This may come before the word of a command that ended in time: what the
	// shell has told by now is read first. Not for ever, since anybody can write there.
	if (s->run.late < LATE_ROUNDS && poll(&f, 1, 0) > 0) {
		s->run.late++;
		timer_set(t, live());
		return;
	}
	s->run.timed_out = true;
	session_interrupt_run(s);
}

bool session_interrupt_run(struct session *s) {
	if (!s->run.number)
		return false;
	if (!s->run.finished && !s->run.tries)
		on_interrupt(&s->interrupt);
	return true;
}

// on_interrupt kills what the command under way started, again and again, until
// the shell comes back. A shell that does not is killed with the rest.
static void on_interrupt(struct timer *t) {
	struct session *s = container_of(t, struct session, interrupt);
	struct run *r = &s->run;
	if (r->tries++ == INTERRUPT_TRIES) {
		process_kill(s->p);
		return;
	}
	size_t n;
	int *list = process_family(s->p, &n);
	for (size_t i = 0; i < n; i++)
		if (list[i] != s->p->pid && !has_pid(r->before, r->before_len, list[i]))
			kill(list[i], SIGKILL);
	free(list);
	timer_set(t, now() + INTERRUPT_EVERY);
}

// ---- calls ----

void session_close(struct conn *c, struct str id) {
	struct err e;
	struct session *s = find(id, &e);
	if (!s) {
		conn_refuse(c, &e);
		return;
	}
	struct process *p = s->p;
	forget(s);
	c->next = p->waiters;
	p->waiters = c;
	c->p = p;
	c->wait = WAIT_END;
	process_kill(p);
}

void session_interrupt(struct conn *c, struct str id) {
	struct err e;
	struct session *s = find(id, &e);
	if (!s) {
		conn_refuse(c, &e);
		return;
	}
	if (s->run.number && !s->run.finished) {
		session_interrupt_run(s);
		conn_answer(c, NULL);
		return;
	}
	err_set(&e, CONFLICT, "session_id", "session %s runs no command", QUOTED(id.s, id.n));
	conn_refuse(c, &e);
}
