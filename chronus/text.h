// The text of a session's command, on its way to the shell.
#ifndef CHRONUS_TEXT_H
#define CHRONUS_TEXT_H

#include "codec.h"
#include "err.h"
#include "loop.h"

// text is a pipe of which the shell opens the end that reads, for each command
// anew, and we the other one, for as long as there is text to write: its end is
// where nobody has that open any more.
//
// It is no file in memory, for a pipe is all that we may share with processes of
// an agent. Whoever has a file of another kind open, if only to read it, can
// have its inode locked for as long as a write takes, and an ftruncate or a
// write of ours would wait for that, with everything else that chronus does.
struct text {
	int fd;            // the end that reads, ours
	struct watch feed; // the other one; fd -1: all went
	char *rest;        // that did not
	size_t off, len;
	void (*broken)(struct text *); // what the shell gets is not whole
};

// text_open makes the pipe, and an end for the shell.
bool text_open(struct text *t, int *child, struct err *e);
void text_close(struct text *t);

// text_put lets the shell read a text, of which there is none. False: it cannot,
// and errno tells why.
bool text_put(struct text *t, struct str s);

// text_clear takes away what the shell has not read: shells read as they go, and
// a command may end them early. False: there is always more, for processes of
// the sandbox may open the pipe too.
bool text_clear(struct text *t);

#endif
