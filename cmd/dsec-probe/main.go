//go:build linux && amd64

// Command dsec-probe looks at a sandbox from inside and prints what it finds
// as one JSON object. It is a static binary that needs nothing of the image;
// only tests use it.
//
//	dsec-probe all                 everything below but ioctls, by name
//	dsec-probe syscalls [FROM TO]  each call with null arguments: {"results": {"0": "ok", "1": "EBADF", ...}}
//	dsec-probe sockets             {"native": {"1": "ok", ...}, "i386_socketcall": "SIGSYS", "i386_socket": ..., "netlink": {"0": "ok", ...}}
//	dsec-probe ioctls FILE         {"results": {NAME: {"plain": "ENOTTY", "bit32": "ENOTTY"}, ...}, "controls": {...}}
//	dsec-probe caps                {"CapInh": "0000...", ..., "NoNewPrivs": "1", "Seccomp": "2", "Seccomp_filters": "2", "threads_alike": true, "threads_unlike": null}
//	dsec-probe fds                 {"fds": {"0": "/dev/null", ...}, "cwd": ..., "root": ..., "exe": ...}
//	dsec-probe namespaces          {"ns": {"user": "user:[...]", ...}, "uid_map": ..., "gid_map": ..., "setgroups": ..., "cgroup": ...}
//	dsec-probe mounts              {"mounts": [{"root", "point", "options", "type", "source", "super"}, ...]}
//	dsec-probe mountcalls          {"mount": "EPERM", "fsopen": ..., ...}
//	dsec-probe procwrites          {"/proc/sys/kernel/core_pattern": "EROFS", ...}
//	dsec-probe limits              {"cpus": 2, "memory_kib": ..., "nofile": [soft, hard], "online": "0-1", ...}
//	dsec-probe endpoints           {"unix": [...], "tcp": [...], "udp": [...], "sockets": [paths]}
//
// A result is "ok", the name of an errno, the name of a signal that ended the
// try, "blocked" where it was still waiting at its deadline, or "exited"; of
// procwrites also "null": the null device is in place of the file.
// Every try runs in a child process, so that what a call does ends with it.
//
// It refuses to run in the host's user namespace, where some of what it tries
// would work.
package main

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"strings"
)

var probes = map[string]func(args []string) (any, error){
	"syscalls":   syscalls,
	"sockets":    sockets,
	"ioctls":     ioctls,
	"caps":       caps,
	"fds":        fds,
	"namespaces": namespaces,
	"mounts":     mounts,
	"mountcalls": mountCalls,
	"procwrites": procWrites,
	"limits":     limits,
	"endpoints":  endpoints,
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "dsec-probe:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if err := inside(); err != nil {
		return err
	}
	if len(args) == 0 {
		return fmt.Errorf("want a command, see the package comment")
	}
	var result any
	var err error
	if args[0] == "all" {
		all := map[string]any{}
		// First what looks, then what tries: where a try is not refused, it changes
		// what there is to see.
		for _, name := range []string{
			"fds", "caps", "namespaces", "mounts", "limits", "endpoints", "sockets", "procwrites", "syscalls", "mountcalls",
		} {
			if all[name], err = probes[name](nil); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		result = all
	} else {
		probe, ok := probes[args[0]]
		if !ok {
			return fmt.Errorf("no command %q", args[0])
		}
		if result, err = probe(args[1:]); err != nil {
			return err
		}
	}
	return json.NewEncoder(os.Stdout).Encode(result)
}

// inside makes sure that this is not the host: there, uid 0 of the map is 0
// and the map has all ids.
func inside() error {
	text, err := os.ReadFile("/proc/self/uid_map")
	if err != nil {
		return err
	}
	f := strings.Fields(string(text))
	if len(f) != 3 {
		return nil // several ranges: some sandbox's
	}
	if n, err := strconv.ParseUint(f[2], 10, 64); err != nil || f[0] == f[1] && n >= 1<<32-1 {
		return fmt.Errorf("this is the host's user namespace; run it in a sandbox")
	}
	return nil
}
