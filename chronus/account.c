#define _GNU_SOURCE
#include "account.h"

#include "sys.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define MAX_FILE (4u << 20) // of /etc/passwd and /etc/group
#define MAX_FIELDS 8
#define NO_ID 0xffffffffu

// field is a part of a line.
struct field {
	const char *s;
	size_t n;
};

static bool is(struct field f, const char *s) { return f.n == strlen(s) && memcmp(f.s, s, f.n) == 0; }

// next_line splits the next line into fields and returns their count, or -1 at
// the end. More than MAX_FIELDS are not told apart.
static int next_line(const char **at, const char *end, struct field f[MAX_FIELDS]) {
	if (*at >= end)
		return -1;
	const char *nl = memchr(*at, '\n', (size_t)(end - *at));
	const char *stop = nl ? nl : end, *p = *at;
	int n = 0;
	for (;;) {
		const char *colon = n < MAX_FIELDS - 1 ? memchr(p, ':', (size_t)(stop - p)) : NULL;
		f[n++] = (struct field){p, (size_t)((colon ? colon : stop) - p)};
		if (!colon)
			break;
		p = colon + 1;
	}
	*at = stop + 1;
	return n;
}

static bool id32(struct field f, uint32_t *id) {
	uint64_t v;
	if (!parse_u64(f.s, f.n, NO_ID - 1, &v))
		return false;
	*id = (uint32_t)v;
	return true;
}

// parse_id reads a decimal id. What looks like a number and is none that an id
// can be is refused, and never taken for a name.
static bool parse_id(const char *s, const char *field, uint32_t *id, bool *numeric, struct err *e) {
	const char *digits = *s == '-' ? s + 1 : s;
	*numeric = digits[strspn(digits, "0123456789")] == 0;
	if (!*numeric || id32((struct field){s, strlen(s)}, id))
		return true;
	return err_set(e, INVALID, field, "want an id from 0 to 4294967294, got %s", QUOTED(s, strlen(s)));
}

static bool is_member(struct field list, const char *name) {
	const char *p = list.s, *end = list.s + list.n;
	for (;;) {
		const char *comma = memchr(p, ',', (size_t)(end - p));
		if (is((struct field){p, (size_t)((comma ? comma : end) - p)}, name))
			return true;
		if (!comma)
			return false;
		p = comma + 1;
	}
}

static bool need_group_file(const struct account_files *files, struct err *e) {
	if (files->no_group)
		*e = *files->no_group;
	return !files->no_group;
}

static bool find_groups(const struct account_files *files, struct account *a, struct err *e) {
	if (!need_group_file(files, e))
		return false;
	struct field f[MAX_FIELDS];
	const char *at = files->group;
	for (int n; (n = next_line(&at, files->group + files->group_len, f)) >= 0;)
		if (n >= 4 && a->groups_len < MAX_ACCOUNT_GROUPS && is_member(f[3], a->name) && id32(f[2], &a->groups[a->groups_len]))
			a->groups_len++;
	return true;
}

static bool find_user(const char *name, const char *field, const struct account_files *files, struct account *a, struct err *e) {
	bool numeric;
	char number[16];
	if (!parse_id(name, field, &a->uid, &numeric, e))
		return false;
	snprintf(a->name, sizeof a->name, "%s", name);
	snprintf(a->home, sizeof a->home, "/");
	snprintf(number, sizeof number, "%u", a->uid);
	struct field f[MAX_FIELDS];
	const char *at = files->passwd;
	for (int n; (n = next_line(&at, files->passwd + files->passwd_len, f)) >= 0;) {
		uint32_t uid, gid;
		if (n < 7 || !(is(f[0], name) || (numeric && is(f[2], number))) || !id32(f[2], &uid) || !id32(f[3], &gid))
			continue;
		a->uid = uid;
		a->gid = gid;
		snprintf(a->name, sizeof a->name, "%.*s", (int)min_size(f[0].n, sizeof a->name), f[0].s);
		if (f[5].n > 0 && f[5].s[0] == '/' && f[5].n < sizeof a->home)
			snprintf(a->home, sizeof a->home, "%.*s", (int)f[5].n, f[5].s);
		return find_groups(files, a, e);
	}
	return numeric || err_set(e, NOT_FOUND, field, "no user %s in the sandbox's /etc/passwd", QUOTED(name, strlen(name)));
}

