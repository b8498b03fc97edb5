// The process that serves the calls for files: chronus-files.
#ifndef CHRONUS_FILES_H
#define CHRONUS_FILES_H

// files_main makes this process, which a launcher has started for that, the one
// that serves a sandbox's files. Its arguments are --files, the capabilities to
// keep, how many tasks files there are to join and, where it is to have a cgroup
// namespace of its own, one more. Descriptors: see files.c.
_Noreturn void files_main(int argc, char **argv);

#endif
