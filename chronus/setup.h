// What a sandbox's processes may do at most.
#ifndef CHRONUS_SETUP_H
#define CHRONUS_SETUP_H

#include "err.h"

// drop_capabilities drops what is not in keep from every set of this process.
bool drop_capabilities(uint64_t keep, struct err *e);

#endif
