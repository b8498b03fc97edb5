// The last output of a process, in memory.
#ifndef CHRONUS_SPOOL_H
#define CHRONUS_SPOOL_H

#include "util.h"

#define SPOOL_LIMIT (256u << 10)  // bytes of one process
#define BUDGET_LIMIT (8u << 20)   // bytes of all processes
#define MIN_BLOCK (4u << 10)
#define MAX_BLOCK (64u << 10)

// block is a run of bytes of one stream.
struct block {
	struct block *next;
	uint64_t seq; // of buf[0]
	uint32_t len, cap;
	uint8_t stream;
	bool mapped;
	uint8_t buf[];
};

// spool is blocks with ascending numbers. Bytes below consumed have been taken
// by the reader that the process waits for; they stay until their room is
// needed, for a reader that comes back.
struct spool {
	struct block *first, *last;
	size_t size; // bytes of all blocks
	uint64_t next, consumed;
	bool lossless; // wait for the reader where nothing consumed can be dropped
	uint32_t grow; // size of the next block
};

// spool_space returns room to read output into and its size, or NULL where the
// reader must take something first. spool_wrote tells how much of it was filled.
uint8_t *spool_space(struct spool *s, uint8_t stream, size_t *room);
void spool_wrote(struct spool *s, size_t n);

// spool_trim gives back what the last block has not been filled with.
void spool_trim(struct spool *s);

// spool_free forgets everything.
void spool_free(struct spool *s);

// spool_first is the number of the oldest byte that is held, or of the next one.
uint64_t spool_first(const struct spool *s);

// spool_at returns bytes from number seq on, with *n at most one chunk. Where
// seq is not held any more, *gap is the number of the first byte that is.
// Without new bytes *n is 0 and *gap is seq.
const uint8_t *spool_at(const struct spool *s, uint64_t seq, uint8_t *stream, size_t *n, uint64_t *gap);

// spool_tight tells whether more than half of the budget of all spools is used;
// spool_reclaim, which another module has, frees what nobody needs.
bool spool_tight(void);
void spool_reclaim(void);

#endif
