// Chronus is PID 1 of a container sandbox. Its launcher starts it in all
// namespaces with an empty environment and one descriptor besides the standard
// ones: 3, a listening Unix socket that is bound on the host and that no name
// inside leads to. It waits for the Setup call of its backend.
//
// It starts commands and tells how they ended, and keeps shell sessions. All it
// reads was made by an agent and may be hostile; everything that it tells about
// a command's end came from wait4(2). One thread does it all, and never blocks.
//
// As PID 1 it has no handlers: the kernel drops every signal from inside its
// namespace that would end it, so root inside cannot. A real fault still does.

#include "calls.h"
#include "chronus.h"
#include "files.h"

#include <fcntl.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

#define LISTEN_FD 3

static void usage(void) {
	static const char text[] = "usage: chronus [--ready] [--listen FD]\n";
	if (write(2, text, sizeof text - 1) < 0)
		_exit(3);
	_exit(2);
}

// options are for tests: --ready needs no Setup and lets orphans come to it.
static int options(int argc, char **argv) {
	uint64_t fd = LISTEN_FD;
	for (int i = 1; i < argc; i++) {
		if (strcmp(argv[i], "--ready") == 0)
			sandbox_ready = true;
		else if (strcmp(argv[i], "--listen") == 0 && i + 1 < argc && parse_u64(argv[i + 1], strlen(argv[i + 1]), 1 << 20, &fd))
			i++;
		else
			usage();
	}
	if (sandbox_ready && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0)
		_exit(1);
	return (int)fd;
}

int main(int argc, char **argv) {
	if (argc > 1 && strcmp(argv[1], "--files") == 0)
		files_main(argc, argv);
	int fd = options(argc, argv);
	if (fcntl(fd, F_SETFD, FD_CLOEXEC) != 0 || fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0)
		usage();
	chronus_init();
	conn_listen(fd, getpid() == 1);
	for (;;)
		chronus_round(3600 * SECOND);
}