static bool find_group(const char *name, const char *field, const struct account_files *files, uint32_t *gid, struct err *e) {
	bool numeric;
	if (!parse_id(name, field, gid, &numeric, e))
		return false;
	if (numeric)
		return true;
	if (!need_group_file(files, e))
		return false;
	struct field f[MAX_FIELDS];
	const char *at = files->group;
	for (int n; (n = next_line(&at, files->group + files->group_len, f)) >= 0;)
		if (n >= 3 && is(f[0], name) && id32(f[2], gid))
			return true;
	return err_set(e, NOT_FOUND, field, "no group %s in the sandbox's /etc/group", QUOTED(name, strlen(name)));
}

bool account_parse(const char *user, const char *field, const struct account_files *files, struct account *a, struct err *e) {
	char name[512];
	snprintf(name, sizeof name, "%s", user);
	char *group = strchr(name, ':');
	if (group)
		*group++ = 0;
	if (!*name || (group && !*group))
		return err_set(e, INVALID, field, "want name, uid, name:group or uid:gid, got %s", QUOTED(user, strlen(user)));
	if (!find_user(name, field, files, a, e))
		return false;
	if (group)
		a->groups_len = 0;
	return !group || find_group(group, field, files, &a->gid, e);
}

// open_regular opens a regular file as the sandbox's programs see it, but
// through no link of /proc. It neither blocks on a FIFO nor wakes a device: the
// type is looked at before the file is opened, and again after. -1: see errno.
static int open_regular(const char *path) {
	static const int flags[] = {O_PATH, O_RDONLY | O_NONBLOCK | O_NOCTTY};
	for (int i = 0;; i++) {
		struct open_how_ how = {.flags = (uint64_t)(flags[i] | O_CLOEXEC), .resolve = RESOLVE_NO_MAGICLINKS_};
		struct stat st;
		int fd;
		do
			fd = sys_openat2(AT_FDCWD, path, &how);
		while (fd < 0 && (errno == EINTR || errno == EAGAIN));
		if (fd < 0)
			return -1;
		bool ok = fstat(fd, &st) == 0 && S_ISREG(st.st_mode);
		if (ok && i == 1)
			return fd;
		close(fd);
		if (!ok) {
			errno = S_ISDIR(st.st_mode) ? EISDIR : NOT_REGULAR;
			return -1;
		}
	}
}

// read_file reads a file; one that is not there is empty.
static bool read_file(const char *path, const char *field, const char **text, size_t *len, struct err *e) {
	*len = 0;
	*text = "";
	int fd = open_regular(path);
	if (fd < 0)
		return errno == ENOENT || err_file(e, errno, field, path);
	char *p = xmalloc(MAX_FILE + 1); // as much as is read is touched
	ssize_t n;
	while (*len <= MAX_FILE && (n = read(fd, p + *len, MAX_FILE + 1 - *len)) != 0) {
		if (n < 0 && errno == EINTR)
			continue;
		if (n < 0)
			return err_file(e, errno, field, path);
		*len += (size_t)n;
	}
	close(fd);
	*text = p;
	return *len <= MAX_FILE || err_set(e, INVALID, field, "the sandbox's %s is larger than %u bytes", path, MAX_FILE);
}

bool account_find(const char *user, const char *field, struct account *a, struct err *e) {
	a->uid = a->gid = 0;
	a->groups_len = 0;
	if (!*user) {
		// Root needs no file, so a sandbox without any still works.
		snprintf(a->name, sizeof a->name, "root");
		snprintf(a->home, sizeof a->home, "/root");
		return true;
	}
	struct account_files f = {0};
	struct err no_group;
	if (!read_file("/etc/group", field, &f.group, &f.group_len, &no_group))
		f.no_group = &no_group;
	return read_file("/etc/passwd", field, &f.passwd, &f.passwd_len, e) && account_parse(user, field, &f, a, e);
}
