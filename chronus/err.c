#include "err.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool err_set(struct err *e, const char *code, const char *field, const char *format, ...) {
	e->code = code;
	e->need_group = false;
	snprintf(e->field, sizeof e->field, "%s", field);
	va_list args;
	va_start(args, format);
	vsnprintf(e->message, sizeof e->message, format, args);
	va_end(args);
	return false;
}

void put_err(struct buf *b, const struct err *e) {
	put_u8(b, e->need_group);
	put_str(b, e->code, strlen(e->code));
	put_str(b, e->field, strlen(e->field));
	put_str(b, e->message, strlen(e->message));
}

// texts are those of Go's syscall.Errno.
static const struct {
	int number;
	const char *text;
} texts[] = {
	{EPERM, "operation not permitted"},
	{ENOENT, "no such file or directory"},
	{ESRCH, "no such process"},
	{EINTR, "interrupted system call"},
	{EIO, "input/output error"},
	{ENXIO, "no such device or address"},
	{E2BIG, "argument list too long"},
	{ENOEXEC, "exec format error"},
	{EBADF, "bad file descriptor"},
	{EAGAIN, "resource temporarily unavailable"},
	{ENOMEM, "cannot allocate memory"},
	{EACCES, "permission denied"},
	{EBUSY, "device or resource busy"},
	{EEXIST, "file exists"},
	{EXDEV, "invalid cross-device link"},
	{ENODEV, "no such device"},
	{ENOTDIR, "not a directory"},
	{EISDIR, "is a directory"},
	{EINVAL, "invalid argument"},
	{ENFILE, "too many open files in system"},
	{EMFILE, "too many open files"},
	{ENOTTY, "inappropriate ioctl for device"},
	{ETXTBSY, "text file busy"},
	{EFBIG, "file too large"},
	{ENOSPC, "no space left on device"},
	{EROFS, "read-only file system"},
	{EMLINK, "too many links"},
	{EPIPE, "broken pipe"},
	{ENAMETOOLONG, "file name too long"},
	{ENOSYS, "function not implemented"},
	{ENOTEMPTY, "directory not empty"},
	{ELOOP, "too many levels of symbolic links"},
	{EOVERFLOW, "value too large for defined data type"},
	{EOPNOTSUPP, "operation not supported"},
	{ESTALE, "stale file handle"},
	{EDQUOT, "disk quota exceeded"},
	{ELIBBAD, "accessing a corrupted shared library"},
};

const char *errno_text(int number) {
	static char other[24];
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
		if (texts[i].number == number)
			return texts[i].text;
	snprintf(other, sizeof other, "errno %d", number);
	return other;
}

static const char *file_code(int number, const char **text) {
	*text = errno_text(number);
	switch (number) {
	case NOT_REGULAR:
		*text = "not a regular file";
		return INVALID;
	case ENOENT:
		return NOT_FOUND;
	case ENOSPC:
	case EDQUOT:
		*text = "the disk of the sandbox is full";
		return EXHAUSTED;
	case EMFILE:
	case ENFILE:
	case ENOMEM:
	case EAGAIN:
		return EXHAUSTED;
	case EACCES:
	case EPERM:
		return DENIED;
	case EEXIST:
	case ENOTEMPTY:
	case EBUSY:
	case ETXTBSY:
	case EROFS:
	case EXDEV:
	case ESTALE:
		return CONFLICT;
	case ELOOP:
		*text = "too many symlinks, or one of /proc that leads out of the file tree";
		return INVALID;
	case ENXIO:
	case ENODEV:
		*text = "not a regular file";
		return INVALID;
	case ENOTDIR:
	case EISDIR:
	case ENAMETOOLONG:
	case EINVAL:
	case EOPNOTSUPP:
	case EFBIG:
	case EMLINK:
	case EOVERFLOW:
		return INVALID;
	case EIO:
		*text = "the file could not be read or written: input/output error";
		return UNAVAILABLE;
	}
	return INTERNAL;
}

bool err_file(struct err *e, int number, const char *field, const char *path) {
	const char *text;
	const char *code = file_code(number, &text);
	return err_set(e, code, field, "%s: %s", QUOTED(path, strlen(path)), text);
}

// utf8 is the length of the character at s, or 0 where it is no valid one.
static size_t utf8(const unsigned char *s, size_t n) {
	size_t len = s[0] < 0x80 ? 1 : s[0] < 0xc2 ? 0 : s[0] < 0xe0 ? 2 : s[0] < 0xf0 ? 3 : s[0] < 0xf5 ? 4 : 0;
	if (len > n)
		return 0;
	for (size_t i = 1; i < len; i++)
		if ((s[i] & 0xc0) != 0x80)
			return 0;
	if (len == 3 && ((s[0] == 0xe0 && s[1] < 0xa0) || (s[0] == 0xed && s[1] >= 0xa0)))
		return 0;
	if (len == 4 && ((s[0] == 0xf0 && s[1] < 0x90) || (s[0] == 0xf4 && s[1] >= 0x90)))
		return 0;
	return len;
}

char *quote(char *out, size_t cap, const char *s, size_t n) {
	static const char named[] = "\aa\bb\ff\nn\rr\tt\vv\\\\\"\"";
	size_t at = 0;
	out[at++] = '"';
	for (size_t i = 0; i < n && at + 12 < cap;) {
		const unsigned char *p = (const unsigned char *)s + i;
		size_t len = utf8(p, n - i);
		const char *name = NULL;
		for (size_t j = 0; len == 1 && j < sizeof named - 1; j += 2)
			if (named[j] == (char)*p)
				name = named + j + 1;
		if (name) {
			out[at++] = '\\';
			out[at++] = *name;
		} else if (len == 2 && p[0] == 0xc2 && p[1] < 0xa0) {
			at += (size_t)snprintf(out + at, cap - at, "\\u%04x", p[1]);
		} else if (len == 0 || (len == 1 && (*p < 0x20 || *p == 0x7f))) {
			at += (size_t)snprintf(out + at, cap - at, "\\x%02x", *p);
		} else {
			memcpy(out + at, p, len);
			at += len;
		}
		i += len ? len : 1;
	}
	out[at++] = '"';
	out[at] = 0;
	return out;
}

// fraction writes ns/unit with as many decimals as it has.
static size_t fraction(char *out, uint64_t ns, uint64_t unit) {
	int n = snprintf(out, 32, "%llu", (unsigned long long)(ns / unit));
	uint64_t rest = ns % unit;
	if (!rest)
		return (size_t)n;
	out[n++] = '.';
	while (rest) {
		rest *= 10;
		out[n++] = (char)('0' + rest / unit);
		rest %= unit;
	}
	out[n] = 0;
	return (size_t)n;
}

char *duration_text(char *out, int64_t ns) {
	uint64_t u = ns < 0 ? -(uint64_t)ns : (uint64_t)ns;
	char *p = out;
	if (ns < 0)
		*p++ = '-';
	if (u == 0 || u >= SECOND) {
		uint64_t minutes = u / (60 * SECOND);
		if (minutes >= 60)
			p += snprintf(p, 16, "%lluh", (unsigned long long)(minutes / 60));
		if (minutes > 0)
			p += snprintf(p, 8, "%llum", (unsigned long long)(minutes % 60));
		p += fraction(p, u % (60 * SECOND), SECOND);
		strcpy(p, "s");
		return out;
	}
	bool micro = u >= MICROSECOND, milli = u >= MILLISECOND;
	p += fraction(p, u, milli ? MILLISECOND : micro ? MICROSECOND : 1);
	strcpy(p, milli ? "ms" : micro ? "µs" : "ns");
	return out;
}
