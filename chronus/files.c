#define _GNU_SOURCE
#include "files.h"

#include "err.h"
#include "setup.h"
#include "sys.h"
#include "util.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

// The way of chronus-files into a sandbox. A launcher starts it in a PID
// namespace of its own beside the sandbox's, so that no process of the sandbox
// has a number for it: none can signal it, trace it, or change its limits,
// priority or affinity, whatever its user. In all other namespaces it is inside.
//
// That is done here, and neither by the launcher nor by the Go program: what it
// joins limits a single thread with memory of its own.

#define CONTROL_FD 3 // stays
#define PID1_FD 4    // a pidfd of the sandbox's PID 1
#define PROGRAM_FD 5 // chronus-files
#define FILTER_FD 6  // its seccomp program
#define JOIN_FD 7    // the first of the v1 tasks files to join

#define MAX_JOINS 8

static _Noreturn void fail(const char *what) {
	char text[200];
	int n = snprintf(text, sizeof text, "chronus-files: %s: %s\n", what, errno_text(errno));
	if (n > 0 && write(2, text, (size_t)n) < 0)
		_exit(126);
	_exit(127);
}

// join puts this process under the sandbox's limits of memory and CPU time: it
// walks trees that an agent made, and reads and writes its files.
static void join(uint64_t joins) {
	for (uint64_t i = 0; i < joins; i++)
		if (write(JOIN_FD + (int)i, "0", 1) != 1)
			fail("join group");
	// There it competes with all that the agent runs, of which there may be
	// thousands of threads; on v2 with chronus alone.
	if (joins)
		setpriority(PRIO_PROCESS, 0, -20);
}

static void enter(bool own_cgroup_namespace) {
	int cgroup = CLONE_NEWCGROUP;
	if (own_cgroup_namespace) { // the sandbox's PID 1 has the host's
		if (unshare(CLONE_NEWCGROUP) != 0)
			fail("cgroup namespace");
		cgroup = 0;
	}
	if (setns(PID1_FD, CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS | cgroup) != 0)
		fail("enter namespaces");
	if (setsid() < 0)
		fail("setsid");
	if (syscall(SYS_setgroups, 0, NULL) != 0 || syscall(SYS_setresgid, 0, 0, 0) != 0 || syscall(SYS_setresuid, 0, 0, 0) != 0)
		fail("become root of the sandbox");
}

// confine takes the rights away that a command has not either.
static void confine(uint64_t keep_caps, const struct sock_fprog_ *filter) {
	struct err e;
	if (!drop_capabilities(keep_caps, &e))
		fail("drop capabilities");
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER_, 0, filter) != 0)
		fail("seccomp");
}

static struct sock_fprog_ read_filter(void) {
	static struct sock_filter_ list[BPF_MAXINSNS_];
	size_t n = 0;
	for (ssize_t k; n < sizeof list && (k = pread(FILTER_FD, (uint8_t *)list + n, sizeof list - n, (off_t)n)) != 0; n += (size_t)k)
		if (k < 0)
			fail("read the seccomp program");
	return (struct sock_fprog_){.len = (uint16_t)(n / sizeof *list), .filter = list};
}

_Noreturn void files_main(int argc, char **argv) {
	static char *const args[] = {"chronus-files", NULL};
	static char *const env[] = {"GOMAXPROCS=2", "GOGC=50", "GOMEMLIMIT=24MiB", NULL};
	uint64_t keep, joins;
	errno = EINVAL;
	if (argc < 4 || argc > 5 || !parse_u64(argv[2], strlen(argv[2]), UINT64_MAX, &keep) ||
	    !parse_u64(argv[3], strlen(argv[3]), MAX_JOINS, &joins))
		fail("arguments");
	int null = open("/dev/null", O_RDWR | O_CLOEXEC); // the platform's
	if (null < 0)
		fail("/dev/null");
	struct sock_fprog_ filter = read_filter();
	join(joins);
	enter(argc == 5);
	confine(keep, &filter);
	sigset_t none;
	sigemptyset(&none);
	// The last one by which a failure is told goes when nothing can fail but the exec.
	if (dup3(null, 0, 0) < 0 || dup3(null, 1, 0) < 0 || syscall(SYS_close_range, CONTROL_FD + 1, ~0u, CLOSE_RANGE_CLOEXEC_) != 0 ||
	    sigprocmask(SIG_SETMASK, &none, NULL) != 0 || dup3(null, 2, 0) < 0)
		fail("descriptors");
	syscall(SYS_execveat, PROGRAM_FD, "", args, env, AT_EMPTY_PATH);
	_exit(127);
}
