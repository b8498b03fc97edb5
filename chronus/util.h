// Small things that every module uses.
#ifndef CHRONUS_UTIL_H
#define CHRONUS_UTIL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define container_of(ptr, type, member) ((type *)(void *)((char *)(ptr) - offsetof(type, member)))

#define SECOND 1000000000ULL
#define MILLISECOND 1000000ULL
#define MICROSECOND 1000ULL

static inline size_t min_size(size_t a, size_t b) { return a < b ? a : b; }
static inline uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }
static inline uint64_t max_u64(uint64_t a, uint64_t b) { return a > b ? a : b; }

// now is the monotonic clock, and never 0; wall the host's clock since 1970. Both in ns.
uint64_t now(void);
int64_t wall(void);

// xmalloc, xcalloc and xrealloc end the program where there is no memory. They
// are for what is small; what a request can make large is allocated by malloc.
void *xmalloc(size_t n);
void *xcalloc(size_t n);
void *xrealloc(void *p, size_t n);

// close_fd closes *fd unless it is -1, which it is afterwards.
void close_fd(int *fd);

// parse_u64 reads all n bytes of s as a decimal number up to max.
bool parse_u64(const char *s, size_t n, uint64_t max, uint64_t *v);

#endif
