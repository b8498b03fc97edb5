#include "util.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static int64_t clock_ns(clockid_t id) {
	struct timespec t;
	clock_gettime(id, &t);
	return (int64_t)t.tv_sec * (int64_t)SECOND + t.tv_nsec;
}

uint64_t now(void) { return (uint64_t)clock_ns(CLOCK_MONOTONIC) + 1; }

int64_t wall(void) { return clock_ns(CLOCK_REALTIME); }

void *xmalloc(size_t n) { return xrealloc(NULL, n); }

void *xcalloc(size_t n) { return memset(xmalloc(n), 0, n); }

void *xrealloc(void *p, size_t n) {
	p = realloc(p, n ? n : 1);
	if (!p)
		_exit(1);
	return p;
}

void close_fd(int *fd) {
	if (*fd >= 0)
		close(*fd);
	*fd = -1;
}

bool parse_u64(const char *s, size_t n, uint64_t max, uint64_t *v) {
	uint64_t x = 0;
	for (size_t i = 0; i < n; i++) {
		if (s[i] < '0' || s[i] > '9')
			return false;
		uint64_t digit = (uint64_t)(s[i] - '0');
		if (x > (max - digit) / 10)
			return false;
		x = 10 * x + digit;
	}
	*v = x;
	return n > 0;
}
