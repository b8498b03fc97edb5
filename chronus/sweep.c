#include "process.h"

// How long what is left of ended commands is kept.
#define KEEP_TOLD (5 * SECOND)      // output, after the exit was delivered
#define KEEP_PROCESS (600 * SECOND) // the entry in the list, with its outcome
#define KEEP_FINISHED 64            // entries of ended commands
#define SWEEP_EVERY (10 * SECOND)

static void on_sweep(struct timer *t);
static struct timer sweeper = {.fire = on_sweep, .live = true};

void sweep_later(void) {
	if (!sweeper.at)
		timer_set(&sweeper, live() + SWEEP_EVERY);
}

// delivered reports whether the one reader that there was to be has all. What
// was detached may be read again and again.
static bool delivered(const struct process *p) { return p->told && !p->detached; }

static bool idle(const struct process *p) { return p->has_outcome && !p->readers; }

static void on_sweep(struct timer *timer) {
	uint64_t t = live();
	bool left = false;
	for (struct process *p = processes, *next; p; p = next) {
		next = p->next;
		if (!p->ended)
			continue;
		left = true;
		if (!idle(p))
			continue;
		if (delivered(p) && t - p->told >= KEEP_TOLD)
			spool_free(&p->spool);
		if (t - p->finished >= KEEP_PROCESS && p->open == 0)
			process_free(p);
	}
	if (left) // where nothing runs, only entries are left, which are small
		timer_set(timer, t + (running ? SWEEP_EVERY : KEEP_PROCESS / 4));
}

void forget_oldest(void) {
	int finished = 0;
	for (struct process *p = processes; p; p = p->next)
		finished += p->has_outcome;
	while (finished-- > KEEP_FINISHED) {
		// First those whose exit was told, then the oldest.
		struct process *oldest = NULL;
		for (struct process *p = processes; p; p = p->next)
			if (idle(p) && (!oldest || (p->told && !oldest->told)))
				oldest = p;
		if (!oldest)
			return;
		process_free(oldest);
	}
}

void spool_reclaim(void) {
	for (int pass = 0; pass < 2; pass++)
		for (struct process *p = processes; p && spool_tight(); p = p->next)
			if (idle(p) && p->open == 0 && (delivered(p) || pass == 1))
				spool_free(&p->spool);
}
