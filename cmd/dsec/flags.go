package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/opendsec/dsec"
	"github.com/opendsec/dsec/client"
	"github.com/opendsec/dsec/internal/units"
)

// flags is a verb's flag set, with what every verb of the client has.
type flags struct {
	*flag.FlagSet
	env    *env
	output string
	url    string
	config string
}

// bareFlags makes the flag set of a verb that reads no configuration.
func bareFlags(e *env, name string) *flags {
	f := &flags{FlagSet: flag.NewFlagSet(name, flag.ContinueOnError), env: e}
	f.SetOutput(io.Discard) // parse tells what is wrong
	f.Usage = func() {}
	return f
}

// newFlags makes the flag set of the verb with the given name.
func newFlags(e *env, name string) *flags {
	f := bareFlags(e, name)
	f.StringVar(&f.config, "config", "", "configuration `file`; default "+defaultConfigFile)
	return f
}

// help writes how the verb is called, and a line for each of its flags.
func (f *flags) help(w io.Writer) {
	c := f.command()
	_, _ = fmt.Fprintf(w, "%s\n\n%s\n\n", c.usage(), c.short)
	var rows [][]string
	f.VisitAll(func(g *flag.Flag) {
		value, text := flag.UnquoteUsage(g)
		switch g.DefValue {
		case "", "0", "0s", "false":
		default:
			text += " (default " + g.DefValue + ")"
		}
		rows = append(rows, []string{"  " + strings.TrimRight(dashed(g.Name)+" "+value, " "), text})
	})
	_ = table(w, "", rows)
}

// dashed is a flag as it is written: with one dash where it is one letter.
func dashed(name string) string {
	if len(name) == 1 {
		return "-" + name
	}
	return "--" + name
}

func (f *flags) command() command {
	for _, c := range commands() {
		if c.name == f.Name() {
			return c
		}
	}
	return command{name: f.Name()}
}

func (c command) usage() string { return strings.TrimRight("usage: dsec "+c.name+" "+c.args, " ") }

// wrong tells that the verb was called wrong, and how it is called.
func (f *flags) wrong(format string, args ...any) error {
	_, _ = fmt.Fprintf(f.env.stderr, "dsec: %s: %s\n%s\n`dsec %s -h` shows its flags\n",
		f.Name(), fmt.Sprintf(format, args...), f.command().usage(), f.Name())
	return errUsage
}

// given are the flags that were given, of those with these names.
func (f *flags) given(names ...string) (given []string) {
	f.Visit(func(g *flag.Flag) {
		if slices.Contains(names, g.Name) {
			given = append(given, dashed(g.Name))
		}
	})
	return given
}

// without refuses flags that say nothing of what was asked for.
func (f *flags) without(what string, names ...string) error {
	if given := f.given(names...); len(given) > 0 {
		return dsec.Invalid(given[0], "means nothing %s", what)
	}
	return nil
}

// clientFlags adds what reaches the server.
func clientFlags(e *env, name string) *flags {
	f := newFlags(e, name)
	f.StringVar(&f.output, "o", "table", "output `format`: table or json")
	f.StringVar(&f.url, "url", "", "`URL` of the API; default $DSEC_URL, then the configuration")
	return f
}

// parse takes flags before, between and after the verb's arguments, of which
// it wants from low to high; high < 0 is no limit. With verbatim > 0, what
// follows that many arguments is not the verb's to read.
func (f *flags) parse(args []string, low, high, verbatim int) ([]string, error) {
	var pos []string
	for {
		if err := f.Parse(args); errors.Is(err, flag.ErrHelp) {
			f.help(f.env.stdout)
			return nil, err
		} else if err != nil {
			return nil, f.wrong("%v", err)
		}
		rest := f.Args()
		if len(rest) == 0 {
			break
		}
		if ended := len(args) > len(rest) && args[len(args)-len(rest)-1] == "--"; ended {
			pos = append(pos, rest...)
			break
		}
		pos = append(pos, rest[0])
		args = rest[1:]
		if verbatim > 0 && len(pos) == verbatim {
			if len(args) > 0 && args[0] == "--" {
				args = args[1:]
			}
			pos = append(pos, args...)
			break
		}
	}
	if f.output != "" && f.output != "table" && f.output != "json" {
		return nil, dsec.Invalid("-o", "want table or json")
	}
	if len(pos) < low || high >= 0 && len(pos) > high {
		return nil, f.wrong("want %s, got %d", arguments(low, high), len(pos))
	}
	return pos, nil
}

// arguments is a number of them in words.
func arguments(low, high int) string {
	switch {
	case high == 0:
		return "no arguments"
	case high == 1 && low == 1:
		return "1 argument"
	case high == low:
		return fmt.Sprintf("%d arguments", low)
	case high < 0:
		return fmt.Sprintf("%d or more arguments", low)
	}
	return fmt.Sprintf("%d to %d arguments", low, high)
}

// connect is parse and client in one; the caller closes the client.
func (f *flags) connect(args []string, low, high, verbatim int) (*client.Client, []string, error) {
	args, err := f.parse(args, low, high, verbatim)
	if err != nil {
		return nil, nil, err
	}
	c, err := f.client()
	return c, args, err
}

