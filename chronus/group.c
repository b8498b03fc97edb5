#define _GNU_SOURCE
#include "group.h"

#include "process.h"

#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define FRESH (20 * MILLISECOND) // since a group's command was waited for
#define KILL_ROUNDS 32           // over the processes that were forked meanwhile

int group_count;
bool grouped;
static struct group *groups;

void group_add(struct group *g) {
	struct group **end = &groups;
	while (*end)
		end = &(*end)->next;
	*end = g;
	g->next = NULL;
	g->oom_kills = group_oom_kills(g);
	group_count++;
	grouped = true;
}

void group_free(struct group *g) {
	for (int i = 0; i < g->procs_len; i++)
		close_fd(&g->procs[i]);
	close_fd(&g->dir);
	close_fd(&g->kill);
	close_fd(&g->events);
	close_fd(&g->oom);
	free(g);
}

struct group *group_take(struct process *p) {
	for (struct group *g = groups; g; g = g->next) {
		if (g->bad || (g->owner && !g->owner->ended) || group_populated(g))
			continue; // its command runs, or descendants of one that ended
		g->owner = p;
		g->ended_at = 0;
		return g;
	}
	return NULL;
}

void group_give_back(struct group *g) { g->ended_at = now(); }

void groups_forget(struct process *p) {
	for (struct group *g = groups; g; g = g->next)
		if (g->owner == p)
			g->owner = NULL;
}

bool group_emptying(void) {
	uint64_t t = now();
	for (struct group *g = groups; g; g = g->next)
		if (!g->bad && ((g->ended_at && t - g->ended_at < FRESH) || (g->owner && g->owner->state == FAILED)))
			return true;
	return false;
}

int64_t small_field(const char *text, size_t n, const char *key) {
	size_t len = strlen(key);
	for (const char *line = text, *end = text + n; line < end;) {
		const char *next = memchr(line, '\n', (size_t)(end - line));
		size_t size = (size_t)((next ? next : end) - line);
		uint64_t v;
		if (size > len && memcmp(line, key, len) == 0)
			return parse_u64(line + len, size - len, INT64_MAX, &v) ? (int64_t)v : -1;
		line = next ? next + 1 : end;
	}
	return -1;
}

static int64_t file_field(int fd, const char *key) {
	char text[1024];
	ssize_t n = pread(fd, text, sizeof text, 0);
	return n > 0 ? small_field(text, (size_t)n, key) : -1;
}

bool group_populated(const struct group *g) {
	if (g->events < 0) {
		size_t n = 0;
		if (g->owner)
			free(family(g->owner->pid, &n));
		return n > 0;
	}
	return file_field(g->events, "populated ") != 0;
}

int64_t group_oom_kills(const struct group *g) { return g->oom < 0 ? -1 : file_field(g->oom, "oom_kill "); }

// ---- processes ----

static int compare(const void *a, const void *b) {
	int x = *(const int *)a, y = *(const int *)b;
	return (x > y) - (x < y);
}

void sort_pids(int *list, size_t n) { qsort(list, n, sizeof *list, compare); }

bool has_pid(const int *sorted, size_t n, int pid) { return n && bsearch(&pid, sorted, n, sizeof pid, compare); }

int *pid_lines(const char *text, size_t size, size_t *n) {
	int *list = xmalloc((size / 2 + 1) * sizeof *list);
	*n = 0;
	for (const char *line = text, *end = text + size; line < end;) {
		const char *next = memchr(line, '\n', (size_t)(end - line));
		uint64_t pid;
		if (parse_u64(line, (size_t)((next ? next : end) - line), INT32_MAX, &pid) && pid > 1)
			list[(*n)++] = (int)pid;
		line = next ? next + 1 : end;
	}
	sort_pids(list, *n);
	return list;
}

// read_all reads a file of the kernel; the caller frees the text.
static char *read_all(int fd, size_t *size) {
	size_t cap = 1024;
	char *text = xmalloc(cap);
	for (*size = 0;;) {
		ssize_t n = read(fd, text + *size, cap - *size);
		if (n <= 0)
			return text;
		*size += (size_t)n;
		if (*size == cap)
			text = xrealloc(text, cap *= 2);
	}
}

int *group_pids(const struct group *g, size_t *n) {
	*n = 0;
	int fd = g->dir < 0 ? -1 : openat(g->dir, "cgroup.procs", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return NULL;
	size_t size;
	char *text = read_all(fd, &size);
	close(fd);
	int *list = pid_lines(text, size, n);
	free(text);
	return list;
}

// kill_listed kills the processes of the group until there are none but killed
// ones. False: they cannot be listed, or fork faster than that.
static bool kill_listed(struct group *g) {
	int *killed = NULL;
	size_t killed_len = 0;
	for (int round = 0; round < KILL_ROUNDS; round++) {
		size_t n;
		int *list = group_pids(g, &n);
		bool found = false;
		for (size_t i = 0; i < n; i++)
			if (!has_pid(killed, killed_len, list[i])) {
				found = true;
				kill(list[i], SIGKILL);
			}
		if (!found) {
			bool sure = n > 0 || killed_len > 0 || !group_populated(g);
			free(list);
			free(killed);
			return sure;
		}
		free(killed);
		killed = list;
		killed_len = n;
	}
	free(killed);
	return false;
}

// cgroup.kill is the last resort: on Linux 6.18 a process that is cloned into
// a cgroup which was ever killed that way is killed at once (clone3 compares
// the cgroup's kill counter with that of its parent's cgroup), so that the
// group can never be used again. One process after the other is as sure: what
// has SIGKILL pending cannot fork.
bool group_kill(struct group *g) {
	if (g->kill < 0)
		return false;
	if (kill_listed(g))
		return true;
	g->bad = g->dir >= 0; // a process that is moved in is not killed
	return write(g->kill, "1", 1) == 1;
}
