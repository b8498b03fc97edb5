// What the program and the fuzz harness share.
#ifndef CHRONUS_MAIN_H
#define CHRONUS_MAIN_H

#include <stdint.h>

void chronus_init(void);

// chronus_round waits for something, for at most max ns, and handles it.
void chronus_round(uint64_t max);

#endif