// client makes the API client.
func (f *flags) client() (*client.Client, error) {
	cfg, err := loadConfig(f.config, false)
	if err != nil {
		return nil, err
	}
	o := client.Options{URL: f.url}
	if os.Getenv("DSEC_URL") == "" && f.url == "" {
		o.URL = cfg.API.urlOf(cfg.API.Listen)
	}
	if os.Getenv("DSEC_KEY_FILE") == "" {
		o.KeyFile = cfg.adminKey()
	}
	return client.New(o)
}

// forEach is a verb that does one thing to each of its arguments, up to the
// first that fails; where there is a check, once all have passed it. done names them in JSON.
func forEach(
	ctx context.Context, e *env, args []string, verb, done string,
	check, do func(c *client.Client, ctx context.Context, arg string) error,
) error {
	f := clientFlags(e, verb)
	c, args, err := f.connect(args, 1, -1, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	for _, step := range []func(*client.Client, context.Context, string) error{check, do} {
		if step == nil {
			continue
		}
		for _, arg := range args {
			if err := step(c, ctx, arg); err != nil {
				return err
			}
		}
	}
	if f.output == "json" {
		return f.print(map[string]any{done: args}, "", nil)
	}
	return nil
}

// list is a verb that shows all that there are of one thing, a row each.
func list[T any](
	ctx context.Context, e *env, args []string, verb, head string,
	get func(c *client.Client, ctx context.Context) ([]T, error), row func(T) []string,
) error {
	f := clientFlags(e, verb)
	c, _, err := f.connect(args, 0, 0, 0)
	if err != nil {
		return err
	}
	defer c.Close()
	all, err := get(c, ctx)
	if err != nil {
		return err
	}
	rows := make([][]string, len(all))
	for i, v := range all {
		rows[i] = row(v)
	}
	return f.print(all, head, rows)
}

// urlOf is the URL of the API at an address that it listens on.
func (a *APIConfig) urlOf(address string) string {
	if a.TLSCert != "" {
		return "https://" + address
	}
	return "http://" + address
}

// print writes v as JSON, or the rows as a table under the head.
func (f *flags) print(v any, head string, rows [][]string) error {
	if f.output == "json" {
		enc := json.NewEncoder(f.env.stdout)
		enc.SetIndent("", "  ")
		return enc.Encode(v)
	}
	return table(f.env.stdout, head, rows)
}

func table(w io.Writer, head string, rows [][]string) error {
	tw := tabwriter.NewWriter(w, 0, 0, 3, ' ', 0)
	if head != "" {
		_, _ = fmt.Fprintln(tw, strings.ReplaceAll(head, " ", "\t"))
	}
	for _, r := range rows {
		_, _ = fmt.Fprintln(tw, strings.Join(r, "\t"))
	}
	return tw.Flush()
}

// pairs is a flag of KEY=VALUE that can be given many times.
type pairs struct{ m map[string]string }

// String implements flag.Value.
func (p *pairs) String() string {
	var out []string
	for _, k := range slices.Sorted(maps.Keys(p.m)) {
		out = append(out, k+"="+p.m[k])
	}
	return strings.Join(out, ",")
}

// Set implements flag.Value.
func (p *pairs) Set(s string) error {
	k, v, ok := strings.Cut(s, "=")
	if !ok || k == "" {
		return errors.New("want KEY=VALUE")
	}
	if p.m == nil {
		p.m = map[string]string{}
	}
	p.m[k] = v
	return nil
}

// span is a flag of time: 90s, 1h30m.
type span struct{ d *time.Duration }

// String implements flag.Value.
func (s span) String() string {
	if s.d == nil || *s.d == 0 {
		return ""
	}
	return s.d.String()
}

// Set implements flag.Value.
func (s span) Set(text string) error {
	d, err := time.ParseDuration(text)
	if err != nil {
		hint := ""
		if _, nerr := strconv.ParseFloat(text, 64); nerr == nil {
			hint = "; for " + text + " seconds write " + text + "s"
		}
		return errors.New("want a number with a unit, such as 500ms, 90s, 30m or 1h30m" + hint)
	}
	*s.d = d
	return nil
}

// size is a flag of bytes: 512M, 2G, 1.5g, 4096.
type size struct{ n *int64 }

// String implements flag.Value.
func (s size) String() string {
	if s.n == nil || *s.n == 0 {
		return ""
	}
	return units.Bytes(*s.n)
}

// Set implements flag.Value.
func (s size) Set(text string) error {
	n, err := parseSize(text)
	*s.n = n
	return err
}

var sizeUnits = []struct {
	suffix string
	n      int64
}{{"T", 1 << 40}, {"G", 1 << 30}, {"M", 1 << 20}, {"K", 1 << 10}}

func parseSize(text string) (int64, error) {
	bad := errors.New("want bytes as 4096, 512K, 256M, 1.5G or 1T")
	unit := int64(1)
	num := strings.TrimSuffix(strings.TrimSuffix(strings.ToUpper(text), "B"), "I")
	for _, u := range sizeUnits {
		if rest, ok := strings.CutSuffix(num, u.suffix); ok {
			num, unit = rest, u.n
			break
		}
	}
	v, err := strconv.ParseFloat(strings.TrimSpace(num), 64)
	if err != nil || !(v >= 0 && v*float64(unit) < 1<<62) { // NaN is neither
		return 0, bad
	}
	return int64(v * float64(unit)), nil
}
