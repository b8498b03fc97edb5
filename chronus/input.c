#define _GNU_SOURCE
#include "process.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

static void on_ready(struct watch *w, uint32_t events);

static bool closed_error(struct err *e, const struct process *p) {
	return err_set(e, CONFLICT, "stdin", "the input of process %llu is closed, or was not opened by open_stdin", (unsigned long long)p->id);
}

// put writes what it can. False: nobody reads any more.
static bool put(struct input *in, const void *p, size_t n, size_t *done) {
	*done = 0;
	while (n > *done) {
		ssize_t k = write(in->w.fd, (const char *)p + *done, n - *done);
		if (k < 0 && errno == EINTR)
			continue;
		if (k < 0)
			return errno == EAGAIN;
		*done += (size_t)k;
	}
	return true;
}

// finish_input ends the input after all that was written: a pipe is closed, a
// terminal gets its end-of-file character.
static void finish_input(struct input *in) {
	if (in->pty)
		in->end_mark = true;
	else
		watch_close(&in->w);
}

// step writes what is first in turn. False: the pipe is full, or nothing is left.
static bool step(struct input *in) {
	size_t n;
	if (in->first) {
		bool ok = put(in, in->first + in->first_off, in->first_len - in->first_off, &n);
		in->first_off += n;
		if (ok && in->first_off < in->first_len)
			return false;
		free(in->first);
		in->first = NULL;
		if (ok && !in->keep_open)
			finish_input(in);
		return true;
	}
	if (in->end_mark) {
		bool ok = put(in, "\4", 1, &n);
		in->end_mark = ok && n == 0;
		return !in->end_mark;
	}
	struct conn *c = in->writers;
	if (!c)
		return false;
	struct writer *w = &c->writer;
	bool ok = put(in, w->data.s, w->data.n, &n);
	w->data.s += n;
	w->data.n -= n;
	w->taken += (uint32_t)n;
	if (!ok) {
		input_close(in);
		return false;
	}
	if (w->data.n > 0)
		return false;
	in->writers = c->next;
	if (w->eof)
		finish_input(in);
	struct buf b = {0};
	put_u32(&b, w->taken);
	conn_answer(c, &b);
	return true;
}

static void pump(struct input *in) {
	while (in->w.fd >= 0 && step(in))
		;
	if (in->w.fd < 0) {
		input_close(in);
		return;
	}
	bool waiting = in->first || in->end_mark || in->writers;
	if (!watch_set(&in->w, waiting ? EPOLLOUT : 0))
		input_close(in);
}

static void on_ready(struct watch *w, uint32_t events) {
	(void)events;
	pump(container_of(w, struct input, w));
}

void input_feed(struct process *p) {
	p->input.w.ready = on_ready;
	if (p->input.w.fd >= 0 && p->input.first)
		pump(&p->input);
}

void input_close(struct input *in) {
	watch_close(&in->w);
	free(in->first);
	in->first = NULL;
	in->end_mark = false;
	while (in->writers) {
		struct conn *c = in->writers;
		struct err e;
		in->writers = c->next;
		closed_error(&e, in->p);
		conn_refuse(c, &e);
	}
}

void input_write(struct conn *c) {
	struct process *p = c->writer.p;
	struct err e;
	if (p->input.w.fd < 0) {
		closed_error(&e, p);
		conn_refuse(c, &e);
		return;
	}
	struct conn **end = &p->input.writers;
	while (*end)
		end = &(*end)->next;
	*end = c;
	c->next = NULL;
	c->wait = WAIT_INPUT;
	pump(&p->input);
}

void input_cancel(struct conn *c) {
	struct input *in = &c->writer.p->input;
	conn_unlink(&in->writers, c);
	if (in->w.fd >= 0)
		pump(in); // for the next in turn
}
