// Command dsec is all of DSec in one binary: `dsec up` serves sandboxes on one
// machine, `dsec apiserver` and `dsec edge` are its two halves as processes of
// their own, and the other verbs are the command-line client. ARCHITECTURE.md
// tells how the parts work together, docs/cli.md what each verb does.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/opendsec/dsec/internal/layer"
	"github.com/opendsec/dsec/internal/layer/lazy"
	"github.com/opendsec/dsec/internal/layer/scrub"
)

// version is set by the build.
var version = "dev"

// command is one verb. A group's verbs have its name in front: "layer list".
type command struct {
	name   string
	args   string
	short  string
	run    func(ctx context.Context, e *env, args []string) error
	hidden bool
}

// commands is the table of all verbs.
func commands() []command {
	return []command{
		{"up", "[flags]", "serve sandboxes on this machine: apiserver, edge and etcd in one process", runUp, false},
		{"sandbox create", "[flags] [LAYER...]", "make a sandbox and print its ID", runCreate, false},
		{"sandbox list", "[flags]", "list sandboxes", runList, false},
		{"sandbox get", "ID", "show one sandbox", runGet, false},
		{"sandbox kill", "ID...", "end sandboxes and free all they held", runKill, false},
		{"sandbox pause", "[flags] ID...", "stop sandboxes where they are; the next command resumes them", runPause, false},
		{"sandbox resume", "ID...", "have paused sandboxes go on", runResume, false},
		{"sandbox pack", "[flags] ID NAME", "make a layer of what was written in a sandbox", runPack, false},
		{"sandbox fork", "[flags] ID", "make sandboxes of what was written in one, and print their IDs", runFork, false},
		{"sandbox migrate", "ID --lose-memory [--lose-actions]", "move a sandbox's disk to another node, and print its new ID", runMigrate, false},
		{"job create", "[flags] NAME", "make a job, which a lease can bound", runJobCreate, false},
		{"job list", "[flags]", "list jobs", runJobList, false},
		{"job get", "NAME", "show one job", runJobGet, false},
		{"job heartbeat", "NAME", "keep the lease of a job", runJobHeartbeat, false},
		{"job pause", "[flags] NAME", "pause all sandboxes of a job", runJobPause, false},
		{"job resume", "NAME", "resume all sandboxes of a job", runJobResume, false},
		{"job kill", "NAME", "kill all sandboxes of a job", runJobKill, false},
		{"job end", "NAME", "end a job and kill its sandboxes", runJobEnd, false},
		{"exec", "[flags] ID COMMAND [ARG...]", "run a command; exits with the command's own code", runExec, false},
		{"shell", "[flags] ID [COMMAND [ARG...]]", "open an interactive shell", runShell, false},
		{"cp", "SRC DST", "copy files and directories; ID:PATH is in a sandbox, - is a tar stream", runCp, false},
		{"logs", "[flags] ID PROCESS", "print the output of a command that was started before", runLogs, false},
		{"log", "[flags] ID", "show what was done to a sandbox, and what came of it", runLog, false},
		{"events", "[flags]", "show what happens to sandboxes and jobs, as it happens", runEvents, false},
		{"webhook create", "[flags] URL", "have events posted to a server of yours; shows the secret once", runWebhookCreate, false},
		{"webhook list", "", "list webhooks", runWebhookList, false},
		{"webhook get", "ID", "show one webhook, and how it goes", runWebhookGet, false},
		{"webhook remove", "ID...", "end webhooks", runWebhookRemove, false},
		{"replay", "[flags] ID", "do again in a fresh sandbox what was done in one, up to the first difference", runReplay, false},
		{"ps", "ID", "list the commands of a sandbox", runPs, false},
		{"stats", "ID...", "show what sandboxes use", runStats, false},
		{"layer import", "[flags] NAME FILE|DIR|-|--image REF|--git URL", "make a layer of an archive, a directory, an image or a checkout", runLayerImport, false},
		{"layer export", "[flags] NAME... FILE.tar|DIR|-", "write layers, lowest first, as an image that other tools run", runLayerExport, false},
		{"layer list", "", "list layers", runLayerList, false},
		{"layer inspect", "NAME", "show all that is known of a layer", runLayerInspect, false},
		{"layer tag", "[flags] NAME NEW-NAME", "give a layer one more name", runLayerTag, false},
		{"layer remove", "NAME...", "remove names of layers", runLayerRemove, false},
		{"layer prefetch", "[flags] NAME...", "bring layers to every node before they are used", runLayerPrefetch, false},
		{"layer gc", "[flags]", "remove layers from the store that nothing refers to", runLayerGC, false},
		{"key create", "--project NAME [flags]", "make an API key; shows its secret once", runKeyCreate, false},
		{"key list", "", "list API keys", runKeyList, false},
		{"key revoke", "ID...", "end API keys", runKeyRevoke, false},
		{"doctor", "", "tell what this machine can do and what is missing", runDoctor, false},
		{"apiserver", "[flags]", "serve the public API alone", runAPIServer, false},
		{"edge", "[flags]", "own this machine's sandboxes alone", runEdge, false},
		{"config", "", "print the commented default configuration", runConfig, false},
		{"version", "", "print the version", runVersion, false},
		{layer.HelperVerb, "", "", runImportHelper, true},
		{scrub.Verb, "", "", runScrubReader, true},
		{"launcher", "", "", runLauncher, true},
		{lazy.Verb, "", "", runLayerd, true},
	}
}

