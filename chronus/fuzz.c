// The fuzz harness: one input, from standard input, to the real code. Its first
// byte says which part reads the rest.
#define _GNU_SOURCE
#include "account.h"
#include "calls.h"
#include "chronus.h"
#include "conn.h"
#include "group.h"
#include "process.h"
#include "session.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_INPUT (4u << 20)
#define ROUNDS 200

static void drain(int fd) {
	char scratch[4096];
	while (recv(fd, scratch, sizeof scratch, MSG_DONTWAIT) > 0)
		;
}

// feed_connection sends the input to a connection, in pieces as the socket takes
// them, and gives it some rounds of the loop.
static void feed_connection(const uint8_t *p, size_t n) {
	int pair[2];
	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) != 0)
		abort();
	fcntl(pair[1], F_SETFL, O_NONBLOCK);
	conn_new(pair[1]);
	bool over = false;
	for (int i = 0; i < ROUNDS && (n > 0 || i < ROUNDS / 2); i++) {
		ssize_t k = over ? -1 : send(pair[0], p, n, MSG_DONTWAIT | MSG_NOSIGNAL);
		if (k > 0) {
			p += k;
			n -= (size_t)k;
		} else if (!over && n == 0) {
			over = shutdown(pair[0], SHUT_WR) == 0;
		}
		drain(pair[0]);
		chronus_round(running > 0 || starting ? MILLISECOND / 10 : 0);
	}
	close(pair[0]);
	for (int i = 0; i < 10; i++)
		chronus_round(0);
}

static void parse_files(const uint8_t *p, size_t n) {
	static struct account a;
	struct err e;
	const uint8_t *end = memchr(p, 0, n);
	if (!end)
		return;
	char *user = strdup((const char *)p);
	size_t rest = n - (size_t)(end + 1 - p);
	struct account_files f = {.passwd = (const char *)end + 1, .passwd_len = rest, .group = (const char *)end + 1, .group_len = rest};
	if (account_parse(user, "user", &f, &a, &e) && (a.uid == UINT32_MAX || a.gid == UINT32_MAX || a.home[0] != '/'))
		abort();
	free(user);
}

static void parse_lines(const uint8_t *p, size_t n) {
	size_t count;
	int *list = pid_lines((const char *)p, n, &count);
	for (size_t i = 0; i < count; i++)
		if (list[i] < 2 || !has_pid(list, count, list[i]))
			abort();
	free(list);
	if (small_field((const char *)p, n, "populated ") < -1)
		abort();
	uint64_t number = 0;
	uint8_t status;
	if (parse_status((const char *)p, n, &number, &status) && number == 0)
		abort();
	struct err e;
	err_file(&e, n ? p[0] : 0, "field", QUOTED((const char *)p, n));
	if (strlen(DURATION((int64_t)(n ? p[0] * 0x0101010101010101ULL : 0))) > 40)
		abort();
}

int main(void) {
	uint8_t *in = xmalloc(MAX_INPUT);
	size_t n = 0;
	for (ssize_t k; n < MAX_INPUT && (k = read(0, in + n, MAX_INPUT - n)) > 0;)
		n += (size_t)k;
	if (n == 0)
		return 0;
	// A copy of its exact size, so that a read past its end is found.
	uint8_t *p = xmalloc(n - 1), what = in[0];
	memcpy(p, in + 1, n - 1);
	free(in);
	n--;
	switch (what) {
	case 0:
	case 1:
		chronus_init();
		sandbox_ready = what == 1;
		feed_connection(p, n);
		break;
	case 2:
		parse_files(p, n);
		break;
	default:
		parse_lines(p, n);
	}
	free(p);
	return 0;
}
