#define _GNU_SOURCE
#include "conn.h"

#include "command.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_FDS 209  // that come with one message: Setup's
#define OUT_ROOM (32u << 10) // bytes that are put before they are sent

static const uint8_t preface[HEADER_LEN - 1] = {'d', 's', 'e', 'c'};
static struct conn *unsettled;

static void unsettle(struct conn *c) {
	if (c->unsettled)
		return;
	c->unsettled = true;
	c->next_unsettled = unsettled;
	unsettled = c;
}

static void watch_conn(struct conn *c) {
	uint32_t events = (c->half ? 0 : EPOLLRDHUP) | (c->early ? 0 : EPOLLIN) | (c->blocked ? EPOLLOUT : 0);
	if (!watch_set(&c->w, events))
		conn_close(c);
}

// busy: the next request has to wait.
static bool busy(const struct conn *c) { return c->wait != WAIT_NOTHING || c->blocked; }

// abortable: while this call is under way its client may send one frame, to have
// the command interrupted. A client that only goes away leaves it running.
static bool abortable(const struct conn *c) {
	return c->call == CALL_RUN_COMMAND && (c->wait == WAIT_TURN || c->wait == WAIT_OUTPUT);
}

static void flush(struct conn *c);

// ---- in ----

// message_grow makes room for n more bytes and a NUL.
static bool message_grow(struct conn *c, size_t n) {
	if (c->msg.n + n + 1 <= c->msg.cap)
		return true;
	uint8_t *p = realloc(c->msg.p, c->msg.n + n + 1);
	if (!p)
		return false;
	c->msg.p = p;
	c->msg.cap = c->msg.n + n + 1;
	return true;
}

static void message_done(struct conn *c) {
	uint8_t type = c->head[0];
	size_t n = c->msg.n;
	c->head_len = 0;
	c->in_payload = false;
	if (type == FRAME_MORE)
		return;
	if (!c->msg.p && !message_grow(c, 0)) {
		conn_close(c);
		return;
	}
	c->msg.p[n] = 0;
	struct dec d = {.p = c->msg.p, .n = n};
	c->call = type;
	call_serve(c, type, &d);
}

static void begin_payload(struct conn *c, uint32_t len) {
	c->in_payload = true;
	c->left = len;
	if (len == 0)
		message_done(c);
	else if (!message_grow(c, len))
		conn_close(c);
}

static void header_done(struct conn *c) {
	uint8_t type = c->head[0];
	struct dec d = {.p = c->head + 1, .n = 4};
	uint32_t len = get_u32(&d);
	if (abortable(c)) {
		if (type == FRAME_ABORT && len == 0)
			call_abort(c);
		conn_close(c);
		return;
	}
	if (len > MAX_FRAME || c->msg.n + len > MAX_MESSAGE || (type == FRAME_MORE && len == 0)) {
		conn_close(c);
		return;
	}
	begin_payload(c, len);
}

static void preface_done(struct conn *c) {
	struct err e;
	uint8_t version = c->head[HEADER_LEN - 1];
	c->head_len = 0;
	c->greeted = true;
	if (memcmp(c->head, preface, sizeof preface) != 0) {
		conn_close(c);
	} else if (version != VERSION && version != VERSION - 1) {
		err_set(&e, UNSUPPORTED, "", "chronus speaks versions %d and %d, not %d", VERSION - 1, VERSION, version);
		conn_refuse(c, &e);
		flush(c);
		conn_close(c);
	}
}

static size_t take_head(struct conn *c, const uint8_t *p, size_t n) {
	size_t k = min_size(n, (size_t)(HEADER_LEN - c->head_len));
	memcpy(c->head + c->head_len, p, k);
	c->head_len = (uint8_t)(c->head_len + k);
	if (c->head_len < HEADER_LEN)
		return k;
	if (!c->greeted)
		preface_done(c);
	else
		header_done(c);
	return k;
}

static size_t take_payload(struct conn *c, const uint8_t *p, size_t n) {
	size_t k = min_size(n, c->left);
	if (p != c->msg.p + c->msg.n)
		memcpy(c->msg.p + c->msg.n, p, k);
	c->msg.n += k;
	c->left -= (uint32_t)k;
	if (c->left == 0)
		message_done(c);
	return k;
}

static void feed(struct conn *c, const uint8_t *p, size_t n) {
	while (n > 0 && !c->dead) {
		if (busy(c) && !abortable(c)) { // bytes that a client should not have sent yet
			c->rest = xmalloc(n);
			memcpy(c->rest, p, n);
			c->rest_len = n;
			c->early = true;
			watch_conn(c);
			return;
		}
		size_t k = c->in_payload ? take_payload(c, p, n) : take_head(c, p, n);
		p += k;
		n -= k;
	}
}

