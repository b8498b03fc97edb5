#define _GNU_SOURCE
#include "pty.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#ifndef TIOCGPTPEER
#define TIOCGPTPEER 0x5441
#endif

static int dev_fd = -1;

void pty_init(void) { dev_fd = open("/dev", O_PATH | O_DIRECTORY | O_CLOEXEC); }

static bool pty_error(struct err *e) {
	bool full = errno == ENOSPC || errno == EMFILE || errno == ENOMEM;
	return err_set(e, full ? EXHAUSTED : UNSUPPORTED, "pty", "no terminal: %s", errno_text(errno));
}

bool pty_resize(int leader, struct window_size size) {
	struct winsize w = {.ws_row = size.rows, .ws_col = size.cols};
	return ioctl(leader, TIOCSWINSZ, &w) == 0;
}

bool pty_open(struct window_size size, int *leader, int *follower, struct err *e) {
	int unlock = 0;
	*follower = -1;
	*leader = openat(dev_fd, "ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
	if (*leader < 0)
		return pty_error(e);
	// The follower by the leader's descriptor, not by a path below /dev/pts.
	if (ioctl(*leader, TIOCSPTLCK, &unlock) == 0 &&
	    (*follower = ioctl(*leader, TIOCGPTPEER, O_RDWR | O_NOCTTY | O_CLOEXEC)) >= 0 && pty_resize(*leader, size))
		return true;
	pty_error(e);
	close_fd(follower);
	close_fd(leader);
	return false;
}
