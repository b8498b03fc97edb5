// The one loop of the one thread: descriptors that are ready, and deadlines.
#ifndef CHRONUS_LOOP_H
#define CHRONUS_LOOP_H

#include "util.h"

#include <sys/epoll.h>

// watch is a descriptor that the loop looks at. While events is 0 it does not
// (the kernel would tell errors all the same).
struct watch {
	int fd;
	uint32_t events;
	void (*ready)(struct watch *, uint32_t events);
};

void loop_init(void);

// watch_set changes what is looked for. False: the kernel has no room.
bool watch_set(struct watch *w, uint32_t events);

// watch_close stops looking and closes the descriptor. No event that the
// kernel has told already is delivered any more, so w may be freed.
void watch_close(struct watch *w);

// live is now() without the times in which the sandbox was held, and stands still
// while it is: for all that an agent's time is measured by.
uint64_t live(void);
// live_hold has live stand still, or go on, where it does not yet.
void live_hold(bool hold);

// timer calls fire once, at the time `at` of now(), or of live(): then not while
// that stands still.
struct timer {
	uint64_t at; // 0: not set
	bool live;   // set once
	void (*fire)(struct timer *);
	struct timer *next;
};

void timer_set(struct timer *t, uint64_t at);
void timer_stop(struct timer *t);

// loop_once waits for something, for at most max ns, and handles it.
void loop_once(uint64_t max);

#endif
