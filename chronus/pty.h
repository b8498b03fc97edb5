// Terminals, of the sandbox's own devpts.
#ifndef CHRONUS_PTY_H
#define CHRONUS_PTY_H

#include "command.h"

// pty_init remembers where /dev is, before an agent is there.
void pty_init(void);

// pty_open makes a terminal. The follower is the side of the command.
bool pty_open(struct window_size size, int *leader, int *follower, struct err *e);
bool pty_resize(int leader, struct window_size size);

#endif
