// What a command's child does between clone and exec.
#ifndef CHRONUS_CHILD_H
#define CHRONUS_CHILD_H

#include "command.h"
#include "group.h"
#include "session.h"
#include "sys.h"

// plan is what a child is to become.
struct plan {
	const struct command *cmd;
	const struct group *group; // or NULL
	int in, out, err;          // its standard descriptors
	bool pty;                  // in is the terminal, for all three
	const struct session_files *session; // or NULL
	int told; // pipe to tell a failure through
};

// What a child tells starts with a byte; the rest is the error as a message has it.
enum { TOLD_ERROR = 1, TOLD_BAD_GROUP = 2 };

// limits is what Setup left for the commands.
extern struct limits {
	struct rlimit64_ rlimit[16];
	uint32_t resource[16];
	int rlimits;
	uint8_t *cpus; // as sched_setaffinity(2) takes it
	size_t cpus_len;
	struct sock_fprog_ filter;
	bool cgroup_namespace; // each command gets one; see setup.c
} limits;

extern int null_fd;  // /dev/null, opened before the agent could change /dev
extern bool as_root; // may switch users and apply limits

// child_clone forks into a cgroup, or with -1 where we are. The child has the
// signal mask of this process, which none may end before it execs.
int child_clone(int cgroup);

// child_run becomes what the plan says, or tells why not.
_Noreturn void child_run(struct plan *p);

#endif
