#define _GNU_SOURCE
#include "reaper.h"

#include "calls.h"
#include "process.h"

#include <signal.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

// MAX_REAPED bounds the work of one round.
#define MAX_REAPED 256

static void on_more(struct timer *t);
static struct timer more = {.fire = on_more};

static uint64_t time_ns(struct timeval t) { return (uint64_t)t.tv_sec * SECOND + (uint64_t)t.tv_usec * MICROSECOND; }

static void reap(void) {
	struct rusage u;
	int status;
	for (int i = 0; i < MAX_REAPED; i++) {
		pid_t pid = wait4(-1, &status, WNOHANG, &u);
		if (pid <= 0)
			return;
		struct exit e = {.status = status, .cpu = time_ns(u.ru_utime) + time_ns(u.ru_stime), .max_rss = (uint64_t)u.ru_maxrss << 10};
		struct process *p = process_of_pid(pid);
		if (p)
			process_reaped(p, &e);
	}
	timer_set(&more, now());
}

static void on_more(struct timer *t) {
	(void)t;
	reap();
}

static void on_child(struct watch *w, uint32_t events) {
	struct signalfd_siginfo info; // one signal stands for all children that ended
	(void)events;
	if (read(w->fd, &info, sizeof info) > 0)
		reap();
	starts_retry();
}

void reaper_init(void) {
	static struct watch w = {.ready = on_child};
	sigset_t set;
	signal(SIGCHLD, SIG_DFL); // ignored, children would not be told of
	sigemptyset(&set);
	sigaddset(&set, SIGCHLD);
	w.fd = signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK);
	sigaddset(&set, SIGPIPE); // a write tells by its error
	if (w.fd < 0 || sigprocmask(SIG_BLOCK, &set, NULL) != 0 || !watch_set(&w, EPOLLIN))
		_exit(1);
}
