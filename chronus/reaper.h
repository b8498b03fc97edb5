// The end of children: those that were started, and orphans that came to PID 1.
#ifndef CHRONUS_REAPER_H
#define CHRONUS_REAPER_H

void reaper_init(void);

#endif
