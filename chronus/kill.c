#define _GNU_SOURCE
#include "process.h"

#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define STOP_ROUNDS 20

// stat_line is what is looked at of a process of /proc.
struct stat_line {
	int pid, parent, session;
	bool in;
};

// next_number reads a decimal number, which may be negative, and what is before it.
static const char *next_number(const char *s, int *v) {
	char *end;
	*v = (int)strtol(s, &end, 10);
	return end;
}

// stat_of reads the state, parent and session of a process that is alive.
static bool stat_of(int proc, const char *name, struct stat_line *s) {
	char path[32], text[512];
	uint64_t pid;
	if (!parse_u64(name, strlen(name), INT32_MAX, &pid))
		return false;
	snprintf(path, sizeof path, "%d/stat", (int)pid);
	int fd = openat(proc, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	text[n > 0 ? n : 0] = 0;
	// The name, in parentheses, may have any bytes.
	const char *p = strrchr(text, ')');
	if (!p || strlen(p) < 4 || p[2] == 'Z' || p[2] == 'X')
		return false;
	int group;
	p = next_number(p + 3, &s->parent);
	p = next_number(p, &group);
	next_number(p, &s->session);
	s->pid = (int)pid;
	s->in = false;
	return true;
}

int *family(int leader, size_t *n) {
	*n = 0;
	DIR *d = leader > 1 ? opendir("/proc") : NULL; // session 0 is everything that has none
	if (!d)
		return NULL;
	struct stat_line *all = NULL;
	size_t len = 0, cap = 0;
	for (struct dirent *e; (e = readdir(d));) {
		if (len == cap)
			all = xrealloc(all, (cap = cap ? 2 * cap : 64) * sizeof *all);
		if (stat_of(dirfd(d), e->d_name, &all[len]))
			len++;
	}
	closedir(d);
	int *list = xmalloc((len + 1) * sizeof *list);
	for (size_t i = 0; i < len; i++)
		if (all[i].session == leader || all[i].pid == leader) {
			all[i].in = true;
			list[(*n)++] = all[i].pid;
		}
	for (size_t at = 0; at < *n; at++)
		for (size_t i = 0; i < len; i++)
			if (!all[i].in && all[i].parent == list[at]) {
				all[i].in = true;
				list[(*n)++] = all[i].pid;
			}
	free(all);
	sort_pids(list, *n);
	return list;
}

int *process_family(struct process *p, size_t *n) {
	*n = 0;
	if (!p->group)
		return family(p->pid, n);
	if (p->group->owner != p)
		return NULL; // it was empty when it was given to another command
	int *list = group_pids(p->group, n);
	if (*n > 0)
		return list;
	free(list);
	return group_populated(p->group) ? family(p->pid, n) : NULL;
}

// kill_started kills the started process alone. A child that has not joined
// its group yet, or has not even exec'd, is known by its pid.
static void kill_started(struct process *p) {
	if (!p->ended)
		kill(p->pid, SIGKILL);
}

void process_kill(struct process *p) {
	// A group that p has given back is empty of p's processes, and may hold
	// another command's: it is left alone.
	if (p->group && (p->group->owner != p || group_kill(p->group))) {
		kill_started(p);
		return;
	}
	// Without a group. All are stopped before any is killed, since one that left
	// its session is found by its parents alone. What forked meanwhile is found by
	// going over them again; a bound keeps a fork bomb from holding us for ever.
	int *known = NULL;
	size_t known_len = 0;
	bool found = true;
	for (int round = 0; round < STOP_ROUNDS && found; round++) {
		size_t n;
		int *list = process_family(p, &n);
		found = false;
		for (size_t i = 0; i < n; i++)
			if (!has_pid(known, known_len, list[i])) {
				found = true;
				kill(list[i], SIGSTOP);
			}
		free(known);
		known = list;
		known_len = n;
	}
	for (size_t i = 0; i < known_len; i++)
		kill(known[i], SIGKILL);
	free(known);
	kill_started(p);
}

void process_signal(struct process *p, int signal) {
	size_t n;
	int *list = process_family(p, &n);
	for (size_t i = 0; i < n; i++)
		kill(list[i], signal);
	free(list);
}
