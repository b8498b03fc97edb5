// What the calls do that is not of one module: starts that wait for a group,
// and what a sandbox is before and after Setup.
#ifndef CHRONUS_CALLS_H
#define CHRONUS_CALLS_H

#include "conn.h"

// sandbox_ready: Setup has worked, or none is needed. Before, no call but
// Info, Setup and AddGroup is served.
extern bool sandbox_ready;

// starts_retry looks again whether a group is free for the starts that wait.
void starts_retry(void);

// setup_call and add_group_call serve the calls that carry descriptors. They
// leave the connection closed or answered.
void setup_call(struct conn *c, struct dec *d);
void add_group_call(struct conn *c, struct dec *d);

#endif
