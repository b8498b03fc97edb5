#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <sys/ioctl.h>
#include <unistd.h>

// MAX_TERMINAL is what a terminal is drained of at most: more than its buffers hold.
#define MAX_TERMINAL (256u << 10)

enum { STREAM_PTY = 3 };

enum step { MOVED, EMPTY, STALLED, ENDED };

// discard reads and forgets, so that nobody blocks before the kill.
static enum step discard(struct output *o) {
	static char scratch[MIN_BLOCK];
	ssize_t n = read(o->w.fd, scratch, sizeof scratch);
	if (n <= 0)
		return n < 0 && (errno == EAGAIN || errno == EINTR) ? EMPTY : ENDED;
	o->total += (uint64_t)n;
	return MOVED;
}

// step moves what one read returns into the spool.
static enum step step(struct output *o) {
	struct process *p = o->p;
	if (p->over)
		return discard(o);
	size_t room;
	uint8_t *space = spool_space(&p->spool, o->stream, &room);
	if (!space)
		return STALLED;
	ssize_t n = read(o->w.fd, space, room);
	if (n <= 0) // EIO is the end of a terminal
		return n < 0 && (errno == EAGAIN || errno == EINTR) ? EMPTY : ENDED;
	o->total += (uint64_t)n;
	if (p->limit > 0 && p->spool.next + (uint64_t)n > p->limit) {
		n = (ssize_t)(p->limit - p->spool.next);
		p->over = true;
	}
	spool_wrote(&p->spool, (size_t)n);
	if (p->over)
		process_over(p);
	return MOVED;
}

static void output_end(struct output *o) {
	if (o->p->pty == o->w.fd)
		o->p->pty = -1;
	watch_close(&o->w);
	o->draining = o->stalled = false;
	o->p->open--;
}

// pump reads once, or as long as the output is being drained.
static void pump(struct output *o) {
	do {
		switch (step(o)) {
		case MOVED:
			o->draining = o->draining && o->total < o->drain_to;
			break;
		case EMPTY:
			o->draining = false;
			break;
		case STALLED:
			o->stalled = true;
			watch_set(&o->w, 0);
			return;
		case ENDED:
			output_end(o);
			break;
		}
	} while (o->draining);
}

// told lets others know what a pump changed.
static void told(struct process *p, bool was_draining) {
	readers_pump(p);
	if (was_draining)
		process_drained(p);
}

static void on_ready(struct watch *w, uint32_t events) {
	struct output *o = container_of(w, struct output, w);
	bool was_draining = o->draining;
	if (!(events & EPOLLIN) && o->stream != STREAM_PTY)
		output_end(o);
	else
		pump(o);
	told(o->p, was_draining);
}

void output_start(struct output *o) {
	o->w.ready = on_ready;
	if (!watch_set(&o->w, EPOLLIN))
		output_end(o);
}

void output_resume(struct process *p) {
	for (int i = 0; i < p->output_count; i++) {
		struct output *o = &p->outputs[i];
		if (!o->stalled)
			continue;
		bool was_draining = o->draining;
		o->stalled = false;
		if (was_draining)
			pump(o);
		if (o->w.fd >= 0 && !o->stalled && !watch_set(&o->w, EPOLLIN))
			output_end(o);
		if (was_draining)
			told(p, true);
	}
}

void process_drain(struct process *p) {
	for (int i = 0; i < p->output_count; i++) {
		struct output *o = &p->outputs[i];
		int n = MAX_TERMINAL; // a terminal does not tell what it holds
		if (o->w.fd < 0 || (o->stream != STREAM_PTY && (ioctl(o->w.fd, FIONREAD, &n) != 0 || n <= 0)))
			continue;
		o->drain_to = max_u64(o->drain_to, o->total + (uint64_t)n);
		o->draining = true;
		if (!o->stalled)
			pump(o);
	}
}

bool process_draining(const struct process *p) {
	bool draining = false;
	for (int i = 0; i < p->output_count; i++)
		draining = draining || p->outputs[i].draining;
	return draining;
}

void outputs_close(struct process *p) {
	for (int i = 0; i < p->output_count; i++)
		if (p->outputs[i].w.fd >= 0)
			output_end(&p->outputs[i]);
}
