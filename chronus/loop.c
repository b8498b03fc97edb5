#define _GNU_SOURCE
#include "loop.h"

#include "sys.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static int epoll_fd = -1;
static struct epoll_event batch[16]; // what the kernel told last
static int batch_len;
static struct timer *timers[2]; // of now() and of live(), the next one first
static uint64_t held_at;        // live() while that stands still; 0: it does not
static uint64_t skipped;        // by how much it is behind now()

void loop_init(void) {
	epoll_fd = epoll_create1(EPOLL_CLOEXEC);
	if (epoll_fd < 0)
		_exit(1);
}

static void forget(struct watch *w) {
	for (int i = 0; i < batch_len; i++)
		if (batch[i].data.ptr == w)
			batch[i].data.ptr = NULL;
}

bool watch_set(struct watch *w, uint32_t events) {
	if (events == w->events)
		return true;
	struct epoll_event e = {.events = events, .data.ptr = w};
	int op = !w->events ? EPOLL_CTL_ADD : events ? EPOLL_CTL_MOD : EPOLL_CTL_DEL;
	if (epoll_ctl(epoll_fd, op, w->fd, &e) != 0)
		return false;
	w->events = events;
	if (!events)
		forget(w);
	return true;
}

void watch_close(struct watch *w) {
	if (w->fd < 0)
		return;
	// A descriptor that a child inherited for a moment would stay in the set.
	watch_set(w, 0);
	w->events = 0;
	forget(w);
	close(w->fd);
	w->fd = -1;
}

uint64_t live(void) { return held_at ? held_at : now() - skipped; }

void live_hold(bool hold) {
	uint64_t t = live();
	if (held_at && !hold)
		skipped = now() - t;
	held_at = hold ? t : 0;
}

void timer_stop(struct timer *t) {
	if (!t->at)
		return;
	t->at = 0;
	for (struct timer **p = &timers[t->live]; *p; p = &(*p)->next)
		if (*p == t) {
			*p = t->next;
			return;
		}
}

void timer_set(struct timer *t, uint64_t at) {
	timer_stop(t);
	t->at = at ? at : 1;
	struct timer **p = &timers[t->live];
	while (*p && (*p)->at <= t->at)
		p = &(*p)->next;
	t->next = *p;
	*p = t;
}

static int wait_events(uint64_t ns) {
	static bool coarse; // a kernel or a filter without epoll_pwait2
	if (!coarse) {
		struct timespec t = {.tv_sec = (time_t)(ns / SECOND), .tv_nsec = (long)(ns % SECOND)};
		long n = syscall(SYS_epoll_pwait2, epoll_fd, batch, (int)(sizeof batch / sizeof *batch), &t, NULL, 0);
		if (n >= 0 || (errno != ENOSYS && errno != EPERM))
			return (int)n;
		coarse = true;
	}
	return epoll_wait(epoll_fd, batch, sizeof batch / sizeof *batch, (int)((ns + MILLISECOND - 1) / MILLISECOND));
}

// until_first is how long the first timer of a list is away, at most max.
static uint64_t until_first(const struct timer *first, uint64_t t, uint64_t max) {
	return !first ? max : first->at <= t ? 0 : min_u64(max, first->at - t);
}

// Those that are set meanwhile for now wait for the next round.
static void fire_timers(struct timer **list, uint64_t t) {
	while (*list && (*list)->at <= t) {
		struct timer *first = *list;
		*list = first->next;
		first->at = 0;
		first->fire(first);
	}
}

void loop_once(uint64_t max) {
	uint64_t ns = until_first(timers[0], now(), max);
	if (!held_at)
		ns = until_first(timers[1], live(), ns);
	int n = wait_events(ns);
	batch_len = n > 0 ? n : 0;
	for (int i = 0; i < batch_len; i++) {
		struct watch *w = batch[i].data.ptr;
		if (w)
			w->ready(w, batch[i].events);
	}
	batch_len = 0;
	fire_timers(&timers[0], now());
	if (!held_at)
		fire_timers(&timers[1], live());
}
