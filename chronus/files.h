// Calls for files, which another process serves: chronus-files.
#ifndef CHRONUS_FILES_H
#define CHRONUS_FILES_H

#include "conn.h"

// files_init opens the program, before an agent could change its path.
void files_init(const char *path);

void files_reaped(int pid);

// files_stopped has a stopped chronus-files go on.
void files_stopped(int pid);
void files_cancel(struct conn *c);

#endif
