#define _GNU_SOURCE
#include "setup.h"

#include "calls.h"
#include "child.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>

// Setup makes a warm container a sandbox, as internal/chronusapi/setup.go
// tells. It works once. After an error the instance is of no use, and its
// backend kills it.

#define NEW_ROOT "/newroot" // where the sandbox's root is attached on the minimal root
#define MAX_MOVES 16        // and mounts
#define MAX_SETUP_GROUPS 16
#define MAX_FILTER (64u << 10)
#define MAX_CPUS 1024

// request is a Setup's. Its strings are in the message, its descriptors the connection's.
struct request {
	int root;
	struct strs move;
	struct {
		int fd;
		struct str path;
	} mounts[MAX_MOVES];
	uint32_t mounts_len;
	struct str cpus, hostname;
	uint64_t keep_caps;
	struct str filter, child_filter;
	struct rlimit64_ rlimit[16];
	uint32_t resource[16], rlimits;
	struct group *groups[MAX_SETUP_GROUPS];
	uint32_t groups_len;
};

// next_fd hands out the descriptors that came, in order.
static int next_fd(struct conn *c, struct dec *d, int *at) {
	if (d->bad || *at >= c->fds_len) {
		d->bad = true;
		return -1;
	}
	return c->fds[(*at)++];
}

static uint32_t get_count(struct dec *d, uint32_t max) {
	uint32_t n = get_u32(d);
	if (n > max)
		d->bad = true;
	return d->bad ? 0 : n;
}

static struct group *get_group(struct conn *c, struct dec *d, int *at) {
	struct group *g = xcalloc(sizeof *g);
	g->dir = g->kill = g->events = g->oom = -1;
	int n = get_u8(d);
	if (n > MAX_GROUP_PROCS)
		d->bad = true;
	while (!d->bad && g->procs_len < n)
		g->procs[g->procs_len++] = next_fd(c, d, at);
	int *const optional[] = {&g->dir, &g->kill, &g->events, &g->oom};
	for (int i = 0; i < 4; i++)
		if (get_bool(d))
			*optional[i] = next_fd(c, d, at);
	return g;
}

static void get_request(struct conn *c, struct dec *d, int *at, struct request *r) {
	*r = (struct request){.root = next_fd(c, d, at)};
	r->move = get_strs(d, MAX_MOVES, MAX_PATH);
	r->mounts_len = get_count(d, MAX_MOVES);
	for (uint32_t i = 0; i < r->mounts_len; i++) {
		r->mounts[i].fd = next_fd(c, d, at);
		r->mounts[i].path = get_str(d, MAX_PATH);
	}
	r->cpus = get_str(d, MAX_CPUS);
	r->hostname = get_str(d, 64);
	r->keep_caps = get_u64(d);
	r->filter = get_str(d, MAX_FILTER);
	r->child_filter = get_str(d, MAX_FILTER);
	r->rlimits = get_count(d, 16);
	for (uint32_t i = 0; i < r->rlimits; i++) {
		r->resource[i] = get_u32(d);
		r->rlimit[i].soft = get_u64(d);
		r->rlimit[i].hard = get_u64(d);
	}
	uint32_t groups = get_count(d, MAX_SETUP_GROUPS);
	while (!d->bad && r->groups_len < groups)
		r->groups[r->groups_len++] = get_group(c, d, at);
}

// failed is an error for the log of the backend; a user never reads it.
static bool failed(struct err *e, const char *what, const char *path) {
	return err_set(e, INTERNAL, "", "set up: %s%s%s: %s", what, *path ? " " : "", path, errno_text(errno));
}

// attach_below moves the mount at from (of the directory at, or at itself where
// from is empty) to path below top. No part of path may be a symlink.
static bool attach_below(int top, int at, const char *from, const char *path) {
	struct open_how_ how = {.flags = O_PATH | O_NOFOLLOW | O_CLOEXEC, .resolve = RESOLVE_NO_SYMLINKS_ | RESOLVE_BENEATH_};
	if (strlen(path) < 2 || path[0] != '/') {
		errno = EINVAL;
		return false;
	}
	int target = sys_openat2(top, path + 1, &how);
	if (target < 0)
		return false;
	unsigned flags = MOVE_MOUNT_T_EMPTY_PATH_ | (*from ? 0 : MOVE_MOUNT_F_EMPTY_PATH_);
	int result = sys_move_mount(at, from, target, "", flags), number = errno;
	close(target);
	errno = number;
	return result == 0;
}

// enter_root makes the detached mount this mount namespace's root, with the
// mounts of the minimal root that move names, and the detached ones, below it.
static bool enter_root(const struct request *r, struct err *e) {
	if (mkdir(NEW_ROOT, 0700) != 0 && errno != EEXIST)
		return failed(e, "mkdir", NEW_ROOT);
	if (sys_move_mount(r->root, "", AT_FDCWD, NEW_ROOT, MOVE_MOUNT_F_EMPTY_PATH_) != 0)
		return failed(e, "attach the root", "");
	int top = open(NEW_ROOT, O_PATH | O_DIRECTORY | O_CLOEXEC);
	if (top < 0)
		return failed(e, "open the root", "");
	struct strs list = r->move;
	const char *what = NULL, *path = "";
	while (!what && list.count > 0) {
		path = strs_next(&list).s;
		if (!attach_below(top, AT_FDCWD, path, path))
			what = "move";
	}
	for (uint32_t i = 0; !what && i < r->mounts_len; i++) {
		path = r->mounts[i].path.s;
		if (!attach_below(top, r->mounts[i].fd, "", path))
			what = "attach";
	}
	if (!what && fchdir(top) != 0)
		what = "chdir to the root", path = "";
	bool ok = !what || failed(e, what, path);
	close(top);
	return ok;
}

