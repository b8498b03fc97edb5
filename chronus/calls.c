#include "calls.h"

#include "process.h"
#include "pty.h"
#include "session.h"
#include "tag.h"

#include <errno.h>
#include <signal.h>

// How long a start waits for a group whose command ended just now, and how
// often it looks: a process that was waited for leaves its group a moment later.
#define GROUP_WAIT (2 * MILLISECOND)
#define GROUP_EVERY (100 * MICROSECOND)

bool sandbox_ready;

static void on_retry(struct timer *t);
static struct timer retry = {.fire = on_retry};
static struct conn *group_waiters; // the one that waits longest first

// ---- starts ----

static void start_call(struct conn *c, struct dec *d) {
	struct start s;
	struct err e;
	bool session = c->call == CALL_OPEN_SESSION, tagged = c->call == CALL_START_TAGGED;
	(session ? get_session_request : tagged ? get_tagged_start : get_start)(d, &s);
	if (!dec_ok(d))
		conn_close(c);
	else if (!(session ? check_session_request : check_start)(&s, &e) || (tagged && !check_tag(s.tag, &e)))
		conn_refuse(c, &e);
	else if (session)
		session_open(c, &s);
	else if (!process_start(c, &s, NULL, &e))
		start_refused(c, &e);
}

void start_refused(struct conn *c, const struct err *e) {
	uint64_t t = now();
	if (!c->until)
		c->until = t + GROUP_WAIT;
	if (!e->need_group || t >= c->until || !group_emptying()) {
		c->until = 0;
		conn_refuse(c, e);
		return;
	}
	struct conn **end = &group_waiters;
	while (*end)
		end = &(*end)->next;
	*end = c;
	c->next = NULL;
	c->wait = WAIT_GROUP;
	if (!retry.at)
		timer_set(&retry, t + GROUP_EVERY);
}

void starts_retry(void) {
	struct conn *list = group_waiters;
	group_waiters = NULL;
	while (list) {
		struct conn *c = list;
		list = c->next;
		c->wait = WAIT_NOTHING;
		struct dec d = {.p = c->msg.p, .n = c->msg.n};
		start_call(c, &d);
		if (c->wait != WAIT_GROUP)
			c->until = 0;
	}
}

static void on_retry(struct timer *t) {
	(void)t;
	starts_retry();
}

// ---- processes ----

static void attach_call(struct conn *c, struct dec *d) {
	uint64_t id = get_u64(d), from = get_u64(d);
	struct err e;
	if (!dec_ok(d)) {
		conn_close(c);
		return;
	}
	struct process *p = process_find(id, &e);
	if (!p) {
		conn_refuse(c, &e);
		return;
	}
	process_follow(c, p, from, process_begin_read(p, from));
	reader_pump(c);
}

static void processes_call(struct conn *c, struct dec *d) {
	struct buf b = {0};
	uint32_t n = 0;
	if (!dec_ok(d)) {
		conn_close(c);
		return;
	}
	for (struct process *p = processes; p; p = p->next)
		n++;
	put_u32(&b, n);
	for (struct process *p = processes; p; p = p->next)
		put_process(&b, p);
	conn_answer(c, &b);
}

static bool signal_process(uint64_t id, int signal, bool tree, struct err *e) {
	struct process *p = check_signal(signal, e) ? process_find(id, e) : NULL;
	if (!p)
		return false;
	if (p->ended && (!tree || !process_lingers(p)))
		return err_set(e, CONFLICT, "", "process %llu has ended", (unsigned long long)id);
	if (tree && signal == SIGKILL)
		process_kill(p);
	else if (tree)
		process_signal(p, signal);
	else if (kill(p->pid, signal) != 0)
		return err_set(e, INTERNAL, "signal", "signal not sent: %s", errno_text(errno));
	return true;
}

static void signal_call(struct conn *c, struct dec *d) {
	uint64_t id = get_u64(d);
	int signal = (int)get_u32(d);
	bool tree = get_bool(d);
	struct err e;
	if (!dec_ok(d))
		conn_close(c);
	else if (signal_process(id, signal, tree, &e))
		conn_answer(c, NULL);
	else
		conn_refuse(c, &e);
}

static void write_stdin_call(struct conn *c, struct dec *d) {
	struct err e;
	uint64_t id = get_u64(d);
	bool eof = get_bool(d);
	struct writer w = {.eof = eof, .data = get_str(d, MAX_CHUNK)};
	if (!dec_ok(d)) {
		conn_close(c);
		return;
	}
	w.p = process_find(id, &e);
	if (!w.p) {
		conn_refuse(c, &e);
		return;
	}
	c->writer = w;
	input_write(c);
}

static bool resize_process(uint64_t id, struct window_size size, struct err *e) {
	struct process *p = check_size(size, e) ? process_find(id, e) : NULL;
	if (!p)
		return false;
	if (!p->is_terminal)
		return err_set(e, CONFLICT, "pty", "process %llu has no terminal", (unsigned long long)id);
	if (!pty_resize(p->pty, size))
		return err_set(e, CONFLICT, "pty", "the terminal of process %llu is closed", (unsigned long long)id);
	return true;
}

