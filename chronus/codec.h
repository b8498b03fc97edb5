// The fields of messages. Integers are big-endian and of fixed width; strings
// have a 32-bit length before them. internal/chronusapi is the other side.
#ifndef CHRONUS_CODEC_H
#define CHRONUS_CODEC_H

#include "util.h"

// buf is bytes that grow.
struct buf {
	uint8_t *p;
	size_t n, cap;
};

void buf_add(struct buf *b, const void *p, size_t n);
void buf_free(struct buf *b);

void put_u8(struct buf *b, uint8_t v);
void put_u16(struct buf *b, uint16_t v);
void put_u32(struct buf *b, uint32_t v);
void put_u64(struct buf *b, uint64_t v);
void put_str(struct buf *b, const char *s, size_t n);

// dec reads the fields of a message. After the first that does not fit, bad is
// set and all later ones read as zero.
struct dec {
	uint8_t *p;
	size_t n;
	bool bad;
};

// str is a string within a message. A message is kept with a NUL after it, and
// what follows a string in any message starts with a zero byte: the length of
// the next string, or a number that is bounded. So s[n] is 0 in all that has
// been validated, and a string can be used where it is.
struct str {
	char *s;
	size_t n;
};

// strs is a list of strings within a message; strs_next goes through it.
struct strs {
	uint32_t count;
	uint8_t *p;
};

uint8_t get_u8(struct dec *d);
uint16_t get_u16(struct dec *d);
uint32_t get_u32(struct dec *d);
uint64_t get_u64(struct dec *d);
bool get_bool(struct dec *d); // 0 and 1 only, so that a message has one encoding
struct str get_str(struct dec *d, size_t limit);
// get_strs takes at most max strings with at most limit bytes together.
struct strs get_strs(struct dec *d, uint32_t max, size_t limit);
struct str strs_next(struct strs *list);

// dec_ok tells whether the whole message was read, and nothing else.
bool dec_ok(const struct dec *d);

// outcome is how a command ended: dsec.Outcome.
struct outcome {
	uint16_t code, signal;
	bool oom, timed_out, output_limit, claimed;
	int64_t started; // ns since 1970
	uint64_t duration, cpu; // ns
	uint64_t max_rss;       // bytes
};

void put_outcome(struct buf *b, const struct outcome *o);

#endif
