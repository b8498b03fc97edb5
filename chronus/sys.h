// System calls and constants that the C library has no names for.
#ifndef CHRONUS_SYS_H
#define CHRONUS_SYS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SYS_epoll_pwait2
#define SYS_epoll_pwait2 441
#endif

#define CLONE_CLEAR_SIGHAND_ 0x100000000ULL
#define CLONE_INTO_CGROUP_ 0x200000000ULL

// clone_args is struct clone_args of Linux 5.7.
struct clone_args_ {
	uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};

struct open_how_ {
	uint64_t flags, mode, resolve;
};
#define RESOLVE_NO_MAGICLINKS_ 0x02
#define RESOLVE_NO_SYMLINKS_ 0x04
#define RESOLVE_BENEATH_ 0x08

#define MOVE_MOUNT_F_EMPTY_PATH_ 0x04
#define MOVE_MOUNT_T_EMPTY_PATH_ 0x40

#define CLOSE_RANGE_CLOEXEC_ 4

#define SECCOMP_SET_MODE_FILTER_ 1
#define BPF_MAXINSNS_ 4096

// sock_filter is one instruction of a seccomp program, as the wire has it.
struct sock_filter_ {
	uint16_t code;
	uint8_t jt, jf;
	uint32_t k;
};
struct sock_fprog_ {
	uint16_t len;
	const struct sock_filter_ *filter;
};

// rlimit64 is what prlimit64(2) takes.
struct rlimit64_ {
	uint64_t soft, hard;
};

// cap_header and cap_data are what capget(2) and capset(2) take; there are two
// of the latter, for the low and the high half.
struct cap_header_ {
	uint32_t version;
	int pid;
};
struct cap_data_ {
	uint32_t effective, permitted, inheritable;
};
#define CAP_VERSION_3_ 0x20080522

static inline int sys_openat2(int dir, const char *path, const struct open_how_ *how) {
	return (int)syscall(SYS_openat2, dir, path, how, sizeof *how);
}

static inline int sys_move_mount(int from, const char *from_path, int to, const char *to_path, unsigned flags) {
	return (int)syscall(SYS_move_mount, from, from_path, to, to_path, flags);
}

#endif
