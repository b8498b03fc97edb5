#include "tag.h"

#include "process.h"

// MAX_DENIED is how many tags are known one by one of which somebody was told that
// no command has them.
#define MAX_DENIED 64

static uint64_t denied[MAX_DENIED], denied_count;
static uint64_t denied_to;  // no tag up to this one is started any more: those before
static uint64_t dropped_to; // commands with tags up to this one may be forgotten
static struct conn *waiters;

bool check_tag(uint64_t tag, struct err *e) { return tag != 0 || err_set(e, INVALID, "tag", "want a number of at least 1, got 0"); }

static struct process *find(uint64_t tag) {
	struct process *const lists[] = {processes, starting};
	for (int i = 0; i < 2; i++)
		for (struct process *p = lists[i]; p; p = p->next)
			if (p->tag == tag && p->state != FAILED)
				return p;
	return NULL;
}

static bool is_denied(uint64_t tag) {
	for (uint64_t i = 0; i < MAX_DENIED && i < denied_count; i++)
		if (denied[i] == tag)
			return true;
	return tag <= denied_to;
}

// deny has no command started with a tag: who asked for it counts on that, while
// the start of a client that is gone may still be in a socket.
static void deny(uint64_t tag) {
	if (is_denied(tag))
		return;
	uint64_t *at = &denied[denied_count++ % MAX_DENIED];
	denied_to = max_u64(denied_to, *at);
	*at = tag;
}

bool tag_free(uint64_t tag, struct err *e) {
	unsigned long long n = tag;
	struct process *p = find(tag);
	if (p && p->state == STARTED)
		return err_set(e, CONFLICT, "tag", "process %llu has tag %llu", (unsigned long long)p->id, n);
	if (p)
		return err_set(e, CONFLICT, "tag", "a command with tag %llu is being started", n);
	if (tag <= dropped_to)
		return err_set(e, CONFLICT, "tag", "tag %llu may be that of a command that is forgotten", n);
	return !is_denied(tag) || err_set(e, CONFLICT, "tag", "tag %llu was asked for before, and is of no command", n);
}

void tag_dropped(uint64_t tag) { dropped_to = max_u64(dropped_to, tag); }

static void answer(struct conn *c, uint64_t tag) {
	struct buf b = {0};
	struct err e;
	struct process *p = find(tag);
	if (p && p->state == STARTING) {
		c->wait = WAIT_TAG;
		c->next = waiters;
		waiters = c;
		return;
	}
	if (!p && tag <= dropped_to) {
		err_set(&e, OUTCOME_UNKNOWN, "tag", "a command with tag %llu may have run and be forgotten", (unsigned long long)tag);
		conn_refuse(c, &e);
		return;
	}
	if (!p)
		deny(tag);
	put_u64(&b, p ? p->id : 0);
	conn_answer(c, &b);
}

// get_tag reads a message that is a tag. False: the call has ended.
static bool get_tag(struct conn *c, struct dec *d, uint64_t *tag) {
	struct err e;
	*tag = get_u64(d);
	if (!dec_ok(d))
		conn_close(c);
	else if (check_tag(*tag, &e))
		return true;
	else
		conn_refuse(c, &e);
	return false;
}

void find_tag_call(struct conn *c, struct dec *d) {
	uint64_t tag;
	if (get_tag(c, d, &tag))
		answer(c, tag);
}

void forget_tag_call(struct conn *c, struct dec *d) {
	uint64_t tag;
	if (!get_tag(c, d, &tag))
		return;
	struct process *p = find(tag);
	if (p) {
		p->keep = false;
		sweep_later();
	}
	conn_answer(c, NULL);
}

void find_tag_cancel(struct conn *c) { conn_unlink(&waiters, c); }

void tags_settle(void) {
	struct conn *list = waiters;
	waiters = NULL;
	while (list) {
		struct conn *c = list;
		struct dec d = {.p = c->msg.p, .n = c->msg.n};
		list = c->next;
		c->wait = WAIT_NOTHING;
		find_tag_call(c, &d);
	}
}
