#include "codec.h"

#include <stdlib.h>
#include <string.h>

void buf_add(struct buf *b, const void *p, size_t n) {
	if (n == 0)
		return;
	if (b->cap - b->n < n) {
		size_t cap = b->cap * 2 > b->n + n ? b->cap * 2 : b->n + n;
		cap = cap < 64 ? 64 : cap;
		b->p = xrealloc(b->p, cap);
		b->cap = cap;
	}
	memcpy(b->p + b->n, p, n);
	b->n += n;
}

void buf_free(struct buf *b) {
	free(b->p);
	*b = (struct buf){0};
}

void put_u8(struct buf *b, uint8_t v) { buf_add(b, &v, 1); }

static void put_big(struct buf *b, uint64_t v, size_t n) {
	uint8_t p[8];
	for (size_t i = 0; i < n; i++)
		p[i] = (uint8_t)(v >> (8 * (n - 1 - i)));
	buf_add(b, p, n);
}

void put_u16(struct buf *b, uint16_t v) { put_big(b, v, 2); }
void put_u32(struct buf *b, uint32_t v) { put_big(b, v, 4); }
void put_u64(struct buf *b, uint64_t v) { put_big(b, v, 8); }

void put_str(struct buf *b, const char *s, size_t n) {
	put_u32(b, (uint32_t)n);
	buf_add(b, s, n);
}

static uint8_t *take(struct dec *d, size_t n) {
	if (d->bad || n > d->n) {
		d->bad = true;
		return NULL;
	}
	uint8_t *p = d->p;
	d->p += n;
	d->n -= n;
	return p;
}

static uint64_t big(const uint8_t *p, size_t n) {
	uint64_t v = 0;
	for (size_t i = 0; p && i < n; i++)
		v = v << 8 | p[i];
	return v;
}

uint8_t get_u8(struct dec *d) { return (uint8_t)big(take(d, 1), 1); }
uint16_t get_u16(struct dec *d) { return (uint16_t)big(take(d, 2), 2); }
uint32_t get_u32(struct dec *d) { return (uint32_t)big(take(d, 4), 4); }
uint64_t get_u64(struct dec *d) { return big(take(d, 8), 8); }

bool get_bool(struct dec *d) {
	uint8_t v = get_u8(d);
	if (v > 1)
		d->bad = true;
	return v == 1;
}

static char empty[1]; // never written

struct str get_str(struct dec *d, size_t limit) {
	size_t n = get_u32(d);
	if (n > limit)
		d->bad = true;
	uint8_t *p = take(d, n);
	if (!p)
		return (struct str){.s = empty, .n = 0};
	return (struct str){.s = (char *)p, .n = n};
}

struct strs get_strs(struct dec *d, uint32_t max, size_t limit) {
	struct strs none = {0};
	uint32_t n = get_u32(d);
	// Every string has at least its length.
	if (d->bad || n > max || n > d->n / 4) {
		d->bad = true;
		return none;
	}
	struct strs list = {.count = n, .p = d->p};
	for (uint32_t i = 0; i < n; i++)
		limit -= get_str(d, limit).n;
	return d->bad ? none : list;
}

struct str strs_next(struct strs *list) {
	size_t n = big(list->p, 4);
	struct str s = {.s = (char *)list->p + 4, .n = n};
	list->p += 4 + n;
	list->count--;
	return s;
}

bool dec_ok(const struct dec *d) { return !d->bad && d->n == 0; }

void put_outcome(struct buf *b, const struct outcome *o) {
	put_u16(b, o->code);
	put_u16(b, o->signal);
	put_u8(b, (uint8_t)(o->oom | o->timed_out << 1 | o->output_limit << 2 | o->claimed << 3));
	put_u64(b, (uint64_t)o->started);
	put_u64(b, o->duration);
	put_u64(b, o->cpu);
	put_u64(b, o->max_rss);
}
