// Tags: numbers by which a command is found again by whoever has lost its
// connection, and so its process number.
#ifndef CHRONUS_TAG_H
#define CHRONUS_TAG_H

#include "conn.h"

bool check_tag(uint64_t tag, struct err *e);

// tag_free tells whether a command may be started with a tag. False, with e set:
// one has it or may have had it, or somebody was told that none ever will.
bool tag_free(uint64_t tag, struct err *e);

// tag_dropped notes that a command is forgotten whose tag was not.
void tag_dropped(uint64_t tag);

void find_tag_call(struct conn *c, struct dec *d);
void forget_tag_call(struct conn *c, struct dec *d);
// find_tag_cancel is for a connection that goes while it waits for its answer.
void find_tag_cancel(struct conn *c);

// tags_settle answers who asked for commands of which it was open whether they
// start. It is called when that is known of one.
void tags_settle(void);

#endif