static void resize_call(struct conn *c, struct dec *d) {
	uint64_t id = get_u64(d);
	struct window_size size = get_window_size(d);
	struct err e;
	if (!dec_ok(d))
		conn_close(c);
	else if (resize_process(id, size, &e))
		conn_answer(c, NULL);
	else
		conn_refuse(c, &e);
}

// ---- sessions ----

static void run_command_call(struct conn *c, struct dec *d) {
	struct session_command cmd;
	struct err e;
	get_session_command(d, &cmd);
	if (!dec_ok(d))
		conn_close(c);
	else if (!check_session_command(&cmd, &e))
		conn_refuse(c, &e);
	else
		session_run(c, &cmd);
}

static void sessions_call(struct conn *c, struct dec *d) {
	struct buf b = {0};
	if (!dec_ok(d)) {
		conn_close(c);
		return;
	}
	put_sessions(&b);
	conn_answer(c, &b);
}

static void session_call(struct conn *c, struct dec *d, void (*call)(struct conn *, struct str)) {
	struct str id = get_str(d, MAX_SESSION_ID);
	if (!dec_ok(d))
		conn_close(c);
	else
		call(c, id);
}

// ---- all ----

static void info_call(struct conn *c, struct dec *d) {
	struct buf b = {0};
	if (!dec_ok(d)) {
		conn_close(c);
		return;
	}
	put_u32(&b, VERSION);
	put_u32(&b, (uint32_t)running);
	put_u32(&b, (uint32_t)session_count);
	conn_answer(c, &b);
}

// hold_call has the time of commands stand still or go on. Between the two the
// sandbox is frozen, and thawed again, by the host.
static void hold_call(struct conn *c, struct dec *d) {
	bool hold = get_bool(d);
	if (!dec_ok(d)) {
		conn_close(c);
		return;
	}
	live_hold(hold);
	conn_answer(c, NULL);
}

void call_serve(struct conn *c, uint8_t call, struct dec *d) {
	struct err e;
	bool rights = call == CALL_SETUP || call == CALL_ADD_GROUP;
	if ((c->fds_len > 0 && !rights) || call < CALL_INFO || call > CALL_FORGET_TAG) {
		conn_close(c); // descriptors that nobody asked for, or no call
		return;
	}
	if (!sandbox_ready && call != CALL_INFO && !rights) {
		err_set(&e, CONFLICT, "", "this sandbox has not been set up yet");
		conn_refuse(c, &e);
		return;
	}
	switch (call) {
	case CALL_INFO: info_call(c, d); return;
	case CALL_START:
	case CALL_START_TAGGED:
	case CALL_OPEN_SESSION: start_call(c, d); return;
	case CALL_ATTACH: attach_call(c, d); return;
	case CALL_PROCESSES: processes_call(c, d); return;
	case CALL_SIGNAL: signal_call(c, d); return;
	case CALL_WRITE_STDIN: write_stdin_call(c, d); return;
	case CALL_RESIZE: resize_call(c, d); return;
	case CALL_RUN_COMMAND: run_command_call(c, d); return;
	case CALL_SESSIONS: sessions_call(c, d); return;
	case CALL_CLOSE_SESSION: session_call(c, d, session_close); return;
	case CALL_INTERRUPT: session_call(c, d, session_interrupt); return;
	case CALL_HOLD: hold_call(c, d); return;
	case CALL_FIND_TAG: find_tag_call(c, d); return;
	case CALL_FORGET_TAG: forget_tag_call(c, d); return;
	case CALL_SETUP: setup_call(c, d); return;
	case CALL_ADD_GROUP: add_group_call(c, d); return;
	default: conn_close(c); // a call for files, which come another way
	}
}

void call_writable(struct conn *c) {
	if (c->wait == WAIT_OUTPUT)
		reader_pump(c);
}

bool call_survives(struct conn *c) {
	return c->wait == WAIT_NOTHING || (c->wait == WAIT_EXEC && (c->p->detached || c->p->orphan));
}

// start_gone is for the connection of a start under way.
static void start_gone(struct conn *c) {
	struct process *p = c->p;
	p->starter = NULL;
	if (!p->detached && !p->orphan)
		process_kill(p);
}

// output_gone is for the connection of a reader.
static void output_gone(struct conn *c) {
	struct process *p = c->reader.p;
	if (c->reader.command)
		session_reader_gone(c);
	reader_remove(c);
	if ((c->call == CALL_START || c->call == CALL_START_TAGGED) && !p->orphan)
		process_kill(p);
}

// A command that waits for its turn needs no more than that its connection goes.
void call_abort(struct conn *c) {
	if (c->wait == WAIT_OUTPUT)
		session_reader_aborts(c);
}

void call_cancel(struct conn *c) {
	enum wait wait = c->wait;
	c->wait = WAIT_NOTHING;
	switch (wait) {
	case WAIT_NOTHING: return;
	case WAIT_GROUP: conn_unlink(&group_waiters, c); return;
	case WAIT_EXEC: start_gone(c); return;
	case WAIT_OUTPUT: output_gone(c); return;
	case WAIT_INPUT: input_cancel(c); return;
	case WAIT_TURN: session_cancel(c); return;
	case WAIT_END: conn_unlink(&c->p->waiters, c); return;
	case WAIT_TAG: find_tag_cancel(c); return;
	}
}
