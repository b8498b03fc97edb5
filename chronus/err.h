// Errors that a user sees: dsec.Error.
#ifndef CHRONUS_ERR_H
#define CHRONUS_ERR_H

#include "codec.h"

#define INVALID "invalid"
#define DENIED "denied"
#define NOT_FOUND "not_found"
#define CONFLICT "conflict"
#define OUTCOME_UNKNOWN "outcome_unknown"
#define UNSUPPORTED "unsupported"
#define EXHAUSTED "exhausted"
#define UNAVAILABLE "unavailable"
#define INTERNAL "internal"

struct err {
	const char *code;
	bool need_group; // a start that found no free command group: ErrNeedGroup
	char field[64];
	char message[3072]; // with the rest less than PIPE_BUF, so that a child tells it in one write
};

// err_set fills in an error and returns false, so that a check can return it.
bool err_set(struct err *e, const char *code, const char *field, const char *format, ...)
	__attribute__((format(printf, 4, 5)));

// err_file is the error for what the kernel said about the path that a field named.
bool err_file(struct err *e, int number, const char *field, const char *path);

// NOT_REGULAR stands among errno's numbers for a file whose reading could block or act.
#define NOT_REGULAR 4095

void put_err(struct buf *b, const struct err *e);

// errno_text is the kernel's text for a number, in lower case.
const char *errno_text(int number);

// quote writes s as a Go string literal, with a NUL at its end, and returns out.
// What does not fit is left out.
char *quote(char *out, size_t cap, const char *s, size_t n);
#define QUOTED(s, n) quote((char[1024]){0}, 1024, s, n)

// duration_text writes ns as Go shows a time.Duration; out has room for 64 bytes.
char *duration_text(char *out, int64_t ns);
#define DURATION(ns) duration_text((char[64]){0}, ns)

#endif