// keep_fds takes the descriptors that came with a message. False: it is malformed.
static bool keep_fds(struct conn *c, struct msghdr *m) {
	bool ok = !(m->msg_flags & MSG_CTRUNC);
	for (struct cmsghdr *h = CMSG_FIRSTHDR(m); h; h = CMSG_NXTHDR(m, h)) {
		if (h->cmsg_level != SOL_SOCKET || h->cmsg_type != SCM_RIGHTS)
			continue;
		size_t n = (h->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		c->fds = xrealloc(c->fds, ((size_t)c->fds_len + n) * sizeof(int));
		memcpy(c->fds + c->fds_len, CMSG_DATA(h), n * sizeof(int));
		c->fds_len += (int)n;
	}
	return ok && c->fds_len <= MAX_FDS;
}

static void on_readable(struct conn *c) {
	// One for all connections: what is in it is used up before the next read.
	static uint8_t scratch[4096];
	static _Alignas(struct cmsghdr) char control[CMSG_SPACE(MAX_FDS * sizeof(int))];
	struct iovec v = {.iov_base = scratch, .iov_len = sizeof scratch};
	if (c->in_payload)
		v = (struct iovec){.iov_base = c->msg.p + c->msg.n, .iov_len = c->left};
	struct msghdr m = {.msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof control};
	ssize_t n = recvmsg(c->w.fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0 || !keep_fds(c, &m))
		conn_close(c);
	else
		feed(c, v.iov_base, (size_t)n);
}

// ---- out ----

// flush sends what it can of what was put.
static void flush(struct conn *c) {
	while (c->sent < c->out.n && !c->dead) {
		ssize_t n = send(c->w.fd, c->out.p + c->sent, c->out.n - c->sent, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0 && errno == EAGAIN) {
			if (!c->blocked) {
				c->blocked = true;
				watch_conn(c);
			}
			return;
		}
		if (n < 0 && (errno == EPIPE || errno == ECONNRESET)) {
			// The client is gone. Its last word may still be there to be read: the
			// event that tells of its end closes the connection, see on_ready.
			c->blocked = true;
			break;
		}
		if (n < 0) {
			conn_close(c);
			return;
		}
		c->sent += (size_t)n;
	}
	c->sent = 0;
	buf_free(&c->out);
}

bool conn_full(struct conn *c) {
	if (c->out.n - c->sent >= OUT_ROOM && !c->blocked)
		flush(c);
	return c->dead || c->blocked;
}

static void on_held(struct timer *t) { unsettle(container_of(t, struct conn, held)); }

void conn_hold(struct conn *c, uint64_t ns) { timer_set(&c->held, now() + ns); }

static void put_frame(struct conn *c, uint8_t type, const void *p, size_t n) {
	timer_stop(&c->held);
	put_u8(&c->out, type);
	put_str(&c->out, p, n);
}

void conn_put(struct conn *c, uint8_t type, const void *p, size_t n) {
	const uint8_t *b = p;
	for (; n > MAX_FRAME; b += MAX_FRAME, n -= MAX_FRAME)
		put_frame(c, FRAME_MORE, b, MAX_FRAME);
	put_frame(c, type, b, n);
	unsettle(c);
}

void conn_put_data(struct conn *c, uint8_t type, const struct buf *head, const void *p, size_t n) {
	timer_stop(&c->held);
	put_u8(&c->out, type);
	put_u32(&c->out, (uint32_t)(head->n + n));
	buf_add(&c->out, head->p, head->n);
	unsettle(c);
	size_t sent = 0;
	if (n >= 4096 && !c->blocked) {
		struct iovec v[2] = {{c->out.p + c->sent, c->out.n - c->sent}, {(void *)(uintptr_t)p, n}};
		struct msghdr m = {.msg_iov = v, .msg_iovlen = 2};
		ssize_t k = sendmsg(c->w.fd, &m, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (k > 0) {
			sent = (size_t)k > v[0].iov_len ? (size_t)k - v[0].iov_len : 0;
			c->sent += (size_t)k - sent;
		}
	}
	if (c->sent == c->out.n)
		c->sent = c->out.n = 0;
	buf_add(&c->out, (const uint8_t *)p + sent, n - sent);
	if (sent < n)
		conn_full(c); // tells whether the socket is full
}

// call_over makes the connection ready for the next request.
static void call_over(struct conn *c) {
	c->wait = WAIT_NOTHING;
	c->half = false;
	buf_free(&c->msg);
	unsettle(c);
}

void conn_answer(struct conn *c, struct buf *result) {
	conn_put(c, FRAME_RESULT, result ? result->p : NULL, result ? result->n : 0);
	if (result)
		buf_free(result);
	call_over(c);
}

void conn_refuse_raw(struct conn *c, const void *p, size_t n) {
	conn_put(c, FRAME_ERROR, p, n);
	call_over(c);
}

void conn_refuse(struct conn *c, const struct err *e) {
	struct buf b = {0};
	put_err(&b, e);
	conn_refuse_raw(c, b.p, b.n);
	buf_free(&b);
}

// ---- life ----

void conn_unlink(struct conn **list, const struct conn *c) {
	for (; *list; list = &(*list)->next)
		if (*list == c) {
			*list = c->next;
			return;
		}
}

static void on_ready(struct watch *w, uint32_t events) {
	struct conn *c = container_of(w, struct conn, w);
	if (events & EPOLLIN && abortable(c)) {
		on_readable(c); // its last word comes with its end
		if (c->dead)
			return;
		events &= ~(uint32_t)EPOLLIN;
	}
	if (events & (EPOLLERR | EPOLLHUP | EPOLLRDHUP) && busy(c)) {
		if (events & (EPOLLERR | EPOLLHUP) || !call_survives(c)) {
			conn_close(c); // a client that goes away in a call has given it up
			return;
		}
		c->half = c->early = true; // it still reads
		watch_conn(c);
	}
	if (events & EPOLLOUT && c->blocked) {
		c->blocked = false;
		flush(c);
		if (!c->dead && !c->blocked) {
			watch_conn(c);
			unsettle(c);
			call_writable(c);
		}
	}
	if (c->dead || c->early || !(events & ~(uint32_t)EPOLLOUT))
		return; // early: settle takes first what came first
	if (!busy(c)) {
		on_readable(c);
	} else {
		c->early = true; // left in the socket until the call has ended
		watch_conn(c);
	}
}

struct conn *conn_new(int fd) {
	struct conn *c = xcalloc(sizeof *c);
	c->w = (struct watch){.fd = fd, .ready = on_ready};
	c->held.fire = on_held;
	watch_conn(c);
	return c;
}

void conn_close(struct conn *c) {
	if (c->dead)
		return;
	c->dead = true;
	watch_close(&c->w);
	timer_stop(&c->held);
	if (c->wait != WAIT_NOTHING)
		call_cancel(c);
	unsettle(c);
}

static void conn_free(struct conn *c) {
	for (int i = 0; i < c->fds_len; i++)
		close(c->fds[i]);
	free(c->fds);
	free(c->rest);
	buf_free(&c->msg);
	buf_free(&c->out);
	free(c);
}

static void settle(struct conn *c) {
	if (!c->dead && !c->blocked && !c->held.at)
		flush(c);
	if (c->dead || busy(c) || !c->early)
		return;
	uint8_t *p = c->rest;
	c->rest = NULL;
	c->early = false;
	watch_conn(c);
	if (p)
		feed(c, p, c->rest_len);
	free(p);
}

void conn_settle(void) {
	struct conn *dead = NULL;
	while (unsettled) {
		struct conn *c = unsettled;
		unsettled = c->next_unsettled;
		c->unsettled = false;
		settle(c);
		if (c->dead && !c->unsettled) {
			c->unsettled = true; // keeps it off the list
			c->next_unsettled = dead;
			dead = c;
		}
	}
	while (dead) {
		struct conn *c = dead;
		dead = c->next_unsettled;
		conn_free(c);
	}
}

// ---- accept ----

static struct {
	struct watch w;
	struct timer retry;
	bool outside;
} listener;

// from_outside reports whether a peer is outside of this PID namespace, which
// is where it has no number.
static bool from_outside(int fd) {
	struct ucred u;
	socklen_t n = sizeof u;
	return getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &u, &n) == 0 && u.pid == 0;
}

static void on_accept(struct watch *w, uint32_t events) {
	(void)events;
	int fd = accept4(w->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
	if (fd >= 0) {
		if (listener.outside && !from_outside(fd))
			close(fd);
		else
			on_readable(conn_new(fd)); // the first request came with it, most often
	} else if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED) {
		watch_set(w, 0); // out of descriptors: others will be closed
		timer_set(&listener.retry, now() + 10 * MILLISECOND);
	}
}

static void on_retry(struct timer *t) {
	if (!watch_set(&listener.w, EPOLLIN))
		timer_set(t, now() + 10 * MILLISECOND);
}

void conn_listen(int fd, bool outside) {
	listener.outside = outside;
	listener.w = (struct watch){.fd = fd, .ready = on_accept};
	listener.retry.fire = on_retry;
	if (!watch_set(&listener.w, EPOLLIN))
		_exit(1);
}
