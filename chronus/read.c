#include "process.h"

// Most commands end at once. Their start is worth a message of its own, which
// wakes every process up to the client, only where nothing follows it for so long.
#define START_HOLD (2 * MILLISECOND)

void put_started(struct buf *b, const struct process *p) {
	put_u8(b, 1);
	put_u64(b, p->id);
	put_u32(b, (uint32_t)p->pid);
}

bool process_begin_read(struct process *p, uint64_t seq) {
	if (p->detached || p->primary)
		return false;
	p->primary = true;
	p->spool.lossless = true;
	p->spool.consumed = max_u64(p->spool.consumed, min_u64(seq, p->spool.next));
	return true;
}

void process_end_read(struct process *p) {
	p->primary = false;
	p->spool.lossless = false;
	output_resume(p);
}

void process_follow(struct conn *c, struct process *p, uint64_t seq, bool primary) {
	struct reader *r = &c->reader;
	*r = (struct reader){.p = p, .next = p->readers, .seq = seq, .primary = primary};
	p->readers = r;
	c->wait = WAIT_OUTPUT;
	if (p->has_outcome) {
		r->known = true;
		r->last = p->spool.next;
		r->outcome = p->outcome;
	}
	struct buf b = {0};
	put_started(&b, p);
	conn_put(c, FRAME_EVENT, b.p, b.n);
	buf_free(&b);
	conn_hold(c, START_HOLD);
}

void reader_remove(struct conn *c) {
	struct reader *r = &c->reader;
	struct process *p = r->p;
	for (struct reader **at = &p->readers; *at; at = &(*at)->next)
		if (*at == r) {
			*at = r->next;
			break;
		}
	if (r->primary)
		process_end_read(p);
}

// tell_exit sends the last event and the answer.
static void tell_exit(struct conn *c) {
	struct reader *r = &c->reader;
	struct buf b = {0};
	put_u8(&b, 4);
	put_outcome(&b, &r->outcome);
	conn_put(c, FRAME_EVENT, b.p, b.n);
	buf_free(&b);
	conn_answer(c, NULL);
	if (!r->command && !r->p->told)
		r->p->told = live();
	reader_remove(c);
}

// send_output sends the next bytes, or a gap. False: there are none.
static bool send_output(struct conn *c) {
	struct reader *r = &c->reader;
	struct process *p = r->p;
	if (r->known && r->seq >= r->last)
		return false;
	uint8_t stream = 0;
	size_t n;
	uint64_t gap;
	const uint8_t *data = spool_at(&p->spool, r->seq, &stream, &n, &gap);
	struct buf b = {0};
	if (gap > r->seq) {
		put_u8(&b, 3);
		put_u64(&b, r->seq);
		put_u64(&b, gap);
		conn_put(c, FRAME_EVENT, b.p, b.n);
		buf_free(&b);
		r->seq = gap;
		return true;
	}
	if (r->known)
		n = r->last > r->seq ? (size_t)min_u64(n, r->last - r->seq) : 0;
	if (n == 0)
		return false;
	put_u8(&b, 2);
	put_u8(&b, stream);
	put_u64(&b, r->seq);
	conn_put_data(c, FRAME_EVENT, &b, data, n);
	buf_free(&b);
	r->seq += n;
	if (r->primary && r->seq > p->spool.consumed)
		p->spool.consumed = r->seq;
	return true;
}

void reader_pump(struct conn *c) {
	struct reader *r = &c->reader;
	struct process *p = r->p;
	bool primary = r->primary, sent = false;
	while (!conn_full(c) && c->wait == WAIT_OUTPUT && send_output(c))
		sent = true;
	if (!c->dead && !c->blocked && c->wait == WAIT_OUTPUT && r->known && r->seq >= r->last)
		tell_exit(c);
	else if (sent && primary)
		output_resume(p);
}

void readers_pump(struct process *p) {
	for (struct reader *r = p->readers, *next; r; r = next) {
		next = r->next;
		reader_pump(container_of(r, struct conn, reader));
	}
}
