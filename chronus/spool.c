#define _GNU_SOURCE
#include "spool.h"

#include "command.h"

#include <stdlib.h>
#include <sys/mman.h>

static size_t used; // of the budget

// Larger blocks are mapped, so that they go back to the kernel at once, and are
// not for children, whose memory would have to be copied.
#define MAPPED_BLOCK (8u << 10)

static struct block *block_new(uint32_t size) {
	struct block *b = MAP_FAILED;
	if (size >= MAPPED_BLOCK)
		b = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (b == MAP_FAILED) {
		b = xmalloc(sizeof *b + MIN_BLOCK);
		*b = (struct block){.cap = MIN_BLOCK};
		return b;
	}
	madvise(b, size, MADV_DONTFORK);
	*b = (struct block){.cap = size - (uint32_t)sizeof *b, .mapped = true};
	return b;
}

// drop forgets the oldest block.
static void drop(struct spool *s) {
	struct block *b = s->first;
	s->first = b->next;
	if (!s->first)
		s->last = NULL;
	s->size -= b->cap;
	used -= b->cap;
	if (b->mapped)
		munmap(b, sizeof *b + b->cap);
	else
		free(b);
}

static bool fits(size_t n) { return used + n <= BUDGET_LIMIT; }

uint8_t *spool_space(struct spool *s, uint8_t stream, size_t *room) {
	struct block *b = s->last;
	if (b && b->stream == stream && (b->cap - b->len >= MIN_BLOCK / 4 || b->len == 0)) {
		*room = b->cap - b->len;
		return b->buf + b->len;
	}
	// A block without bytes, of the other stream, would have the next one's number.
	if (b && b->len == 0) {
		b->stream = stream;
		*room = b->cap;
		return b->buf;
	}
	uint32_t size = s->grow ? s->grow : MIN_BLOCK;
	if (!fits(size))
		spool_reclaim();
	while (s->first && (s->size + size > SPOOL_LIMIT || !fits(size))) {
		if (s->lossless && s->first->seq + s->first->len > s->consumed)
			return NULL;
		drop(s);
	}
	if (!fits(size))
		size = MIN_BLOCK; // every process gets one
	b = block_new(size);
	b->stream = stream;
	b->seq = s->next;
	if (s->last)
		s->last->next = b;
	else
		s->first = b;
	s->last = b;
	s->size += b->cap;
	used += b->cap;
	*room = b->cap;
	return b->buf;
}

void spool_wrote(struct spool *s, size_t n) {
	struct block *b = s->last;
	b->len += (uint32_t)n;
	s->next += n;
	uint32_t size = b->cap + (b->mapped ? (uint32_t)sizeof *b : 0);
	if (b->len == b->cap) // busy
		s->grow = 2 * size < MAX_BLOCK ? 2 * size : MAX_BLOCK;
}

void spool_trim(struct spool *s) {
	struct block *b = s->last, **at = &s->first;
	if (!b || b->mapped || b->len == 0 || b->cap == b->len)
		return;
	s->size -= b->cap - b->len;
	used -= b->cap - b->len;
	while (*at != b)
		at = &(*at)->next;
	*at = s->last = b = xrealloc(b, sizeof *b + b->len);
	b->cap = b->len;
}

void spool_free(struct spool *s) {
	while (s->first)
		drop(s);
	s->grow = 0;
}

uint64_t spool_first(const struct spool *s) { return s->first ? s->first->seq : s->next; }

const uint8_t *spool_at(const struct spool *s, uint64_t seq, uint8_t *stream, size_t *n, uint64_t *gap) {
	*n = 0;
	for (const struct block *b = s->first; b; b = b->next) {
		if (b->seq + b->len <= seq)
			continue;
		if (b->seq > seq) {
			*gap = b->seq;
			return NULL;
		}
		*n = min_size((size_t)(b->seq + b->len - seq), MAX_CHUNK);
		*stream = b->stream;
		*gap = seq;
		return b->buf + (seq - b->seq);
	}
	*gap = max_u64(seq, s->next);
	return NULL;
}

bool spool_tight(void) { return used > BUDGET_LIMIT / 2; }
