#define _GNU_SOURCE
#include "files.h"

#include "calls.h"
#include "child.h"
#include "group.h"
#include "process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

// The process is started when a call for files comes, and ends by itself when
// it has nothing to do. Each connection with such a call is handed to it over a
// socket, with what has been read of it, and is its own from then on.

static int program = -1;
static int pid;             // 0: it does not run
static struct watch socket_; // our end; fd -1: none
static struct watch exec_;   // tells how its exec went; -1: it did
static struct conn *waiters;
static int failures; // in a row, of processes that ended at once

#define MAX_FAILURES 3

static void on_socket(struct watch *w, uint32_t events);
static void on_exec(struct watch *w, uint32_t events);
static bool start(void);
static void restart(void);

void files_init(const char *path) {
	program = open(path, O_PATH | O_CLOEXEC);
	socket_.fd = exec_.fd = -1;
	socket_.ready = on_socket;
	exec_.ready = on_exec;
}

// hand_over sends a connection with n bytes of it. False, with errno: it did not go.
static bool hand_over(struct conn *c, const uint8_t *p, size_t n) {
	_Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {0};
	struct iovec v[2] = {{c->head, HEADER_LEN}, {(void *)(uintptr_t)p, n}};
	struct msghdr m = {.msg_iov = v, .msg_iovlen = 2, .msg_control = control, .msg_controllen = sizeof control};
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);
	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(h), &c->w.fd, sizeof(int));
	if (sendmsg(socket_.fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL) < 0)
		return false;
	failures = 0;
	c->wait = WAIT_NOTHING;
	conn_close(c);
	return true;
}

static void gone(void) {
	watch_close(&exec_);
	watch_close(&socket_);
	pid = 0; // it is waited for whenever it ends
}

bool call_to_files(struct conn *c, const uint8_t *p, size_t n) {
	if (!sandbox_ready)
		return false;
	if (socket_.fd >= 0 && exec_.fd < 0 && !waiters) {
		if (hand_over(c, p, n))
			return true;
		if (errno != EAGAIN && errno != ENOBUFS && errno != ETOOMANYREFS)
			gone();
	}
	if (socket_.fd < 0 && !start())
		return false;
	struct conn **end = &waiters;
	while (*end)
		end = &(*end)->next;
	*end = c;
	c->next = NULL;
	c->wait = WAIT_FILES; // what was read stays with the connection
	if (exec_.fd < 0)
		watch_set(&socket_, EPOLLIN | EPOLLOUT);
	return true;
}

void files_cancel(struct conn *c) {
	for (struct conn **at = &waiters; *at; at = &(*at)->next)
		if (*at == c) {
			*at = c->next;
			return;
		}
}

// hand_over_waiters hands over what waits, as far as the socket takes it.
static void hand_over_waiters(void) {
	while (waiters) {
		struct conn *c = waiters;
		if (hand_over(c, c->rest, c->rest ? c->rest_len : 0)) {
			waiters = c->next;
			continue;
		}
		if (errno == EAGAIN || errno == ENOBUFS || errno == ETOOMANYREFS)
			break;
		restart();
		return;
	}
	watch_set(&socket_, EPOLLIN | (waiters ? EPOLLOUT : 0));
}

// give_up has the calls that wait refused.
static void give_up(void) {
	gone();
	failures = 0;
	while (waiters) {
		struct conn *c = waiters;
		waiters = c->next;
		conn_no_files(c);
	}
}

// restart is for a process that went away, and starts another for calls that wait.
static void restart(void) {
	gone();
	if (waiters && (++failures == MAX_FAILURES || !start()))
		give_up();
}

static void on_socket(struct watch *w, uint32_t events) {
	(void)w;
	if (exec_.fd >= 0)
		on_exec(&exec_, events); // that comes first
	else if (events & ~(uint32_t)EPOLLOUT) // it says nothing but its end
		restart();
	else
		hand_over_waiters();
}

static void on_exec(struct watch *w, uint32_t events) {
	char byte;
	(void)events;
	ssize_t n = read(w->fd, &byte, 1);
	if (n < 0)
		return;
	watch_close(w);
	if (n > 0)
		give_up();
	else
		hand_over_waiters();
}

// ---- start ----

static _Noreturn void run(int fd, int told) {
	static char *const argv[] = {"chronus-files", NULL};
	static char *const env[] = {"GOMAXPROCS=2", "GOGC=50", "GOMEMLIMIT=24MiB", NULL};
	sigset_t none;
	sigemptyset(&none);
	// What it does for one sandbox is charged to that: it walks trees that an agent
	// made, and reads and writes its files.
	bool limited = group_join_limits();
	// By way of higher numbers, since one of ours may be where another goes.
	int file = fcntl(program, F_DUPFD_CLOEXEC, 10);
	told = fcntl(told, F_DUPFD_CLOEXEC, 10);
	if (limited && file >= 0 && told >= 0 && dup3(fd, 3, 0) == 3 && dup3(null_fd, 0, 0) == 0 && dup3(null_fd, 1, 0) == 1 &&
	    dup3(null_fd, 2, 0) == 2 && syscall(SYS_close_range, 4, ~0u, CLOSE_RANGE_CLOEXEC_) == 0 &&
	    sigprocmask(SIG_SETMASK, &none, NULL) == 0)
		syscall(SYS_execveat, file, "", argv, env, AT_EMPTY_PATH);
	if (write(told, "x", 1) < 0)
		_exit(126);
	_exit(127);
}

static bool start(void) {
	int pair[2], told[2];
	struct err e;
	if (program < 0 || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) != 0)
		return false;
	if (!pipe_new(told, 0, &e)) {
		close(pair[0]);
		close(pair[1]);
		return false;
	}
	socket_.fd = pair[0];
	exec_.fd = told[0];
	pid = child_clone(-1);
	if (pid == 0)
		run(pair[1], told[1]);
	close(pair[1]);
	close(told[1]);
	if (pid > 0 && watch_set(&socket_, EPOLLIN) && watch_set(&exec_, EPOLLIN))
		return true;
	gone();
	return false;
}

void files_reaped(int ended) {
	if (ended == pid)
		pid = 0; // its socket tells the rest
}

// An agent may stop all that it can signal; its files stay readable then.
void files_stopped(int stopped) {
	if (stopped == pid)
		kill(pid, SIGCONT);
}
