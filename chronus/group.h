// Control groups that one command at a time runs in.
#ifndef CHRONUS_GROUP_H
#define CHRONUS_GROUP_H

#include "util.h"

#define MAX_GROUP_PROCS 8

// group is descriptors that the host opened; -1 is one that is not there.
struct group {
	struct group *next;
	int procs[MAX_GROUP_PROCS], procs_len; // cgroup.procs, for writing
	int dir;    // v2 directory to clone into
	int kill;   // cgroup.kill
	int events; // cgroup.events
	int oom;    // memory.oom_control (v1) or memory.events (v2)
	struct process *owner; // the last command in it; NULL: forgotten, or none yet
	uint64_t ended_at;     // when that was waited for; 0 while it runs
	int64_t oom_kills;     // seen when the last command ended
	bool bad;              // its descriptors do not work: never used again
};

extern int group_count;
extern bool grouped; // commands need a group each

void group_add(struct group *g); // takes a group on the heap over
void group_free(struct group *g);

// group_take finds a free group for p, or returns NULL.
struct group *group_take(struct process *p);
// group_give_back tells that p, its owner, was waited for.
void group_give_back(struct group *g);
// groups_forget drops references to p.
void groups_forget(struct process *p);
// group_emptying reports whether the command of a group ended just now: its
// processes leave the group a moment later.
bool group_emptying(void);
bool group_populated(const struct group *g);
// group_oom_kills is how many processes were killed for memory so far, or -1.
int64_t group_oom_kills(const struct group *g);
// group_kill kills all processes of the group. False: it could not.
bool group_kill(struct group *g);
// group_pids lists the processes; NULL: none, or they cannot be listed. The caller frees it.
int *group_pids(const struct group *g, size_t *n);

// family lists the processes of the session of leader, and its descendants, sorted.
int *family(int leader, size_t *n);

// small_field finds the number after key at the start of a line, or returns -1.
int64_t small_field(const char *text, size_t n, const char *key);
// pid_lines parses the text of cgroup.procs.
int *pid_lines(const char *text, size_t size, size_t *n);

void sort_pids(int *list, size_t n);
bool has_pid(const int *sorted, size_t n, int pid);

#endif
