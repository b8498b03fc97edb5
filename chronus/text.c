#define _GNU_SOURCE
#include "text.h"

#include "command.h"
#include "process.h"
#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

// MAX_PIPE is what a pipe holds where a process of the sandbox made it larger,
// unless the host allows more than it does by default.
#define MAX_PIPE (1u << 20)

static void on_feed(struct watch *w, uint32_t events);

// reopen opens a pipe of ours once more. Neither end that a shell or a command
// has is ever ours too: they could take O_NONBLOCK from it.
static int reopen(int fd, int flags) {
	static int dir = -1; // of our descriptors
	char name[32];
	if (dir < 0) {
		struct open_how_ how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS_};
		snprintf(name, sizeof name, "/proc/%d/fd", (int)getpid());
		dir = sys_openat2(AT_FDCWD, name, &how);
	}
	snprintf(name, sizeof name, "%d", fd);
	return openat(dir, name, flags | O_CLOEXEC);
}

bool text_open(struct text *t, int *child, struct err *e) {
	int fds[2];
	t->feed = (struct watch){.fd = -1, .ready = on_feed};
	if (!pipe_new(fds, 0, e))
		return false;
	close(fds[1]);
	t->fd = fds[0];
	// The shell opens it as its own user.
	*child = fchmod(t->fd, 0644) == 0 ? reopen(t->fd, O_RDONLY) : -1;
	return *child >= 0 || err_set(e, EXHAUSTED, "", "no pipe for the session: %s", errno_text(errno));
}

static void feed_end(struct text *t) {
	watch_close(&t->feed);
	free(t->rest);
	t->rest = NULL;
}

void text_close(struct text *t) {
	feed_end(t);
	close_fd(&t->fd);
}

// feed writes what the pipe takes, and ends it where that was all. False: it
// cannot go on.
static bool feed(struct text *t, const char *s, size_t n, size_t *done) {
	*done = 0;
	while (*done < n) {
		ssize_t k = write(t->feed.fd, s + *done, n - *done);
		if (k < 0 && errno == EAGAIN)
			return watch_set(&t->feed, EPOLLOUT);
		if (k < 0 && errno != EINTR)
			return false;
		*done += k > 0 ? (size_t)k : 0;
	}
	feed_end(t);
	return true;
}

static void on_feed(struct watch *w, uint32_t events) {
	struct text *t = container_of(w, struct text, feed);
	size_t n;
	(void)events;
	bool ok = feed(t, t->rest + t->off, t->len - t->off, &n);
	t->off += n;
	if (ok)
		return;
	t->broken(t); // before the shell sees an end
	feed_end(t);
}

bool text_put(struct text *t, struct str s) {
	size_t n = 0;
	t->feed.fd = reopen(t->fd, O_WRONLY | O_NONBLOCK);
	bool ok = t->feed.fd >= 0 && feed(t, s.s, s.n, &n);
	if (ok && n == s.n)
		return true;
	t->off = 0;
	t->len = s.n - n;
	t->rest = ok ? malloc(t->len) : NULL;
	if (t->rest) {
		memcpy(t->rest, s.s + n, t->len);
		return true;
	}
	int why = errno;
	if (!text_clear(t))
		t->broken(t);
	errno = why;
	return false;
}

bool text_clear(struct text *t) {
	static char scratch[MAX_CHUNK];
	feed_end(t);
	for (unsigned i = 0; i < MAX_PIPE / MAX_CHUNK + 1; i++) {
		ssize_t n = read(t->fd, scratch, sizeof scratch);
		if (n <= 0 && !(n < 0 && errno == EINTR))
			return true;
	}
	return false;
}
