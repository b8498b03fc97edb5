#include "chronus.h"

#include "child.h"
#include "process.h"
#include "pty.h"
#include "reaper.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>

void chronus_init(void) {
	struct rlimit open_files;
	if (getrlimit(RLIMIT_NOFILE, &open_files) == 0) {
		open_files.rlim_cur = open_files.rlim_max; // many commands have many pipes; theirs is Setup's
		setrlimit(RLIMIT_NOFILE, &open_files);
	}
	loop_init();
	reaper_init();
	pty_init();
	null_fd = open("/dev/null", O_RDWR | O_CLOEXEC);
	if (null_fd < 0)
		_exit(1);
	umask(0);
	as_root = geteuid() == 0;
}

void chronus_round(uint64_t max) {
	loop_once(max);
	conn_settle();
	forget_oldest();
}
