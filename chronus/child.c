#define _GNU_SOURCE
#include "child.h"

#include "account.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/stat.h>

// A child is a fork with memory of its own. One that borrows ours would be
// cheaper by 0.08 ms of CPU, but the kernel's OOM killer, which may pick it, ends
// everything that shares its memory; and what a child does to its own memory's
// state (another user, dumpable) would be done to ours. So it is ordinary code,
// and where it has to look at the sandbox's files it can, which PID 1 does not.

#define DEFAULT_PATH "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#define MAX_TRIES 256

struct limits limits;
int null_fd = -1;
bool as_root;

int child_clone(int cgroup) {
	struct clone_args_ a = {.flags = CLONE_CLEAR_SIGHAND_, .exit_signal = SIGCHLD};
	if (limits.cgroup_namespace)
		a.flags |= CLONE_NEWCGROUP;
	if (cgroup >= 0) {
		a.flags |= CLONE_INTO_CGROUP_;
		a.cgroup = (uint64_t)cgroup;
	}
	return (int)syscall(SYS_clone3, &a, sizeof a);
}

// tell tells why nothing was started, and ends the child.
static _Noreturn void tell(const struct plan *p, uint8_t what, const struct err *e) {
	struct buf b = {0};
	put_u8(&b, what);
	put_err(&b, e);
	if (write(p->told, b.p, b.n) < 0)
		_exit(126);
	_exit(127);
}

static _Noreturn void fail(const struct plan *p, const char *call) {
	struct err e;
	err_set(&e, INTERNAL, "", "command not started: %s: %s", call, errno_text(errno));
	tell(p, TOLD_ERROR, &e);
}

// ENOTSUPP_ is what the kernel says where it has no room for machine code.
#define ENOTSUPP_ 524

// fail_filter is for a seccomp program that the kernel has no room for, which is
// the host's matter.
static _Noreturn void fail_filter(const struct plan *p) {
	struct err e;
	if (errno != ENOMEM && errno != ENOTSUPP_)
		fail(p, "seccomp");
	err_set(&e, UNAVAILABLE, "", "command not started: the kernel takes no seccomp program now: %s", errno_text(errno));
	tell(p, TOLD_ERROR, &e);
}

// field is the name of a field of the request, which in a session's is not below "command.".
static const char *field(const struct plan *p, const char *name) {
	return p->session ? name + strlen("command.") : name;
}

static void join_groups(const struct plan *p) {
	for (int i = 0; p->group && i < p->group->procs_len; i++)
		if (write(p->group->procs[i], "0", 1) != 1) {
			struct err e;
			err_set(&e, INTERNAL, "", "command not started: join group: %s", errno_text(errno));
			tell(p, TOLD_BAD_GROUP, &e);
		}
}

static void set_files(const struct plan *p) {
	const int from[] = {p->in, p->pty ? p->in : p->out, p->pty ? p->in : p->err};
	for (int to = 0; to < 3; to++)
		if (dup3(from[to], to, 0) < 0)
			fail(p, "dup");
	if (p->pty && ioctl(0, TIOCSCTTY, 0) != 0)
		fail(p, "set terminal");
}

// TOLD_FD is where the pipe to tell a failure through goes.
#define TOLD_FD 3

// close_files closes what the command does not get: on exec is too late, since
// the path of a program or a directory may lead through /proc/self/fd, and ".."
// of a directory of the host's, such as a cgroup, is the host's.
static void close_files(struct plan *p) {
	int keep[4] = {p->told}, n = 1, end = TOLD_FD;
	if (p->session) {
		keep[n++] = p->session->child_control;
		keep[n++] = p->session->child_status;
		keep[n++] = p->session->child_text;
	}
	// By way of higher numbers, since one of ours may be where another goes.
	int high = p->session ? SESSION_BASH_FD + 3 : TOLD_FD + 1;
	for (int i = 0; i < n; i++)
		if ((keep[i] = fcntl(keep[i], F_DUPFD_CLOEXEC, high)) < 0)
			fail(p, "dup");
	if (dup3(keep[0], TOLD_FD, O_CLOEXEC) < 0)
		fail(p, "dup");
	p->told = TOLD_FD;
	for (int i = 1; i < n; i++)
		if ((end = dup3(keep[i], SESSION_BASH_FD + i - 1, 0)) < 0)
			fail(p, "dup");
	if ((n > 1 && syscall(SYS_close_range, TOLD_FD + 1, SESSION_BASH_FD - 1, 0) != 0) ||
	    syscall(SYS_close_range, end + 1, ~0u, 0) != 0)
		fail(p, "close");
}

