#include "command.h"

#include <string.h>

static void get_command(struct dec *d, struct command *c) {
	c->argv = get_strs(d, MAX_ARGS, MAX_ARG_BYTES);
	c->shell = get_str(d, MAX_ARG_BYTES);
	c->env = get_strs(d, MAX_ARGS, MAX_ARG_BYTES);
	c->cwd = get_str(d, MAX_PATH);
	c->user = get_str(d, MAX_USER);
	c->timeout = (int64_t)get_u64(d);
	c->output_limit = (int64_t)get_u64(d);
}

struct window_size get_window_size(struct dec *d) {
	struct window_size w = {.rows = get_u16(d)};
	w.cols = get_u16(d);
	return w;
}

void get_start(struct dec *d, struct start *s) {
	*s = (struct start){0};
	get_command(d, &s->cmd);
	s->in = get_str(d, MAX_STDIN);
	s->open_stdin = get_bool(d);
	s->detach = get_bool(d);
	s->orphan = get_bool(d);
	s->pty = get_bool(d);
	if (s->pty)
		s->size = get_window_size(d);
}

void get_tagged_start(struct dec *d, struct start *s) {
	uint64_t tag = get_u64(d);
	get_start(d, s);
	s->tag = tag;
}

void get_session_request(struct dec *d, struct start *s) {
	*s = (struct start){0};
	s->cmd.env = get_strs(d, MAX_ARGS, MAX_ARG_BYTES);
	s->cmd.cwd = get_str(d, MAX_PATH);
	s->cmd.user = get_str(d, MAX_USER);
}

void get_session_command(struct dec *d, struct session_command *c) {
	c->session = get_str(d, MAX_SESSION_ID);
	c->text = get_str(d, MAX_ARG_BYTES);
	c->timeout = (int64_t)get_u64(d);
	c->output_limit = (int64_t)get_u64(d);
}

static bool has_byte(struct str s, char c) { return memchr(s.s, c, s.n) != NULL; }

static bool check_list(struct strs list, const char *field, size_t *size, struct err *e) {
	for (uint32_t i = 0; list.count > 0; i++) {
		struct str s = strs_next(&list);
		if (has_byte(s, 0))
			return err_set(e, INVALID, field, "want elements without NUL bytes; element %u has one", i);
		*size += s.n;
	}
	if (*size > MAX_ARG_BYTES)
		return err_set(e, INVALID, field, "want at most %u bytes of argv and env together, got %zu", MAX_ARG_BYTES, *size);
	return true;
}

static bool check_env(struct strs env, const char *field, size_t *size, struct err *e) {
	struct strs list = env;
	for (uint32_t i = 0; list.count > 0; i++) {
		// A value may have new lines, as keys in PEM do; a name may not.
		struct str s = strs_next(&list);
		const char *end = memchr(s.s, '=', s.n);
		if (!end || end == s.s || memchr(s.s, '\n', (size_t)(end - s.s)))
			return err_set(e, INVALID, field, "want NAME=VALUE; element %u is not", i);
	}
	return check_list(env, field, size, e);
}

static bool check_cwd(struct str cwd, const char *field, struct err *e) {
	if (cwd.n == 0)
		return true;
	if (cwd.s[0] != '/')
		return err_set(e, INVALID, field, "want an absolute path");
	if (cwd.n >= MAX_PATH)
		return err_set(e, INVALID, field, "want less than %u bytes, got %zu", MAX_PATH, cwd.n);
	if (has_byte(cwd, 0))
		return err_set(e, INVALID, field, "want a path without NUL bytes");
	return true;
}

static bool check_user(struct str user, const char *field, struct err *e) {
	if (has_byte(user, 0) || has_byte(user, '\n'))
		return err_set(e, INVALID, field, "want a name or uid, with :group or :gid if wanted, in at most %u bytes", MAX_USER);
	return true;
}

static bool check_limits(int64_t timeout, int64_t output, const char *timeout_field, const char *output_field, struct err *e) {
	if (timeout < 0 || timeout > MAX_TIMEOUT)
		return err_set(e, INVALID, timeout_field, "want 0 (none) to %s, got %s", DURATION(MAX_TIMEOUT), DURATION(timeout));
	if (output < 0)
		return err_set(e, INVALID, output_field, "want 0 (none) or a count of bytes, got %lld", (long long)output);
	return true;
}

static bool check_command(const struct command *c, struct err *e) {
	if (c->argv.count == 0 && c->shell.n == 0)
		return err_set(e, INVALID, "command.argv", "want a program, or a shell text in command.shell");
	if (c->argv.count > 0 && c->shell.n > 0)
		return err_set(e, INVALID, "command.argv", "want argv or shell, not both");
	struct strs argv = c->argv;
	if (argv.count > 0 && strs_next(&argv).n == 0)
		return err_set(e, INVALID, "command.argv", "want a program as the first element, got an empty string");
	if (has_byte(c->shell, 0))
		return err_set(e, INVALID, "command.shell", "want text without NUL bytes");
	size_t size = c->shell.n;
	return check_list(c->argv, "command.argv", &size, e) && check_env(c->env, "command.env", &size, e) &&
	       check_cwd(c->cwd, "command.cwd", e) && check_user(c->user, "command.user", e) &&
	       check_limits(c->timeout, c->output_limit, "command.timeout", "command.output_limit", e);
}

bool check_start(const struct start *s, struct err *e) {
	return check_command(&s->cmd, e) && (!s->pty || check_size(s->size, e));
}

bool check_session_request(const struct start *s, struct err *e) {
	size_t size = 0;
	return check_env(s->cmd.env, "env", &size, e) && check_cwd(s->cmd.cwd, "cwd", e) && check_user(s->cmd.user, "user", e);
}

bool check_session_command(const struct session_command *c, struct err *e) {
	if (c->session.n == 0)
		return err_set(e, INVALID, "session_id", "want the ID of a session");
	if (has_byte(c->text, 0))
		return err_set(e, INVALID, "command", "want text without NUL bytes");
	return check_limits(c->timeout, c->output_limit, "timeout", "output_limit", e);
}

bool check_size(struct window_size w, struct err *e) {
	if (w.rows == 0 || w.cols == 0)
		return err_set(e, INVALID, "pty", "want rows and columns of at least 1, got %ux%u", w.rows, w.cols);
	return true;
}

bool check_signal(int signal, struct err *e) {
	if (signal < 1 || signal > 64)
		return err_set(e, INVALID, "signal", "want 1 to 64, got %d", signal);
	return true;
}

void put_shown_argv(struct buf *b, const struct command *c) {
	struct strs list = c->argv;
	size_t at = b->n, room = MAX_LISTED_ARGV;
	uint32_t count = 0;
	put_u32(b, 0);
	if (c->argv.count == 0) {
		put_str(b, "sh", 2);
		put_str(b, "-c", 2);
		put_str(b, c->shell.s, min_size(c->shell.n, room - 4));
		count = 3;
	}
	for (; list.count > 0 && count < 64 && room > 0; count++) {
		struct str s = strs_next(&list);
		put_str(b, s.s, min_size(s.n, room));
		room -= min_size(s.n, room);
	}
	b->p[at + 3] = (uint8_t)count;
}