// leave_old_root: the current directory is the new one.
static bool leave_old_root(struct err *e) {
	if (syscall(SYS_pivot_root, ".", ".") != 0)
		return failed(e, "pivot_root", "");
	// The old root now lies on top of the new one, at ".".
	if (umount2(".", MNT_DETACH) != 0)
		return failed(e, "detach the old root", "");
	if (chdir("/") != 0)
		return failed(e, "chdir to /", "");
	return true;
}

// CAP_SYS_ADMIN_ is kept where commands get cgroup namespaces: on a hierarchy
// with nsdelegate a process inside of one is not cloned into a cgroup outside,
// so PID 1 stays in the host's. Commands do not get the capability: it is not in
// the bounding set, and the seccomp program does not know of it.
#define CAP_SYS_ADMIN_ 21

// The launcher has dropped most of the bounding set already.
bool drop_capabilities(uint64_t keep, struct err *e) {
	for (unsigned n = 0; n < 64; n++) {
		int set = prctl(PR_CAPBSET_READ, n, 0, 0, 0);
		if (set < 0)
			break; // past the last one
		if (set > 0 && (n == CAP_SYS_ADMIN_ || !(keep >> n & 1)) && prctl(PR_CAPBSET_DROP, n, 0, 0, 0) != 0)
			return failed(e, "drop bounding set", "");
	}
	struct cap_header_ header = {.version = CAP_VERSION_3_};
	struct cap_data_ data[2];
	if (prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0) != 0 || syscall(SYS_capget, &header, data) != 0)
		return failed(e, "drop capabilities", "");
	for (int i = 0; i < 2; i++) {
		data[i].permitted &= (uint32_t)(keep >> (32 * i));
		data[i].effective = data[i].permitted;
		data[i].inheritable = 0;
	}
	return syscall(SYS_capset, &header, data) == 0 || failed(e, "drop capabilities", "");
}

// take_filter copies a seccomp program out of the message.
static bool take_filter(struct str bytes, struct sock_fprog_ *f, struct err *e) {
	const size_t size = sizeof(struct sock_filter_);
	if (bytes.n % size != 0 || bytes.n / size > BPF_MAXINSNS_)
		return err_set(e, INTERNAL, "", "set up: a seccomp program of %zu bytes", bytes.n);
	struct sock_filter_ *list = xmalloc(bytes.n);
	memcpy(list, bytes.s, bytes.n);
	*f = (struct sock_fprog_){.len = (uint16_t)(bytes.n / size), .filter = list};
	return true;
}

static bool confine(const struct request *r, const struct sock_fprog_ *filter, struct err *e) {
	if (r->hostname.n > 0 && sethostname(r->hostname.s, r->hostname.n) != 0)
		return failed(e, "set host name", "");
	// A UTS namespace begins with the names of its parent's.
	if (r->hostname.n > 0 && setdomainname("(none)", strlen("(none)")) != 0)
		return failed(e, "set domain name", "");
	if (!drop_capabilities(r->keep_caps, e))
		return false;
	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0)
		return failed(e, "no_new_privs", "");
	return !filter->len || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER_, 0, filter) == 0 || failed(e, "seccomp", "");
}

static bool set_up(const struct request *r, struct err *e) {
	struct sock_fprog_ filter = {0}, child = {0};
	if (sandbox_ready)
		return err_set(e, CONFLICT, "", "this sandbox has been set up already");
	bool ok = take_filter(r->filter, &filter, e) && take_filter(r->child_filter, &child, e) && enter_root(r, e) &&
		  leave_old_root(e) && confine(r, &filter, e);
	free((void *)(uintptr_t)filter.filter);
	if (!ok) {
		free((void *)(uintptr_t)child.filter);
		return false;
	}
	limits.filter = child;
	limits.cpus = xmalloc(r->cpus.n);
	memcpy(limits.cpus, r->cpus.s, r->cpus.n);
	limits.cpus_len = r->cpus.n;
	memcpy(limits.rlimit, r->rlimit, sizeof r->rlimit);
	memcpy(limits.resource, r->resource, sizeof r->resource);
	limits.rlimits = (int)r->rlimits;
	limits.cgroup_namespace = r->keep_caps >> CAP_SYS_ADMIN_ & 1;
	sandbox_ready = true;
	return true;
}

static void free_groups(struct request *r) {
	while (r->groups_len > 0)
		free(r->groups[--r->groups_len]);
}

void setup_call(struct conn *c, struct dec *d) {
	struct request r;
	struct err e;
	int at = 0;
	get_request(c, d, &at, &r);
	if (!dec_ok(d) || at < c->fds_len) {
		free_groups(&r);
		conn_close(c); // with the descriptors
		return;
	}
	c->fds_len = 0;
	bool ok = set_up(&r, &e);
	close(r.root);
	for (uint32_t i = 0; i < r.mounts_len; i++)
		close(r.mounts[i].fd);
	for (uint32_t i = 0; i < r.groups_len; i++)
		(ok ? group_add : group_free)(r.groups[i]);
	if (ok)
		conn_answer(c, NULL);
	else
		conn_refuse(c, &e);
}

void add_group_call(struct conn *c, struct dec *d) {
	struct err e;
	int at = 0;
	struct group *g = get_group(c, d, &at);
	if (!dec_ok(d) || at < c->fds_len) {
		free(g);
		conn_close(c);
		return;
	}
	c->fds_len = 0;
	if (group_count < MAX_PROCESSES) {
		group_add(g);
		conn_answer(c, NULL);
		return;
	}
	group_free(g);
	err_set(&e, EXHAUSTED, "", "%d command groups are the most of a sandbox", MAX_PROCESSES);
	conn_refuse(c, &e);
}
