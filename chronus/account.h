// Whom a command runs as, by the sandbox's own files.
#ifndef CHRONUS_ACCOUNT_H
#define CHRONUS_ACCOUNT_H

#include "err.h"

#define MAX_ACCOUNT_GROUPS 1024

struct account {
	uint32_t uid, gid;
	size_t groups_len;
	char name[512];
	char home[4096];
	uint32_t groups[MAX_ACCOUNT_GROUPS]; // supplementary
};

// account_find finds user, which is name, uid, name:group or uid:gid; empty is
// root. A uid or gid need not be in the sandbox's files. It reads files that
// the agent may have made, and so is for children only.
bool account_find(const char *user, const char *field, struct account *a, struct err *e);

// The two files as text, for account_find and its tests.
struct account_files {
	const char *passwd, *group;
	size_t passwd_len, group_len;
	const struct err *no_group; // why the second could not be read, for who needs it
};
bool account_parse(const char *user, const char *field, const struct account_files *f, struct account *a, struct err *e);

#endif