// env is what a verb may touch.
type env struct {
	stdin          io.Reader
	stdout, stderr io.Writer
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// exitError ends the process with a code of its own. line, where set, is
// printed behind `dsec: `.
type exitError struct {
	code int
	line string
}

func (e exitError) Error() string { return e.line }

// errUsage was reported already.
var errUsage = errors.New("usage")

// run runs one verb and returns the exit code.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	e := &env{stdin, stdout, stderr}
	if len(args) == 0 || isHelp(args[0]) {
		if len(args) < 2 {
			usage(stdout, "")
			return 0
		}
		args = append(args[1:], "-h")
	}
	if args[0] == "--version" {
		args = append([]string{"version"}, args[1:]...)
	}
	cmd, rest, ok := find(args)
	if !ok {
		return noVerb(e, args)
	}
	err := cmd.run(ctx, e, rest)
	var exit exitError
	switch {
	case err == nil:
		return 0
	case errors.Is(err, flag.ErrHelp):
		return 0
	case errors.Is(err, errUsage):
		return 2
	case errors.As(err, &exit):
		if exit.line != "" {
			_, _ = fmt.Fprintln(stderr, "dsec: "+exit.line)
		}
		return exit.code
	case ctx.Err() != nil && errors.Is(err, context.Canceled):
		_, _ = fmt.Fprintln(stderr, "dsec: interrupted")
		return exitInterrupted
	}
	_, _ = fmt.Fprintln(stderr, "dsec: "+line(err))
	return exitCode(err)
}

func isHelp(arg string) bool {
	return arg == "help" || arg == "-h" || arg == "-help" || arg == "--help"
}

// noVerb tells what there is where no verb is called: the verbs of a group by
// whose name alone dsec was called.
func noVerb(e *env, args []string) int {
	if !isGroup(args[0]) {
		_, _ = fmt.Fprintf(e.stderr, "dsec: %s: no such command; see `dsec help`\n", args[0])
		return 2
	}
	switch {
	case len(args) == 1:
		usage(e.stderr, args[0])
		return 2
	case isHelp(args[1]):
		usage(e.stdout, args[0])
		return 0
	}
	_, _ = fmt.Fprintf(e.stderr, "dsec: %s %s: no such command; see `dsec %s -h`\n", args[0], args[1], args[0])
	return 2
}

func isGroup(name string) bool {
	return slices.ContainsFunc(commands(), func(c command) bool { return strings.HasPrefix(c.name, name+" ") })
}

func find(args []string) (command, []string, bool) {
	for _, c := range commands() {
		words := strings.Fields(c.name)
		if len(args) >= len(words) && strings.Join(args[:len(words)], " ") == c.name {
			return c, args[len(words):], true
		}
	}
	return command{}, nil, false
}

// usage lists the verbs: all, or those of a group.
func usage(w io.Writer, group string) {
	what := "COMMAND"
	if group != "" {
		group += " "
		what = group + "COMMAND"
	}
	_, _ = fmt.Fprintf(w, "usage: dsec %s [flags]\n\n", what)
	for _, c := range commands() {
		if !c.hidden && strings.HasPrefix(c.name, group) {
			_, _ = fmt.Fprintf(w, "  %-15s %s\n", c.name, c.short)
		}
	}
	_, _ = fmt.Fprintf(w, "\n`dsec %s -h` shows a command's flags. See docs/cli.md.\n", what)
}

func runVersion(_ context.Context, e *env, args []string) error {
	if _, err := bareFlags(e, "version").parse(args, 0, 0, 0); err != nil {
		return err
	}
	_, err := fmt.Fprintln(e.stdout, "dsec "+version)
	return err
}

func runConfig(_ context.Context, e *env, args []string) error {
	if _, err := bareFlags(e, "config").parse(args, 0, 0, 0); err != nil {
		return err
	}
	_, err := e.stdout.Write(defaultConfig)
	return err
}
