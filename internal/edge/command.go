package edge

import (
	"path"
	"strconv"
	"strings"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/internal/chronusapi"
	"github.com/opendsec/dsec/internal/layer/convert"
	dsecv1 "github.com/opendsec/dsec/proto/dsec/v1"
)

// Limits on the output of one command where the request names none, and the
// most that it may name for one whose output is collected. One that is streamed
// has none of its own: it waits for its reader.
const (
	defaultSessionOutput = 64 << 20
	defaultExecOutput    = 16 << 20
	maxExecOutput        = 64 << 20
	// maxStartOutput bounds a streamed command: a count that no machine reaches.
	maxStartOutput = 1 << 50
)

// command fills a request's command with the sandbox's defaults and checks it.
// What only the sandbox can tell, chronus checks before it starts anything.
func command(spec *dsec.Spec, c *dsecv1.Command, output, maxOutput int64) (chronusapi.Command, error) {
	var out chronusapi.Command
	if c == nil {
		return out, dsec.Invalid("command", "want a command")
	}
	out.Shell = c.Shell
	switch {
	case len(c.RawArgv) > 0 && (len(c.Argv) > 0 || c.Shell != ""):
		return out, dsec.Invalid("command.raw_argv", "want one of argv, raw_argv and shell")
	case len(c.RawArgv) > 0:
		out.Argv = make([]string, len(c.RawArgv))
		for i, a := range c.RawArgv {
			out.Argv[i] = string(a)
		}
	default:
		out.Argv = c.Argv
	}
	env, err := environment("command.env", c.Env)
	if err != nil {
		return out, err
	}
	out.Env = convert.MergeEnv(spec.Env, env)
	out.Cwd = inside(spec.Workdir, c.Cwd)
	if out.User = c.User; out.User == "" {
		out.User = spec.User
	}
	if out.Timeout, err = timeout("command.timeout", c.Timeout); err != nil {
		return out, err
	}
	switch n := c.OutputLimitBytes; {
	case n < 0 || n > maxOutput:
		return out, dsec.Invalid("command.output_limit_bytes", "want 1 to %d, or 0 for the default (%s); got %d", maxOutput, bytesOrNone(output), n)
	case n > 0:
		out.OutputLimit = n
	default:
		out.OutputLimit = output
	}
	return out, out.Validate()
}

func bytesOrNone(n int64) string {
	if n == 0 {
		return "none"
	}
	return strconv.FormatInt(n, 10)
}

// inside is dir seen from the sandbox's workdir. Empty stays empty, so that
// chronus takes its own default, where there is no workdir either.
func inside(workdir, dir string) string {
	if dir == "" {
		return workdir
	}
	if strings.HasPrefix(dir, "/") {
		return dir
	}
	if workdir == "" {
		workdir = "/"
	}
	if strings.IndexByte(dir, 0) >= 0 {
		return dir // refused by Validate; path.Join would not mind
	}
	return path.Join(workdir, dir)
}

// timeout reads the timeout of a command: unset is none, zero is a mistake.
func timeout(field string, d *durationpb.Duration) (time.Duration, error) {
	if d == nil {
		return 0, nil
	}
	t := d.AsDuration()
	if d.CheckValid() != nil || t <= 0 || t > chronusapi.MaxTimeout {
		return 0, dsec.Invalid(field, "want more than 0s and at most %.0fs", chronusapi.MaxTimeout.Seconds())
	}
	return t, nil
}

// windowSize checks a terminal's size.
func windowSize(field string, t *dsecv1.TerminalSize) (chronusapi.WindowSize, error) {
	if t.GetRows() < 1 || t.GetRows() > 0xffff || t.GetCols() < 1 || t.GetCols() > 0xffff {
		return chronusapi.WindowSize{}, dsec.Invalid(field, "want 1 to 65535 rows and columns, got %d and %d", t.GetRows(), t.GetCols())
	}
	return chronusapi.WindowSize{Rows: uint16(t.Rows), Cols: uint16(t.Cols)}, nil
}
