#define _GNU_SOURCE
#include "process.h"

#include "session.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>

struct process *processes, *starting;
int running;

struct process *process_find(uint64_t id, struct err *e) {
	for (struct process *p = processes; p; p = p->next)
		if (p->id == id)
			return p;
	err_set(e, NOT_FOUND, "", "no process %llu", (unsigned long long)id);
	return NULL;
}

struct process *process_of_pid(int pid) {
	struct process *const lists[] = {processes, starting};
	for (int i = 0; i < 2; i++)
		for (struct process *p = lists[i]; p; p = p->next)
			if (p->pid == pid && !p->ended)
				return p;
	return NULL;
}

void process_free(struct process *p) {
	for (struct process **lists[] = {&processes, &starting}, ***l = lists; l < lists + 2; l++)
		for (struct process **at = *l; *at; at = &(*at)->next)
			if (*at == p) {
				*at = p->next;
				break;
			}
	groups_forget(p);
	timer_stop(&p->timer);
	outputs_close(p);
	input_close(&p->input);
	watch_close(&p->exec);
	spool_free(&p->spool);
	buf_free(&p->argv);
	free(p);
}

void process_over(struct process *p) {
	if (!p->session || !session_interrupt_run(p->session))
		process_kill(p);
}

static struct outcome outcome_of(struct process *p) {
	int status = p->exit.status;
	struct outcome o = {
		// Any other end is its own: it was on its way when the time was over.
		.timed_out = p->timed_out && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL,
		.output_limit = p->over,
		.started = p->started,
		.duration = p->elapsed,
		.cpu = p->exit.cpu,
		.max_rss = p->exit.max_rss,
	};
	if (WIFSIGNALED(status))
		o.signal = (uint16_t)WTERMSIG(status);
	else
		o.code = (uint16_t)WEXITSTATUS(status);
	int64_t kills = p->group ? group_oom_kills(p->group) : -1;
	if (kills >= 0) {
		o.oom = kills > p->group->oom_kills;
		p->group->oom_kills = kills;
	}
	return o;
}

// complete tells the end of a process of which all that it wrote is in the spool.
static void complete(struct process *p) {
	p->outcome = outcome_of(p);
	p->has_outcome = true;
	p->end_seq = p->spool.next;
	p->finished = live();
	spool_trim(&p->spool);
	running--;
	input_close(&p->input);
	for (struct reader *r = p->readers; r; r = r->next)
		if (!r->command) {
			r->known = true;
			r->last = p->end_seq;
			r->outcome = p->outcome;
		}
	if (p->session)
		session_ended(p->session);
	readers_pump(p);
	while (p->waiters) {
		struct conn *c = p->waiters;
		p->waiters = c->next;
		conn_answer(c, NULL);
	}
	sweep_later();
}

void process_drained(struct process *p) {
	if (process_draining(p))
		return;
	if (p->session)
		session_drained(p->session);
	if (p->ended && p->state == STARTED && !p->has_outcome)
		complete(p);
}

void process_reaped(struct process *p, const struct exit *e) {
	p->ended = true;
	p->exit = *e;
	p->elapsed = live() - p->started_at;
	if (p->group)
		group_give_back(p->group);
	timer_stop(&p->timer);
	if (p->state == STARTING)
		process_exec_told(p, true);
	if (p->state == FAILED) {
		process_free(p);
		return;
	}
	// What its pipes hold now belongs to its output; what descendants write
	// later is not waited for.
	process_drain(p);
	readers_pump(p);
	process_drained(p);
}

bool process_lingers(struct process *p) {
	return p->group ? p->group->owner == p && group_populated(p->group) : p->open > 0;
}

void put_process(struct buf *b, struct process *p) {
	put_u64(b, p->id);
	put_u32(b, (uint32_t)p->pid);
	buf_add(b, p->argv.p, p->argv.n);
	put_u64(b, (uint64_t)p->started);
	put_u8(b, p->has_outcome);
	if (p->has_outcome)
		put_outcome(b, &p->outcome);
	put_u64(b, p->spool.next);
	put_u64(b, spool_first(&p->spool));
	put_u8(b, p->is_terminal);
	put_u8(b, p->has_outcome && process_lingers(p));
	put_str(b, p->session_id, p->session_id_len);
}