static void set_limits(const struct plan *p) {
	for (int i = 0; i < limits.rlimits; i++)
		if (syscall(SYS_prlimit64, 0, limits.resource[i], &limits.rlimit[i], NULL) != 0)
			fail(p, "rlimit");
}

static void set_user(const struct plan *p, const struct account *a) {
	if (!as_root && (a->uid == geteuid() || p->cmd->user.n == 0))
		return; // a test without privileges, as itself
	if (syscall(SYS_setgroups, a->groups_len, a->groups) == 0 && syscall(SYS_setresgid, a->gid, a->gid, a->gid) == 0 &&
	    syscall(SYS_setresuid, a->uid, a->uid, a->uid) == 0)
		return;
	struct err e;
	err_set(&e, INVALID, field(p, "command.user"), "the sandbox has no user or group of this number: %s", errno_text(errno));
	tell(p, TOLD_ERROR, &e);
}

static void set_cwd(const struct plan *p) {
	const char *cwd = p->cmd->cwd.n ? p->cmd->cwd.s : "/";
	// Through no link of /proc, which could lead out of the file tree.
	struct open_how_ how = {.flags = O_PATH | O_DIRECTORY | O_CLOEXEC, .resolve = RESOLVE_NO_MAGICLINKS_};
	int fd;
	do
		fd = sys_openat2(AT_FDCWD, cwd, &how);
	while (fd < 0 && (errno == EINTR || errno == EAGAIN));
	if (fd >= 0 && fchdir(fd) == 0) {
		close(fd);
		return;
	}
	struct err e;
	err_file(&e, errno, field(p, "command.cwd"), cwd);
	tell(p, TOLD_ERROR, &e);
}

// ---- environment ----

static const char *get_env(char **env, const char *name) {
	size_t n = strlen(name);
	for (; *env; env++)
		if (strncmp(*env, name, n) == 0 && (*env)[n] == '=')
			return *env + n + 1;
	return NULL;
}

// environment is the command's with what every program expects.
static char **environment(const struct plan *p, const struct account *a) {
	const char *const more[][2] = {
		{"PATH", DEFAULT_PATH}, {"HOME", a->home}, {"USER", a->name}, {"LOGNAME", a->name}, {"TERM", p->pty ? "xterm" : NULL},
	};
	struct strs list = p->cmd->env;
	char **env = xcalloc((list.count + sizeof more / sizeof *more + 1) * sizeof *env);
	size_t n = 0;
	while (list.count > 0)
		env[n++] = strs_next(&list).s;
	for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
		char *kv;
		if (!more[i][1] || get_env(env, more[i][0]))
			continue;
		if (asprintf(&kv, "%s=%s", more[i][0], more[i][1]) < 0)
			_exit(126);
		env[n++] = kv;
	}
	return env;
}

// ---- exec ----

// search is the search for a program: what failed at the place that came nearest.
struct search {
	const struct plan *p;
	char **env;
	const char *path;
	int tries;
	int worst; // 0: nothing was there
	char at[200];
};

static void try(struct search *s, const char *path, char **argv) {
	if (s->tries == MAX_TRIES)
		return;
	s->tries++;
	execve(path, argv, s->env);
	int number = errno;
	struct stat st;
	if (number == ENOENT || number == ENOTDIR) {
		if (s->worst != 0 || lstat(path, &st) != 0)
			return;
		number = ENOENT; // it is there, but not what it needs
	} else if (s->worst != 0 && s->worst != ENOENT && s->worst != EACCES) {
		return;
	}
	s->worst = number;
	snprintf(s->at, sizeof s->at, "%s", path);
}

// look tries each place where a program may be, as execvp does.
static void look(struct search *s, const char *name, char **argv) {
	if (strchr(name, '/')) {
		try(s, name, argv);
		return;
	}
	for (const char *dir = s->path;; dir++) {
		char path[MAX_PATH];
		size_t n = strcspn(dir, ":");
		if (n + strlen(name) + 2 < sizeof path) {
			snprintf(path, sizeof path, "%.*s/%s", n ? (int)n : 1, n ? dir : ".", name);
			try(s, path, argv);
		}
		dir += n;
		if (!*dir)
			return;
	}
}

