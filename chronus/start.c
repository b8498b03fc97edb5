#define _GNU_SOURCE
#include "process.h"

#include "child.h"
#include "pty.h"
#include "session.h"
#include "tag.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { STDOUT = 1, STDERR = 2, STREAM_PTY = 3 };

// child_files are the ends of pipes and terminals that the child gets. They are
// closed here once it has them.
struct child_files {
	int in, out, err, told;
};

static void child_files_close(struct child_files *f) {
	close_fd(&f->in);
	close_fd(&f->out);
	close_fd(&f->err);
	close_fd(&f->told);
}

bool pipe_new(int fds[2], int ours, struct err *e) {
	if (pipe2(fds, O_CLOEXEC) != 0) {
		fds[0] = fds[1] = -1;
		return err_set(e, EXHAUSTED, "", "no pipe: %s", errno_text(errno));
	}
	fcntl(fds[ours], F_SETFL, O_NONBLOCK);
	return true;
}

static void add_output(struct process *p, uint8_t stream, int fd) {
	p->outputs[p->output_count++] = (struct output){.w.fd = fd, .p = p, .stream = stream};
	p->open++;
}

static bool open_output(struct process *p, uint8_t stream, int *child, struct err *e) {
	int fds[2];
	if (!pipe_new(fds, 0, e))
		return false;
	*child = fds[1];
	add_output(p, stream, fds[0]);
	return true;
}

static bool open_terminal(struct process *p, const struct start *s, struct child_files *f, struct err *e) {
	int leader;
	if (!pty_open(s->size, &leader, &f->in, e))
		return false;
	p->pty = leader;
	p->is_terminal = true;
	add_output(p, STREAM_PTY, leader);
	// Another number, for a descriptor is looked at for one purpose only.
	p->input.w.fd = fcntl(leader, F_DUPFD_CLOEXEC, 3);
	p->input.pty = true;
	return p->input.w.fd >= 0 || err_set(e, EXHAUSTED, "pty", "no terminal: %s", errno_text(errno));
}

// open_files makes the command's pipes or terminal.
static bool open_files(struct process *p, const struct start *s, struct child_files *f, struct err *e) {
	int fds[2];
	if (!pipe_new(fds, 0, e))
		return false;
	p->exec.fd = fds[0];
	f->told = fds[1];
	if (s->pty)
		return open_terminal(p, s, f, e);
	if (s->in.n > 0 || s->open_stdin) {
		if (!pipe_new(fds, 1, e))
			return false;
		f->in = fds[0];
		p->input.w.fd = fds[1];
	}
	return open_output(p, STDOUT, &f->out, e) && open_output(p, STDERR, &f->err, e);
}

// has_exited tells whether a child has ended and was not waited for yet.
static bool has_exited(int pid) {
	siginfo_t info = {0};
	return waitid(P_PID, (id_t)pid, &info, WEXITED | WNOHANG | WNOWAIT) == 0 && info.si_pid == pid;
}

// on_timeout may be late, on a host that is busy, and before the word of an end.
// A command that ended by itself meanwhile did not time out. Stopped, it does not
// take the end of what it started, which is killed with it, for its own.
static void on_timeout(struct timer *t) {
	struct process *p = container_of(t, struct process, timer);
	kill(p->pid, SIGSTOP);
	if (has_exited(p->pid))
		return;
	p->timed_out = true;
	process_kill(p);
}

static void on_told(struct watch *w, uint32_t events) {
	(void)events;
	process_exec_told(container_of(w, struct process, exec), false);
}

static struct process *new_process(const struct start *s) {
	struct process *p = xcalloc(sizeof *p);
	p->pty = p->exec.fd = p->input.w.fd = -1;
	p->exec.ready = on_told;
	p->timer = (struct timer){.fire = on_timeout, .live = true};
	p->input.p = p;
	p->limit = (uint64_t)s->cmd.output_limit;
	p->tag = s->tag;
	p->keep = s->tag != 0;
	p->detached = s->detach;
	p->orphan = s->orphan;
	p->primary = p->spool.lossless = !s->detach;
	return p;
}

