#include "process.h"

#include "tag.h"

// How long what is left of ended commands is kept. That of one whose tag was not
// forgotten is kept for as long as there is room.
#define KEEP_TOLD (5 * SECOND)      // output, after the exit was delivered
#define KEEP_PROCESS (600 * SECOND) // the entry in the list, with its outcome
#define KEEP_FINISHED 64            // entries of ended commands: MaxEnded of internal/chronusapi
#define SWEEP_EVERY (10 * SECOND)

static void on_sweep(struct timer *t);
static struct timer sweeper = {.fire = on_sweep, .live = true};

void sweep_later(void) {
	uint64_t at = live() + SWEEP_EVERY;
	if (!sweeper.at || sweeper.at > at)
		timer_set(&sweeper, at);
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
		if (!p->ended || p->keep)
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

// need tells how likely it is that somebody asks for a command that has ended.
static int need(const struct process *p) { return p->keep ? 2 : p->told ? 0 : 1; }

void forget_oldest(void) {
	int finished = 0;
	for (struct process *p = processes; p; p = p->next)
		finished += p->has_outcome;
	while (finished-- > KEEP_FINISHED) {
		// First those whose exit was told, then the oldest; last those that are kept.
		struct process *oldest = NULL;
		for (struct process *p = processes; p; p = p->next)
			if (idle(p) && (!oldest || need(p) < need(oldest)))
				oldest = p;
		if (!oldest)
			return;
		if (oldest->keep)
			tag_dropped(oldest->tag);
		process_free(oldest);
	}
}

void spool_reclaim(void) {
	for (int pass = 0; pass < 3; pass++)
		for (struct process *p = processes; p && spool_tight(); p = p->next)
			if (idle(p) && p->open == 0 && (p->keep ? pass == 2 : pass > 0 || delivered(p)))
				spool_free(&p->spool);
}
