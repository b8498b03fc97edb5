package main

import (
	"bytes"
	"strings"
	"testing"
)

// tell runs dsec and gives what it says and its exit code.
func tell(t *testing.T, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	var out, errw bytes.Buffer
	code = run(t.Context(), args, strings.NewReader(""), &out, &errw)
	return out.String(), errw.String(), code
}

// TestGroupsListTheirVerbs: whoever knows a group's name finds its verbs.
func TestGroupsListTheirVerbs(t *testing.T) {
	for _, group := range []string{"layer", "sandbox", "key"} {
		bare, told, code := tell(t, group)
		if bare != "" || code != 2 {
			t.Errorf("dsec %s: %q, exit %d", group, bare, code)
		}
		for _, args := range [][]string{{group, "-h"}, {group, "--help"}, {group, "help"}, {"help", group}} {
			help, stderr, code := tell(t, args...)
			if help != told || stderr != "" || code != 0 {
				t.Errorf("%q: %q, %q, exit %d, want\n%s", args, help, stderr, code, told)
			}
		}
		for _, c := range commands() {
			if of := strings.HasPrefix(c.name, group+" "); of != strings.Contains(told, "  "+c.name+" ") {
				t.Errorf("dsec %s says of %s:\n%s", group, c.name, told)
			}
		}
		if _, stderr, code := tell(t, group, "nosuch"); code != 2 || stderr != "dsec: "+group+" nosuch: no such command; see `dsec "+group+" -h`\n" {
			t.Errorf("exit %d: %s", code, stderr)
		}
	}
	if _, stderr, code := tell(t, "nosuch", "-h"); code != 2 || stderr != "dsec: nosuch: no such command; see `dsec help`\n" {
		t.Errorf("exit %d: %s", code, stderr)
	}
}

// TestHelpOfEveryVerb: on standard output, how it is called, and one line for each flag.
func TestHelpOfEveryVerb(t *testing.T) {
	for _, c := range commands() {
		if c.hidden {
			continue
		}
		help, stderr, code := tell(t, append(strings.Fields(c.name), "-h")...)
		if code != 0 || stderr != "" {
			t.Errorf("dsec %s -h: exit %d: %s", c.name, code, stderr)
		}
		head, flags, _ := strings.Cut(help, "\n\n"+c.short+"\n\n")
		if head != c.usage() {
			t.Errorf("dsec %s -h begins with %q", c.name, head)
		}
		for line := range strings.Lines(flags) {
			if !strings.HasPrefix(line, "  -") {
				t.Errorf("dsec %s -h has the line %q", c.name, line)
			}
		}
	}
}

// TestCalledWrong: what is wrong, and how the verb is called.
func TestCalledWrong(t *testing.T) {
	for want, args := range map[string][]string{
		"dsec: layer inspect: want 1 argument, got 0\n":                         {"layer", "inspect"},
		"dsec: layer remove: want 1 or more arguments, got 0\n":                 {"layer", "remove"},
		"dsec: layer import: want 1 to 2 arguments, got 3\n":                    {"layer", "import", "a", "b", "c"},
		"dsec: layer list: want no arguments, got 1\n":                          {"layer", "list", "x"},
		"dsec: layer tag: flag provided but not defined: -force\n":              {"layer", "tag", "--force"},
		"dsec: version: want no arguments, got 1\n":                             {"version", "x"},
		"dsec: config: flag provided but not defined: -config\n":                {"config", "--config", "x"},
		"dsec: layer gc: invalid value \"1\" for flag -min-age: want a number ": {"layer", "gc", "--min-age", "1"},
	} {
		stdout, stderr, code := tell(t, args...)
		name := strings.Join(args[:min(2, len(args))], " ")
		if args[0] != "layer" {
			name = args[0]
		}
		if stdout != "" || code != 2 || !strings.HasPrefix(stderr, want) || !strings.Contains(stderr, "\nusage: dsec "+name) {
			t.Errorf("%q: exit %d, %q, want %q", args, code, stderr, want)
		}
	}
}