// reserve takes a place and a group.
static bool reserve(struct process *p, struct err *e) {
	if (p->tag && !tag_free(p->tag, e))
		return false;
	if (running >= MAX_PROCESSES)
		return err_set(e, EXHAUSTED, "", "%d commands run, which is the most of a sandbox", running);
	if (grouped && !(p->group = group_take(p))) {
		err_set(e, EXHAUSTED, "", "no free command group");
		e->need_group = true;
		return false;
	}
	return true;
}

static bool fork_child(struct process *p, const struct start *s, const struct child_files *f, struct err *e) {
	struct plan plan = {
		.cmd = &s->cmd, .group = p->group, .in = f->in >= 0 ? f->in : null_fd, .out = f->out, .err = f->err,
		.pty = s->pty, .session = p->session ? session_files(p->session) : NULL, .told = f->told,
	};
	p->started = wall();
	p->started_at = live();
	p->pid = child_clone(p->group ? p->group->dir : -1);
	if (p->pid == 0)
		child_run(&plan);
	return p->pid > 0 || err_set(e, EXHAUSTED, "", "no process can be started: %s", errno_text(errno));
}

struct process *process_start(struct conn *c, const struct start *s, struct session *session, struct err *e) {
	struct process *p = new_process(s);
	struct child_files f = {-1, -1, -1, -1};
	p->session = session;
	bool ok = reserve(p, e) && open_files(p, s, &f, e) && fork_child(p, s, &f, e) && watch_set(&p->exec, EPOLLIN);
	child_files_close(&f);
	if (!ok && p->pid <= 0) {
		process_free(p);
		return NULL;
	}
	p->next = starting;
	starting = p;
	running++;
	p->starter = c;
	c->p = p;
	c->wait = WAIT_EXEC;
	put_shown_argv(&p->argv, &s->cmd);
	if (s->in.n > 0) {
		// The message is given back while the command still reads.
		p->input.first = xmalloc(s->in.n);
		memcpy(p->input.first, s->in.s, s->in.n);
		p->input.first_len = s->in.n;
		p->input.keep_open = s->open_stdin || s->pty;
	}
	if (s->cmd.timeout > 0)
		timer_set(&p->timer, p->started_at + (uint64_t)s->cmd.timeout);
	return p;
}

static void failed(struct process *p, const uint8_t *told, size_t n) {
	struct conn *c = p->starter;
	p->state = FAILED; // kept until it was waited for, since its group is not free before
	p->starter = NULL;
	running--;
	if (p->group && told[0] == TOLD_BAD_GROUP)
		p->group->bad = true;
	if (c)
		conn_refuse_raw(c, told + 1, n - 1);
	timer_stop(&p->timer);
	outputs_close(p);
	input_close(&p->input);
	if (p->session)
		session_failed(p->session);
	p->session = NULL;
	tags_settle();
}

// publish makes a process that has exec'd visible.
static void publish(struct process *p) {
	static uint64_t last_id;
	for (struct process **at = &starting; *at; at = &(*at)->next)
		if (*at == p) {
			*at = p->next;
			break;
		}
	p->id = ++last_id;
	p->state = STARTED;
	struct process **end = &processes;
	while (*end)
		end = &(*end)->next;
	*end = p;
	p->next = NULL;
	tags_settle();
}

void process_exec_told(struct process *p, bool ended) {
	uint8_t told[4096]; // what is written at once, and so read at once
	ssize_t n = read(p->exec.fd, told, sizeof told);
	if (n < 0 && !ended)
		return;
	watch_close(&p->exec);
	if (n > 1) {
		failed(p, told, (size_t)n);
		return;
	}
	publish(p);
	for (int i = 0; i < p->output_count; i++)
		output_start(&p->outputs[i]);
	input_feed(p);
	struct conn *c = p->starter;
	p->starter = NULL;
	if (c && c->half && !p->detached) {
		// It went away, and sees its end when the orphan can be seen.
		c->wait = WAIT_NOTHING;
		conn_close(c);
		c = NULL;
	}
	if (p->session) {
		session_started(p->session, c);
	} else if (!c) {
		process_end_read(p); // an orphan, or one that was killed
	} else if (p->detached) {
		struct buf b = {0};
		put_started(&b, p);
		conn_put(c, FRAME_EVENT, b.p, b.n);
		buf_free(&b);
		conn_answer(c, NULL);
	} else {
		process_follow(c, p, 0, true);
		buf_free(&c->msg);
	}
}