// look_shell looks for a shell in PATH, and where every system has it: a
// command's PATH need not lead to one.
static void look_shell(struct search *s, const char *name, char **argv) {
	char path[32];
	look(s, name, argv);
	snprintf(path, sizeof path, "/bin/%s", name);
	try(s, path, argv);
	snprintf(path, sizeof path, "/usr/bin/%s", name);
	try(s, path, argv);
}

static void look_session(struct search *s) {
	const struct plan *p = s->p;
	char *bash[] = {"bash", "--noprofile", "--norc", "-c", (char *)(uintptr_t)session_bash_loop, NULL};
	look_shell(s, "bash", bash);
	// There is no bash.
	for (int i = 0; i < 3; i++)
		if (dup3(SESSION_BASH_FD + i, SESSION_SH_FD + i, 0) < 0)
			fail(p, "dup");
	syscall(SYS_close_range, SESSION_BASH_FD, SESSION_BASH_FD + 2, 0);
	char *sh[] = {"sh", "-c", (char *)(uintptr_t)session_sh_loop, NULL};
	look_shell(s, "sh", sh);
}

static void look_command(struct search *s) {
	const struct command *cmd = s->p->cmd;
	if (cmd->shell.n > 0) {
		for (int i = 0; i < 2; i++) {
			char *shell = i ? "sh" : "bash", *argv[] = {shell, "-c", cmd->shell.s, NULL};
			look_shell(s, shell, argv);
		}
		return;
	}
	struct strs list = cmd->argv;
	char **argv = xcalloc((list.count + 1) * sizeof *argv);
	for (size_t n = 0; list.count > 0;)
		argv[n++] = strs_next(&list).s;
	look(s, argv[0], argv);
}

// exec_error tells why no exec worked.
static void exec_error(const struct search *s, struct err *e) {
	const struct plan *p = s->p;
	bool program = p->cmd->argv.count > 0;
	struct strs argv = p->cmd->argv;
	struct str name = program ? strs_next(&argv) : (struct str){"bash or sh", 10};
	const char *where = p->session ? "" : program ? "command.argv" : "command.shell";
	const char *at = QUOTED(s->at, strlen(s->at)), *text = errno_text(s->worst);
	switch (s->worst) {
	case 0:
		err_set(e, NOT_FOUND, where, "no program %s in the sandbox", QUOTED(name.s, min_size(name.n, 200)));
		return;
	case ENOENT:
		err_set(e, NOT_FOUND, where, "%s needs an interpreter (#! line or ELF loader) that is not in the sandbox", at);
		return;
	case EACCES:
	case EPERM:
		err_set(e, INVALID, where, "%s is not executable for this user", at);
		return;
	case ENOEXEC:
		err_set(e, INVALID, where, "%s is not a program; a script needs a #! line", at);
		return;
	case E2BIG:
		err_set(e, INVALID, where, "argv and env are larger than the kernel takes (128 KiB for one string)");
		return;
	case EAGAIN:
	case ENOMEM:
	case EMFILE:
	case ENFILE:
		err_set(e, EXHAUSTED, where, "%s cannot be started now: %s", at, text);
		return;
	case ETXTBSY:
		err_set(e, CONFLICT, where, "%s is open for writing", at);
		return;
	case EIO:
		err_set(e, UNAVAILABLE, where, "%s cannot be read: %s", at, text);
		return;
	}
	err_set(e, INVALID, where, "%s cannot be started: %s", at, text);
}

void child_run(struct plan *p) {
	static struct account a;
	struct err e;
	join_groups(p);
	if (limits.cpus_len && syscall(SYS_sched_setaffinity, 0, limits.cpus_len, limits.cpus) < 0)
		fail(p, "affinity");
	if (setsid() < 0)
		fail(p, "setsid");
	umask(022); // that of chronus is 0
	set_files(p);
	close_files(p);
	if (!account_find(p->cmd->user.n ? p->cmd->user.s : "", field(p, "command.user"), &a, &e))
		tell(p, TOLD_ERROR, &e);
	set_limits(p);
	set_user(p, &a);
	set_cwd(p);
	struct search s = {.p = p, .env = environment(p, &a)};
	s.path = get_env(s.env, "PATH");
	if (limits.filter.len && syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER_, 0, &limits.filter) != 0)
		fail_filter(p);
	sigset_t none;
	sigemptyset(&none);
	sigprocmask(SIG_SETMASK, &none, NULL);
#ifdef FUZZ
	_exit(127); // a fuzzer's input must not run programs
#endif
	if (p->session)
		look_session(&s);
	else
		look_command(&s);
	exec_error(&s, &e);
	tell(p, TOLD_ERROR, &e);
}
