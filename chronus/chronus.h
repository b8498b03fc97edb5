// What is set up at the start, and the loop's round.
#ifndef CHRONUS_H
#define CHRONUS_H

#include <stdint.h>

// chronus_init becomes the one that reaps this process's children, and sets its
// umask to 0: modes are those of the requests.
void chronus_init(void);

// chronus_round waits for something, for at most max ns, and handles it.
void chronus_round(uint64_t max);

#endif
